# SPDX-License-Identifier: Apache-2.0
"""Which call of a model is recorded, which cannot be, and what remains of it."""

import gc
import weakref

import pytest
import torch
from backfold._replay import ModelCall
from test_replay import Returns, assert_same, batch, gradients_again, network, recorded
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_first_outermost_call_with_gradients_is_recorded():
    class Recursive(nn.Linear):
        def forward(self, x, depth=2):
            with torch.enable_grad():
                y = super().forward(x).tanh()
                return self(y, depth - 1) * 2 if depth else y

    model, x = Recursive(12, 12), batch()

    def loss_of():
        with torch.no_grad():
            evaluated = model(x * 5)
        evaluated.sum().backward()
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(3, 3))  # what a user may catch
        return model(x).square().mean() + 0 * model(x * 3).sum()

    call, _ = recorded(model, loss_of)
    model.zero_grad()
    model(x).square().mean().backward()
    assert_same(gradients_again(call), [p.grad for p in model.parameters()])


def test_each_block_of_an_accumulation_has_its_own_call():
    model, calls, losses = network()[0], [], []
    for scale in (1, 2, 3):
        with ModelCall.watch(model, 1.0) as call:
            losses.append(model(batch() * scale).square().mean())
        calls.append(call)
    sum(losses).backward()
    total = [sum(parts) for parts in zip(*map(gradients_again, calls), strict=True)]
    for found, parameter in zip(total, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def test_gradients_of_several_backwards_add_up():
    model = network()[0]
    with ModelCall.watch(model, 1.0) as call:
        y = model(batch())
    y.exp().mean().backward(retain_graph=True)
    y.square().mean().backward()
    for found, parameter in zip(gradients_again(call), model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def test_an_output_that_is_changed_in_place_afterwards_gives_its_own_gradient():
    model = network()[0]
    call, expected = recorded(model, lambda: model(batch()).mul_(3).square().mean())
    assert_same(gradients_again(call), expected)


def changed_base(y: torch.Tensor) -> torch.Tensor:
    y._base.mul_(2)
    return y


def raises_index_error(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(IndexError):
        model(x)


@pytest.mark.parametrize(
    ("make", "use", "reason"),
    [
        (None, lambda model, x: x, "no call of the model was seen"),
        (lambda y: y.detach(), lambda model, x: model(x), "returned no tensor with a gradient"),
        (lambda y: "text", lambda model, x: model(x), "returned no tensor with a gradient"),
        (lambda y: y, lambda model, x: model(x) * 0 + 1, ""),
        (lambda y: y, lambda model, x: model(x).detach(), "no gradient has arrived"),
        (lambda y: y.view(-1), lambda model, x: changed_base(model(x)), "no gradient has arrived"),
        (lambda y: [][0], lambda model, x: raises_index_error(model, x), "model raised"),
    ],
)
def test_a_call_that_cannot_be_run_again_says_why(make, use, reason):
    model, x = Returns(make), batch()
    with ModelCall.watch(model) as call:
        result = use(model, x)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
    assert call.ready == (reason == "")
    assert reason in call.reason
    if reason:
        with pytest.raises(RuntimeError, match=f"cannot be run again: .*{reason}"):
            call.step()


def test_a_model_that_gets_what_cannot_be_copied_runs_all_the_same():
    class Drawing(nn.Linear):
        def forward(self, x, numbers):
            return super().forward(x) * next(numbers)

    model = Drawing(12, 5)
    numbers = (number for number in (2.0, 3.0))
    call, _ = recorded(model, lambda: model(batch(), numbers).sum())
    assert "could not be recorded" in call.reason
    assert torch.equal(model.bias.grad, torch.full((5,), 32.0))


def test_scripted_models_are_refused():
    model = torch.jit.trace(nn.Linear(12, 5), batch())
    call, _ = recorded(model, lambda: model(batch()).sum())
    assert "ScriptModule" in call.reason


def test_hooks_vanish_and_memory_goes_with_the_call():
    model, x = network(), batch()
    with ModelCall.watch(model) as call:
        y = model(x)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    y.sum().backward(retain_graph=True)
    call.step()
    assert not y._backward_hooks
    with ModelCall.watch(model) as call:
        y = model(x)
    gone = weakref.ref(call._arguments)
    del call
    gc.collect()
    assert gone() is None  # though the graph of y is alive
    y.sum().backward()


def test_a_parallel_model_is_run_without_what_is_around_it(monkeypatch):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # needs no name server for this machine
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(network())
        for _ in range(3):
            model.zero_grad()
            call, expected = recorded(model, lambda: model(batch()).square().mean())
            model.register_forward_pre_hook(lambda *_: pytest.fail("buffers would be broadcast"))
            assert_same(gradients_again(call), expected)
            model._forward_pre_hooks.clear()
    finally:
        torch.distributed.destroy_process_group()
