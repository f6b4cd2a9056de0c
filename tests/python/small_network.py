# SPDX-License-Identifier: Apache-2.0
"""The small network that several tests run, and its gradients."""

import torch
from torch import nn


def network(device: str = "cpu", width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Sequential(*body), nn.Linear(width, width)).to(device)


def batch(device: str = "cpu", rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(model: nn.Module, fold, x: torch.Tensor) -> list[torch.Tensor]:
    with fold:
        loss = model(x * 2).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
