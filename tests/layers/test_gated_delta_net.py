"""The gated delta net over rows of different lengths equals the recurrence for each row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deltaserve.layers.gated_delta_net import GatedDeltaNet
from tests.layers.filled import CPU, F64, context, filled

K_HEADS, V_HEADS, K_DIM, V_DIM, TAPS, HIDDEN = 2, 6, 5, 3, 4, 10
KEYS, VALUES = K_HEADS * K_DIM, V_HEADS * V_DIM


def net(ordinal: int = 0, dtype: torch.dtype = F64) -> GatedDeltaNet:
    return filled(
        GatedDeltaNet(
            ordinal=ordinal,
            hidden_size=HIDDEN,
            num_k_heads=K_HEADS,
            num_v_heads=V_HEADS,
            k_dim=K_DIM,
            v_dim=V_DIM,
            conv_width=TAPS,
            eps=1e-6,
            dtype=dtype,
            device=CPU,
        )
    )


def by_recurrence(layer: GatedDeltaNet, x_TE: Tensor) -> Tensor:
    """The layer on one whole row, token by token, from the fused weight's documented order q|k|v|z|b|a."""
    parts = [2 * KEYS + VALUES, VALUES, V_HEADS, V_HEADS]
    mixed, z, b, a = torch.split(x_TE @ layer.in_proj.weight.T, parts, dim=-1)
    padded = torch.cat([torch.zeros(TAPS - 1, mixed.shape[1], dtype=F64), mixed])
    mixed = torch.stack([padded[tap : tap + len(mixed)] * layer.conv_weight[:, tap] for tap in range(TAPS)]).sum(0)
    q, k, v = torch.split(functional.silu(mixed), [KEYS, KEYS, VALUES], dim=-1)
    state = torch.zeros(V_HEADS, K_DIM, V_DIM, dtype=F64)
    out = []
    for t in range(len(x_TE)):
        q_HK, k_HK = (part[t].view(K_HEADS, K_DIM) for part in (q, k))
        q_HK, k_HK = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q_HK, k_HK))
        q_HK, k_HK = (part.repeat_interleave(V_HEADS // K_HEADS, 0) for part in (q_HK, k_HK))
        decay = (-layer.A_log.exp() * functional.softplus(a[t] + layer.dt_bias)).exp()
        state = decay[:, None, None] * state
        error = b[t].sigmoid()[:, None] * (v[t].view(V_HEADS, V_DIM) - (k_HK[:, :, None] * state).sum(1))
        state = state + k_HK[:, :, None] * error[:, None]
        o_HV = (q_HK[:, :, None] * state).sum(1) / K_DIM**0.5
        o_HV = o_HV / (o_HV.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm_weight
        out.append((o_HV * functional.silu(z[t].view(V_HEADS, V_DIM))).flatten())
    return torch.stack(out) @ layer.out_proj.weight.T


def pools(count: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    conv = [torch.full((4, TAPS - 1, 2 * KEYS + VALUES), float("nan"), dtype=F64) for _ in range(count)]
    state = [torch.full((4, V_HEADS, K_DIM, V_DIM), float("nan"), dtype=F64) for _ in range(count)]
    return conv, state


def test_ragged_rows_then_their_next_tokens() -> None:
    layer = net()
    conv, state = pools()
    rows, cuts = [torch.randn(length, HIDDEN, dtype=F64) for length in (70, 2, 9)], [65, 1, 2]
    expected = [by_recurrence(layer, row) for row in rows]
    first = layer(torch.cat([row[:cut] for row, cut in zip(rows, cuts, strict=True)]), context(cuts, (), conv, state))
    torch.testing.assert_close(first, torch.cat([part[:cut] for part, cut in zip(expected, cuts, strict=True)]))
    lengths = [len(row) - cut for row, cut in zip(rows, cuts, strict=True)]
    second = layer(
        torch.cat([row[cut:] for row, cut in zip(rows, cuts, strict=True)]), context(lengths, (), conv, state, cuts)
    )
    torch.testing.assert_close(second, torch.cat([part[cut:] for part, cut in zip(expected, cuts, strict=True)]))


def test_the_ordinal_picks_the_pools() -> None:
    layer = net(ordinal=1)
    conv, state = pools(2)
    layer(torch.randn(3, HIDDEN, dtype=F64), context([3], (), conv, state))
    for pool in (*conv[:1], *state[:1]):
        assert pool.isnan().all()
    for pool in (*conv[1:], *state[1:]):
        assert not pool[0].isnan().any()
        assert pool[1:].isnan().all()


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "norm_weight"])
def test_decays_and_norm_are_wide(name: str) -> None:
    assert getattr(net(dtype=torch.bfloat16), name).dtype == torch.float32
