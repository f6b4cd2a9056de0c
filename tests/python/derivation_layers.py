# SPDX-License-Identifier: Apache-2.0
"""Layers as people write them, for the tests of derivation."""

import torch
from derivation import leaf
from torch import nn
from torch.nn import functional


class HandWrittenGelu(nn.Module):
    """As in GPT-2."""

    def forward(self, x):
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class HandWrittenRmsNorm(nn.Module):
    """As in Llama."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Gated(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Written out, with dropout, as with attn_implementation="eager"."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.three(x).chunk(3, -1))
        scores = (q @ k.transpose(2, 3)) / (width // self.heads) ** 0.5
        hidden = torch.ones(length, length, device=x.device, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        found = functional.dropout(weights, self.dropout) @ v
        return self.out(found.transpose(1, 2).reshape(batch, length, width))


class Residual(nn.Module):
    """As in ResNet, ReLU in place and all."""

    def __init__(self, channels: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += x
        return self.relu(y)


class Block(nn.Module):
    """Norm, gated unit with a hand-written activation, residual connection."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm(x)
        gate = self.gate(h)
        y = 0.5 * gate * (1 + torch.tanh(gate + 0.05 * gate.pow(3)))
        return x + self.down(functional.dropout(y * self.up(h), 0.1))


def blocks(device: str, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(depth))).to(device)


def batch(device: str, rows: int = 24) -> torch.Tensor:
    return leaf(rows, 32, device=device, seed=9).detach()
