"""Decoding many prompts in lock step, greedily or by sampling, and the acceptance of the MTP layer's drafts."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from training.layers import linear, rms
from training.network import AttentionLayer, GdnLayer, Network, shift

DRAFTS = 3
CHECK_EVERY = 16


@torch.no_grad()
def generate(
    net: Network,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    stop: Sequence[int],
    dtype: torch.dtype,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """New tokens of each prompt, its end token included; all rows advance together from position 0."""
    device = net.embed.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ends = lengths + torch.tensor(list(limits), device=device)
    width = min(int(ends.max()), net.config.max_position_embeddings)
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    layers = [layer for layer in net.layers if isinstance(layer, GdnLayer | AttentionLayer)]
    states = [layer.state(len(prompts), width, device, dtype) for layer in layers]
    generator = torch.Generator(device).manual_seed(seed)
    stops, done = torch.tensor(list(stop), device=device), torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stopped = torch.full_like(lengths, width)
    for at in range(width - 1):
        x = net.embed[tokens[:, at]].to(dtype)
        for layer, state in zip(layers, states, strict=True):
            x = layer.step(x, state, at, net.cos, net.sin, dtype)
        logits = linear(rms(x, net.norm), net.head).float()
        chosen = _choose(logits, temperature, generator)
        generating = (at + 1 >= lengths) & ~done
        tokens[:, at + 1] = torch.where(generating, chosen, tokens[:, at + 1])
        hit = generating & (torch.isin(chosen, stops) | (at + 2 >= ends))
        stopped = torch.where(hit, at + 2, stopped)
        done |= hit
        if at % CHECK_EVERY == 0 and bool(done.all()):
            break
    rows, last = tokens.tolist(), stopped.tolist()
    return [row[len(p) : e] for row, p, e in zip(rows, prompts, last, strict=True)]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if not temperature:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(-1)


def batches(sequences: Sequence[list[int]], starts: Sequence[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, mask of generated tokens) of sequences padded to a multiple of 64, `size` tokens at a time."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    while order:
        width = (len(sequences[order[-1]]) + 63) // 64 * 64
        chosen = [order.pop() for _ in range(min(len(order), max(1, size // width)))]
        tokens, mask = (
            torch.zeros(len(chosen), width, dtype=torch.long),
            torch.zeros(len(chosen), width, dtype=torch.bool),
        )
        for row, i in enumerate(chosen):
            tokens[row, : len(sequences[i])] = torch.tensor(sequences[i])
            mask[row, starts[i] + 1 : len(sequences[i])] = True
        yield tokens, mask


@torch.no_grad()
def acceptance(
    net: Network, sequences: Sequence[list[int]], starts: Sequence[int], dtype: torch.dtype, temperature: float = 0.0
) -> list[float]:
    """The share of accepted drafts for the first, second and third draft, each given that those before were accepted.

    At temperature 0 a draft is accepted when it is the generated token.  Otherwise drafts are sampled too and accepted
    with probability min(1, p / q) (Leviathan et al. 2023, theorem 3.5): the expectation is the sum of min(p, q).
    `starts` are the prompt lengths; the sequences must have been generated at the same temperature.
    """
    good, total = [0.0] * DRAFTS, [0.0] * DRAFTS
    for tokens, mask in batches(sequences, starts, size=65_536):
        tokens, mask = tokens.to(net.embed.device), mask.to(net.embed.device)
        embedded = functional.embedding(tokens, net.embed)
        target, _ = net.trunk(embedded, dtype, dtype)
        hidden, reached = target, shift(mask, 2).float()
        for k in range(DRAFTS):
            hidden, _ = net.mtp(hidden, shift(embedded, k + 1), dtype)
            wanted, valid = shift(tokens, k + 2), shift(mask, k + 2).float() * reached
            draft = linear(hidden, net.head).float()
            if temperature:
                goal = linear(shift(target, k + 1), net.head).float()
                p, q = (goal / temperature).softmax(-1), (draft / temperature).softmax(-1)
                rate = torch.minimum(p, q).sum(-1)
            else:
                rate = (draft.argmax(-1) == wanted).float()
            good[k] += float((rate * valid).sum())
            total[k] += float(valid.sum())
            reached = reached * rate
    return [round(g / max(1.0, t), 4) for g, t in zip(good, total, strict=True)]
