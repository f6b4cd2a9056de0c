# SPDX-License-Identifier: Apache-2.0
"""Every codec on every backend of this machine, compared with its scalar reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from backfold import _C, codecs
from backfold._controller import Controller
from backfold._packing import pack

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16)
SEED = 7


class Case(NamedTuple):
    """One tensor to be packed; `options` are those of backfold.pack()."""

    name: str
    tensor: Tensor
    options: dict


@dataclass
class Result:
    """What one codec did on one backend."""

    codec: str
    backend: str
    cases: int = 0
    failures: list[str] = field(default_factory=list)


def _maps(dtype: torch.dtype) -> Tensor:
    """Smooth maps of awkward sizes whose samples differ in magnitude."""
    generator = torch.Generator().manual_seed(SEED)
    coarse = torch.randn(3, 6, 4, 5, generator=generator)
    fine = nn.functional.interpolate(coarse, size=(13, 19), mode="bilinear")
    fine = fine + 0.1 * torch.randn(fine.shape, generator=generator)
    return (fine * torch.tensor([1.0, 5.0, 0.01]).view(-1, 1, 1, 1)).to(dtype)


def _memory_orders(maps: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "contiguous", maps
    yield "channels last", maps.contiguous(memory_format=torch.channels_last)


def _group_cases(dtype: torch.dtype) -> Iterator[Case]:
    maps = _maps(dtype)
    widths = [bits for bits in WIDTHS if bits < 8 * dtype.itemsize]
    for layout in ("flat", "strided", "rotated"):
        for bits in widths:
            yield Case(f"{bits} bits, {layout}", maps, {"bits": bits, "layout": layout})
    for bits in widths[1:]:
        yield Case(f"{bits} bits, zeros exact", maps.relu(), {"bits": bits, "zero_exact": True})


def _codec_cases(codec: codecs.Codec, dtype: torch.dtype) -> Iterator[Case]:
    maps = _maps(dtype)
    if isinstance(codec, codecs.FewBit):
        for op in ("aten::gelu", "aten::silu"):
            yield Case(f"{codec}, {op}", maps, {"codec": codec, "op": op})
    elif isinstance(codec, codecs.Project):
        rows = maps.flatten(0, 1).flatten(1)[:, :64].repeat(4, 1)
        yield Case(f"{codec}, rows", rows, {"codec": codec})
    else:
        for order, tensor in _memory_orders(maps):
            yield Case(f"{codec}, {order}", tensor, {"codec": codec})


# Which cases stand for which codec. Exact and Keep make no packets of their own.
_PACKING: dict[str, list[codecs.Codec]] = {
    "Quantize, per sample": [codecs.Quantize(bits, per_sample=True) for bits in (1, 2, 4, 8)],
    "Pool": [codecs.Pool(block) for block in (2, 4, 8)],
    "PoolResidual": [codecs.PoolResidual(4, 2), codecs.PoolResidual(8, 4)],
    "Project": [codecs.Project(4, 2), codecs.Project(8, 4)],
    "RunningRange": [codecs.RunningRange(bits) for bits in (2, 4, 8)],
    "FewBit": [codecs.FewBit(bits) for bits in (2, 3, 4)],
}
_KEEPING = {"Exact": codecs.Exact(), "Keep": codecs.Keep()}
NAMES = ("Quantize", *_PACKING, *_KEEPING)


def _cases(name: str, dtype: torch.dtype) -> Iterator[Case]:
    if name == "Quantize":
        yield from _group_cases(dtype)
        return
    for codec in _PACKING[name]:
        yield from _codec_cases(codec, dtype)


@contextmanager
def _on_host_target(name: str) -> Iterator[None]:
    _C.use_host_target(name)
    try:
        yield
    finally:
        _C.use_host_target("")


def _round_trip(case: Case, device: str) -> tuple[Tensor, Tensor, str]:
    """The payload, what it decodes to, and the host target that packed."""
    packet = pack(case.tensor.to(device), seed=SEED, **case.options)
    ran = _C.host_target_that_ran()  # decoding a projection ends with signs, which have no SIMD
    return packet.payload.cpu(), packet.unpack().cpu(), ran


def backends() -> list[str]:
    """Those that are compared with the reference: SIMD targets, and GPUs that have kernels."""
    gpus = torch.cuda.device_count() if _C.built_with_cuda() else 0
    return [*_C.simd_targets(), *(f"cuda:{index}" for index in range(gpus))]


def check(name: str, backend: str) -> Result:
    """Runs one codec on one backend. `name` is one of NAMES."""
    result = Result(name, backend)
    compare = _compare_gradients if name in _KEEPING else _compare_packets
    try:
        compare(name, backend, result)
    except Exception as error:  # whatever goes wrong is what the doctor looks for
        result.failures.append(f"{type(error).__name__}: {error}")
    return result


def _compare_packets(name: str, backend: str, result: Result) -> None:
    gpu = backend.startswith("cuda")
    for dtype in DTYPES:
        for case in _cases(name, dtype):
            result.cases += 1
            where = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            with _on_host_target("reference"):
                payload, decoded, _ = _round_trip(case, "cpu")
            with _on_host_target("" if gpu else backend):
                found, restored, ran = _round_trip(case, backend if gpu else "cpu")
            if ran != backend and not gpu:
                result.failures.append(f"{where}: ran on {ran}")
            elif gpu and name == "Project":
                # Its matrix product is torch's, which rounds differently on each device.
                error = (restored.double() - decoded.double()).norm() / decoded.double().norm()
                if not error < 0.2:
                    result.failures.append(f"{where}: differs by {error:.2g} of its norm")
            elif not torch.equal(found, payload):
                result.failures.append(f"{where}: {_differing(found, payload)} bytes differ")
            elif not _same_bits(restored, decoded):
                result.failures.append(f"{where}: the same bytes decode differently")


def _differing(found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape:
        return f"{found.numel()} instead of {wanted.numel()}"
    return f"{int((found != wanted).sum())} of {wanted.numel()}"


def _same_bits(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


class _EveryExactKind(nn.Module):
    """Saves signs, comparisons, masks, bits and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.convolution = nn.Embedding(300, 64), nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 15 * 31, 8)

    def forward(self, words: Tensor) -> Tensor:
        maps = self.convolution(self.words(words).unsqueeze(1)).relu()
        maps = nn.functional.dropout(nn.functional.max_pool2d(maps, 2), 0.2)
        maps = torch.where(maps > 1, maps.clamp(-1, 2), nn.functional.hardtanh(maps * 3))
        return self.head(maps.flatten(1)).logsumexp(1).sum()


def _compare_gradients(name: str, backend: str, result: Result) -> None:
    """Gradients must be those of plain autograd, bit by bit."""
    gpu = backend.startswith("cuda")
    device = backend if gpu else "cpu"
    devices = [device] if gpu else []
    # Convolutions of cuDNN may add up in another order each time.
    exact = torch.backends.cudnn.flags(deterministic=True, benchmark=False)
    with torch.random.fork_rng(devices), exact:
        torch.manual_seed(SEED)
        model = _EveryExactKind().to(device)
        words = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(SEED))
        fold = Controller(model, codec=_KEEPING[name], min_bytes=0, adaptive=False)
        with _on_host_target("" if gpu else backend):
            folded = [_gradients(model, words.to(device), fold) for _ in range(3)]
            ran = backend if gpu else _C.host_target_that_ran()
        plain = _gradients(model, words.to(device), None)
    if name == "Exact" and ran != backend:
        result.failures.append(f"ran on {ran or 'nothing'}")
    for gradients in folded:
        for (parameter, _), found, wanted in zip(
            model.named_parameters(), gradients, plain, strict=True
        ):
            result.cases += 1
            if not _same_bits(found, wanted):
                result.failures.append(f"gradient of {parameter} is not that of plain autograd")


def _gradients(model: nn.Module, words: Tensor, fold: Controller | None) -> list[Tensor]:
    torch.manual_seed(SEED)  # for the dropout mask
    if fold is None:
        loss = model(words)
    else:
        with fold:
            loss = model(words)
    return [gradient.cpu() for gradient in torch.autograd.grad(loss, list(model.parameters()))]
