# SPDX-License-Identifier: Apache-2.0
"""Small untrained models in the style of MobileNet and Swin: depthwise convolution, squeeze and
excitation, windows and gates."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# ---- Like MobileNet ----------------------------------------------------------------------------


class InvertedResidual(nn.Module):
    """Widen, convolve each channel separately, weight the channels, narrow."""

    def __init__(self, before: int, after: int, stride: int, group_norm: bool = False):
        super().__init__()
        inner = 4 * before
        self.widen = nn.Conv2d(before, inner, 1, bias=False)
        self.norm_widen = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False)
        self.norm_depthwise = nn.GroupNorm(4, inner) if group_norm else nn.BatchNorm2d(inner)
        self.squeeze = nn.Conv2d(inner, before, 1)
        self.excite = nn.Conv2d(before, inner, 1)
        self.narrow = nn.Conv2d(inner, after, 1, bias=False)
        self.norm_narrow = nn.BatchNorm2d(after)
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.norm_widen(self.widen(x)))
        y = functional.silu(self.norm_depthwise(self.depthwise(y)))
        weights = self.excite(functional.silu(self.squeeze(y.mean(dim=(2, 3), keepdim=True))))
        y = self.norm_narrow(self.narrow(y * weights.sigmoid()))
        return x + y if self.residual else y


class MobileNetLike(nn.Module):
    """Six blocks; the fourth has a group norm."""

    def __init__(self, width: int, classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            InvertedResidual(width, width, 1),
            InvertedResidual(width, 2 * width, 2),
            InvertedResidual(2 * width, 2 * width, 1),
            InvertedResidual(2 * width, 2 * width, 1, group_norm=True),
            InvertedResidual(2 * width, 4 * width, 2),
            InvertedResidual(4 * width, 4 * width, 1),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.silu(self.norm(self.stem(images)))
        return self.head(self.blocks(x).mean(dim=(2, 3)))


# ---- Like Swin ---------------------------------------------------------------------------------


class WindowBlock(nn.Module):
    """Attention inside windows of a grid, shifted by `shift`; a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, window: int, shift: int):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm_attention = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))
        self.project = nn.Linear(width, width)
        self.norm_feed = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        batch, height, _, width = x.shape
        x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        tiles = x.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window)).transpose(2, 3)
        heads = self.query_key_value(tiles.flatten(3, 4)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(4, 0, 1, 2, 5, 3, 6)
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5 + self.bias
        mixed = (scores.softmax(dim=-1) @ value).transpose(-3, -2).flatten(-2)
        tiles = self.project(mixed).unflatten(3, (self.window, self.window)).transpose(2, 3)
        x = tiles.reshape(batch, height, height, width)
        return x.roll((self.shift, self.shift), dims=(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        y = self.norm_feed(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class SwinLike(nn.Module):
    """Patches of two by two, two blocks, patches merged, two blocks. Windows wrap around."""

    def __init__(self, width: int, heads: int, window: int = 4, classes: int = 10):
        super().__init__()
        self.embed = nn.Conv2d(3, width, 2, stride=2)
        self.first = nn.Sequential(
            WindowBlock(width, heads, window, 0), WindowBlock(width, heads, window, window // 2)
        )
        self.merge = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.second = nn.Sequential(
            WindowBlock(2 * width, heads, window, 0),
            WindowBlock(2 * width, heads, window, window // 2),
        )
        self.norm = nn.RMSNorm(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.embed(images).permute(0, 2, 3, 1))
        x = self.second(self.merge(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean(dim=(1, 2)))
