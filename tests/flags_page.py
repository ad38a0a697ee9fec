"""docs/flags.md as the configs have it; run as a program it writes the page."""

from __future__ import annotations

from deltaserve.bench.client_config import LoadConfig, MultiTurnConfig
from deltaserve.config import EngineConfig
from deltaserve.flags import flag_table
from deltaserve.server.config import ServerConfig
from tests.markdown import ROOT

PAGE = ROOT / "docs" / "flags.md"


def text() -> str:
    return f"""# Flags

Written from the fields of the configs by `make docs`; a test keeps it equal to them.

## The engine

For every command that runs a model. In Python the same names are arguments of `LLM(...)`, with underscores:
`LLM(max_num_seqs=8)`.

{flag_table(EngineConfig)}

## The server

For `deltaserve serve`.

{flag_table(ServerConfig)}

## Measuring a server

For `deltaserve bench serve` ([bench.md](bench.md)).

{flag_table(LoadConfig)}

For `deltaserve bench multi-turn`.

{flag_table(MultiTurnConfig)}
"""


if __name__ == "__main__":
    PAGE.write_text(text())
