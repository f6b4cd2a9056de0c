# SPDX-License-Identifier: Apache-2.0
"""Size, error and bias of each codec of backfold.codecs.

The error of a tensor is norm(decoded - source) / norm(source), in one draw. The mean error over n
draws of an unbiased codec has 1/n of the energy of one draw, so

    bias = sqrt(n) * norm(mean error) / root mean square of norm(error)

is 1 for an unbiased codec and sqrt(n), here 5.7, for one that errs the same way each time. It is
measured on the first samples of a tensor, about 2^17 elements.
FewBit is judged by the derivative at the decoded input, which is all that its reader uses.
"""

import math
import typing
from collections.abc import Iterable, Iterator

import backfold
import torch
from backfold import codecs
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

DRAWS = 32
PART = 1 << 17  # elements that the bias is measured on
CODECS: list[codecs.Codec] = [
    codecs.Quantize(4),
    codecs.Quantize(2),
    codecs.Quantize(2, per_sample=True),
    codecs.Pool(4),
    codecs.Pool(8),
    codecs.PoolResidual(8, 2),
    codecs.Project(8, 2),
    codecs.Project(8, 8),
    codecs.RunningRange(8),
    codecs.RunningRange(4),
    codecs.FewBit(2),
    codecs.FewBit(3),
]
ACTIVATIONS = {"gelu": functional.gelu, "silu": functional.silu}


class Saved(typing.NamedTuple):
    tensor: Tensor
    op: str  # "aten::gelu" or "aten::silu" where that saved it, else ""


class Savers(TorchFunctionMode):
    """Tracks which activation is running, if any."""

    op = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        before, self.op = self.op, f"aten::{name}" if name in ACTIVATIONS else self.op
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.op = before


class Loss(typing.NamedTuple):
    """One tensor under one codec."""

    elements: int
    bytes: int
    error: float
    bias: float


def read_as(codec: codecs.Codec, saved: Saved, value: Tensor) -> Tensor:
    """What backward reads of a decoded tensor, as far as the codec promises it."""
    if not isinstance(codec, codecs.FewBit):
        return value
    with torch.enable_grad():
        x = value.detach().requires_grad_()
        activation = ACTIVATIONS[saved.op.removeprefix("aten::")]
        return torch.autograd.grad(activation(x).sum(), x)[0]


def fits(codec: codecs.Codec, saved: Saved) -> bool:
    try:
        backfold.pack(saved.tensor, codec=codec, op=saved.op)
    except ValueError:
        return False
    return bool(saved.tensor.any())


def decoding_error(codec: codecs.Codec, saved: Saved, seed: int, stream: int) -> Tensor:
    packet = backfold.pack(saved.tensor, codec=codec, op=saved.op, seed=seed, stream=stream)
    source = read_as(codec, saved, saved.tensor)
    return read_as(codec, saved, packet.unpack()).sub(source)


def bias(codec: codecs.Codec, saved: Saved, stream: int) -> float:
    samples = max(2, PART * len(saved.tensor) // saved.tensor.numel())
    part = saved._replace(tensor=saved.tensor[:samples])
    while not fits(codec, part) and samples < len(saved.tensor):  # too few rows for a projection
        samples *= 2
        part = saved._replace(tensor=saved.tensor[:samples])
    total = torch.zeros_like(part.tensor)
    energy = 0.0
    for seed in range(DRAWS):
        error = decoding_error(codec, part, seed, stream)
        energy += error.norm().item() ** 2
        total += error
    return total.norm().item() / math.sqrt(energy) if energy else 0.0


def loss(codec: codecs.Codec, saved: Saved, stream: int) -> Loss:
    size = backfold.pack(saved.tensor, codec=codec, op=saved.op).nbytes
    error = decoding_error(codec, saved, 0, stream).norm().item()
    relative = error / read_as(codec, saved, saved.tensor).norm().item()
    return Loss(saved.tensor.numel(), size, relative, bias(codec, saved, stream))


HEAD = ["codec", "stored bits", "error", "bias", "stated", "tensors", "skipped"]


def rows(saved: Iterable[Saved], tensors: int) -> Iterator[list[str]]:
    """A line per codec: means over the tensors it fits, weighted by elements."""
    losses: dict[codecs.Codec, list[Loss]] = {codec: [] for codec in CODECS}
    for stream, one in enumerate(saved):
        for codec, found in losses.items():
            if fits(codec, one):
                found.append(loss(codec, one, stream))
    for codec, found in losses.items():
        stated = "biased" if codec.biased else "unbiased"
        yield [str(codec), *means(found), stated, str(len(found)), str(tensors - len(found))]


def means(found: list[Loss]) -> list[str]:
    if not found:
        return ["-", "-", "-"]
    elements = sum(one.elements for one in found)
    bits = 8 * sum(one.bytes for one in found) / elements
    error = math.fsum(one.error * one.elements for one in found) / elements
    bias = math.fsum(one.bias * one.elements for one in found) / elements
    return [f"{bits:.2f}", f"{error:.4f}", f"{bias:.2f}"]
