# SPDX-License-Identifier: Apache-2.0
"""Graphs of torch.compile with offload=True: packets leave, and gradients are bitwise the same."""

import gc

import backfold
import pytest
import torch
from test_compile import (
    equal,
    fresh_compiler,  # noqa: F401
    gradients,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def network(device: str) -> tuple[nn.Module, torch.Tensor]:
    """Whose tensors are large enough to leave, at 4 bits as well."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    return model.to(device), x.to(device)


def run(model, x, forward, steps: int = 3, **options):
    fold = backfold.Controller(model, adaptive=False, **options)
    found = [gradients(model, forward, x, fold) for _ in range(steps)]
    return found, fold.report().to_dict()


@pytest.mark.parametrize("bits", [None, 4])
def test_what_leaves_comes_back_bitwise(bits, device, deterministic):
    model, x = network(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    here, report = run(model, x, compiled, bits=bits)
    assert report["offloaded_bytes"] == 0
    away, report = run(model, x, compiled, bits=bits, offload=True)
    assert all(equal(a, b) for a, b in zip(here, away, strict=True))
    # What backward asks for first stays.
    assert report["offloaded_bytes"] > 0.5 * report["held_bytes"]


def test_by_inductor(device):
    model, x = network(device)
    compiled = torch.compile(model, fullgraph=True)
    here, _ = run(model, x, compiled, bits=4)
    away, report = run(model, x, compiled, bits=4, offload=True)
    assert all(equal(a, b) for a, b in zip(here, away, strict=True))
    assert report["offloaded_bytes"] > 0


def test_a_graph_that_never_runs_backward_gives_its_room_back(device):
    model, x = network(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fold = backfold.Controller(model, bits=4, adaptive=False, offload=True)
    expected = gradients(model, compiled, x, fold)
    for _ in range(3):
        with fold:
            loss = compiled(x).square().mean()
        del loss
        gc.collect()
    again = backfold.Controller(model, bits=4, adaptive=False, offload=True)
    assert equal(gradients(model, compiled, x, again), expected)
