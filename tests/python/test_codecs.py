# SPDX-License-Identifier: Apache-2.0
"""Codecs on single tensors: what they keep, how large their errors are, what they refuse."""

import math

import backfold
import pytest
import torch
from backfold import codecs
from states import tensor_in

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
UNBIASED = [
    codecs.Quantize(2),
    codecs.Quantize(2, per_sample=True),
    codecs.PoolResidual(4, 2),
    codecs.Project(4, 4),
    codecs.RunningRange(4),
]


def smooth_maps(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Maps whose neighbours are similar, as in activations; samples of different magnitude."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.randn(6, 8, 5, 5, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, size=(21, 19), mode="bilinear")
    noisy = fine + 0.1 * torch.randn(fine.shape, generator=generator)
    return (noisy * torch.arange(1, 7).view(-1, 1, 1, 1)).to(device, dtype)


def decoded(tensor: torch.Tensor, codec: codecs.Codec, seed: int = 0, op: str = "") -> torch.Tensor:
    return backfold.unpack(backfold.pack(tensor, codec=codec, seed=seed, op=op))


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_the_mean_of_many_draws_is_the_tensor(device, codec):
    tensor = smooth_maps(device)
    draws = torch.stack([decoded(tensor, codec, seed).double() for seed in range(400)])
    error = (draws.mean(0) - tensor).norm()
    spread = (draws.var(0).sum() / len(draws)).sqrt()
    # The mean of 400 draws is off by about its standard deviation. A bias of a tenth of the spread
    # of one draw would double that.
    assert error < 1.15 * spread


def test_pooling_alone_decodes_to_means_of_blocks(device):
    tensor = smooth_maps(device)
    found = decoded(tensor, codecs.Pool(4))
    padded = torch.nn.functional.avg_pool2d(
        tensor, 4, ceil_mode=True, count_include_pad=False
    ).bfloat16()
    wanted = padded.float().repeat_interleave(4, 2).repeat_interleave(4, 3)[:, :, :21, :19]
    # bf16 may round a sum taken in another order to the next number.
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    assert len({decoded(tensor, codecs.Pool(4), seed).norm().item() for seed in range(3)}) == 1


@pytest.mark.parametrize("ratio", [2, 8])
def test_a_projection_is_off_by_what_its_formula_says(device, ratio):
    torch.manual_seed(0)
    rows = torch.randn(256, 256, device=device)
    exact = codecs.Project(ratio, 8)
    energies = [(decoded(rows, exact, seed) - rows).square().sum().item() for seed in range(24)]
    kept = 256 // ratio
    expected = rows.square().sum().item() * (256 - 1) / kept
    assert sum(energies) / 24 == pytest.approx(expected, rel=0.1)
    packet = backfold.pack(rows, codec=codecs.Project(ratio, 2))
    assert packet.nbytes == pytest.approx(rows.numel() / ratio * (2 + 0.25) / 8, rel=0.02)


def documented_signs(count: int, seed: int, stream: int) -> torch.Tensor:
    """1 or -1, as "Random signs" of docs/formats.md defines them."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    step = 0x9E3779B97F4A7C15
    start = mix(mix((seed + step) % 2**64) ^ stream)
    words = [mix((start + word * step) % 2**64) for word in range(-(-count // 64))]
    return torch.tensor([1.0 - 2.0 * (words[i // 64] >> i % 64 & 1) for i in range(count)])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_projection_multiplies_by_the_documented_signs(device, dtype):
    # Of the identity, x P is P, two values, which 8 bits nearly hold; P P^T / 36 comes back.
    packet = backfold.pack(
        torch.eye(72, device=device, dtype=dtype), codec=codecs.Project(2, 8), seed=7, stream=2**63
    )
    signs = documented_signs(72 * 36, 7, 2**63).view(72, 36)
    found = packet.unpack().double().cpu()
    # One wrong sign makes its row wrong by 2 / 36, another key everything by about 1 / 6.
    torch.testing.assert_close(found, (signs @ signs.t()).double() / 36, rtol=0, atol=0.02)


def test_a_projection_keeps_the_size_of_16_bit_elements(device):
    # 1 / sqrt(254) in bf16 is 0.4% too large: squared, it would make everything 0.8% larger.
    rows = torch.eye(2 * 254, device=device, dtype=torch.bfloat16)
    diagonal = decoded(rows, codecs.Project(2, 8), seed=9).diagonal().double()
    assert diagonal.mean().item() == pytest.approx(1, abs=0.002)


def test_a_projection_is_the_same_on_every_device(device):
    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    here = decoded(rows, codecs.Project(4, 8), seed=9)
    there = decoded(rows.to(device), codecs.Project(4, 8), seed=9).cpu()
    # One code of 8 bits may differ where the matrix product rounds differently.
    step = (rows.norm(dim=1).max() * 2 / 255).item()
    assert (here - there).abs().max() < 4 * step


@pytest.mark.parametrize("codec", [*UNBIASED, codecs.Pool(4)], ids=repr)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_and_memory_order_is_served(device, dtype, codec):
    maps = smooth_maps(device, dtype)
    for tensor in (maps, maps.contiguous(memory_format=torch.channels_last), maps[:, ::2]):
        packet = backfold.pack(tensor, codec=codec)
        found = backfold.unpack(packet)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert packet.nbytes < packet.source_nbytes / 2
        relative = (found.double() - tensor.double()).norm() / tensor.double().norm()
        assert relative < (2.5 if isinstance(codec, codecs.Project) else 0.8)


@pytest.mark.parametrize("shape", [(4, 42, 24), (2, 3, 9, 10, 11)])
def test_sequences_and_volumes_are_pooled(device, shape):
    tensor = torch.randn(shape, device=device).cumsum(1)
    assert decoded(tensor, codecs.PoolResidual(4, 4)).sub(tensor).norm() < 0.2 * tensor.norm()
    sequence = backfold.pack(tensor, codec=codecs.Pool(4))
    convolved = backfold.pack(tensor, codec=codecs.Pool(4), op="aten::convolution")
    # Of (batch, tokens, channels) tokens are averaged, of a convolution's input positions.
    assert (sequence.nbytes == convolved.nbytes) == (len(shape) != 3)


def test_few_bits_of_a_derivative(device):
    x = torch.randn(100_000, device=device, generator=torch.Generator(device).manual_seed(1))
    for bits, limit in ((2, 0.14), (3, 0.07), (4, 0.04)):
        found = decoded(x, codecs.FewBit(bits), op="aten::gelu")
        slope, wanted = (
            torch.autograd.functional.jvp(torch.nn.functional.gelu, v, torch.ones_like(v))[1]
            for v in (found, x)
        )
        assert len(slope.unique()) <= 2**bits
        assert (slope - wanted).norm() / wanted.norm() < limit


def test_ranges_run(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).to(device)
    fold = backfold.Controller(bits=None, codec=codecs.RunningRange(8), min_bytes=0)
    ranges = []
    for scale in (1.0, 4.0, 0.5):
        with fold:
            loss = model(scale * torch.randn(256, 64, device=device)).square().sum()
        loss.backward()
        (site,) = (s for s in fold.state_dict()["sites"] if "addmm" in s["name"])
        ranges.append(tensor_in(site["ranges"]))
    own = ranges[0]
    assert own.shape == (64, 2) and (own[:, 0] < own[:, 1]).all()
    # Nine tenths of the old range, one tenth of the new.
    assert (ranges[1][:, 1] >= ranges[0][:, 1]).all() and (ranges[2] != ranges[1]).any()
    assert not fold.report().to_dict()["sites"][0]["reason"].endswith("biased")


WRONG = [
    (codecs.Pool(4), torch.zeros(64, 64), "takes tensors of 3 to 5 dimensions, got [64, 64]"),
    (codecs.Project(64, 2), torch.zeros(64, 100), "takes a last dimension of 128 or more"),
    (codecs.Project(8, 2), torch.zeros(4, 4096), "takes 512 or more rows"),
    (
        codecs.Quantize(2, per_sample=True),
        torch.zeros(4096),
        "takes tensors whose first dimension is a batch",
    ),
    (codecs.Quantize(2, per_sample=True), torch.zeros(1, 4096), "of 2 or more samples"),
    (codecs.FewBit(3), torch.zeros(64, 64), "takes tensors saved by aten::gelu and aten::silu"),
    (codecs.RunningRange(), torch.zeros(64), "takes tensors of 2 or more dimensions"),
]


@pytest.mark.parametrize(("codec", "tensor", "message"), WRONG, ids=lambda value: repr(value)[:30])
def test_what_a_codec_is_not_for_is_said(codec, tensor, message):
    with pytest.raises(ValueError, match="codec: ") as error:
        backfold.pack(tensor, codec=codec)
    assert message in str(error.value) and repr(codec).split("(")[0] in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: codecs.Quantize(7),
            "Quantize: bits must be one of 1, 2, 3, 4, 5, 6, 8, 16",
        ),
        (lambda: codecs.Pool(1), "Pool: block must be from 2 to 16, got 1"),
        (lambda: codecs.PoolResidual(8, 5), "PoolResidual: bits must be one of 1, 2, 3, 4, 8"),
        (lambda: codecs.Project(1), "Project: ratio must be 2 or more"),
        (lambda: codecs.RunningRange(8, 1.0), "RunningRange: decay must be in [0, 1), got 1"),
        (lambda: codecs.FewBit(1), "FewBit: bits must be one of 2, 3, 4, got 1"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match="must be") as error:
        make()
    assert message in str(error.value)


def test_arguments_of_another_type_are_refused():
    with pytest.raises(TypeError, match=r"Pool: block must be an int, got 4\.0"):
        codecs.Pool(4.0)
    with pytest.raises(TypeError, match="Quantize: per_sample must be True or False, got 1"):
        codecs.Quantize(2, 1)
    with pytest.raises(TypeError, match=r"codec must be one of backfold\.codecs, got 'pool'"):
        backfold.pack(torch.zeros(4, 4), codec="pool")


def test_samples_that_range_far_get_the_wide_codes(device):
    tensor = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)).to(device)
    tensor *= torch.logspace(-1, 2, 32, device=device).view(-1, 1)
    one_width = decoded(tensor, codecs.Quantize(2)) - tensor
    by_rank = decoded(tensor, codecs.Quantize(2, per_sample=True)) - tensor
    # Without a plan all samples have the same width.
    assert math.isclose(by_rank.norm().item(), one_width.norm().item(), rel_tol=0.1)
