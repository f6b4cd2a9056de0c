# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 with offloading, with checkpoints and with compiled graphs."""

import contextlib
import functools
import warnings

import backfold
import pytest
import torch
from processes import returned, run
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

WIDTH, ROWS, STEPS = 96, 1536, 5  # what a layer saves is worth sending, at 4 bits as well


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + self.down(functional.dropout(hidden, 0.1, self.training))


class Stack(nn.Module):
    """Layers between a stem and a head, each of them a checkpoint if that is wanted."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        plain = lambda layer, x: layer(x)  # noqa: E731
        self.run = functools.partial(checkpoint, use_reentrant=False) if checkpoints else plain

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def built(kind: str, remedy: str, options: dict | None):
    """The model as processes share it, and a controller; without options there is none."""
    model = Stack(remedy == "checkpoint")
    if kind == "DDP":
        whole = DistributedDataParallel(model)
    else:
        for part in (*model.layers, model):
            fully_shard(part)
        whole = model
    if options is None:
        fold = None
    else:
        offload = {"offload": True} if remedy == "offload" else {}
        fold = backfold.Controller(whole, min_bytes=1024, probe_steps=(2, 4), **offload, **options)
    if remedy == "compile":
        whole = torch.compile(whole, backend="aot_eager")
    return whole, fold


def trained(rank: int, kind: str, remedy: str, options: dict | None) -> dict:
    whole, fold = built(kind, remedy, options)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + rank)  # of dropout, too
    losses, plans, away = [], [], 0
    for _ in range(STEPS):
        x, y = torch.randn(ROWS, 16), torch.randint(10, (ROWS,))
        with fold or contextlib.nullcontext():
            loss = functional.cross_entropy(whole(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if fold is not None:
            away = max(away, fold.report().to_dict()["offloaded_bytes"])
            plans.append(fold.plan())
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in whole.parameters()]
    sizes = None if fold is None else fold.report().to_dict()
    return {"losses": losses, "weights": weights, "plans": plans, "away": away, "sizes": sizes}


def all_ways(rank: int, kind: str, remedy: str) -> list[dict]:
    warnings.filterwarnings("ignore", message="backfold: the model's call cannot be run again")
    return [trained(rank, kind, remedy, o) for o in (None, {"bits": None}, {"bits": 4})]


# With what part of autograd's bytes 4 bits make do. Checkpoints keep little but their starts, which
# stay exact under FSDP2, as nothing is run again there to measure them.
CASES = [
    ("DDP", "offload", 0.3),
    ("DDP", "checkpoint", 0.5),
    ("DDP", "compile", 0.3),
    ("FSDP2", "offload", 0.3),
    ("FSDP2", "checkpoint", 0.8),
]


@pytest.mark.parametrize(("kind", "remedy", "part"), CASES)
def test_remedies_combine_in_processes(kind, remedy, part):
    results = returned(run(all_ways, 2, kind, remedy, timeout=120))
    for plain, exact, folded in results:
        assert exact["losses"] == plain["losses"]
        assert all(map(torch.equal, exact["weights"], plain["weights"]))
        assert folded["losses"] == pytest.approx(plain["losses"], rel=0.05)
        assert not all(map(torch.equal, folded["weights"], plain["weights"]))  # it rounds
        if remedy == "offload":
            assert exact["away"] > 0 and folded["away"] > 0
        assert folded["sizes"]["held_bytes"] < part * folded["sizes"]["unique_bytes"]
    first, second = (folded for _, _, folded in results)
    assert first["plans"] == second["plans"]
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert first["plans"][-1]["sites"]
