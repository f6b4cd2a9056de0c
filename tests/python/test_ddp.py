# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model with DistributedDataParallel."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import backfold
import pytest
import torch
from processes import returned, run
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 48),
        nn.GELU(),
        nn.LayerNorm(48),
        nn.Linear(48, 40),
        nn.Tanh(),
        nn.Linear(40, 7),
    )


def batch(rank: int, step: int, rows: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, 24, generator=generator) * (1 + 3 * rank)
    return x, torch.randint(7, (rows,), generator=generator)


def built(order: str, model: nn.Module, **options) -> tuple[nn.Module, backfold.Controller | None]:
    """The model in DDP, and a controller that was given the one or the other, before or after."""
    options = {"min_bytes": 0, **options}
    if order == "model, then DDP":
        fold = backfold.Controller(model, **options)
        return DistributedDataParallel(model), fold
    parallel = DistributedDataParallel(model)
    given = parallel if order == "DDP" else model
    return parallel, None if order == "plain" else backfold.Controller(given, **options)


def train(parallel, fold, rank, steps, first=1, after=None, accumulate=1, batch=batch):
    """Trains, and returns the loss of each step. `after(step)` is called behind each one."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        for part in range(accumulate):
            silent = parallel.no_sync() if part + 1 < accumulate else contextlib.nullcontext()
            x, y = batch(rank, 10 * step + part)
            with silent:
                with fold if fold is not None else contextlib.nullcontext():
                    loss = functional.cross_entropy(parallel(x), y)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if after is not None:
            after(step)
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def exact_training(rank, accumulate):
    results = {}
    for order in ("plain", "DDP", "model", "model, then DDP"):
        parallel, fold = built(order, network(), bits=None)
        losses = train(parallel, fold, rank, 4, accumulate=accumulate)
        results[order] = losses, weights(parallel)
    return results


@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_rounding_training_is_that_of_plain_ddp(accumulate):
    for results in returned(run(exact_training, 2, accumulate)):
        losses, plain = results.pop("plain")
        for order, found in results.items():
            assert found[0] == losses, order
            assert all(map(torch.equal, found[1], plain)), order


def planned_training(rank, order, accumulate, options):
    parallel, fold = built(order, network(), probe_steps=(2, 5), **options)
    plans = []
    train(
        parallel, fold, rank, 8, accumulate=accumulate, after=lambda step: plans.append(fold.plan())
    )
    return plans, fold.report().to_dict()["plan"], weights(parallel)


@pytest.mark.parametrize(
    "size, order, accumulate, options",
    [
        (2, "DDP", 1, {"bits": 4}),
        (2, "model, then DDP", 3, {"bits": 2}),
        (4, "model", 1, {"ratio": 6}),
        (2, "DDP", 1, {"peak": 7000}),
    ],
)
def test_all_processes_have_the_same_plan_at_every_step(size, order, accumulate, options):
    results = returned(run(planned_training, size, order, accumulate, options))
    plans, summary, trained = results[0]
    for other_plans, other_summary, other_trained in results[1:]:
        assert other_plans == plans
        assert other_summary == summary
        assert all(map(torch.equal, trained, other_trained))
    widths = [json.dumps(plan["sites"]) for plan in plans]
    assert len(set(widths)) >= (3 if accumulate == 1 else 2)  # none at first, then two probes'
    assert plans[-1]["sites"]
    estimates = {site["estimate"] for site in plans[-1]["sites"].values()}
    assert estimates & {"re-run", "closed form"}  # the model was run again


def tables(rank):
    """What a process of its own measures on the data of each rank."""
    found = []
    for of_rank in range(2):
        fold = backfold.Controller(model := network(), bits=4, min_bytes=0, sync=False, seed=3)
        x, y = batch(of_rank, 1, rows=64)
        fold.calibrate(lambda m=model, x=x, y=y: functional.cross_entropy(m(x), y).backward())
        found.append(fold.state_dict())
    fold = backfold.Controller(model := network(), bits=4, min_bytes=0, seed=3)
    x, y = batch(rank, 1, rows=64)
    fold.calibrate(lambda: functional.cross_entropy(model(x), y).backward())
    return found, fold.state_dict()


def test_errors_are_the_means_of_what_the_processes_measure():
    def errors(state, name):
        (site,) = (one for one in state["sites"] if one["name"] == name)
        return site["sensitivity"]["errors"]

    first, second = returned(run(tables, 2))
    own, together = first[0], first[1]
    # Each process draws its own directions: only rank 0 measures what a process alone does. The
    # other one's data are four times as large, and so are its errors, squared.
    compared = 0
    for site in together["sites"]:
        mine, yours = (errors(state, site["name"]) for state in own)
        for width, error in site["sensitivity"]["errors"].items():
            if not 0 < mine[width] < yours[width]:
                continue
            assert error == pytest.approx((mine[width] + yours[width]) / 2, rel=0.5)
            compared += 1
    assert compared >= 4
    assert second[1]["gradient_energy"] == together["gradient_energy"]


def rounded(rank, alone):
    model = network()
    parallel = model if alone else DistributedDataParallel(model)
    fold = backfold.Controller(parallel, bits=2, adaptive=False, min_bytes=0)
    x, y = batch(0, 1)
    with contextlib.nullcontext() if alone else parallel.no_sync(), fold:
        loss = functional.cross_entropy(parallel(x), y)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def rounded_without_name(rank):
    fold = backfold.Controller(bits=2, adaptive=False, min_bytes=0, derive=False)
    model, (x, y) = network(), batch(0, 1)
    with fold:
        loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_processes_round_the_same_data_differently():
    alone = returned(run(rounded_without_name, 1))[0]
    first, second = returned(run(rounded_without_name, 2))
    assert all(map(torch.equal, first, alone))  # rank 0 rounds as if it were alone
    assert not torch.equal(first[0], second[0])
    # The noise of both is of the same size, and that of their mean is smaller.
    model, (x, y) = network(), batch(0, 1)
    functional.cross_entropy(model(x), y).backward()
    exact = model[0].weight.grad
    noise = [(found[0] - exact).norm() for found in (first, second)]
    mean = ((first[0] + second[0]) / 2 - exact).norm()
    assert mean < 0.9 * max(noise)  # 1.0 if both round alike


class Branches(nn.Module):
    """Each process has a branch of its own behind a common trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(24, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 7) for _ in range(2))

    def forward(self, x):
        x = self.trunk(x).tanh()
        mine = self.branches[distributed.get_rank()]
        return mine(x.sigmoid() * 2 if distributed.get_rank() else x)


def branching(rank):
    parallel = DistributedDataParallel(model := Branches(), find_unused_parameters=True)
    fold = backfold.Controller(parallel, bits=3, min_bytes=0, derive=False)
    plans = []
    train(parallel, fold, rank, 6, after=lambda step: plans.append(fold.plan()))
    return plans, len(model.branches)


def test_a_plan_has_the_places_of_all_processes():
    (first, _), (second, _) = returned(run(branching, 2))
    assert first == second
    places = " ".join(first[-1]["sites"])
    assert "sigmoid" in places  # of rank 1 alone
    assert "branches.0" in places and "branches.1" in places


def appearing(rank):
    """From step 6 on rank 1 saves something that the plan does not know."""
    model = network()
    parallel, fold = built("DDP", model, bits=4)
    model.register_forward_hook(
        lambda *args: args[-1].exp().log() if rank == 1 and fold.steps >= 5 else None
    )
    plans = []
    train(parallel, fold, rank, 16, after=lambda step: plans.append(fold.plan()))
    return plans


def test_what_one_process_meets_is_measured_by_all():
    first, second = returned(run(appearing, 2))
    assert first == second
    known = ["exp" in " ".join(plan["sites"]) for plan in first]
    assert not known[5] and known[15]  # they look after ten entries


def growing(rank):
    """The batches of rank 1 become twice as large at step 6."""
    parallel, fold = built("DDP", network(), budget=9000)
    plans, steps = [], []

    def note(step):
        sites = fold.plan()["sites"].items()
        plans.append({name: (site["bits"], site["layout"]) for name, site in sites})
        steps.append((fold.report().to_dict()["plan"] or {}).get("step"))

    def larger(rank, step):
        return batch(rank, step, rows=40 if rank == 1 and step >= 60 else 20)

    train(parallel, fold, rank, 14, after=note, batch=larger)
    return plans, steps


def test_a_larger_step_of_one_process_is_planned_for_by_all():
    first, second = returned(run(growing, 2))
    assert first == second
    plans, steps = first
    assert steps == [None] * 2 + [2] * 10 + [12] * 2  # the tenth entry after the plan
    assert plans[12] != plans[11]


def by_gact(rank):
    parallel = DistributedDataParallel(network())
    fold = backfold.controller(parallel, opt_level="L2", min_bytes=0, probe_steps=(2, 5))
    fold.install_hook()
    plans = []
    for step in range(1, 7):
        x, y = batch(rank, step)

        def forward_backward(x=x, y=y):
            functional.cross_entropy(parallel(x), y).backward()

        forward_backward()
        fold.iterate(forward_backward)
        plans.append(fold.fold.plan())
    fold.uninstall_hook()
    return plans


def test_programs_written_for_gact_plan_together():
    first, second = returned(run(by_gact, 2))
    assert first == second
    assert len({json.dumps(plan) for plan in first}) == 3  # none, and two


def empty_step(rank):
    model = network()
    parallel, fold = built("model", model, bits=4)
    plans = []
    for step in range(1, 8):
        x, y = batch(rank, step)
        with fold:
            if rank == 0 or step not in (2, 3):
                loss = functional.cross_entropy(parallel(x), y)
        if rank == 1 and step in (2, 3):  # something must be there for DDP to reduce
            loss = parallel(x).sum() * 0
        loss.backward()
        plans.append(fold.plan()["sites"])
    return plans, fold.steps


def test_a_process_that_saves_nothing_in_the_probe_step_delays_it_for_all():
    (first, steps), (second, other_steps) = returned(run(empty_step, 2))
    assert (steps, other_steps) == (7, 5)
    assert first == second
    assert [bool(plan) for plan in first] == [False] * 4 + [True] * 3


class SyncedNorm(nn.Module):
    """A norm over the batches of all processes, as SyncBatchNorm is on GPUs."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            distributed.all_reduce(total := x.clone())
            return total

        @staticmethod
        def backward(ctx, gradient):
            distributed.all_reduce(total := gradient.clone())
            return total

    def forward(self, x):
        count = torch.tensor(float(x.size(0)))
        distributed.all_reduce(count)
        return x - self.Sum.apply(x.sum(0)) / count


class Synced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(24, 32), SyncedNorm(), nn.Tanh(), nn.Linear(32, 7))

    def forward(self, x, beside=None):
        return self.layers(x)


def synced(rank, order, broken):
    model = Synced()
    runs = []
    model.layers[1].register_forward_hook(lambda *_: runs.append(1))
    parallel, fold = built(order, model, bits=4)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    # A lock cannot be copied, so a call with one cannot be recorded.
    beside = threading.Lock() if broken and rank == 1 else None
    with pytest.warns(UserWarning, match="rank 1: ") if broken else contextlib.nullcontext():
        for step in range(4):
            x, y = batch(rank, step)
            with fold:
                loss = functional.cross_entropy(parallel(x, beside), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    estimates = {site["estimate"] for site in fold.plan()["sites"].values()}
    return len(runs), estimates


@pytest.mark.parametrize("order", ["DDP", "model"])
def test_a_model_with_collectives_is_run_again_by_all_processes(order):
    first, second = returned(run(synced, 2, order, False))
    assert first == second
    assert first[0] == 4 + 2  # steps, and the two runs of the probe
    assert first[1] & {"re-run", "closed form"}


def test_a_model_that_one_process_cannot_run_again_is_run_again_by_none():
    first, second = returned(run(synced, 2, "DDP", True))
    assert first[0] == second[0] == 4
    assert "signal gain" in first[1] and not first[1] & {"re-run", "closed form"}


def raising_replay(rank):
    model = network()
    parallel, fold = built("DDP", model, bits=4, probe_steps=(2, 6))
    calls = []

    def fail(*_):
        calls.append(1)
        if rank == 1 and len(calls) in (3, 5):  # with a part of the batch, and with all of it
            raise RuntimeError("no second time")

    model.register_forward_pre_hook(fail)
    with pytest.warns(UserWarning, match="rank 1: running it again failed: no second time"):
        train(parallel, fold, rank, 8)
    return fold.plan(), len(calls)


def test_a_process_that_fails_to_run_the_model_again_stops_all_of_them_from_doing_so():
    (plan, calls), (other_plan, other_calls) = returned(run(raising_replay, 2))
    assert plan == other_plan and plan["sites"]  # of what the first one measured
    # Eight steps, two runs of two passes where they did not fail, and nothing at step 6.
    assert (calls, other_calls) == (8 + 4, 8 + 2)


def test_the_example_trains_in_two_processes():
    example = pathlib.Path(__file__).parents[2] / "examples" / "python" / "ddp.py"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    local = ["--local-addr", "localhost"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            *rendezvous,
            *local,
            example,
            "--device",
            "cpu",
            "--steps",
            "80",
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert re.search(r"plan of \d+ places: \[\d", done.stdout)
