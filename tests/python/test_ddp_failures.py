# SPDX-License-Identifier: Apache-2.0
"""Processes that fail, differ, stop early or start again."""

import contextlib
import os
import re
import signal

import backfold
import pytest
import torch
from processes import Raised, returned, run
from test_ddp import batch, built, network, train, weights
from torch import distributed, nn
from torch.distributed.algorithms import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def raising_forward(rank, at):
    model = network()
    parallel, fold = built("DDP", model, bits=4)

    def fail(*_):
        if rank == 1 and fold.steps == at - 1:
            raise KeyError("a broken batch")

    model.register_forward_pre_hook(fail)
    train(parallel, fold, rank, 4)


@pytest.mark.parametrize("at", [1, 2, 3])  # before, in and after the probe step
def test_a_process_that_raises_in_forward_ends_the_others_with_an_error(at):
    first, second = run(raising_forward, 2, at, timeout=5)
    assert isinstance(second, Raised) and second.type == "KeyError"
    assert isinstance(first, Raised) and first.type != "KeyError"


def killed(rank, at):
    parallel, fold = built("DDP", network(), bits=4)

    def kill(step):
        if rank == 1 and step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(parallel, fold, rank, 4, after=kill)


@pytest.mark.parametrize("at", [1, 2])  # the others meet it in DDP, and in the controller
def test_a_process_that_is_killed_ends_the_others_with_an_error(at):
    first, second = run(killed, 2, at, timeout=5)
    assert second is None
    assert isinstance(first, Raised)


def differing(rank, what):
    model = network()
    options = {"bits": 4}
    if what == "shape" and rank == 1:
        model[5] = nn.Linear(40, 8)
    elif what == "name" and rank == 1:
        model.add_module("more", nn.Linear(7, 7))
    elif what == "option":
        options = {"bits": 4 - rank}
    fold = backfold.Controller(model, min_bytes=0, **options)
    x, _ = batch(rank, 1)
    with fold:
        model(x).sum()


@pytest.mark.parametrize(
    "what, named",
    [
        ("shape", r"the parameter 5.weight is .*\[7, 40\].* on rank 0 and .*\[8, 40\].* on rank 1"),
        ("name", "the parameter more.weight of rank 1 does not exist on rank 0"),
        ("option", "the option bits is 4.0 on rank 0 and 3.0 on rank 1"),
    ],
)
def test_processes_with_different_models_are_told_what_differs(what, named):
    for result in run(differing, 2, what, timeout=5):
        assert result.type == "ValueError"
        assert re.search(named, result.text), result.text
        assert "sync=False" in result.text


def failing_calibration(rank):
    model = network()
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    x, y = batch(rank, 1)
    calls = []

    def step():
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise KeyError("not now")
        functional.cross_entropy(model(x), y).backward()

    with pytest.raises(KeyError if rank == 1 else RuntimeError, match="not now"):
        fold.calibrate(step)
    fold.calibrate(lambda: functional.cross_entropy(model(x), y).backward())
    return fold.plan()


def test_a_calibration_that_fails_in_one_process_fails_in_all():
    first, second = returned(run(failing_calibration, 2))
    assert first == second and first["sites"]


def calibrated_with_gradients(rank, views):
    """Gradients that a step has left, after a calibration through DDP."""
    parallel = DistributedDataParallel(network(), gradient_as_bucket_view=views)
    fold = backfold.Controller(parallel, bits=4, min_bytes=0)
    x, y = batch(rank, 1)

    def step():
        functional.cross_entropy(parallel(x * 3), y).backward()

    with fold:
        loss = functional.cross_entropy(parallel(x), y)
    loss.backward()
    before = [parameter.grad.clone() for parameter in parallel.parameters()]
    fold.calibrate(step)
    return before, [parameter.grad for parameter in parallel.parameters()], fold.plan()


@pytest.mark.parametrize("views", [False, True])
def test_a_calibration_leaves_the_gradients_in_the_buckets_alone(views):
    results = returned(run(calibrated_with_gradients, 2, views))
    for before, after, plan in results:
        assert all(map(torch.equal, before, after))
        assert plan == results[0][2]


def resumed(rank, shared):
    return [resumed_after(rank, stop, shared) for stop in (1, 2, 3, 6)]


def resumed_after(rank, stop, shared):
    saved = {}

    def save(step):
        if step == stop:
            if rank == 0 or not shared:
                saved["state"] = fold.state_dict()
            weights = parallel.state_dict().items()
            saved["weights"] = {name: value.clone() for name, value in weights}

    options = {"bits": 3, "probe_steps": (2, 6)}
    parallel, fold = built("DDP", network(), **options)
    whole = plain_steps(parallel, fold, rank, 1, 9, save)
    if shared:
        sent = [saved.get("state")]
        distributed.broadcast_object_list(sent)
        saved["state"] = sent[0]
    again, other = built("DDP", network(), **options)
    again.load_state_dict(saved["weights"])
    other.load_state_dict(saved["state"])
    rest = plain_steps(again, other, rank, stop + 1, 9)
    return whole[stop:], rest, weights(parallel), weights(again), fold.plan(), other.plan()


def plain_steps(parallel, fold, rank, first, last, after=lambda step: None):
    """Without momentum, so that the weights are all that there is to save."""
    losses = []
    for step in range(first, last + 1):
        x, y = batch(rank, step)
        with fold:
            loss = functional.cross_entropy(parallel(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
        after(step)
    return losses


@pytest.mark.parametrize("shared", [False, True])  # each process its own state, or that of rank 0
def test_a_resumed_run_is_bitwise_the_same(shared):
    # The state was saved before the probe step, while its measurement was pending, and later.
    first, second = returned(run(resumed, 2, shared))
    for results in zip(first, second, strict=True):
        for whole, rest, expected, found, plan, other in results:
            assert rest == whole
            assert all(map(torch.equal, expected, found))
            assert plan == other == results[0][4]


def with_saved_plan(rank, path):
    parallel, fold = built("DDP", network(), bits=3)
    plain_steps(parallel, fold, rank, 1, 4)
    if rank == 0:
        fold.save_plan(path)
    distributed.barrier()
    parallel, other = built("DDP", parallel.module, plan=path)
    plain_steps(parallel, other, rank, 1, 2)
    bits = {name: site["bits"] for name, site in fold.plan()["sites"].items()}
    return bits, {name: site["bits"] for name, site in other.plan()["sites"].items()}


def test_a_plan_that_one_process_saves_serves_all(tmp_path):
    for made, loaded in returned(run(with_saved_plan, 2, str(tmp_path / "plan.json"))):
        assert made and loaded == made


def joined(rank):
    parallel, fold = built("DDP", network(), bits=4)
    steps = 3 + 4 * rank
    with pytest.warns(UserWarning, match="Join"), Join([parallel]):
        train(parallel, fold, rank, steps)
    return fold.steps, weights(parallel)


def test_processes_that_run_out_of_batches_train_on_without_plans():
    (first, trained), (second, other) = returned(run(joined, 2, timeout=20))
    assert (first, second) == (3, 7)
    assert all(map(torch.equal, trained, other))


def uneven(rank):
    """Rank 1 enters the block once more, so that it meets where the other one reduces gradients."""
    parallel, fold = built("DDP", network(), bits=4)
    if rank == 1:
        with fold:
            parallel.module(batch(rank, 0)[0]).sum()
    train(parallel, fold, rank, 4)


def test_processes_that_are_out_of_step_end_with_an_error():
    for result in run(uneven, 2, timeout=5):
        assert isinstance(result, Raised) and result.type in ("RuntimeError", "DistBackendError")


def on_its_own(rank):
    parallel, fold = built("DDP", network(), bits=4, sync=False)
    for step in range(2 + 3 * rank):  # nobody waits for the other
        x, y = batch(rank, step)
        with parallel.no_sync(), fold:
            loss = functional.cross_entropy(parallel(x), y)
        loss.backward()
    distributed.barrier()
    return fold.plan()


def test_without_sync_each_process_plans_on_its_own():
    first, second = returned(run(on_its_own, 2))
    assert not first["sites"] and second["sites"]


def in_a_group(rank):
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    mine = groups[rank // 2]
    model = network() if rank < 2 else nn.Linear(24, 7)
    if rank < 2:
        parallel = DistributedDataParallel(model, process_group=mine)
        fold = backfold.Controller(parallel, bits=4, min_bytes=0)
    else:
        fold = backfold.Controller(model, bits=4, min_bytes=0, sync=mine)
        parallel = DistributedDataParallel(model, process_group=mine)
    train(parallel, fold, rank, 3)
    return fold.plan()


def test_the_processes_of_a_group_plan_together():
    plans = returned(run(in_a_group, 4))
    assert plans[0] == plans[1] != plans[2] == plans[3]
    assert plans[0]["sites"] and plans[2]["sites"]


def test_sync_must_be_known():
    with pytest.raises(TypeError, match="sync must be True, False or a process group, got 'yes'"):
        backfold.Controller(sync="yes")


def late(rank):
    distributed.destroy_process_group()
    fold = backfold.Controller(model := network(), bits=4, min_bytes=0)
    # The group exists again once the controller is there.
    store = distributed.TCPStore("localhost", 29000 + os.getppid() % 1000, 2, rank == 0)
    with contextlib.suppress(RuntimeError):
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    parallel = DistributedDataParallel(model)
    train(parallel, fold, rank, 3)
    return fold.plan()


def test_the_group_may_be_made_after_the_controller():
    first, second = returned(run(late, 2))
    assert first == second and first["sites"]
