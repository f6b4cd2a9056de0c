# SPDX-License-Identifier: Apache-2.0
"""Budgets without rounding, kept by several processes with one plan."""

import contextlib
import json
import re
import time
import warnings

import backfold
import pytest
import torch
from backfold._processes import Processes
from processes import Raised, returned, run
from torch import distributed, nn
from torch.distributed.algorithms import Join
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

WIDTH, ROWS, LAYERS = 128, 256, 8
PIECE = 4 * WIDTH * ROWS  # bytes of what each layer saves: its result, or its input


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x


class Slow(TorchDispatchMode):
    """Makes the products with some weights take long."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.weights = {layer.weight.data_ptr() for layer in layers}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default and args[2].data_ptr() in self.weights:
            time.sleep(0.02)
        return func(*args, **(kwargs or {}))


def batch(rank: int, step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def train(whole, fold, rank, steps, rows=lambda rank, step: ROWS, slow=(), after=None):
    """Gradients of every step. Products of `slow` layers take long in the first, which is timed."""
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    found = []
    for step in range(1, steps + 1):
        x = batch(rank, step, rows(rank, step))
        with Slow(slow) if slow and step == 1 else contextlib.nullcontext():
            with fold or contextlib.nullcontext():
                loss = whole(x).square().mean()
            loss.backward()
        found.append([p.grad.clone() for p in whole.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)
    return found


def built(**options):
    warnings.filterwarnings("ignore", message=".*is kept by offloading")
    whole = DistributedDataParallel(Deep())
    return whole, backfold.Controller(whole, bits=None, min_bytes=0, **options)


def delayed(rank, options):
    """Each process has slow layers of its own."""
    expected = train(DistributedDataParallel(Deep()), None, rank, 5)
    whole, fold = built(**options)
    plans, reports = [], []

    def note(_):
        plans.append(fold.plan())
        reports.append(fold.report().to_dict())

    slow = whole.module.layers[:3] if rank == 0 else whole.module.layers[5:]
    found = train(whole, fold, rank, 5, slow=slow, after=note)
    same = [all(map(torch.equal, *one)) for one in zip(found, expected, strict=True)]
    return same, plans, reports


@pytest.mark.parametrize("target", ["budget", "ratio", "peak"])
def test_processes_whose_products_take_different_times_have_one_plan(target):
    # Of nine tensors seven may stay; products 3 and 4 are fast in both processes.
    limits = {"budget": 7.5 * PIECE, "ratio": 16 / 7.5, "peak": 8 * PIECE}
    options = {target: limits[target] if target == "ratio" else int(limits[target])}
    (same, plans, reports), (others, other_plans, other_reports) = returned(
        run(delayed, 2, {**options, "offload": False})
    )
    assert all(same) and all(others)
    assert plans == other_plans
    assert "remade" not in plans[0] and plans[1]["remade"]
    for number, found in ((r["remade"]["places"], r["held_bytes"]) for r in reports[2:]):
        assert number == len(plans[-1]["remade"])
        if target == "budget":
            assert found <= options["budget"]
    if target == "budget":
        # A process alone takes the products that the other one is slow at.
        layers = {int(re.search(r"layers\.(\d)", place)[1]) for place in plans[-1]["remade"]}
        assert layers <= {3, 4}
    assert [r["remade"] for r in reports] == [r["remade"] for r in other_reports]


def test_what_leaves_is_the_same_in_all_processes():
    results = returned(run(delayed, 2, {"budget": int(3.5 * PIECE)}))
    for same, plans, reports in results:
        assert all(same)
        assert plans == results[0][1]
        assert plans[-1]["offloaded"]
        assert reports[-1]["remade"]["sent_bytes"] > 0
        assert reports[-1]["remade"]["held_bytes"] <= 3.5 * PIECE


def of_sizes(rank, rows, steps):
    whole, fold = built(budget=6 * PIECE, offload=False)
    plans, held = [], []

    def note(_):
        plans.append(fold.plan())
        held.append(fold.report().to_dict()["held_bytes"])

    train(whole, fold, rank, steps, rows=rows, after=note)
    return plans, held


def sharded(rank):
    warnings.filterwarnings("ignore", message=".*is kept by offloading")
    found, plans = [], []
    for folds in (False, True):
        model = Deep()
        for part in (*model.layers, model):
            fully_shard(part)
        fold = backfold.Controller(model, bits=None, budget=4 * PIECE) if folds else None
        note = (lambda _, fold=fold: plans.append(fold.plan())) if folds else None
        steps = train(model, fold, rank, 4, after=note)
        found.append([[gradient.full_tensor() for gradient in step] for step in steps])
    same = [all(map(torch.equal, *one)) for one in zip(*found, strict=True)]
    return same, plans, fold.report().to_dict()["remade"]


def test_shards_keep_a_budget_by_offloading_alone():
    for same, plans, remade in returned(run(sharded, 2)):
        assert all(same)
        assert plans[1]["offloaded"] and "remade" not in plans[-1]
        assert remade["held_bytes"] <= 4 * PIECE < remade["held_bytes"] + remade["sent_bytes"]


def uneven_rows(rank, step):
    return ROWS if rank == 1 else ROWS // 2


def growing_rows(rank, step):
    return ROWS if rank == 1 and step >= 6 else ROWS // 2


def test_the_process_with_the_largest_batch_is_planned_for():
    (plans, held), (other_plans, other_held) = returned(run(of_sizes, 2, uneven_rows, 4))
    assert plans == other_plans and plans[-1]["remade"]
    assert held[-1] < other_held[-1] <= 6 * PIECE


def test_a_larger_step_of_one_process_is_planned_for_by_all():
    (plans, _), (other_plans, held) = returned(run(of_sizes, 2, growing_rows, 14))
    assert plans == other_plans
    assert ["remade" in plan for plan in plans] == [False] * 11 + [True] * 3  # ten entries later
    assert held[4] <= 6 * PIECE < held[10] and held[-1] <= 6 * PIECE


def counted(rank, first):
    """How often processes met at each entry. Rank 1 saves something from step `first` on."""
    times, gather = [0], Processes.gather

    def counting(self, message):
        times[-1] += 1
        return gather(self, message)

    Processes.gather = counting
    whole, fold = built(budget=5 * PIECE, offload=False)
    plans = []
    for step in range(1, 24):
        x = batch(rank, step)
        with fold:
            if rank == 0 or step >= first:
                loss = whole(x).square().mean()
        if rank == 1 and step < first:
            loss = whole(x).square().mean()
        loss.backward()
        plans.append(fold.plan())
        times.append(0)
        with torch.no_grad(), fold:  # is no entry
            whole.module(x)
    return times[:-1], plans


def test_ordinary_steps_exchange_nothing():
    (times, plans), (others, other_plans) = returned(run(counted, 2, 1))
    assert times == others and plans == other_plans
    # The introduction and that nobody knows anything; what all know, and the plan; and a look.
    assert times == [2, 2] + [0] * 9 + [1] + [0] * 11


def test_a_process_that_has_timed_nothing_is_waited_for():
    (times, plans), (others, other_plans) = returned(run(counted, 2, 4))
    assert times == others and plans == other_plans
    assert ["remade" in plan for plan in plans] == [False] * 4 + [True] * 19
    assert times[:6] == [2, 1, 1, 1, 2, 0]


def never_saves(rank):
    whole, fold = built(budget=5 * PIECE // 16, offload=False)
    plans = []
    for step in range(1, 70):
        with fold:
            loss = whole.module(batch(rank, step, 16)).sum() if rank == 0 else None
        if loss is not None:
            loss.backward()
        plans.append(fold.plan())
    # Without a forward pass through DDP nothing else has to be waited for.
    return plans, fold.steps


def test_a_process_that_never_saves_anything_is_waited_for_no_longer_than_patience():
    (first, steps), (second, none) = returned(run(never_saves, 2))
    assert (steps, none) == (69, 0)
    assert "remade" not in first[63] and first[64]["remade"]
    assert "remade" not in second[-1]  # it has no such places


def impossible(rank):
    whole, fold = built(budget=1000, offload=False)
    train(whole, fold, rank, 3)


def test_an_impossible_budget_is_the_same_error_in_all_processes():
    first, second = run(impossible, 2, timeout=10)
    assert isinstance(first, Raised) and first.type == "ValueError"
    assert first.text == second.text
    assert "budget=1000 bytes cannot be met with bits=None: the lowest possible is" in first.text


def differing(rank, options):
    whole = DistributedDataParallel(Deep())
    fold = backfold.Controller(whole, min_bytes=0, **options[rank])
    train(whole, fold, rank, 2)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"bits": None, "budget": 10**7}, "the option budget is 1000000.0 on rank 0"),
        ({"budget": 10**6}, "the option bits of rank 0 does not exist on rank 1"),
    ],
)
def test_options_that_differ_are_named(other, named):
    options = [{"bits": None, "budget": 10**6}, other]
    for result in run(differing, 2, options, timeout=10):
        assert isinstance(result, Raised) and result.type == "ValueError"
        assert named in result.text


def killed(rank):
    whole, fold = built(budget=5 * PIECE)
    with fold:
        loss = whole(batch(rank, 1)).sum()
    loss.backward()
    if rank == 1:
        raise KeyError("no more")
    with fold:
        whole(batch(rank, 2))


def test_a_process_that_fails_ends_the_others_with_an_error():
    first, second = run(killed, 2, timeout=5)
    assert second.type == "KeyError"
    assert isinstance(first, Raised) and first.type != "KeyError"


def joined(rank):
    whole, fold = built(budget=5 * PIECE, offload=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Join")
        with Join([whole]):
            train(whole, fold, rank, 3 + 3 * rank)
    return fold.steps, fold.plan()


def test_processes_that_run_out_of_batches_train_on_without_a_plan():
    (steps, plan), (more, other) = returned(run(joined, 2, timeout=20))
    assert (steps, more) == (3, 6)
    assert plan == other and "remade" not in plan


def alone(rank):
    whole, fold = built(budget=5 * PIECE, offload=False, sync=False)
    for step in range(2 + 3 * rank):  # nobody waits for the other
        with whole.no_sync(), fold:
            loss = whole(batch(rank, step)).sum()
        loss.backward()
    distributed.barrier()
    return fold.report().to_dict()["held_bytes"]


def test_without_sync_each_process_plans_on_its_own():
    for held in returned(run(alone, 2)):
        assert held <= 5 * PIECE


def alone_first(rank):
    """A state of a process that was alone, from which several go on."""
    model = Deep()
    fold = backfold.Controller(model, bits=None, min_bytes=0, budget=5 * PIECE, offload=False)
    slow = model.layers[:3] if rank == 0 else model.layers[5:]
    fold._core.join(0, 1, None)
    fold._joined = True
    train(model, fold, rank, 3, slow=slow)
    whole, again = built(budget=5 * PIECE, offload=False)
    state = json.loads(json.dumps(fold.state_dict()).replace('"layers.', '"module.layers.'))
    again.load_state_dict(state)
    plans = []
    train(whole, again, rank, 2, after=lambda _: plans.append(again.plan()))
    return fold.plan()["remade"], plans


def test_plans_that_processes_made_alone_become_one():
    (mine, plans), (yours, others) = returned(run(alone_first, 2))
    assert len(mine) == len(yours) and mine != yours
    assert plans == others and plans[0]["remade"]


def resumed(rank):
    """After three steps all take up the state of rank 0."""
    whole, fold = built(budget=5 * PIECE, offload=False)
    train(whole, fold, rank, 3)
    states = [fold.state_dict() if rank == 0 else None]
    distributed.broadcast_object_list(states)
    again = backfold.Controller(whole, bits=None, min_bytes=0, budget=5 * PIECE, offload=False)
    again.load_state_dict(states[0])
    plans = []
    train(whole, again, rank, 12, after=lambda _: plans.append(again.plan()))
    return fold.plan(), plans, again.report().to_dict()["held_bytes"]


def test_processes_may_all_take_up_the_state_of_one():
    for plan, plans, held in returned(run(resumed, 2)):
        assert plan["remade"] and all(one == plan for one in plans)
        assert held <= 5 * PIECE
