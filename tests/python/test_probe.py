# SPDX-License-Identifier: Apache-2.0
"""Probes: what they measure, and what they leave alone."""

import copy
import math
import random

import backfold
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """Attention, a normalisation and a gated product: every kind of node that a probe treats
    differently."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, tokens, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / q.size(-1) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, width))
        a, b = self.gate(x).chunk(2, -1)
        return x + functional.silu(a) * b


class Mixed(nn.Module):
    """A small convolution with batch norm in front of a block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.narrow = nn.Conv2d(16, 32, 4, stride=4)
        self.block = Block()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(functional.relu(self.bn(self.conv(x))))
        return self.head(self.drop(self.block(x.flatten(2).transpose(1, 2))).mean(1))


def mixed(device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixed().to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, 16, 16, generator=generator).to(device)
    y = torch.randint(10, (32,), generator=generator).to(device)
    return model, x, y


def tables(fold: backfold.Controller) -> dict[str, dict[str, float]]:
    """Errors by the site that owns the packet and by width, summed over its readers."""
    found: dict[str, dict[str, float]] = {}
    for site in fold.state_dict()["sites"]:
        of_packet = found.setdefault(site["root"] or site["name"], {})
        for bits, error in site["sensitivity"]["errors"].items():
            of_packet[bits] = of_packet.get(bits, 0.0) + error
    return {name: errors for name, errors in found.items() if errors}


def estimates(fold: backfold.Controller) -> dict[str, str]:
    return {site["name"]: site["sensitivity"]["estimate"] for site in fold.state_dict()["sites"]}


def test_one_forward_measures_what_whole_passes_do(device):
    model, x, y = mixed(device)

    def step():
        functional.cross_entropy(model(x), y).backward()

    found, errors = {}, {}
    for method in ("probe", "exact"):
        fold = backfold.Controller(model, bits=2.5, min_bytes=0)
        fold.calibrate(step, method)
        found[method] = tables(fold)
        errors[method] = (
            fold.check(lambda: functional.cross_entropy(model(x), y), 16).rows[-1].error
        )
    assert found["probe"].keys() == found["exact"].keys() and len(found["exact"]) >= 12
    logarithms = [
        math.log(found["probe"][name][bits] / error)
        for name, of_place in found["exact"].items()
        for bits, error in of_place.items()
    ]
    # One random direction: single sites scatter, those with few rows most; their sum does not.
    assert max(map(abs, logarithms)) < math.log(10)
    assert abs(sum(logarithms) / len(logarithms)) < math.log(1.5)
    assert errors["probe"] ** 2 < 1.3 * errors["exact"] ** 2


def test_a_probe_changes_nothing_but_the_plan(device):
    model, x, y = mixed(device)
    optimizer = torch.optim.AdamW(model.parameters())
    fold = backfold.Controller(model, bits=3, min_bytes=0)

    def loss():
        return functional.cross_entropy(model(x), y)

    for _ in range(2):  # the second is a probe step
        optimizer.zero_grad()
        with fold:
            value = loss()
        value.backward()
        optimizer.step()

    def state():
        return copy.deepcopy(
            [
                model.state_dict(),
                optimizer.state_dict()["state"],
                [p.grad for p in model.parameters()],
                [p._version for p in model.parameters()],
                [module.training for module in model.modules()],
                torch.get_rng_state(),
                torch.cuda.get_rng_state() if device == "cuda" else None,
                random.getstate(),
                numpy.random.get_state(),
            ]
        )

    before = state()
    assert not fold.plan()["sites"]
    with fold:  # reruns the recorded call
        pass
    assert fold.plan()["sites"]
    compare(before, state())


def compare(a, b) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, numpy.ndarray):
        assert (a == b).all()
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            compare(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for one, other in zip(a, b, strict=True):
            compare(one, other)
    else:
        assert a == b


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("replay", [True, False])
def test_the_step_that_is_recorded_is_bitwise_what_it_would_have_been(device, replay):
    found = []
    for steps in ((), (1, 2)):
        model, x, y = mixed(device)
        fold = backfold.Controller(
            model, bits=2, min_bytes=0, probe_steps=steps, probe_every=None, replay=replay
        )
        for seed in (3, 4):
            torch.manual_seed(seed)
            model.zero_grad()
            with fold:
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            fold._probes.forget()  # the plan of the first would change the second
        found.append([loss, *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_probes_come_at_their_steps_and_cost_nothing_between(device):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=3, min_bytes=0, probe_steps=(2, 5), probe_every=4)
    calls, probed = 0, []

    def count(*_):
        nonlocal calls
        calls += 1

    model.register_forward_hook(count)
    for step in range(1, 15):
        before = calls
        with fold:
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if calls - before > 1:
            probed.append(step - 1)
            assert calls - before == 3  # and two reruns
    assert probed == [2, 5, 9, 13]


def test_places_that_the_plan_does_not_know_are_measured(device):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)).to(device)
    x = torch.randn(64, 64, device=device)

    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.used = model, 1

        def forward(self, x):
            for part in self.parts[: self.used]:
                x = functional.gelu(part(x))
            return x

    growing = Growing()
    fold = backfold.Controller(growing, bits=3, min_bytes=0, probe_steps=(2,), probe_every=None)

    def steps(count):
        for _ in range(count):
            with fold:
                loss = growing(x).square().mean()
            loss.backward()

    steps(4)
    assert {name.split("/")[0] for name in fold.plan()["sites"]} == {"parts.0.bias"}
    growing.used = 2
    steps(12)
    assert {name.split("/")[0] for name in fold.plan()["sites"]} == {"parts.0.bias", "parts.1.bias"}


def test_without_a_model_signal_gains_of_the_own_step_plan(device):
    model, x, y = mixed(device)
    fold = backfold.Controller(bits=3, min_bytes=0)
    for _ in range(3):
        with fold:
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
    planned = {name: way for name, way in estimates(fold).items() if way != "none"}
    assert len(planned) >= 12 and set(planned.values()) == {"signal gain"}
    plan = fold.report().to_dict()["plan"]
    assert plan["error"] < plan["uniform_error"]


class SwishImplementation(torch.autograd.Function):
    """A name that the table knows, so it is folded. Its backward must not be rerun."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        SwishImplementation.calls += 1
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradient * gate * (1 + x * (1 - gate))


def test_python_functions_are_not_run_again(device):
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device)
    x = torch.randn(64, 64, device=device)
    fold = backfold.Controller(nn.ModuleList([first, second]), bits=4, min_bytes=0)
    SwishImplementation.calls = 0
    passes = 0

    def step():
        nonlocal passes
        passes += 1
        second(SwishImplementation.apply(first(x))).square().mean().backward()

    fold.calibrate(step)
    assert passes == 4
    # From the learning pass, that for the leaves' gradients, and the clean one; the perturbed one
    # has none.
    assert SwishImplementation.calls == 3
    ways = {name.split("/")[1]: way for name, way in estimates(fold).items()}
    assert ways["SwishImplementation"] == "signal gain"


@pytest.mark.parametrize("method", ["probe", "exact"])
def test_a_step_without_backward_is_refused(device, method):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    with pytest.raises(ValueError, match="step must run backward"):
        fold.calibrate(lambda: functional.cross_entropy(model(x), y), method)
    assert not fold.plan()["sites"]


def test_a_step_that_fails_fails_as_itself(device):
    model, x, y = mixed(device)
    before = copy.deepcopy(model.state_dict())
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    functional.cross_entropy(model(x), y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())

    def step():
        functional.cross_entropy(model(x), y)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fold.calibrate(step)
    compare(before, model.state_dict())
    compare(gradients, [p.grad for p in model.parameters()])


def test_calibrate_may_hold_the_block_itself(device):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=3, min_bytes=0)

    def step():
        with fold:
            loss = functional.cross_entropy(model(x), y)
        loss.backward()

    fold.calibrate(step)
    assert len(fold.plan()["sites"]) >= 12
    step()
    assert fold.report().to_dict()["plan"]["sites"] >= 12


def test_the_same_seed_gives_the_same_plan_and_another_order_of_discovery_too(device):
    plans = []
    for warm_up in (False, False, True):
        model, x, y = mixed(device)
        fold = backfold.Controller(model, bits=3, min_bytes=0)
        if warm_up:  # sites of the block are seen before those in front of it
            hidden = torch.randn(32, 16, 32, device=device)
            with fold:
                model.block(hidden).sum()
        else:
            with fold:
                functional.cross_entropy(model(x), y)

        def step(model=model, x=x, y=y):
            functional.cross_entropy(model(x), y).backward()

        torch.manual_seed(5)
        with fold:
            functional.cross_entropy(model(x), y).backward()
        fold.calibrate(step)
        plans.append({name: (s["bits"], s["layout"]) for name, s in fold.plan()["sites"].items()})
    assert plans[0] == plans[1]
    assert plans[0] == {name: plans[2][name] for name in plans[0]}


def test_models_that_differ_from_step_to_step_are_planned_without_growing_tables(device):
    torch.manual_seed(0)

    class RandomDepth(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                if torch.rand(()) < 0.7:
                    x = block(x)
            return x

    model = RandomDepth().to(device)
    fold = backfold.Controller(model, bits=3, min_bytes=0, probe_steps=(2, 8), probe_every=8)
    counts = []
    for step in range(60):
        x = torch.randn(8, 8 + step % 5, 32, device=device, requires_grad=True)
        with fold:
            loss = model(x).square().mean()
        loss.backward()
        counts.append(len(fold.state_dict()["sites"]))
    assert counts[-1] <= counts[30] + 4  # what the loss saves is named by the block before it
    known = [site for site in fold.state_dict()["sites"] if site["sensitivity"]["errors"]]
    assert len(known) >= 4 * 8


def test_what_a_mask_makes_infinite_is_measured_all_the_same(device):
    torch.manual_seed(0)
    mask = torch.ones(16, 16, dtype=torch.bool, device=device).triu(1)
    tokens = torch.randn(32, 16, 32, device=device)
    query = nn.Linear(32, 32, device=device)

    def step():
        scores = (query(tokens) @ tokens.transpose(1, 2)).masked_fill(mask, -torch.inf)
        (scores.softmax(-1) @ tokens).square().mean().backward()

    fold = backfold.Controller(query, bits=4, min_bytes=0)
    fold.calibrate(step)
    softmax = next(errors for name, errors in tables(fold).items() if "softmax" in name)
    assert all(error > 0 for error in softmax.values())


def sequence_loss(logits: torch.Tensor) -> torch.Tensor:
    flat = logits.flatten(0, 1)
    return functional.cross_entropy(flat, torch.arange(len(flat), device=flat.device) % 256)


def scaled_loss(logits: torch.Tensor) -> torch.Tensor:
    scale = nn.Parameter(torch.full((1,), 1.5, device=logits.device))
    return sequence_loss(logits.transpose(0, 1).contiguous() * scale)


@pytest.mark.parametrize("loss", [sequence_loss, scaled_loss])
def test_what_the_loss_saves_is_measured_in_the_own_backward(device, loss):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 256)).to(device)
    x = torch.randn(32, 8, 32, device=device)
    own = backfold.Controller(model, bits=2, min_bytes=0, probe_steps=(2,), probe_every=None)
    for _ in range(3):
        with own:
            result = loss(model(x))
        result.backward()
    exact = backfold.Controller(model, bits=2, min_bytes=0)
    exact.calibrate(lambda: loss(model(x)).backward(), "exact")
    site = next(name for name in estimates(own) if "_log_softmax" in name)
    assert estimates(own)[site] == "re-run"
    for bits, error in tables(own)[site].items():
        # Signal gains are 5.5 times too large here.
        assert abs(math.log(error / tables(exact)[site][bits])) < math.log(3)


def test_a_loss_that_cannot_be_run_again_is_judged_by_signal_gains():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * gradient + 0 * x

    model = nn.Linear(64, 64)
    fold = backfold.Controller(model, bits=4, min_bytes=0, probe_steps=(2,), probe_every=None)
    for _ in range(3):
        with fold:
            loss = Doubled.apply(model(torch.randn(64, 64)).exp()).log_softmax(-1).square().mean()
        loss.backward()
    found = {name.split("/")[1]: way for name, way in estimates(fold).items() if way != "none"}
    # log_softmax is measured up to the Python function, which must not run twice.
    assert found["aten::_log_softmax"] == "signal gain"
    assert found["aten::exp"] == "re-run"
