# SPDX-License-Identifier: Apache-2.0
"""Autograd's engine, which hands out Backfold's hooks without Python and is torch's in all else."""

import pathlib
import subprocess
import sys
import warnings

import backfold
import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks

pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(fold=None, hooks=None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    with fold or torch.enable_grad(), hooks or torch.enable_grad():
        loss = model(x).square().sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def exact() -> backfold.Controller:
    return backfold.Controller(nn.Linear(1, 1), bits=None, min_bytes=0)


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_hooks_inside_a_block_take_precedence():
    packed = []
    fold = exact()
    inner = saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t)
    assert_same(gradients(fold, inner), gradients())
    assert packed
    assert fold.report().to_dict()["saved_bytes"] == 0


def test_a_block_inside_hooks_takes_precedence():
    packed = []
    fold = exact()
    with saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        assert_same(gradients(fold), gradients(exact()))
    assert not packed
    assert fold.report().to_dict()["saved_bytes"] > 0


def test_saved_tensors_can_be_looked_at_but_not_hooked_again():
    x = torch.randn(8, 8, requires_grad=True)
    with exact():
        y = x.exp() * x.sin()
    assert y.grad_fn._saved_self.equal(x.exp())
    with pytest.raises(RuntimeError, match="hook"):
        y.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: t)


def test_anomaly_mode_names_the_forward():
    x = torch.tensor([0.0], requires_grad=True)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        with exact():
            y = (x.sqrt() * 0).sum()
        with pytest.raises(RuntimeError, match="SqrtBackward0"):
            y.backward()
    assert any("x.sqrt()" in str(warning.message) for warning in caught)


def test_compiled_autograd_unpacks():
    wanted = gradients()
    fold = exact()
    for _ in range(2):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            found = gradients(fold)
        assert_same(found, wanted)


FORKING = """
import multiprocessing, test_engine, torch

torch.set_num_threads(1)  # a child has none of OpenMP's threads, and torch waits for them

def run(queue):
    queue.put([gradient.tolist() for gradient in test_engine.gradients(test_engine.exact())])

test_engine.gradients(test_engine.exact())
context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=run, args=(queue,))
child.start()
found = queue.get(timeout=60)
child.join()
assert found == [gradient.tolist() for gradient in test_engine.gradients()]
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch's engine has a thread for each GPU, and none may fork"
)
def test_a_forked_child_runs_backward():
    folder = pathlib.Path(__file__).parent
    subprocess.run([sys.executable, "-c", FORKING], cwd=folder, check=True, timeout=120)


def test_a_graph_that_is_backed_through_from_a_function_of_python():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():  # an engine within the engine
                inner = x.detach().requires_grad_()
                (again,) = torch.autograd.grad((inner * 2).sum(), inner)
            return gradient * again

    x = torch.randn(8, 8, requires_grad=True)
    with exact():
        y = Twice.apply(x).exp().sum()
    y.backward()
    assert torch.equal(x.grad, (x * 2).exp().detach() * 2)


NESTING = """
import os, threading, test_engine, torch

threads = set()

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        threads.add(threading.get_ident())
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y = Nested.apply(inner, ctx.depth - 1) if ctx.depth else inner * inner
            (slope,) = torch.autograd.grad(y.sum(), inner)
        return gradient * slope, None

x = torch.randn(8, 8, requires_grad=True)
with test_engine.exact():
    Nested.apply(x, 100).sum().backward()  # beyond a depth of 60, torch takes other threads
assert len(threads) > 1
assert torch.equal(x.grad, 2 * x.detach())
# While Python ends, torch's threads may ask for its lock, which aborts plain torch as well.
os._exit(0)
"""


def test_what_a_thread_of_the_engine_saves_for_an_open_block_is_kept():
    # In a process of its own: no test could fork once such threads exist.
    folder = pathlib.Path(__file__).parent
    subprocess.run([sys.executable, "-c", NESTING], cwd=folder, check=True, timeout=120)
