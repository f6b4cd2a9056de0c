# SPDX-License-Identifier: Apache-2.0
"""Gradients of several processes against those of one that has all of their data."""

import contextlib

import backfold
import pytest
import torch
from processes import returned, run
from test_ddp import batch, network
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

STEPS = 3


def rows(ranks, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of those ranks, one behind the other."""
    parts = [batch(rank, step) for rank in ranks]
    return torch.cat([x for x, _ in parts]).double(), torch.cat([y for _, y in parts])


def gradients(whole: nn.Module, model: nn.Module, fold, ranks) -> list[list[torch.Tensor]]:
    """Of every step, and complete where parameters are shards."""
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        x, y = rows(ranks, step)
        with fold or contextlib.nullcontext():
            loss = functional.cross_entropy(whole(x), y)
        loss.backward()
        complete = [
            getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()
        ]
        found.append([gradient.clone() for gradient in complete])
        optimizer.step()
        optimizer.zero_grad()
    return found


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "DDP":
        return DistributedDataParallel(model)
    for part in (model[0], model[3], model):
        fully_shard(part)
    return model


def trained(rank: int, kind: str, folds: bool) -> list[list[torch.Tensor]]:
    model = network().double()
    whole = wrapped(kind, model)
    fold = backfold.Controller(whole, bits=None, min_bytes=0) if folds else None
    found = gradients(whole, model, fold, [rank])
    if fold is not None:
        sizes = fold.report().to_dict()
        assert sizes["held_bytes"] < sizes["unique_bytes"]  # it was folded
    return found


def both(rank: int, kind: str) -> tuple:
    return trained(rank, kind, False), trained(rank, kind, True)


def difference(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> float:
    """The largest of any gradient, as a part of that gradient's largest element."""
    parts = [
        ((a - b).abs().max() / b.abs().max()).item()
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return max(parts)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_gradients_are_those_of_one_process_with_the_same_data(kind, size):
    model = network().double()
    one = gradients(model, model, None, range(size))
    for plain, folded in returned(run(both, size, kind)):
        # Sums in another order: 8e-16 was seen. A process that reduced nothing is above 1.
        assert difference(plain, one) < 1e-12
        for expected, found in zip(plain, folded, strict=True):
            assert all(map(torch.equal, found, expected))
