"""The pieces of sampling, each over the rows of a step. Know no request, no seat and no order between them.

Every row's result is a function of that row alone: no result depends on how many rows there are or on which.
Probabilities are kept as integer weights, because integers have one sum whatever the order of adding: a cumulative sum
is then the same on every device and at every batch size.

Shape letters: R rows, V vocabulary, N tokens that are looked up, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltaserve.ops.cpu import LANES, kernels, takes_tensors
from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.sampling import reference

WEIGHT_ONE = reference.WEIGHT_ONE
"""The weight of a row's most likely token."""
MAX_VOCAB = 2**62 // WEIGHT_ONE
"""The weights of a row must add up in an int64."""


def is_finite(logits_RV: Tensor) -> Tensor:
    """Which rows hold neither NaN nor infinity. Returns [R] bool.

    Finite rows whose largest and smallest logits are further apart than the largest float count as not finite.
    """
    if has_kernels(logits_RV):
        return greedy_checked(logits_RV)[1]
    return reference.is_finite(logits_RV)


def penalize(
    logits_RV: Tensor,
    output_count_RV: Tensor,
    in_prompt_RV: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> Tensor:
    """Make tokens that are already there less (or more) likely.

    Repetition (Keskar et al. 2019, section 4.1) counts prompt and output: a positive logit is divided by it, a negative
    one multiplied. Then `frequency * count + presence * (count > 0)` is taken off, where only the output counts.

    Name           Shape    Dtype       Meaning
    logits         [R, V]   fp32/fp64   not written to
    output_count   [R, V]   int32       how often a token is in the output so far
    in_prompt      [R, V]   bool        whether it is in the prompt
    repetition     [R]      as logits   1 changes nothing; above 0
    frequency      [R]      as logits   0 changes nothing
    presence       [R]      as logits   0 changes nothing
    returns        [R, V]   as logits
    """
    assert logits_RV.shape == output_count_RV.shape == in_prompt_RV.shape, (
        f"sampling: logits {tuple(logits_RV.shape)}, counts {tuple(output_count_RV.shape)}, "
        f"prompt {tuple(in_prompt_RV.shape)}"
    )
    return reference.penalize(logits_RV, output_count_RV, in_prompt_RV, repetition_R, frequency_R, presence_R)


def greedy(logits_RV: Tensor) -> Tensor:
    """The most likely token of each row, of equals the lowest id. Returns [R] int64."""
    if has_kernels(logits_RV):
        return greedy_checked(logits_RV)[0]
    return reference.greedy(logits_RV)


def greedy_checked(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """`greedy` and `is_finite` in one pass over the logits; rows that are not finite get some token.

    Does not wait for a GPU, and its shapes follow from the logits': it can be part of a graph that is replayed.

    Name      Shape    Dtype       Meaning
    logits    [R, V]   any float
    returns   [R]      int64       the most likely token, of equals the lowest id
              [R]      bool        whether the row is finite
    """
    if has_kernels(logits_RV):
        from deltaserve.ops.sampling.triton_greedy import extremes

        return extremes(logits_RV)[:2]
    if logits_RV.shape[1] % LANES == 0 and logits_RV.is_contiguous() and takes_tensors(logits_RV):
        checked: tuple[Tensor, Tensor] = kernels("sampling.numba_greedy").greedy_checked(logits_RV)
        return checked
    return greedy(logits_RV), is_finite(logits_RV)


def weigh(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """`exp((logit - largest) / temperature)` in units of 1 / WEIGHT_ONE, rounded down.

    Name          Shape    Dtype       Meaning
    logits        [R, V]   fp32/fp64   finite
    temperature   [R]      as logits   above 0
    returns       [R, V]   int64       0 to WEIGHT_ONE, and WEIGHT_ONE for the most likely token
    """
    assert logits_RV.shape[1] <= MAX_VOCAB, f"sampling: a vocabulary of {logits_RV.shape[1]}, at most {MAX_VOCAB}"
    return reference.weigh(logits_RV, temperature_R)


def cut_top(weight_RV: Tensor, logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, width: int) -> Tensor:
    """Drop all but the `top_k` largest logits, then all but the smallest set of the largest with `top_p` of the rest.

    Equal logits fare alike: those equal to the last one kept are kept. (Holtzman et al. 2020 for top-p.)

    Name      Shape    Dtype       Meaning
    weight    [R, V]   int64       from `weigh`
    logits    [R, V]   fp32/fp64   those the weights were made of
    top_k     [R]      int64       1 to width; V cuts nothing
    top_p     [R]      float64     above 0; 1 cuts nothing
    width     -        -           how many logits are sorted: the largest top_k of the rows
    returns   [R, V]   int64       the weight, or 0
    """
    assert 1 <= width <= logits_RV.shape[1], f"sampling: {width} of {logits_RV.shape[1]} logits to sort"
    return reference.cut_top(weight_RV, logits_RV, top_k_R, top_p_R, width)


def cut_min(weight_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Drop tokens less likely than `min_p` times the most likely one (Nguyen et al. 2024).

    Name      Shape    Dtype     Meaning
    weight    [R, V]   int64     from `weigh`, cut or not
    min_p     [R]      float64   0 to 1; 0 cuts nothing
    returns   [R, V]   int64     the weight, or 0
    """
    return reference.cut_min(weight_RV, min_p_R)


def stream_key(seed: int, stream: int) -> int:
    """What `uniform` wants to know of a seed; streams of one seed are independent. Any int in, an int64 out."""
    return reference.stream_key(seed, stream)


def uniform(key_R: Tensor, position_R: Tensor) -> Tensor:
    """Noise that is a function of (key, position): the same on every device, in every batch, in any order.

    SplitMix64 (Steele, Lea and Flood 2014) read at index `position` of the sequence that starts at `key`.

    Name       Shape   Dtype     Meaning
    key        [R]     int64     from `stream_key`
    position   [R]     int64     a token's number in its sequence
    returns    [R]     float64   0 <= u < 1, a multiple of 2^-53
    """
    assert key_R.shape == position_R.shape, f"sampling: {tuple(key_R.shape)} keys, {tuple(position_R.shape)} positions"
    if key_R.device.type == "cpu":
        return reference.uniform_on_host(key_R, position_R)
    if has_kernels(key_R):
        from deltaserve.ops.sampling import triton_right

        return triton_right.uniform(key_R, position_R)
    return reference.uniform(key_R, position_R)


def draw(weight_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Inverse of the cumulative weights, in order of token ids.

    Name      Shape    Dtype     Meaning
    weight    [R, V]   int64     not negative; a row of zeros gives some token
    uniform   [R]      float64   one number per row, 0 <= u < 1
    returns   [R]      int64     a token of positive weight
    """
    return reference.draw(weight_RV, uniform_R)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    key_R: Tensor,
    position_R: Tensor,
    cut_widths: Sequence[int],
    has_top_p: bool,
    has_min_p: bool,
) -> Tensor:
    """`weigh`, `cut_top`, `cut_min` and `draw` with `uniform` noise, as far as the rows need them.

    On a GPU nothing is sorted and nothing waits; its exponential may differ from a CPU's in the last bits, and so may
    a token whose noise lies that near to a boundary.

    Name          Shape    Dtype       Meaning
    logits        [R, V]   fp32/fp64   finite
    temperature   [R]      as logits   as in `weigh`
    top_k         [R]      int64       as in `cut_top`
    top_p         [R]      float64     as in `cut_top`
    min_p         [R]      float64     as in `cut_min`
    key           [R]      int64       as in `uniform`
    position      [R]      int64       as in `uniform`
    cut_widths    [R]      ints        0 where top-k and top-p cut nothing, else top_k
    has_top_p     -        -           whether top-p cuts in some row
    has_min_p     -        -           whether min-p cuts in some row
    returns       [R]      int64       a token
    """
    assert logits_RV.shape[0] == len(cut_widths), f"sampling: {len(cut_widths)} widths, {logits_RV.shape[0]} rows"
    vocab = logits_RV.shape[1]
    assert vocab <= MAX_VOCAB, f"sampling: a vocabulary of {vocab}, at most {MAX_VOCAB}"
    if has_kernels(logits_RV):
        from deltaserve.ops.sampling import triton_draw

        has_top_k = any(0 < width < vocab for width in cut_widths)
        cuts = (top_k_R if has_top_k else None, top_p_R if has_top_p else None, min_p_R if has_min_p else None)
        return triton_draw.sample(logits_RV, temperature_R, uniform(key_R, position_R), *cuts)
    weight_RV = weigh(logits_RV, temperature_R)
    cut = [row for row, width in enumerate(cut_widths) if width]
    if len(cut) == len(cut_widths):
        weight_RV = cut_top(weight_RV, logits_RV, top_k_R, top_p_R, max(cut_widths))
    elif cut:
        cut_C = torch.tensor(cut, device=logits_RV.device)
        limits = (top_k_R[cut_C], top_p_R[cut_C], max(cut_widths))
        weight_RV[cut_C] = cut_top(weight_RV[cut_C], logits_RV[cut_C], *limits)
    if has_min_p:
        weight_RV = cut_min(weight_RV, min_p_R)
    return draw(weight_RV, uniform(key_R, position_R))


def count_right(token_BJ: Tensor, ok_BJ: Tensor, guess_BK: Tensor) -> Tensor:
    """How many tokens of each request are meant: those up to and including the first that is not its guess.

    Name      Shape      Dtype   Meaning
    token     [B, J]     int64
    ok        [B, J]     bool    whether the logits of a token were finite
    guess     [B, K]     int64   K = J - 1; 0 of them where all is meant
    returns   [B, 2+J]   int64   how many; 1 if all that are meant are ok, else 0; the tokens
    """
    assert guess_BK.shape[1] == token_BJ.shape[1] - 1, f"sampling: {guess_BK.shape[1]} guesses, {token_BJ.shape} tokens"
    if has_kernels(token_BJ):
        from deltaserve.ops.sampling import triton_right

        return triton_right.count_right(token_BJ, ok_BJ, guess_BK)
    return reference.count_right(token_BJ, ok_BJ, guess_BK)


def pretend(
    token_R: Tensor, row_N: Tensor, guess_N: Tensor, share_N: Tensor, key_R: Tensor, position_R: Tensor, vocab: int
) -> None:
    """Some tokens become the guesses of them, and others anything else: only for measuring what guesses bring.

    Name       Shape   Dtype     Meaning
    token      [R]     int64     written to
    row        [N]     int64     whose token a guess is of; no two are one
    guess      [N]     int64
    share      [N]     float64   how often a guess is to be right, by `uniform` noise
    key        [R]     int64     for that noise
    position   [R]     int64
    """
    if has_kernels(token_R):
        from deltaserve.ops.sampling import triton_right

        triton_right.pretend(token_R, row_N, guess_N, share_N, key_R, position_R, vocab)
        return
    noise_N = uniform(key_R[row_N], position_R[row_N])
    drawn_N = token_R[row_N]
    other_N = torch.where(drawn_N == guess_N, (guess_N + 1) % vocab, drawn_N)
    token_R.index_copy_(0, row_N, torch.where(noise_N < share_N, guess_N, other_N))


def token_logprobs(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Natural log-probabilities, in fp32, of given tokens and of the most likely ones.

    Tokens are ordered by their logits, equals by id. A token's number is the same float in both places.

    Name      Shape    Dtype       Meaning
    logits    [N, V]   fp32/fp64   raw
    token     [N]      int64       what is looked up
    num_top   -        -           K, 0 to V
    returns   [N]      float32     log-probability of `token`
              [N]      int64       its place in the order, 1 for the most likely
              [N, K]   int64       the most likely tokens, in order
              [N, K]   float32     their log-probabilities
    """
    assert 0 <= num_top <= logits_NV.shape[1], f"sampling: {num_top} of {logits_NV.shape[1]} logprobs"
    return reference.token_logprobs(logits_NV, token_N, num_top)
