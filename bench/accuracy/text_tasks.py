# SPDX-License-Identifier: Apache-2.0
"""Training tasks on text: MiniLM on SST-2, a character GPT on Shakespeare."""

import pathlib
import typing
from collections.abc import Iterator

import torch
from datasets import Sentences, shakespeare, sst2
from networks import CharacterGpt, minilm
from torch import Tensor, nn
from torch.nn import functional
from training import ACCURACY, Scale, Size, Training, moved_to, with_adamw


class Tokens(typing.NamedTuple):
    ids: Tensor  # [sentences, longest], on the device
    lengths: Tensor  # on the host, so that cutting a batch does not wait for the device
    labels: Tensor


class Sst2Task:
    scale = ACCURACY
    seeds = 3
    min_bytes = 16384
    BATCH, LONGEST = 128, 64

    def __init__(self, data: pathlib.Path, device: str, size: Size, weights: pathlib.Path | None):
        if size.examples is not None and size.examples < self.BATCH:
            raise ValueError(
                f"--examples must be at least {self.BATCH}, a batch, got {size.examples}"
            )
        self.steps = size.steps or 400
        self.title = f"MiniLM-L6 on SST-2, {self.steps} steps of {self.BATCH} sentences"
        if size.examples:
            self.title += f", {size.examples:,} of them"
        self.device, self.weights = device, weights
        tokenizer = minilm(weights).tokenizer
        self.train, self.dev = (
            self.tokens(sst2(data, split, size.examples), tokenizer) for split in ("train", "dev")
        )

    def tokens(self, sentences: Sentences, tokenizer: typing.Any) -> Tokens:
        encoded = tokenizer(sentences.texts, truncation=True, max_length=self.LONGEST)["input_ids"]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in encoded], batch_first=True)
        lengths = torch.tensor([len(row) for row in encoded])
        return Tokens(ids.to(self.device), lengths, torch.tensor(sentences.labels).to(self.device))

    def training(self) -> Training:
        model = minilm(self.weights).model.to(self.device).train()
        return with_adamw(model, 1e-4, self.steps)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Indices of sentences."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(self.steps):
            if len(order) < self.BATCH:
                order = torch.randperm(len(self.train.lengths), generator=generator)
            yield order[: self.BATCH]
            order = order[self.BATCH :]

    def logits(self, model: nn.Module, tokens: Tokens, chosen: Tensor) -> Tensor:
        lengths = tokens.lengths[chosen]
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        ids = tokens.ids[moved_to(self.device, chosen), :longest]
        return model(input_ids=ids, attention_mask=moved_to(self.device, mask.long())).logits

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        labels = self.train.labels[moved_to(self.device, batch)]
        return functional.cross_entropy(self.logits(model, self.train, batch), labels)

    def score(self, model: nn.Module) -> float:
        right = 0
        for chosen in self.dev.lengths.argsort().split(256):  # similar lengths, little padding
            found = self.logits(model, self.dev, chosen).argmax(dim=1)
            right += (found == self.dev.labels[chosen.to(self.device)]).sum().item()
        return 100 * right / len(self.dev.lengths)


class GptTask:
    """The last tenth of the text is held out; the score is the mean loss of its characters."""

    scale = Scale("held-out loss", 4)
    seeds = 3
    min_bytes = 4096
    BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 128, 4, 3

    def __init__(self, data: pathlib.Path, device: str, size: Size):
        self.steps, self.width = size.steps or 1000, size.width or self.WIDTH
        if self.width % self.HEADS:
            raise ValueError(f"--width must be a multiple of {self.HEADS}, got {self.width}")
        self.title = (
            f"character GPT of {self.LAYERS} layers, {self.width} wide, on Shakespeare, "
            f"{self.steps} steps of {self.BATCH} x {self.CONTEXT} characters"
        )
        self.device = device
        text = shakespeare(data)
        self.characters = text.characters
        codes = text.codes.to(device)
        self.train, self.held_out = codes.split([len(codes) * 9 // 10, -(-len(codes) // 10)])

    def training(self) -> Training:
        model = CharacterGpt(self.characters, self.CONTEXT, self.width, self.HEADS, self.LAYERS).to(
            self.device
        )
        return with_adamw(model, 2e-3, self.steps)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Windows of one character more than the context."""
        generator = torch.Generator().manual_seed(seed)
        places = torch.arange(self.CONTEXT + 1)
        for _ in range(self.steps):
            start = len(self.train) - self.CONTEXT
            starts = torch.randint(start, (self.BATCH, 1), generator=generator)
            yield self.train[moved_to(self.device, starts + places)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(found, batch[:, 1:].flatten())

    def score(self, model: nn.Module) -> float:
        windows = self.held_out.unfold(0, self.CONTEXT + 1, self.CONTEXT)
        losses = [self.loss(model, part) * len(part) for part in windows.split(128)]
        return torch.stack(losses).sum().item() / len(windows)
