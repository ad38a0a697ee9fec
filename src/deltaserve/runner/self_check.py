"""Whether the MTP layer guesses better than chance: looked at once, before a model serves. Knows no request.

A layer whose weights were loaded wrongly changes no token; it only makes every guess wrong, and nobody would see why it
is slow. So the layer and the model read the same short text, and the layer must find the model's own favourite tokens
likelier than chance.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import Layout
from deltaserve.runner.memory import Pools
from deltaserve.runner.model import Model

NUM_TOKENS = 48
"""Ids 0, 1, 2 ...: in the usual byte-level vocabularies the printable characters in order."""


@torch.inference_mode()
def favourites(model: Model, vocab_size: int, pools: Pools) -> float:
    """Mean log-probability that the layer gives to the model's most likely tokens; NaN where its logits are not finite.

    Writes the first block of `pools`, and keeps no state.
    """
    device = pools.kv[0].device
    token_ids = torch.arange(NUM_TOKENS, device=device) % vocab_size
    layout = Layout.from_rows([NUM_TOKENS], blocks=[[0]], device=device)
    hidden_TD = model(token_ids, _context(layout, pools))
    layout = Layout.from_rows([NUM_TOKENS - 1], starts=[1], blocks=[[0]], device=device)
    layout = replace(layout, first_key=torch.ones_like(layout.context_len))
    ahead_TD = model.look_ahead(token_ids[1:], hidden_TD[:-1], _context(layout, pools))
    best_T = model.logits(hidden_TD[1:]).argmax(-1)
    logprob_TV = model.logits(ahead_TD).log_softmax(-1)
    if not bool(logprob_TV.isfinite().all()):
        return math.nan
    chosen_T: Tensor = logprob_TV.gather(1, best_T[:, None])
    return float(chosen_T.mean())


def complaint(found: float, vocab_size: int) -> str | None:
    """What is wrong, for the log, where `favourites` has found this; None if nothing is."""
    chance = -math.log(vocab_size)
    if math.isnan(found):
        return (
            "the MTP layer's logits are not finite: its weights (mtp.*) look damaged or loaded wrongly; "
            "speculation is off"
        )
    if found <= chance:
        return (
            f"the MTP layer guesses no better than chance (log-probability {found:.2f} of the model's own favourites, "
            f"chance {chance:.2f}): its weights (mtp.*) look loaded wrongly; speculation will gain nothing"
        )
    return None


def _context(layout: Layout, pools: Pools) -> ForwardContext:
    return ForwardContext(layout=layout, kv=pools.kv, conv=pools.conv, state=pools.state)
