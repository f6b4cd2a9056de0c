# SPDX-License-Identifier: Apache-2.0
"""Trains a small character GPT with folded activations, then lets it write.

    python examples/python/char_gpt.py

The text is pydoc's help on the Python language: half a million characters that are on every
machine. main() shows everything needed to use Backfold.
"""

from pydoc_data.topics import topics

import backfold
import torch
from torch import Tensor, nn

CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 4
BATCH = 32


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each on a normalised copy of its input."""

    def __init__(self):
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.feed(self.norm_feed(x))


class CharGPT(nn.Module):
    """Predicts the logits of the next character at every position."""

    def __init__(self, characters: int):
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.characters(text) + self.places(places))))


class Topics:
    """Pydoc's topics: one in ten for testing, the text of the others for training."""

    name = "char_gpt"
    title = "topics, character GPT"
    steps = 200

    def __init__(self, device: str, seed: int = 0):
        names = sorted(topics)
        self.alphabet = sorted(set("".join(topics.values())))
        self.test = self.encode([topics[name] for name in names[::10]])
        self.train = self.encode([topics[name] for name in names if name not in names[::10]])
        self.device, self.seed = device, seed

    def encode(self, texts: list[str]) -> Tensor:
        index = {character: code for code, character in enumerate(self.alphabet)}
        return torch.tensor([index[character] for character in "".join(texts)])

    def model(self) -> nn.Module:
        """An untrained model, the same for the same seed."""
        torch.manual_seed(self.seed)
        return CharGPT(len(self.alphabet)).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def cut(self, text: Tensor, seed: int) -> Tensor:
        """A batch of excerpts of the text, CONTEXT + 1 characters each."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        return text[starts + torch.arange(CONTEXT + 1)].to(self.device)

    def batch(self, step: int) -> Tensor:
        """The batch of the given step, the same for the same seed."""
        return self.cut(self.train, self.seed * 1_000_003 + step)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """The loss on unseen text, in nats per character."""
        model.eval()
        losses = [self.loss(model, self.cut(self.test, seed)) for seed in range(8)]
        model.train()
        return torch.stack(losses).mean().item()

    def show(self, score: float) -> str:
        return f"loss {score:.3f}"

    @torch.no_grad()
    def write(self, model: nn.Module, start: str, length: int) -> str:
        """Lets the model continue a text."""
        model.eval()
        codes = [self.alphabet.index(character) for character in start]
        for _ in range(length):
            logits = model(torch.tensor([codes[-CONTEXT:]], device=self.device))[0, -1]
            codes.append(torch.multinomial(logits.softmax(dim=0), 1).item())
        model.train()
        return "".join(self.alphabet[code] for code in codes)


def main() -> None:
    task = Topics("cuda" if torch.cuda.is_available() else "cpu")
    model = task.model()
    optimizer = task.optimizer(model)
    fold = backfold.Controller(model, bits=4)
    for step in range(task.steps):
        with fold:
            loss = task.loss(model, task.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(fold.report())
    print(f"loss {loss.item():.3f}, on unseen text {task.show(task.score(model))}")
    print(task.write(model, "The ", 200))


if __name__ == "__main__":
    main()
