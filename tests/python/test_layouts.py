# SPDX-License-Identifier: Apache-2.0
"""Which layout a plan chooses: by the error of the tensor and by its time on the device."""

import backfold
import torch
from torch import nn


def planned_layout(spread: float, device: str) -> str:
    """The layout of a tensor whose even columns are `spread` times as large as its odd ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 16)).to(device)
    scale = torch.ones(128)
    scale[::2] = spread
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(scale))
    x = torch.rand(1024, 128, device=device) * 2 - 1
    fold = backfold.Controller(model, bits=4)
    fold.calibrate(lambda: model(x).square().sum().backward())
    return fold.plan()["sites"]["1.bias/aten::addmm/mat1/0"]["layout"]


def test_a_small_gain_is_worth_a_layout_only_where_it_is_free(device):
    # Groups of columns have 0.88 of the error of flat ones, which chose them on any device once.
    assert planned_layout(1.15, device) == ("flat" if device == "cpu" else "strided 1")


def test_a_large_gain_is_worth_it_everywhere(device):
    assert planned_layout(30, device) == "strided 1"
