"""deltaserve serves the Qwen3-Next model family.

`LLM` answers in this process, `SamplingParams` says how; both are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltaserve.core.request import SamplingParams
    from deltaserve.engine.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "LLM":
        from deltaserve.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from deltaserve.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'deltaserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
