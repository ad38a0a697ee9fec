"""Values that no field of the engine's config has, as they can come from Python."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.config import EngineConfig


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"quantization": "int8"}, "quantization is 'int8'; it must be one of auto, none, fp8"),
        ({"load_format": None}, "load_format is None; it must be one of auto, dummy"),
        ({"prefix_cache": True}, "prefix_cache is True; it must be one of on, off"),
        ({"overlap": "yes"}, "overlap is 'yes'; it must be one of auto, on, off"),
        ({"enforce_eager": "off"}, "enforce_eager is 'off'; it must be True or False"),
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5; it must be a whole number"),
        ({"max_num_seqs": "4"}, "max_num_seqs is '4'; it must be a whole number"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"speculative_tokens": 9}, "speculative_tokens is 9; it must be auto, or 0 to 8"),
    ],
)
def test_a_value_that_no_field_has_is_named(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        EngineConfig(**chosen)


def test_numbers_of_guesses_may_be_numbers() -> None:
    assert EngineConfig(speculative_tokens=3) == EngineConfig(speculative_tokens="3")  # type: ignore[arg-type]
