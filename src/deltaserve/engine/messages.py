"""What the API process and the engine process say to each other. Knows no socket, no text and no protocol of users."""

from __future__ import annotations

import msgspec

from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request
from deltaserve.core.stats import Stats


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The only line on the engine process's standard input, as JSON. The end of that input ends the process."""

    config: EngineConfig
    address: str
    """The ZeroMQ address that the API process has bound."""
    factory: str
    """`module:name` of what turns an EngineConfig into an engine and its EngineInfo."""
    search_path: list[str]
    """The API process's `sys.path`, so that both find the same modules."""
    log_level: str = "info"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the API must know of the engine that has come up. Lengths in tokens."""

    checkpoint: str
    """The folder that holds the model's files: tokenizer, template, defaults of generation."""
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    device: str
    dtype: str


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    requests: list[Request]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Ends requests in any phase. Nothing is answered; ids that have ended already are no fault."""

    request_ids: list[str]
    reason: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered by a Pong between two steps."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Closes the engine and ends its process with code 0."""


Command = Submit | Cancel | Ping | Stop
"""From the API process to the engine process."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo
    stats: Stats


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """One step: all its outputs, and the engine's figures after it. Without outputs when the engine falls idle."""

    outputs: list[Output]
    stats: Stats
    queued: list[float] = []
    """Seconds that each request which began in this step had waited since its arrival."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine refuses a request that it could never serve; the message is for the user."""

    request_id: str
    message: str


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    number: int
    stats: Stats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last word of an engine that cannot start or go on."""

    message: str
    refused: bool
    """The user's choice cannot be honoured (a ValueError), as opposed to a failure of ours or of the machine."""


Report = Ready | Progress | Rejected | Pong | Failed
"""From the engine process to the API process."""
