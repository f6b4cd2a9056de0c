# SPDX-License-Identifier: Apache-2.0
"""Traps of saved-tensor hooks, part three: what runs around a model, and on which thread."""

import contextlib
import gc
import threading

import backfold
import pytest
import torch
from checkpoints import CHECKPOINTS
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.LayerNorm(64), nn.Linear(64, 64)).to(device)


def folding(model=None, bits=None, **options) -> backfold.Controller:
    return backfold.Controller(model, bits=bits, min_bytes=0, **options)


def batch(device: str) -> torch.Tensor:
    return torch.linspace(-2, 2, 32 * 64, device=device).view(32, 64).sin()


def gradients(model: nn.Module, forward, fold=None, inner=None) -> list[torch.Tensor]:
    """Gradients of all parameters, for forward(x) under `fold` and, inside it, `inner`."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with fold or contextlib.nullcontext(), inner or contextlib.nullcontext():
        loss = forward(batch(next(model.parameters()).device.type) * 1).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    # 4 bits score about 0.1; gradients of other tensors at least 1.
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.5 * b.norm()


def test_trap_07_forwards_without_gradients_count_nothing(device):
    # Rounding is keyed by the step. If a rollout under no_grad counted as one, evaluating the model
    # in between would change the bits of the training.
    def run(rollouts: int) -> tuple[int, list[torch.Tensor]]:
        model = network(device)
        fold = folding(model, bits=4)
        for _ in range(4):
            for _ in range(rollouts):
                with torch.no_grad(), fold:
                    model(batch(device))
                with fold, torch.no_grad():
                    model(batch(device))
            found = gradients(model, model, fold)
        return fold.steps, found

    assert run(0)[0] == run(3)[0] == 4
    assert_equal(run(0)[1], run(3)[1])


@pytest.mark.parametrize("order", ["fold outside", "fold inside"])
def test_trap_17_only_the_innermost_hooks_run(device, order):
    # A fold that relies on seeing every tensor would wait for those that save_on_cpu took.
    model = network(device)
    plain = gradients(model, model)
    for bits in (None, 4):
        fold, other = folding(model, bits), torch.autograd.graph.save_on_cpu()
        contexts = (fold, other) if order == "fold outside" else (other, fold)
        found = gradients(model, model, *contexts)
        if order == "fold outside":  # the fold sees only what save_on_cpu leaves: the loss
            assert_near(found, plain)
            ops = {site["op"] for site in fold.report().to_dict()["sites"]}
            assert not any("addmm" in op for op in ops)
        else:
            (assert_equal if bits is None else assert_near)(found, plain)


def test_trap_17_one_controller_inside_another(device):
    model = network(device)
    plain = gradients(model, model)
    inner, outer = folding(model), folding(model, bits=2)
    assert_equal(gradients(model, model, outer, inner)[:-2], plain[:-2])
    assert inner.steps == 1  # and the loss is the outer one's, or nobody's


@pytest.mark.parametrize("order", ["fold outside", "fold inside"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_trap_18_checkpointing(device, kind, order):
    # The inputs of a checkpoint are what autograd saves; the inside runs again in backward, where
    # a fold must neither count tensors it has packed before nor be found entered.
    model = network(device)

    def forward(x, run, fold=None):
        h = model[0](x)
        body = model[1:5]
        if fold is not None and order == "fold inside":
            body = lambda h: with_fold(fold, model[1:5], h)  # noqa: E731
        return model[5:](run(body, h))

    def with_fold(fold, function, *arguments):
        with fold:
            return function(*arguments)

    run = CHECKPOINTS[kind]
    plain = gradients(model, lambda x: forward(x, run))
    for bits in (None, 4):
        fold = folding(model, bits)
        outside = fold if order == "fold outside" else None
        found = gradients(model, lambda x, fold=fold: forward(x, run, fold), outside)
        (assert_equal if bits is None else assert_near)(found, plain)
        assert fold.steps >= 1 or kind == "reentrant"


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_trap_19_checkpointing_under_autocast(device, kind):
    # The recomputed tensors must have the dtype of the first ones, or checkpoint raises: the inputs
    # have to come back in the precision in which they were saved.
    model = network(device)

    def forward(x):
        with torch.autocast(device, torch.bfloat16):
            return model[5:](CHECKPOINTS[kind](model[1:5], model[0](x))).float()

    plain = gradients(model, forward)
    assert_equal(gradients(model, forward, folding(model)), plain)
    assert_near(gradients(model, forward, folding(model, bits=4)), plain)


@pytest.mark.parametrize("backward", ["inside", "outside"])
@pytest.mark.parametrize("grad", ["gradcheck", "gradgradcheck"])
def test_trap_20_double_backward(device, grad, backward):
    # What backward saves when it builds a graph is packed, too, and what it reads of packets must
    # be part of that graph.
    x = torch.linspace(-1, 1, 12, dtype=torch.double, device=device).view(3, 4).requires_grad_()
    w = x.detach().cos().t().contiguous().requires_grad_()

    def function(x, w):
        with contextlib.ExitStack() as stack:
            if backward == "outside":
                stack.enter_context(folding())
            h = (x * 2).exp() @ w
            h = h.relu() + h.sigmoid() * h.tanh() + h.clamp(-1.5, 1.5) + h.softmax(1)
            return h * h.norm()

    with folding() if backward == "inside" else contextlib.nullcontext():
        assert getattr(torch.autograd, grad)(function, (x, w))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "vmap", "jvp"])
def test_trap_22_function_transforms(device, transform):
    # torch.func refuses hooks. Either that error is passed on unchanged, or the transform works;
    # the controller must stay usable after both.
    x = batch(device)[0]

    def function(x):
        return (x * 2).exp().square().sum()

    run = {
        "grad": lambda: torch.func.grad(function)(x),
        "vjp": lambda: torch.func.vjp(function, x)[1](torch.ones((), device=device))[0],
        "jacrev": lambda: torch.func.jacrev(function)(x),
        "vmap": lambda: torch.func.vmap(function)(x.view(8, 8)),
        "jvp": lambda: torch.func.jvp(function, (x,), (x,))[1],
    }[transform]
    expected, fold = run(), folding()
    try:
        with fold:
            found = run()
    except RuntimeError as error:
        assert "saved tensor hooks" in str(error)
    else:
        assert torch.equal(found, expected)
    model = network(device)
    assert_equal(gradients(model, model, fold), gradients(model, model))


@pytest.mark.parametrize("bits", [None, 4])
def test_trap_23_compiled_models(device, bits):
    # Hooks see what a compiled graph saves only at its border, all at once: folding it there would
    # save nothing in peak and cost time. It is folded inside of the graph, see test_compile.py.
    model = network(device)
    model[2].p = 0.0  # eager and compiled graphs draw different masks
    whole = lambda x: model(x).square().mean()  # noqa: E731
    plain = gradients(model, whole)
    # A module hook that Dynamo cannot trace would break the graph at each module.
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    fold = folding(model, bits)
    found = gradients(model, compiled, fold)
    (torch.testing.assert_close if bits is None else assert_near)(found, plain)
    torch.compiler.reset()


def test_trap_24_a_forward_on_another_thread_is_told_once(device, recwarn):
    # Hooks are thread-local: what DataParallel's threads save bypasses the fold, and a user would
    # wonder why nothing got smaller.
    model = network(device)
    fold = folding(model, bits=4)
    x = batch(device)
    for _ in range(3):
        with fold:
            thread = threading.Thread(target=lambda: model(x))
            thread.start()
            thread.join()
    told = [str(warning.message) for warning in recwarn if "thread" in str(warning.message)]
    assert len(told) == 1
    assert fold.steps == 0


@pytest.mark.parametrize("bits", [None, 4])
def test_trap_25_backward_runs_on_another_thread(device, bits):
    # Engine threads, or the user's own, know nothing about the thread that packed, and the
    # controller may be gone by then: everything that unpack needs is in the packet.
    model = network(device)
    plain = gradients(model, model)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    fold = folding(model, bits)
    with fold:
        loss = model(batch(device) * 1).square().mean()
    del fold
    gc.collect()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    found = [parameter.grad for parameter in model.parameters()]
    (assert_equal if bits is None else assert_near)(found, plain)
