# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made again in backward, where memory changes and nobody announces it."""

import ctypes

import pytest
import torch
from derivation import assert_exact, controller, leaf, relative_error
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 32


def leaves_on(device: str) -> list[torch.Tensor]:
    return [leaf(SIZE, SIZE, device=device, seed=i) for i in range(5)]


def test_statistics_that_a_norm_updates_unannounced(device):
    # Batch norm's schema does not say that it writes its running mean.
    a, first, second, third, *_ = leaves = leaves_on(device)
    fold = controller()  # without a model no buffer is known

    def forward():
        mean, var = torch.full((2, SIZE), 0.5, device=device).unbind()
        mean, var = mean.clone(), var.clone()
        h = a @ first
        kept = h @ second
        centred = (h - mean) @ third
        normed = functional.batch_norm(h, mean, var, training=True, momentum=0.9)
        return centred + kept + normed

    assert_exact(forward, leaves, fold=fold)


@pytest.mark.parametrize("bits", [None, 8])
def test_an_address_that_is_used_again(device, bits):
    # A new storage at the address of an old one, with the same sizes and version.
    a = leaf(SIZE, SIZE, device=device)
    memory = torch.empty(SIZE, SIZE, device=device)
    weights = [leaf(SIZE, SIZE, device=device, seed=i) for i in range(6)]
    fold, outs = controller(bits), []
    with fold:
        for i, weight in enumerate(weights):
            h = torch.from_dlpack(memory)
            h.copy_(a.detach() * 2.0**i)
            y = (h + a * 0) * 1.5  # in the graph
            outs.append((y @ weight).sum())
            del h, y
    for i, (out, weight) in enumerate(zip(outs, weights, strict=True)):
        (found,) = torch.autograd.grad(out, weight)
        expected = (1.5 * 2.0**i * a.detach()).t() @ torch.ones_like(weight)
        assert relative_error([found], [expected]) < (1e-6 if bits is None else 0.02)


@pytest.mark.parametrize("raw", ["numpy", "pointer"])
def test_a_function_that_writes_unseen_has_no_recipe(raw):
    # What its forward clones is not what it returns.
    class Unseen(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            y = x.clone()
            if raw == "numpy":
                y.numpy()[2:] = 5.0
            else:
                ctypes.memset(y.data_ptr(), 0, y.nbytes // 2)
            return y

        @staticmethod
        def backward(context, gradient):
            return gradient

    a, first, second, third, fourth = leaves = leaves_on("cpu")

    def forward():
        h = a @ first
        kept = h @ third
        return kept + Unseen.apply(h) @ second + functional.gelu(h) @ fourth

    assert_exact(forward, leaves)


def test_a_function_that_writes_its_input(device):
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            x.mul_(2)
            context.mark_dirty(x)
            return x

        @staticmethod
        def backward(context, gradient):
            return gradient * 2

    a, first, second, third, *_ = leaves = leaves_on(device)

    def forward():
        y = Doubles.apply(functional.gelu(a @ first))
        return y @ second + (y * 3) @ third

    assert_exact(forward, leaves)
