"""The tests' own safety net works."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fresh_memory_is_nan(dtype: torch.dtype) -> None:
    base = torch.zeros(3, dtype=dtype)
    for fresh in (torch.empty(5, dtype=dtype), torch.empty_like(base), base.new_empty(2)):
        assert fresh.dtype == dtype
        assert fresh.isnan().all()


def test_integers_and_meta_tensors_are_left_alone() -> None:
    assert torch.empty(4, dtype=torch.int64).shape == (4,)
    assert torch.empty(4, device="meta").is_meta


def test_seed_is_given_to_every_generator(seed: int) -> None:
    drawn = (random.random(), float(np.random.random()), float(torch.rand(())))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    assert drawn == (random.random(), float(np.random.random()), float(torch.rand(())))


def test_tests_run_on_one_thread() -> None:
    assert torch.get_num_threads() == 1
