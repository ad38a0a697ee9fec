"""Random weights at the speed of the device's memory, for tests of speed and size without a checkpoint. Knows no file.

Magnitudes are those of a model that works: activations neither explode nor vanish, states decay and stay finite,
tokens spread over all experts. No number is zero: multiplying zeros costs less power than real weights, and flatters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltaserve.models.names import is_scale
from deltaserve.models.qwen3_next import Qwen3Next

PIECE = 1 << 28
"""Numbers filled at once, so that what the draw needs beside the weights stays small."""


@torch.inference_mode()
def fill_at_random(model: Qwen3Next, seed: int) -> None:
    """Fills every weight; the same seed gives the same weights on the same kind of device."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    rms = _e4m3_rms()
    for name, parameter in parameters.items():
        kind, flat = name.rpartition(".")[2], _flat(parameter)
        if kind == "A_log":  # decay rates of 1 to 16, as models begin with
            flat.uniform_(1.0, 16.0, generator=generator).log_()
        elif kind == "dt_bias":  # time steps of 0.001 to 0.1 where the input adds nothing; softplus turned round
            steps = flat.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
            steps.add_(torch.log(-torch.expm1(-steps)))
        elif kind in ("weight_plus_one", "norm_weight"):
            flat.uniform_(0.9, 1.1, generator=generator)
        elif is_scale(name):
            size = rms * math.sqrt(_in_width(parameters, name))
            flat.uniform_(0.75 / size, 1.25 / size, generator=generator)
        elif parameter.dtype == torch.float8_e4m3fn:
            for piece in torch.split(flat, PIECE):
                _fill_e4m3(piece, generator)
        else:
            # Embeddings feed a norm-free sum: of size 1, like what the layers add to it.
            std = 1.0 if kind == "weight" and name.startswith("embed_tokens") else parameter.shape[-1] ** -0.5
            for piece in torch.split(flat, PIECE):
                piece.normal_(0.0, std, generator=generator)
                piece.masked_fill_(piece == 0, std)


def _fill_e4m3(flat: Tensor, generator: torch.Generator) -> None:
    """Every code alike, but for zero and NaN, which become numbers in the middle of the range."""
    codes = flat.view(torch.uint8)
    whole = 0 if codes.storage_offset() % 8 else len(codes) // 8 * 8
    if whole:  # eight codes at a draw
        codes[:whole].view(torch.int64).random_(-(2**63), None, generator=generator)
    codes[whole:].random_(0, 256, generator=generator)
    without_sign = codes & 0x7F
    odd_ones = (without_sign == 0x7F) | (without_sign == 0)
    codes.bitwise_xor_(odd_ones.to(torch.uint8).mul_(0x38))


def _e4m3_rms() -> float:
    """The root mean square of what `_fill_e4m3` draws."""
    codes = [code ^ 0x38 if code & 0x7F in (0, 0x7F) else code for code in range(256)]
    numbers = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return float(numbers.square().mean().sqrt())


def _in_width(parameters: dict[str, torch.nn.Parameter], scales: str) -> int:
    return parameters[scales.removesuffix("_scale_inv").removesuffix("_scale")].shape[-1]


def _flat(parameter: Tensor) -> Tensor:
    """Its numbers as they lie in memory."""
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return parameter.data.permute(order).view(-1)
