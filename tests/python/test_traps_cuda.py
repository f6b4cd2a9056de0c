# SPDX-License-Identifier: Apache-2.0
"""Traps of saved-tensor hooks, part four: streams, devices and memory of a GPU."""

import backfold
import pytest
import torch
from torch import nn
from torch.nn import functional

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Everything(nn.Module):
    """One layer per way of keeping a tensor."""

    def __init__(self, device: str):
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.convolve = nn.Sequential(
            nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)
        )
        self.pool = nn.MaxPool1d(2)
        self.mix = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.read = nn.Linear(64, 100)
        self.to(device)

    def forward(self, words, targets):
        h = self.pool(self.convolve(self.words(words).transpose(1, 2))).transpose(1, 2)
        scores = self.read(functional.hardtanh(self.mix(h)))
        return functional.cross_entropy(scores.flatten(0, 1), targets, ignore_index=0)


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(100, (16, 64), generator=generator)
    return words.to(device), words[:, :32].flatten().to(device)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@needs_gpu
@pytest.mark.parametrize("bits", [None, 4])
def test_trap_26_side_streams(bits):
    # Packed on one stream and read on another: a payload that the allocator hands out again before
    # the reader is done shows as a gradient of somebody else's numbers, or NaN.
    side, w = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", requires_grad=True)
    fold = backfold.Controller(bits=bits, min_bytes=0)
    for i in range(50):
        x = torch.full((1024, 1024), float(i + 1), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), fold:
            h = x * 2
            x.record_stream(side)
            out = (h * w).sum()
            del h
            churn = [torch.full((1024, 1024), -1.0, device="cuda") for _ in range(4)]
            del churn
        torch.cuda.current_stream().wait_stream(side)
        (found,) = torch.autograd.grad(out, w)
        churn = [torch.full((1024, 1024), -2.0, device="cuda") for _ in range(4)]
        del churn
        torch.testing.assert_close(found, torch.full_like(found, 2.0 * (i + 1)), rtol=0.01, atol=0)


@needs_gpu
def test_trap_28_graph_capture_works_or_is_refused_clearly():
    # A host-side decision made during capture is replayed forever with the data of the first run.
    w = torch.randn(256, 256, device="cuda", requires_grad=True)
    x = torch.randn(256, 256, device="cuda")
    fold = backfold.Controller(bits=8, min_bytes=0)

    def step():
        with fold:
            out = ((x * 2) * w).sum()
        return torch.autograd.grad(out, w)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            found = step()
    except RuntimeError as error:
        assert "captur" in str(error)
    else:
        for seed in range(3):
            torch.manual_seed(seed)
            x.normal_()
            graph.replay()
            assert relative_error(found, x * 2) < 0.02
    torch.cuda.synchronize()
    assert relative_error(step(), x * 2) < 0.02  # and the controller is still usable


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_trap_29_another_device_than_the_current_one():
    # Without a device guard the kernel runs on cuda:0 with a pointer of cuda:1.
    for current, other in ((0, 1), (1, 0)):
        torch.cuda.set_device(current)
        w = torch.randn(256, 256, device=f"cuda:{other}", requires_grad=True)
        x = torch.randn(256, 256, device=f"cuda:{other}")
        with backfold.Controller(bits=8, min_bytes=0):
            out = ((x * 2) * w).sum()
        (found,) = torch.autograd.grad(out, w)
        assert found.device == w.device and relative_error(found, x * 2) < 0.02
    torch.cuda.set_device(0)


def check_more_than_int32_elements(device: str) -> None:
    # An offset in 32 bits wraps, and the last elements are lost or taken from the beginning. The
    # kernels' own tests at this size are in tests/core.
    elements = 2**31 + 4096
    w = torch.ones(1, device=device, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(elements, device=device, dtype=torch.bool)
    mask[-3] = False
    with backfold.Controller(bits=None) as fold:
        out = w.expand(elements).masked_fill(~mask, 0)[-64:].sum()
        del mask
    (site,) = (s for s in fold.report().to_dict()["sites"] if s["kind"] == "bits")
    assert site["held_bytes"] == elements // 8
    (found,) = torch.autograd.grad(out, w)
    assert found.item() == 63


@needs_gpu
def test_trap_30_more_elements_than_32_bits_count():
    check_more_than_int32_elements("cuda")


@needs_gpu
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("min_bytes", [0, 16384])
def test_trap_32_no_host_synchronisation(bits, min_bytes):
    # One .item() in pack stalls the queue of kernels at each saved tensor.
    model, data = Everything("cuda"), batch("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    fold = backfold.Controller(model, bits=bits, min_bytes=min_bytes)
    model(*data).backward()  # plain first: libraries load and synchronise
    try:
        for _ in range(4):  # learning from a step must not cost one either
            torch.cuda.set_sync_debug_mode("error")
            with fold:
                loss = model(*data)
            loss.backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fold.steps == 4


@needs_gpu
def test_trap_37_all_memory_comes_from_torchs_allocator():
    # A separate cudaMalloc grows outside the cache, cannot use its free memory, and is missing from
    # every figure that a user looks at.
    def outside() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    w = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    fold = backfold.Controller(bits=8, derive=False)
    held = []
    for i in range(12):
        if i == 2:
            before = outside()
        with fold:
            held.append(((w * 2).exp().tanh() * w).sum())  # 32 MiB and more at 8 bits
    # Ten steps hold 320 MiB at least. Some MiB are for kernels that are loaded late.
    assert outside() - before < 64 << 20
    assert torch.cuda.memory_allocated() > 320 << 20
