# SPDX-License-Identifier: Apache-2.0
"""Trains a small CNN on scikit-learn's digits with folded activations.

    python examples/python/digits.py

main() shows everything needed to use Backfold; the rest is an ordinary model and its data.
"""

import backfold
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 128
WIDTH = 64


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x + self.convolutions(x))


def cnn() -> nn.Sequential:
    """Nine convolutions on images of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, kernel_size=3, padding=1),
        nn.ReLU(),
        Residual(),
        Residual(),
        nn.MaxPool2d(2),
        Residual(),
        Residual(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH * 2 * 2, 10),
    )


class Digits:
    """1,797 handwritten digits: four fifths for training, one fifth for testing."""

    name = "digits"
    title = "digits, CNN"
    steps = 100

    def __init__(self, device: str, seed: int = 0):
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.images, self.labels = pixels.to(device), torch.tensor(labels).to(device)
        self.device, self.seed = device, seed
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        self.train, self.test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]

    def model(self) -> nn.Module:
        """An untrained model, the same for the same seed."""
        torch.manual_seed(self.seed)
        return cnn().to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of the given step, the same for the same seed."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = self.train[torch.randperm(len(self.train), generator=generator)[:BATCH]]
        return self.images[chosen], self.labels[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """The fraction of test images that the model classifies correctly."""
        model.eval()
        named = model(self.images[self.test]).argmax(dim=1)
        model.train()
        return (named == self.labels[self.test]).double().mean().item()

    def show(self, score: float) -> str:
        return f"{score:.1%} right"


def main() -> None:
    task = Digits("cuda" if torch.cuda.is_available() else "cpu")
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
    print(f"loss {loss.item():.3f}, {task.show(task.score(model))}")


if __name__ == "__main__":
    main()
