# SPDX-License-Identifier: Apache-2.0
"""The models that plans are made for: small, trained for a few steps, one batch of real data each.

A case is determined by its seed: weights, batches, dropout. Its loss draws the same random numbers
each time, so that two gradients differ only by what was folded.
"""

import pathlib
import typing
from collections.abc import Callable, Iterable

import torch
from architectures import MobileNetLike, SwinLike
from datasets import cifar10, cora, normalised, shakespeare, sst2
from graph_networks import GraphAttentionNetwork
from networks import CharacterGpt, ResNet18, minilm
from torch import Tensor, nn
from torch.nn import functional

STEPS = 30  # before a plan is made, so that gradients are not those of random weights
MIN_BYTES = 1024  # folded from this size on: the models are small, and so are their tensors


class Source(typing.NamedTuple):
    """Where data and models come from, and where they go."""

    data: pathlib.Path
    device: torch.device = torch.device("cpu")
    minilm: pathlib.Path | None = None  # a folder; default: the wheel


class Case(typing.NamedTuple):
    model: nn.Module
    loss: Callable[[], Tensor]

    def step(self) -> None:
        """Forward and backward."""
        self.model.zero_grad(set_to_none=True)
        self.loss().backward()


def warmed_up(
    model: nn.Module,
    loss: Callable[[typing.Any], Tensor],
    batches: Iterable[typing.Any],
    rate: float,
    seed: int,
) -> Case:
    """Trains on all batches but the last, which the case keeps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    *earlier, last = batches
    for batch in earlier:
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def seeded() -> Tensor:
        torch.manual_seed(seed)
        return loss(last)

    return Case(model, seeded)


def image_case(
    make: Callable[[], nn.Module], batch: int, source: Source, seed: int, rate: float = 2e-3
) -> Case:
    images = cifar10(source.data, "train", every=25)
    torch.manual_seed(seed)
    model = make().to(source.device)
    pixels = normalised(images.pixels).to(source.device)
    labels = images.labels.to(source.device)

    def loss(chosen: Tensor) -> Tensor:
        return functional.cross_entropy(model(pixels[chosen]), labels[chosen])

    batches = (torch.randint(len(pixels), (batch,)) for _ in range(STEPS + 1))
    return warmed_up(model, loss, batches, rate, seed)


def resnet(source: Source, seed: int) -> Case:
    return image_case(lambda: ResNet18(width=16), 16, source, seed)


def mobilenet(source: Source, seed: int) -> Case:
    return image_case(lambda: MobileNetLike(width=16), 16, source, seed)


def swin(source: Source, seed: int) -> Case:
    return image_case(lambda: SwinLike(width=48, heads=3), 8, source, seed)


def gpt(source: Source, seed: int) -> Case:
    text = shakespeare(source.data)
    context = 64
    torch.manual_seed(seed)
    model = CharacterGpt(text.characters, context, width=64, heads=4, layers=4).to(source.device)

    def loss(starts: Tensor) -> Tensor:
        window = text.codes[starts + torch.arange(context + 1)].to(source.device)
        return functional.cross_entropy(
            model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
        )

    places = len(text.codes) - context
    batches = (torch.randint(places, (16, 1)) for _ in range(STEPS + 1))
    return warmed_up(model, loss, batches, 2e-3, seed)


def graph(source: Source, seed: int) -> Case:
    nodes = cora(source.data)
    torch.manual_seed(seed)
    model = GraphAttentionNetwork(nodes.features.shape[1], 7).to(source.device)
    features, edges = nodes.features.to(source.device), nodes.edges.to(source.device)

    def loss(batch: Tensor) -> Tensor:
        logits = model(features, edges)
        return functional.cross_entropy(logits[batch], nodes.labels[batch].to(source.device))

    return warmed_up(model, loss, [nodes.train] * (STEPS + 1), 1e-2, seed)


def sentences(source: Source, seed: int) -> Case:
    corpus = sst2(source.data, "train")
    torch.manual_seed(seed)
    model, tokenizer = minilm(source.minilm)
    model.to(source.device).train()
    model.get_input_embeddings().requires_grad_(False)  # half of the weights, and few rows in use

    def loss(batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        tokens, labels = batch
        return functional.cross_entropy(model(**tokens).logits, labels)

    def batch() -> tuple[dict[str, Tensor], Tensor]:
        chosen = torch.randint(len(corpus.texts), (8,)).tolist()
        texts = [corpus.texts[i] for i in chosen]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
        labels = torch.tensor([corpus.labels[i] for i in chosen])
        return dict(tokens.to(source.device)), labels.to(source.device)

    return warmed_up(model, loss, (batch() for _ in range(STEPS + 1)), 5e-5, seed)


CASES: dict[str, Callable[[Source, int], Case]] = {
    "ResNet-18": resnet,
    "GPT": gpt,
    "graph": graph,
    "MobileNet-like": mobilenet,
    "Swin-like": swin,
    "MiniLM": sentences,
}
