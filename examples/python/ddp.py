# SPDX-License-Identifier: Apache-2.0
"""Trains a small network in several processes, with folded activations.

    torchrun --nproc-per-node 2 examples/python/ddp.py

Nothing but the controller's block is added to an ordinary DistributedDataParallel loop: the
processes measure on their own batches, share what they find, and use the same plan.
"""

import argparse
import os

import backfold
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(),
        nn.Linear(256, 8),
    )  # fmt: skip


def batch(teacher: nn.Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs, labelled by a fixed network."""
    x = torch.randn(BATCH, 64, device=device)
    with torch.no_grad():
        return x, teacher(x).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    arguments = parser.parse_args()
    on_gpu = (arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = distributed.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    teacher = nn.Linear(64, 8).to(device)
    model = DistributedDataParallel(network().to(device))
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # every process has its own batches
    for step in range(1, arguments.steps + 1):
        x, y = batch(teacher, device)
        with fold:
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    # Saving needs no other process, and what rank 0 saves is good for all of them.
    if rank == 0:
        report = fold.report().to_dict()
        print(f"held {report['held_bytes']:,} of {report['unique_bytes']:,} bytes")
        bits = [site["bits"] for site in fold.plan()["sites"].values()]
        print(f"plan of {len(bits)} places: {bits}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
