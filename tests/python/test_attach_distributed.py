# SPDX-License-Identifier: Apache-2.0
"""Attached models in several processes: inside of a wrapper, or the wrapper itself."""

import backfold
import pytest
import torch
from processes import run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

OPTIONS = {"bits": 3.5, "min_bytes": 0, "probe_steps": (2,), "probe_every": None}
HOWS = ["inside", "wrapper", "sharded later", "sharded first"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def train(rank: int, how: str) -> tuple:
    """What one process has after five steps: steps, plan, whether gradients are those of all."""
    model = network()
    if how == "inside":
        fold = backfold.attach(model, **OPTIONS)
        whole = DistributedDataParallel(model)
    elif how == "wrapper":
        whole = DistributedDataParallel(model)
        fold = backfold.attach(whole, **OPTIONS)
    elif how == "sharded later":
        fold = backfold.attach(model, replay=False, **OPTIONS)
        whole = fully_shard(model)
    else:
        whole = fully_shard(model)
        fold = backfold.attach(whole, replay=False, **OPTIONS)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    torch.manual_seed(1 + rank)
    for _ in range(5):
        whole(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = fold.report().to_dict()["held_bytes"]
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in whole.parameters()]
    steps = fold.steps
    fold.detach()
    whole(torch.randn(64, 64))
    return steps, fold.steps, fold.plan(), held, weights


def train_all(rank: int) -> dict:
    return {how: train(rank, how) for how in HOWS}


@pytest.fixture(scope="module")
def trained() -> list[dict]:
    return run(train_all, 2)


@pytest.mark.parametrize("how", HOWS)
def test_processes_plan_together(trained, how):
    first, second = (one[how] for one in trained)
    assert first[:2] == second[:2] == (5, 5)
    assert first[2] == second[2] and first[2]["sites"]
    assert 0 < first[3] < 64 * (64 + 96 + 96)  # a quarter of the bytes
    assert all(torch.equal(a, b) for a, b in zip(first[4], second[4], strict=True))
