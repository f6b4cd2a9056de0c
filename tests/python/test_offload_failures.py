# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out in the middle of a step, with copies under way."""

import gc
import os
import subprocess
import sys

import backfold
import pytest
import torch
from allocations import left_by
from derivation import assert_same_bits
from test_offload import mapped_bytes, perceptron, settled
from test_offload_plan import lowest_without

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is kept by offloading"),
]

WARM = 4  # steps until a plan has something leave
LAYERS = 12


def options_of(mode, model, x):
    """How a controller offloads: everything, exact or rounded, or what a budget needs."""
    if mode.startswith("everything"):
        bits = None if mode == "everything exact" else 4
        return {"bits": bits, "adaptive": False, "derive": False, "offload": True}
    extra = {"bits": None} if mode == "budget exact" else {"probe_steps": (2,)}
    return {"budget": int(0.55 * lowest_without(model, x, **extra)), **extra}


MODES = ["everything exact", "everything rounded", "budget exact", "budget rounded"]


class Loop:
    """Steps whose gradients depend on nothing but how many there were before."""

    def __init__(self, mode, device):
        self.model, self.x = perceptron(device)
        self.fold = backfold.Controller(self.model, **options_of(mode, self.model, self.x))
        for _ in range(WARM):
            self.step()

    def step(self):
        self.model.zero_grad(set_to_none=True)
        with self.fold:
            loss = self.model(self.x).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def disturbed(self, where, layer, action):
        """A step in which `action` runs when a layer has, forward or backward."""

        def seen(module, args, result):
            if where == "forward":
                action()
            else:
                result.register_hook(lambda gradient: action())

        hook = self.model[layer].register_forward_hook(seen)
        try:
            self.step()
        finally:
            hook.remove()

    def sent(self):
        return self.fold.report().to_dict()["offloaded_bytes"]


def user_error():
    return torch.OutOfMemoryError("tried to allocate 20.00 GiB")


def saves_much(device):
    """A graph whose tensors take longer to leave than a report takes to be made."""
    y = torch.linspace(-1, 1, 1 << 23, device=device, requires_grad=True)
    for _ in range(3):
        y = torch.tanh(y)
    return y.sum()


@pytest.mark.parametrize("layer", [4, LAYERS - 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_the_error_is_the_users_and_the_next_step_works(device, deterministic, mode, where, layer):
    expected, loop = Loop(mode, device), Loop(mode, device)
    much = where == "forward" and mode == "everything exact"  # packets are gone too soon to tell
    leaves, graphs = [], []

    def wait():
        graphs.append(saves_much(device) if much else None)
        leaves.append(settled(expected.fold, 0.5)["offloaded_bytes"])

    expected.disturbed(where, layer, wait)
    raised, left = user_error(), []

    def run_out():
        graphs.append(saves_much(device) if much else None)
        left.append(loop.sent())
        raise raised

    with pytest.raises(torch.OutOfMemoryError) as error:
        loop.disturbed(where, layer, run_out)
    assert error.value is raised
    assert left[0] < leaves[0] if much else leaves[0] > 0  # copies were under way
    graphs.clear()
    for _ in range(2):
        assert_same_bits(loop.step(), expected.step())


def failing(loop, times):
    """Bytes of files after each of so many failures."""

    def run_out():
        raise user_error()

    sizes = []
    for i in range(times):
        with pytest.raises(torch.OutOfMemoryError):
            loop.disturbed("forward" if i % 2 else "backward", 3 + i % 8, run_out)
        sizes.append(mapped_bytes())
    loop.model.zero_grad(set_to_none=True)
    gc.collect()
    settled(loop.fold)
    return sizes


@pytest.mark.parametrize("mode", MODES)
def test_repeated_failures_leave_no_memory(mode):
    gc.collect()
    before = mapped_bytes()
    loop = Loop(mode, "cpu")
    first = failing(loop, 4)
    later = []
    assert left_by(lambda: later.extend(failing(loop, 8))) == 0  # bytes of tensors
    assert max(later) <= max(first) + (4 << 20)
    loop = None
    gc.collect()
    assert mapped_bytes() == before


NOTHING_PINNED = """
import backfold, torch
from backfold import _controller
from torch._subclasses.fake_tensor import FakeTensorMode
_controller.require_kernels = lambda tensors: None  # nothing is folded
with FakeTensorMode():  # parameters of a GPU that is not there
    model = torch.nn.ParameterList([torch.empty(8, 8, device="cuda")])
    fold = backfold.Controller(model, offload=True)
for _ in range(2):
    try:
        with fold:
            raise SystemExit("the block was entered")
    except RuntimeError as error:
        print(error)
assert fold.steps == 0
"""


def test_without_pinned_memory_no_block_is_entered():
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_PINNED],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = "offloading needs pinned host memory, which cannot be had: "
    told = [line for line in done.stdout.splitlines() if line.startswith(said)]
    assert len(told) == 2 and min(map(len, told)) > len(said), done.stdout  # and why
