"""deltaserve serves the Qwen3-Next model family."""

from __future__ import annotations

__version__ = "0.1.0"
