# SPDX-License-Identifier: Apache-2.0
"""backfold.pack and backfold.unpack, and the operators beneath them."""

import doctest
import os
import pathlib
import re
import subprocess
import sys

import backfold
import backfold._build_info
import backfold._packing
import backfold._torch_version
import pytest
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LAYOUTS = ["flat", "strided", "rotated"]
TORCH_VERSIONS = pathlib.Path(__file__).parents[2] / "cmake" / "torch_versions.txt"


def sample(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_bits_come_back_close_with_geometry(device, dtype, layout):
    x = sample(300, 70, device=device, dtype=dtype)
    y = backfold.unpack(backfold.pack(x, 8, layout))
    assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device)
    error = (y.double() - x.double()).norm() / x.double().norm()
    assert error < 0.02  # one step of 8 bits over 6 deviations; 4 bits score 0.2


@pytest.mark.parametrize("device", DEVICES)
def test_mean_of_many_draws_is_the_source(device):
    x = sample(4, 256, device=device)
    draws = [backfold.unpack(backfold.pack(x, 2, stream=i)) for i in range(400)]
    error = torch.stack(draws).mean(0) - x
    step = (x.amax() - x.amin()) / 3
    # 400 draws leave at most step / 40 of deviation; rounding to nearest leaves step / 2.
    assert error.abs().max() < step * 0.15


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1:],
        lambda x: x.view(8, 32, 8, 16).contiguous(memory_format=torch.channels_last),
        lambda x: x.view(2, 128, 128).permute(2, 0, 1),
    ],
    ids=["transposed", "offset", "channels_last", "permuted"],
)
def test_dense_views_keep_their_strides(device, view):
    x = view(sample(256, 128, device=device))
    y = backfold.unpack(backfold.pack(x, 16))
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, x, atol=1e-3, rtol=0)


def test_what_is_not_dense_is_copied_into_a_dense_tensor():
    x = sample(256, 256)
    for view in (x[:, ::2], x[:1].expand(64, 256)):
        y = backfold.unpack(backfold.pack(view, 16))
        assert y.is_contiguous()
        torch.testing.assert_close(y, view, atol=1e-3, rtol=0)


def test_a_packet_is_never_larger_than_its_source():
    for elements in (0, 1, 7, 20, 100):
        x = sample(elements)
        packet = backfold.pack(x, 4)
        assert packet.nbytes <= x.nbytes
        if packet.exact:
            assert torch.equal(backfold.unpack(packet), x)
    assert not backfold.pack(sample(128)).exact


def test_packing_leaves_source_and_generators_alone():
    x = sample(64, 64).requires_grad_()
    before, state = x.detach().clone(), torch.get_rng_state()
    y = backfold.unpack(backfold.pack(x, 4))
    assert torch.equal(x, before) and not y.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_a_packet_does_not_keep_its_source():
    x = sample(64, 64)
    packet = backfold.pack(x, 4)
    expected = backfold.unpack(packet)
    x.zero_()
    assert torch.equal(backfold.unpack(packet), expected)


PACK_AND_FOLD = """
import backfold, torch
x = torch.linspace(-1, 1, 65536).reshape(256, 256).requires_grad_()
print(backfold.pack(x.detach(), 3, "rotated").payload.sum().item())
with backfold.Controller(bits=4, min_bytes=0) as fold:
    loss = (x * x.cos()).sum()
loss.backward()
print(x.grad.sum().item())
"""


def run_on_target(target: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "BACKFOLD_TARGET"}
    if target is not None:
        environment["BACKFOLD_TARGET"] = target
    return subprocess.run(
        [sys.executable, "-c", PACK_AND_FOLD], env=environment, capture_output=True, text=True
    )


def test_the_environment_forces_a_target_for_the_whole_process():
    own, reference = run_on_target(None), run_on_target("reference")
    assert own.returncode == reference.returncode == 0, own.stderr + reference.stderr
    assert own.stdout == reference.stdout
    refused = run_on_target("AVX9")
    assert refused.returncode != 0
    assert "BACKFOLD_TARGET 'AVX9' is neither reference nor among" in refused.stderr


@pytest.mark.skipif("cuda" not in DEVICES, reason="compares a GPU with the CPU: needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cpu_and_cuda_give_the_same_bytes(layout):
    x = sample(500, 96)
    on_cpu, on_cuda = backfold.pack(x, 3, layout), backfold.pack(x.cuda(), 3, layout)
    assert torch.equal(on_cpu.payload, on_cuda.payload.cpu())
    assert torch.equal(backfold.unpack(on_cpu), backfold.unpack(on_cuda).cpu())


@pytest.mark.skipif("cuda" not in DEVICES, reason="watches GPU synchronisation: needs a GPU")
def test_no_host_synchronisation():
    x = sample(256, 256, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        backfold.unpack(backfold.pack(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_pass_opcheck(device, layout):
    x = sample(256, 64, device=device)
    torch.library.opcheck(torch.ops.backfold.pack.default, (x, 4, layout))
    payload = torch.ops.backfold.pack(x, 4, layout)
    arguments = (payload, x.shape, x.stride(), x.dtype, 4, layout)
    torch.library.opcheck(torch.ops.backfold.unpack.default, arguments)
    assert torch.equal(
        torch.ops.backfold.unpack(*arguments), backfold.unpack(backfold.pack(x, 4, layout))
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"bits": 7}, ValueError, "bits must be one of 1, 2, 3, 4, 5, 6, 8, 16, got 7"),
        ({"bits": 0}, ValueError, "bits must be one of"),
        ({"bits": 2**40}, ValueError, "bits must be one of"),
        ({"layout": "diagonal"}, ValueError, "layout must be 'flat', 'strided' or 'rotated'"),
        ({"group": 64}, ValueError, "group must be 128 or 256, got 64"),
        ({"bits": 1, "zero_exact": True}, ValueError, "bits must be at least 2 for zero_exact"),
        ({"tensor": torch.ones(256, dtype=torch.int64)}, TypeError, "tensor must be float32"),
        ({"tensor": torch.ones(256, dtype=torch.complex64)}, TypeError, "tensor must be float32"),
        ({"tensor": torch.ones(256, 2).to_sparse()}, TypeError, "must be strided"),
        ({"tensor": torch.ones(256, device="meta")}, ValueError, "CPU or CUDA device, got meta"),
        ({"tensor": [1.0]}, TypeError, "tensor must be a torch.Tensor, got list"),
        (
            {"tensor": torch.ones(256).bfloat16(), "bits": 16},
            ValueError,
            "fewer than the source has",
        ),
    ],
)
def test_bad_input_gets_one_clear_sentence(arguments, error, text):
    arguments = {"tensor": torch.ones(256), **arguments}
    with pytest.raises(error, match=text):
        backfold.pack(**arguments)


def test_unpack_wants_a_packet():
    with pytest.raises(TypeError, match=r"packet must come from backfold\.pack"):
        backfold.unpack(torch.ones(3))


@pytest.mark.parametrize("found", ["2.9.1", "3.0.0+cu130"])
def test_an_unsupported_torch_is_named(monkeypatch, found):
    monkeypatch.delenv("BACKFOLD_ANY_TORCH", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    versions = dict(re.findall(r"^(\w+) ([\d.]+)$", TORCH_VERSIONS.read_text(), re.MULTILINE))
    text = f"works with torch {versions['oldest']} to {versions['newest']}, found {found}"
    with pytest.raises(ImportError, match=re.escape(text)):
        backfold._torch_version.require_supported_torch()


def test_a_newer_torch_may_be_tried(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.0.0")
    monkeypatch.delenv("BACKFOLD_ANY_TORCH", raising=False)
    with pytest.raises(ImportError, match="To try it, set BACKFOLD_ANY_TORCH=1"):
        backfold._torch_version.require_supported_torch()
    monkeypatch.setenv("BACKFOLD_ANY_TORCH", "1")
    monkeypatch.setattr("backfold._build_info.TORCH_RELEASE", "3.0")
    with pytest.warns(UserWarning, match="found 3.0.0, which is newer; continuing"):
        backfold._torch_version.require_supported_torch()


def test_another_torch_than_at_build_time_is_named(monkeypatch):
    info = backfold._build_info
    other = {info.OLDEST_TORCH, info.NEWEST_TORCH} - {info.TORCH_RELEASE}
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{other.pop()}.0")
    with pytest.raises(ImportError, match=r"was compiled for torch .*, found"):
        backfold._torch_version.require_supported_torch()


@pytest.mark.parametrize("module", [backfold, backfold._packing, backfold._torch_version])
def test_examples_in_docstrings_run(module):
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0
