"""transformers' own generate on the same checkpoint, threads and dtype: what the ratios are ratios to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Peer:
    """Qwen3NextForCausalLM as transformers has it, without optional kernels (none of them runs on a CPU)."""

    def __init__(self, path: Path, dtype: str) -> None:
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(path, dtype=dtype).eval()
        self.pad = int(self.model.generation_config.pad_token_id or 0)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Exactly `num_tokens` greedy tokens for each prompt; prompts of different lengths are padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # The checkpoint's own defaults sample; a greedy run must not inherit them.
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.inference_mode():
            answer = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=self.pad,
                **greedy,
            )
        rows: list[list[int]] = answer[:, longest:].tolist()
        return rows
