# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel on GPUs: processes that share one through gloo, one on each by NCCL."""

import pytest
import torch
from processes import returned, run
from test_ddp import batch, built, network, train, weights
from test_traps_cuda import needs_gpu

pytestmark = needs_gpu


def of_device(device: torch.device):
    return lambda rank, step: tuple(one.to(device) for one in batch(rank, step))


def training(rank: int, options: dict) -> dict[str, tuple]:
    """Weights, and the plan if there is one, of plain and of folded training."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    results = {}
    for order in ("plain", "DDP"):
        parallel, fold = built(order, network().to(device), probe_steps=(2, 5), **options)
        losses = train(parallel, fold, rank, 8, batch=of_device(device))
        plan = fold.plan() if fold and options["bits"] else None
        results[order] = losses, [weight.cpu() for weight in weights(parallel)], plan
    return results


# As many processes as torch's backend can have on this machine: NCCL wants a GPU for each.
GROUPS = [("gloo", 2)] + (
    [("nccl", torch.cuda.device_count())] if torch.cuda.is_available() else []
)


@pytest.mark.parametrize(("backend", "size"), GROUPS)
def test_without_rounding_training_is_that_of_plain_ddp(backend, size):
    for results in returned(run(training, size, {"bits": None}, backend=backend)):
        (losses, plain, _), (found_losses, found, _) = results["plain"], results["DDP"]
        assert found_losses == losses
        assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize(("backend", "size"), GROUPS)
def test_all_processes_have_one_plan_and_train_as_plain_does(backend, size):
    results = returned(run(training, size, {"bits": 4}, backend=backend))
    losses, trained, plan = results[0]["DDP"]
    assert plan["sites"]
    for other in results[1:]:
        assert other["DDP"][2] == plan
        assert all(map(torch.equal, trained, other["DDP"][1]))
    plain = results[0]["plain"][0]
    assert abs(losses[-1] - plain[-1]) < 0.1 * plain[-1]
