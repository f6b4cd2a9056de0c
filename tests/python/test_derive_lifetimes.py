# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made again in backward: nothing lives longer for it, whatever happens."""

import contextlib
import gc
import weakref

import pytest
import torch
from derivation import assert_exact, controller, derived, leaf
from derivation_layers import batch, blocks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


class Watched:
    """Storages of activations, by weak reference."""

    def __init__(self):
        self.storages = []

    def __call__(self, module, inputs, output):
        self.storages.append(StorageWeakRef(output.untyped_storage()))

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


@pytest.mark.parametrize("how", ["backward", "no backward", "an exception"])
def test_nothing_stays_alive(device, how):
    # A recipe that held its source's node would hold all of the graph, in a cycle in C++.
    model, x, watched = blocks(device), batch(device), Watched()
    for module in model.modules():
        module.register_forward_hook(watched)
    fold = controller(model=model)
    gc.disable()  # nothing must need it
    try:
        with contextlib.suppress(KeyError), fold:
            loss = model(x).square().mean()
            if how == "an exception":
                del loss
                raise KeyError
        assert derived(fold)
        if how == "backward":
            loss.backward()
        loss = None
        assert len(watched.storages) > 10 and watched.alive() == 0
    finally:
        gc.enable()


def test_a_graph_goes_with_its_result_inside_the_block(device):
    # The store knows who made what, and must keep none of it.
    w1, w2 = leaf(32, 32, device=device), leaf(32, 32, device=device, seed=1)
    with controller():
        h = batch(device) @ w1
        y = functional.gelu(h)
        index = torch.arange(24, device=device)
        z = (y[index] * 2).clone()
        out = z @ w2
        storages = [StorageWeakRef(t.untyped_storage()) for t in (h, y, z, out, index)]
        del h, y, z, out, index
        assert all(storage.expired() for storage in storages)


def test_a_thousand_aborted_steps_leave_nothing(device):
    model, x = blocks(device, 1), batch(device)
    fold = controller(model=model)
    layers = list(model[1].children())
    calls = 0

    def abort(module, inputs, output):
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyError

    for layer in layers:
        layer.register_forward_hook(abort)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    before, alive = None, []
    for step in range(1000):
        with contextlib.suppress(KeyError), fold:
            out = model(x)
            alive.append(weakref.ref(out))
            del out
        if step == 50:
            before = tensors()
    assert all(reference() is None for reference in alive)
    assert tensors() <= before
    for layer in layers:
        layer._forward_hooks.clear()
    assert_exact(lambda: model(x), list(model.parameters()), fold=fold)


def test_an_operator_that_raises_leaves_no_recipe(device):
    w1, w2 = leaf(32, 32, device=device), leaf(32, 32, device=device, seed=1)

    def forward():
        h = batch(device) @ w1
        with contextlib.suppress(RuntimeError):
            h.add_(torch.ones(7, device=device))
        with contextlib.suppress(RuntimeError):
            torch.cat([h, h[:, :5]])
        return functional.gelu(h) @ w2

    assert_exact(forward, [w1, w2])
