# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made again in backward, and everything that can run around or instead of it."""

import contextlib
import functools
import gc
import threading

import pytest
import torch
from derivation import (
    assert_exact,
    assert_same_bits,
    controller,
    derived,
    gradients,
    leaf,
    relative_error,
    same_bits,
    sites,
)
from derivation_layers import batch, blocks
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def test_backward_twice(device):
    model, x = blocks(device), batch(device)
    leaves = list(model.parameters())

    def run(fold):
        torch.manual_seed(3)
        with fold:
            loss = model(x).square().mean()
        return [
            torch.autograd.grad(loss, leaves, retain_graph=again) for again in (True, True, False)
        ]

    fold = controller(model=model)
    found, expected = run(fold), run(contextlib.nullcontext())
    for pair in zip(found, expected, strict=True):
        assert_same_bits(*pair)
    assert derived(fold)


@pytest.mark.parametrize("inside", [True, False])
def test_double_backward(device, inside):
    # What is made again must be part of the graph that create_graph builds.
    model, x = blocks(device), batch(device)
    leaves = list(model.parameters())

    def run(fold):
        torch.manual_seed(3)
        with contextlib.ExitStack() as stack:
            stack.enter_context(fold)
            loss = model(x).square().mean()
            if not inside:
                stack.close()
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            penalty = sum(gradient.square().sum() for gradient in first)
        return torch.autograd.grad(penalty, leaves, allow_unused=True)

    fold = controller(model=model)
    assert_same_bits(run(fold), run(contextlib.nullcontext()))
    assert derived(fold)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_source_that_is_passed_through(device, bits):
    # It is below min_bytes, so neither packed nor recorded, and what is made of it is large.
    x, row = leaf(256, 64, device=device), leaf(64, device=device, seed=1)
    fold = controller(bits, min_bytes=1024)

    def forward():
        small = row.exp()
        return (torch.tanh(x * 1) + small).square() * small

    found, expected = gradients(forward, [x, row], fold), gradients(forward, [x, row])
    if bits is None:
        assert_same_bits(found, expected)
    assert relative_error(found, expected) < 0.01
    assert [site["kind"] for site in sites(fold, op="aten::exp")] == ["passed"]


@pytest.mark.parametrize("op", [functional.gelu, functional.silu, lambda h: h * h * 3])
def test_gradgradcheck(device, op):
    x = torch.linspace(-1, 1, 12, dtype=torch.double, device=device).view(3, 4).requires_grad_()
    w = x.detach().cos().t().contiguous().requires_grad_()
    fold = controller()

    def function(x, w):
        with fold:
            h = x @ w
            return op(h) @ h.t()

    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))
    assert derived(fold)


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_checkpointing(device, where, reentrant, cast):
    model, x = blocks(device), batch(device)
    run = functools.partial(checkpoint, use_reentrant=reentrant)
    fold = controller(model=model)

    def forward(fold=None):
        inside = fold if where == "inside" and fold else contextlib.nullcontext()

        def block(h):
            with inside:
                return model[1](h)

        with torch.autocast(device, cast or torch.bfloat16, enabled=cast is not None):
            return model[2](run(block, model[0](x)))

    leaves = list(model.parameters())

    def found(fold):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with fold if fold and where == "around" else contextlib.nullcontext():
            loss = forward(fold).square().mean()
        loss.backward()
        return [parameter.grad for parameter in leaves]

    assert_same_bits(found(fold), found(None))
    assert derived(fold)


def test_hooks_that_read_what_was_saved_see_ordinary_tensors(device):
    # Inside and outside of backward, more than once, and the values are those of the first run.
    w1, w2 = leaf(32, 32, device=device), leaf(32, 32, device=device, seed=1)
    x, fold, seen = batch(device), controller(), []
    with fold:
        h = x @ w1
        y = functional.gelu(h)
        expected = y.detach().clone()
        out = y @ w2
        node = out.grad_fn
        del h, y
    assert derived(fold)
    node.register_prehook(lambda _: seen.append(node._saved_self))
    seen += [node._saved_self, node._saved_self]
    out.square().mean().backward()
    assert len(seen) == 3
    for tensor in seen:
        assert type(tensor) is torch.Tensor and same_bits(tensor.detach(), expected)
        assert tensor.requires_grad and tensor.grad_fn is not None


def test_a_reader_that_changes_what_it_read_changes_it_for_no_other():
    # One Python function writes into its saved tensor; the product beside it must not see that.
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(context, y):
            context.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(context, gradient):
            (y,) = context.saved_tensors
            y.data.zero_()
            return gradient * 2

    x, w1, w2 = (leaf(32, 32, seed=i) for i in range(3))

    def forward(careless):
        y = functional.gelu(x @ w1)
        first = y @ w2
        second = careless(y)
        del y
        return first + second

    fold = controller()
    expected = gradients(lambda: forward(lambda y: y * 2), [x, w1, w2])
    assert_same_bits(gradients(lambda: forward(Careless.apply), [x, w1, w2], fold), expected)
    assert derived(fold)


def small() -> nn.Sequential:
    layers = [nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 32)]
    return nn.Sequential(*layers)


def test_two_threads_with_two_controllers():
    torch.manual_seed(0)
    models = [small() for _ in range(2)]

    def train(model, fold):
        model.zero_grad(set_to_none=True)
        for step in range(20):
            with fold:
                loss = model(batch("cpu", 8 + step)).square().mean()
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = [train(model, contextlib.nullcontext()) for model in models]
    folds, found = [controller(model=model) for model in models], {}

    def work(i):
        found[i] = train(models[i], folds[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert_same_bits(found[i], expected[i])
        assert derived(folds[i])


def test_backward_on_another_thread_after_the_controller_is_gone():
    model, x = small(), batch("cpu")
    expected = gradients(lambda: model(x), list(model.parameters()))
    fold = controller(model=model)
    with fold:
        loss = model(x).square().mean()
    assert derived(fold)
    del fold
    gc.collect()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same_bits([parameter.grad for parameter in model.parameters()], expected)


def test_parts_without_gradients_have_no_recipes(device):
    model, x = blocks(device, 1), batch(device)

    def forward():
        with torch.no_grad():
            h = functional.gelu(model[0](x))
            h.mul_(2)
        with torch.inference_mode():
            constant = model[0](x).tanh()
        return model(h + constant.clone())

    leaves = list(model.parameters())
    assert_exact(forward, leaves, fold=controller(model=model))


@pytest.mark.parametrize("forward_threads, backward_threads", [(1, 2), (2, 1)])
def test_threads_that_change_before_backward(forward_threads, backward_threads):
    # Batch norm cuts its sums into as many parts as there are threads: the last bits differ.
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64)]
    model, x = nn.Sequential(*layers), torch.randn(3000, 64)

    def run(fold):
        model.zero_grad(set_to_none=True)
        torch.set_num_threads(forward_threads)
        with fold:
            loss = model(x).square().mean()
        torch.set_num_threads(backward_threads)
        loss.backward()
        assert torch.get_num_threads() == backward_threads
        return [parameter.grad for parameter in model.parameters()]

    fold = controller(model=model)
    assert_same_bits(run(fold), run(contextlib.nullcontext()))
    assert derived(fold)


def test_hooks_of_others_inside_the_block(device):
    model, x = blocks(device), batch(device)

    def forward():
        h = model[1](model[0](x))
        with torch.autograd.graph.save_on_cpu():
            return model[2](h)

    assert_exact(forward, list(model.parameters()), fold=controller(model=model))


def test_generators_are_untouched(device):
    # Dropout made again by its mask, not by new random numbers.
    model, x = blocks(device), batch(device)
    states = []
    for fold in (contextlib.nullcontext(), controller(model=model)):
        torch.manual_seed(5)
        with fold:
            loss = model(x).square().mean()
        loss.backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_negative_views(device):
    # The imaginary part of a conjugate is a tensor of numbers whose sign is turned when read.
    z = torch.randn(24, 32, dtype=torch.complex64, device=device)
    leaves = [leaf(32, 32, device=device, seed=i) for i in range(3)]
    turned = z.conj().imag[:1]
    assert turned.is_neg()

    def forward():
        h = batch(device) @ leaves[0]
        kept = functional.gelu(h) @ leaves[1]
        return kept + (h + turned) @ leaves[2]

    assert_exact(forward, leaves)


def test_kernels_are_those_of_the_first_run(device):
    """oneDNN is off in forward alone: its GELU has other last bits."""
    torch.manual_seed(0)
    sizes = ((64, 64), (64, 256), (256, 8))
    h, w, v = (torch.randn(size, device=device).requires_grad_() for size in sizes)

    def of_step(fold) -> list[torch.Tensor]:
        with fold, torch.backends.mkldnn.flags(enabled=False):
            out = (torch.nn.functional.gelu(h @ w) @ v).square().mean()
        found = torch.autograd.grad(out, [h, w, v])
        assert torch.backends.mkldnn.enabled
        return list(found)

    expected = of_step(contextlib.nullcontext())
    found = of_step(controller())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
