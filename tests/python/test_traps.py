# SPDX-License-Identifier: Apache-2.0
"""Traps of saved-tensor hooks, part one: what is saved, and what comes back.

Each test is named after a trap that bit a real project and says why it fails without the handling.
The other parts: test_traps_tensors.py, test_traps_context.py, test_traps_cuda.py.
"""

import random

import backfold
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

MODES = [None, 4, 8]


def controller(bits=8, model=None, **options) -> backfold.Controller:
    return backfold.Controller(model, bits=bits, min_bytes=options.pop("min_bytes", 0), **options)


def leaf(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device).requires_grad_()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# How a tensor is kept determines where a change to it could go unnoticed.
@pytest.mark.parametrize("min_bytes", [0, 1 << 40], ids=["folded", "passed"])
@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("changed", ["activation", "result", "leaf", "view", "dead"])
def test_trap_01_in_place_change_after_saving_raises(device, bits, min_bytes, changed):
    # With hooks set, autograd no longer compares versions: without a check at unpack, a tensor held
    # by reference gives the gradient of the changed values, silently.
    x, w = leaf(64, 64, device=device), leaf(64, 64, device=device, seed=1)
    with controller(bits, min_bytes=min_bytes):
        h = x * 2
        y = (h * w).exp()
        out = y.sum()
    with torch.no_grad():
        if changed == "leaf":
            w.add_(1)
        elif changed == "result":
            y.add_(1)
        elif changed == "view":
            h[3:].t().zero_()
        else:
            h.add_(1)
    if changed == "dead":
        del h  # its version must still be known: plain autograd keeps the tensor and raises
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_trap_02_pack_does_not_modify_its_input(device, bits, dtype):
    # A packer that scales or clamps in place would change what the rest of the forward pass uses.
    base = leaf(96, 160, device=device).to(dtype)
    for view in (base, base.t(), base[1:, ::2], base[:1].expand(96, 160)):
        h = view.detach().clone().copy_(view).requires_grad_()
        before, version, stride = h.detach().clone(), h._version, h.stride()
        with controller(bits):
            results = [h.exp(), h.relu(), h @ h.t(), h.softmax(0), h.clamp(-1, 1)]
        assert torch.equal(h, before) and (h._version, h.stride()) == (version, stride)
        expected = [h.exp(), h.relu(), h @ h.t(), h.softmax(0), h.clamp(-1, 1)]
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("bits", MODES)
def test_trap_03_unpack_may_run_more_than_once(device, bits):
    # A packet that gives its memory away at the first read has nothing for the second.
    x, w = leaf(64, 128, device=device), leaf(128, 64, device=device, seed=1)
    with controller(bits):
        out = ((x * 2) @ w).relu().tanh()
    node = out.grad_fn
    out = out.sum()
    read = [node._saved_result for _ in range(2)]
    assert torch.equal(*read)
    gradients = [torch.autograd.grad(out, (x, w), retain_graph=True) for _ in range(3)]
    for again in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], again, strict=True))
    assert torch.equal(node._saved_result, read[0])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("bits", [None, 8])
def test_trap_04_unpack_order_is_not_the_reverse_of_pack_order(device, bits, order):
    # An implementation that keeps a stack of packets hands each branch the packet of another: the
    # factors below tell them apart.
    x = leaf(64, 64, device=device)
    weights = [leaf(64, 64, device=device, seed=i) for i in range(4)]
    with controller(bits):
        outs = [((x * (3**i)) * w).sum() for i, w in enumerate(weights)]
    for i in order:
        (found,) = torch.autograd.grad(outs[i], weights[i])
        assert relative_error(found, x * (3**i)) < (1e-6 if bits is None else 0.02)


@pytest.mark.parametrize("bits", MODES)
def test_trap_05_no_cycle_keeps_a_result_alive(device, bits):
    # A packet that holds the result itself, not a detached alias, holds grad_fn, which holds the
    # packet: a cycle in C++ that no collector sees.
    x = leaf(64, 64, device=device)
    with controller(bits):
        y = (x * 2).exp()
    storage = StorageWeakRef(y.untyped_storage())
    assert not storage.expired()
    del y
    assert storage.expired()


class Allocated:
    """Bytes that this process holds: exact on CUDA, the resident set on the CPU."""

    def __init__(self, device: str):
        self.device = device
        self.start = self.now()

    def now(self) -> int:
        if self.device == "cuda":
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def grown(self) -> int:
        return self.now() - self.start


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", ["forward raises", "no backward", "unused output"])
def test_trap_06_nothing_leaks_when_backward_never_runs(device, how):
    # A side table that unpack empties is never emptied here: 150 rounds of 1 MiB at 8 bits and more
    # would leave over 100 MiB behind.
    fold = controller(8)

    def step():
        x = leaf(512, 512, device=device)
        with fold:
            h = (x * 2).exp()
            other = (h @ h).tanh()
            if how == "forward raises":
                raise KeyError
        if how == "unused output":
            (h * 2).sum().backward()
        return other

    for i in range(170):
        if i == 20:
            allocated = Allocated(device)
        try:
            step()
        except KeyError:
            assert how == "forward raises"
    assert allocated.grown() < (1 << 25 if device == "cpu" else 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_trap_08_a_reused_address_is_another_tensor(device, bits):
    # Each h is freed before the next is made, and the next gets its address, with the same sizes
    # and version: a store keyed by address would serve the first to all readers. What allocators do
    # occasionally, an alias of borrowed memory does every time: a new storage at the same address.
    x, memory = leaf(256, 256, device=device), torch.empty(256, 256, device=device)
    weights = [leaf(256, 256, device=device, seed=i) for i in range(8)]
    outs = []
    with controller(bits):
        for i, w in enumerate(weights):
            h = torch.from_dlpack(memory)
            h.copy_(x.detach() * (2.0**i))
            outs.append((h * w).sum())
            del h
    for i, (w, out) in enumerate(zip(weights, outs, strict=True)):
        (found,) = torch.autograd.grad(out, w)
        assert relative_error(found, x * (2.0**i)) < 0.3  # those of another tensor: at least 0.5


@pytest.mark.parametrize("bits", [None, 8])
def test_trap_09_views_of_one_storage_differ_in_geometry(device, bits):
    # One storage, one size, five tensors: a store keyed by storage alone returns h for all of them.
    x = leaf(128, 128, device=device)
    views = [
        lambda h: h,
        lambda h: h.t(),
        lambda h: h[:, :1].expand(128, 128),
        lambda h: h.as_strided((128, 128), (127, 1)),
        lambda h: h.as_strided((128, 128), (1, 127), 100),
    ]
    weights = [leaf(128, 128, device=device, seed=i) for i in range(len(views))]
    with controller(bits):
        h = x.detach() * 2
        outs = [(view(h) * w).sum() for view, w in zip(views, weights, strict=True)]
        del h
    for view, w, out in zip(views, weights, outs, strict=True):
        (found,) = torch.autograd.grad(out, w)
        assert relative_error(found, view(x.detach() * 2)) < (1e-6 if bits is None else 0.02)


DENSE = {
    "transposed": lambda x: x.t(),
    "channels_last": lambda x: x.view(8, 16, 8, 16).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(8, 16, 128).permute(2, 0, 1),
    "offset": lambda x: x[1:],
}
WITH_GAPS = {
    "every second": lambda x: x[:, ::2],
    "block, transposed": lambda x: x[3:, 5:].t(),
}


@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("geometry", [*DENSE, *WITH_GAPS])
def test_trap_10_strides_come_back(device, bits, geometry):
    # Backward kernels choose the layout of a gradient by the strides of what was saved: packets
    # that unpack contiguous change it.
    view = {**DENSE, **WITH_GAPS}[geometry]
    x = leaf(128, 128, device=device).detach()
    w = torch.ones_like(view(x)).requires_grad_()
    plain = torch.autograd.grad((view(x * 2) * w).sum(), w)[0]
    with controller(bits):
        h = view(x * 2)
        stride = h.stride()
        out = h * w
        del h
    saved = out.grad_fn._saved_self
    if geometry in DENSE:  # a packet need not keep the gaps
        assert saved.stride() == stride
    (found,) = torch.autograd.grad(out.sum(), w)
    assert found.stride() == plain.stride()
    for tensor in (saved, found):
        assert relative_error(tensor, plain) < {None: 1e-6, 4: 0.3, 8: 0.02}[bits]


@pytest.mark.parametrize("bits", [None, 8])
def test_trap_11_storage_offsets_come_back(device, bits):
    # x[1:] is contiguous and begins elsewhere: reading from the storage's first byte is off by a
    # row, an error of 1.4.
    x = leaf(65, 256, device=device).detach()
    weights = [leaf(64, 256, device=device, seed=i) for i in range(2)]
    with controller(bits):
        h = x * 2
        outs = [(h[1:] * weights[0]).sum(), (h[:-1] * weights[1]).sum()]
        del h
    found = [torch.autograd.grad(out, w)[0] for out, w in zip(outs, weights, strict=True)]
    for gradient, rows in zip(found, (x[1:] * 2, x[:-1] * 2), strict=True):
        assert relative_error(gradient, rows) < (1e-6 if bits is None else 0.02)


@pytest.mark.parametrize("bits", MODES)
def test_trap_12_expanded_tensors_do_not_inflate(device, bits):
    # 64 KiB of storage seen as 16 MiB: densified at 4 bits it would still take 2 MiB.
    x = leaf(64, 256, 1, device=device).detach()
    w = leaf(64, 256, 256, device=device, seed=1)
    fold = controller(bits)
    with fold:
        h = (x * 2).expand(64, 256, 256)
        out = (h * w).sum()
        del h
    assert fold.report().to_dict()["held_bytes"] <= x.nbytes
    (found,) = torch.autograd.grad(out, w)
    limit = {None: 1e-6, 4: 0.3, 8: 0.02}[bits]
    assert relative_error(found, (x * 2).expand_as(found)) < limit


def test_trap_33_generators_are_untouched(device):
    # Stochastic rounding with torch's generator would shift every dropout mask after it.
    x, w = leaf(256, 256, device=device), leaf(256, 256, device=device, seed=1)
    fold = controller(4)
    states = [torch.get_rng_state(), random.getstate()]
    on_device = torch.cuda.get_rng_state() if device == "cuda" else None
    for _ in range(3):
        with fold:
            out = ((x * 2) @ w).exp().relu().sum()
        out.backward()
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    if device == "cuda":
        assert torch.equal(torch.cuda.get_rng_state(), on_device)
