# SPDX-License-Identifier: Apache-2.0
"""A U-Net that predicts the noise in images, as diffusion models do, in plain torch modules."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUPS = 32  # of each group norm


def time_embedding(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of the steps at falling frequencies."""
    half = width // 2
    places = torch.arange(half, device=steps.device)
    angles = steps[:, None] * torch.exp(-math.log(10_000) * places / half)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class ResBlock(nn.Module):
    def __init__(self, before: int, after: int, time_width: int, dropout: float):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time_width, after)
        self.norm2 = nn.GroupNorm(GROUPS, after)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        y = y + self.time(time)[:, :, None, None]
        y = self.conv2(self.dropout(functional.silu(self.norm2(y))))
        return self.shortcut(x) + y


class Attention(nn.Module):
    """Every position attends to every other, in heads of 64 channels."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm = nn.GroupNorm(GROUPS, width)
        self.enter = nn.Conv2d(width, 3 * width, 1)
        self.leave = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.enter(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1))
        query, key, value = heads.transpose(-2, -1).unbind(dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + self.leave(mixed.transpose(-2, -1).flatten(1, 2).unflatten(2, x.shape[2:]))


class Stage(nn.Module):
    """A residual block, with attention behind it or not."""

    def __init__(self, before: int, after: int, time_width: int, attends: bool, dropout: float):
        super().__init__()
        self.block = ResBlock(before, after, time_width, dropout)
        self.attention = Attention(after) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.attention(self.block(x, time))


class Unet(nn.Module):
    """Two blocks at each resolution going down, three going up, joined by what was made going down.

    `multiples` of the base width, one for each resolution; attention where an image has at most
    `attends_to` pixels on a side.
    """

    def __init__(
        self,
        base: int,
        multiples: tuple[int, ...],
        size: int,
        attends_to: int = 16,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.base, time_width = base, 4 * base
        self.time = nn.Sequential(
            nn.Linear(base, time_width), nn.SiLU(), nn.Linear(time_width, time_width), nn.SiLU()
        )
        self.enter = nn.Conv2d(3, base, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, made = base, [base]
        for level, multiple in enumerate(multiples):
            attends = size >> level <= attends_to
            for _ in range(2):
                self.down.append(Stage(width, base * multiple, time_width, attends, dropout))
                width = base * multiple
                made.append(width)
            if level + 1 < len(multiples):
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                made.append(width)
        self.middle = nn.ModuleList(
            Stage(width, width, time_width, attends, dropout) for attends in (True, False)
        )
        for level, multiple in reversed(list(enumerate(multiples))):
            attends = size >> level <= attends_to
            for _ in range(3):
                before = width + made.pop()
                self.up.append(Stage(before, base * multiple, time_width, attends, dropout))
                width = base * multiple
            if level:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm = nn.GroupNorm(GROUPS, width)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        time = self.time(time_embedding(steps, self.base))
        x = self.enter(images)
        made = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, Stage) else part(x)
            made.append(x)
        for part in self.middle:
            x = part(x, time)
        for part in self.up:
            if isinstance(part, Stage):
                x = part(torch.cat([x, made.pop()], dim=1), time)
            else:
                x = part(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.leave(functional.silu(self.norm(x)))
