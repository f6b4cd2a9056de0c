# SPDX-License-Identifier: Apache-2.0
"""backfold.Controller: steps, bad input, threads, failures."""

import gc
import threading
import types
import weakref

import backfold
import pytest
import torch
from small_network import batch, equal, gradients, network
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_step_is_an_entry_in_which_something_was_saved(device):
    model, x, fold = network(device), batch(device), backfold.Controller(min_bytes=0)
    assert fold.steps == 0
    with fold:
        pass
    with fold, torch.no_grad():
        model(x)
    with torch.no_grad(), fold:
        model(x)
    with torch.inference_mode(), fold:
        model(x)
    with fold:
        x + 1
    assert fold.steps == 0
    with fold:
        model(x)
    assert fold.steps == 1


def test_several_forwards_in_one_entry_are_one_step(device):
    model, x, fold = network(device), batch(device), backfold.Controller(bits=8, min_bytes=0)
    with fold:
        losses = [model(x * i).square().mean() for i in range(1, 4)]
    assert fold.steps == 1
    for i, loss in reversed(list(enumerate(losses, start=1))):
        found = torch.autograd.grad(loss, list(model.parameters()))
        plain = torch.autograd.grad(model(x * i).square().mean(), list(model.parameters()))
        for a, b in zip(found, plain, strict=True):
            assert (a - b).norm() < 0.1 * b.norm()  # that of another factor: at least 0.5


def test_backward_inside_the_block_counts_no_second_step(device):
    model, x, fold = network(device), batch(device), backfold.Controller(model=None, min_bytes=0)
    for _ in range(3):
        with fold:
            model(x).sum().backward()
    assert fold.steps == 3


def test_accumulation_over_entries_counts_each(device):
    model, x = network(device), batch(device)
    fold = backfold.Controller(model, bits=None, min_bytes=0)
    losses = []
    for _ in range(4):
        with fold:
            losses.append(model(x).sum())
    assert fold.steps == 4
    sum(losses).backward()
    found = [p.grad / 4 for p in model.parameters()]
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"bits": 7, "adaptive": False}, ValueError, "bits must be .*1, 2, 3, 4, 5, 6, 8.*got 7"),
        ({"bits": 0}, ValueError, "bits must be .*got 0"),
        ({"bits": -1}, ValueError, "bits must be .*got -1"),
        ({"bits": 2**70}, ValueError, "bits must be"),
        ({"bits": 16.5}, ValueError, "bits must be .*16.5"),
        ({"bits": "4"}, TypeError, "bits must be .*'4'"),
        ({"bits": True}, TypeError, "bits must be .*True"),
        ({"model": lambda x: x}, TypeError, "model must be a torch.nn.Module.*got function"),
        ({"model": nn.Linear}, TypeError, "model must be a torch.nn.Module.*got type"),
        ({"model": network(), "keep": ["0.9"]}, ValueError, "keep.*'0.9'.*match"),
        ({"model": network(), "keep": ["0.0", "x*"]}, ValueError, r"keep.*'x\*'.*match"),
        ({"model": network(), "keep": [nn.ReLU()]}, ValueError, "keep.*ReLU"),
        ({"model": network(), "keep": [3]}, TypeError, "keep.*int"),
        ({"keep": ["0"]}, ValueError, "keep.*'0'.*no model"),
        ({"min_bytes": -1}, ValueError, "min_bytes must be .*got -1"),
        ({"min_bytes": 1.5}, TypeError, "min_bytes must be .*1.5"),
        ({"seed": -1}, ValueError, "seed must be .*got -1"),
        ({"seed": "x"}, TypeError, "seed must be .*'x'"),
    ],
)
def test_bad_input_gets_one_clear_sentence(arguments, error, text):
    with pytest.raises(error, match=text):
        backfold.Controller(**arguments)


def test_a_build_without_kernels_says_how_to_get_them(monkeypatch):
    class OnGpu(nn.Module):
        def named_parameters(self, *args, **kwargs):
            yield "weight", types.SimpleNamespace(is_cuda=True, device="cuda:0")

    monkeypatch.setattr("backfold._C.built_with_cuda", lambda: False)
    with pytest.raises(
        RuntimeError, match=r"no CUDA kernels, but weight is on cuda:0.*pip install"
    ):
        backfold.Controller(OnGpu())


def test_a_controller_cannot_be_entered_inside_itself(device):
    fold, x = backfold.Controller(bits=None, min_bytes=0), batch(device).requires_grad_()
    with fold:
        with (
            pytest.raises(RuntimeError, match=r"inside itself|already entered"),
            fold,
        ):
            pass
        out = (x * 2).exp().sum()  # the outer block is still in force
    out.backward()
    assert fold.steps == 1 and torch.equal(x.grad, 2 * (x * 2).exp())
    with fold:
        x.exp()
    assert fold.steps == 2


def in_thread(function) -> BaseException | None:
    """What `function` raised on its own thread."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_controller_in_use_is_refused_to_another_thread(device):
    fold, x = backfold.Controller(min_bytes=0), batch(device).requires_grad_()

    def enter():
        with fold:
            x.exp()

    with fold:
        error = in_thread(enter)
    assert isinstance(error, RuntimeError) and "thread" in str(error)
    assert in_thread(enter) is None and fold.steps == 1  # once left, it can serve any thread


def test_two_threads_with_two_controllers(device):
    # Shared state between controllers would mix the packets, or the steps, of the two.
    model, x = network(device), batch(device)
    alone = gradients(model, backfold.Controller(model, bits=2, min_bytes=0), x)
    plain = torch.autograd.grad(model(x * 2).square().mean(), list(model.parameters()))
    failures, barrier = [], threading.Barrier(2)

    def run(bits, expected):
        barrier.wait()
        for _ in range(20):
            fold = backfold.Controller(model, bits=bits, min_bytes=0)
            if not equal(gradients(model, fold, x), expected) or fold.steps != 1:
                failures.append(bits)

    threads = [
        threading.Thread(target=run, args=(bits, expected))
        for bits, expected in ((2, alone), (None, list(plain)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_exception_leaves_nothing_behind(device):
    # 1,000 aborted steps. A packet left over by each would be 8 MiB; a hook left over would pack
    # what is saved outside.
    def all_tensors() -> list[weakref.ref]:
        gc.collect()
        things = gc.get_objects()
        return [weakref.ref(thing) for thing in things if issubclass(type(thing), torch.Tensor)]

    others = all_tensors()  # left by other tests: they may go at any time
    model, x = network(device), batch(device)
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    gradients(model, fold, x)
    steps = fold.steps

    def tensors() -> int:
        return len(all_tensors()) - sum(one() is not None for one in others)

    def memory() -> int:
        if device == "cuda":
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    for i in range(1000):
        if i == 100:
            live, bytes_ = tensors(), memory()
        with pytest.raises(KeyError), fold:
            loss = model(x * 2).square().mean()
            raise KeyError
        del loss
    assert tensors() == live
    assert memory() - bytes_ < (16 << 20 if device == "cpu" else 1)
    out = x.clone().requires_grad_().exp()  # saved after the block: unchanged, in place
    address, node = out.data_ptr(), out.grad_fn
    del out
    assert node._saved_result.data_ptr() == address
    assert fold.steps in (steps, steps + 1000)  # aborted steps count alike, all or none
    gradients(model, fold, x)
