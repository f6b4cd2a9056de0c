# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional network by Lightning, with folded activations.

    python examples/python/lightning_digits.py

The callback is all that Backfold adds: it folds each training_step, the loss included, logs what is
held, saves its state with checkpoints and writes a report.
"""

import argparse
import pathlib
import sys

import torch
from torch import Tensor, nn

try:
    import lightning.pytorch as pl
    from backfold.lightning import FoldCallback
except ImportError as missing:
    sys.exit(f"this example needs lightning: {missing}")
try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("this example needs scikit-learn: pip install scikit-learn")


class Digits(pl.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/lightning"))
    chosen = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    loader = torch.utils.data.DataLoader(data, batch_size=128, shuffle=True)

    callback = FoldCallback(bits=4)
    trainer = pl.Trainer(
        max_steps=chosen.steps,
        callbacks=[callback],
        logger=pl.loggers.CSVLogger(chosen.output),
        log_every_n_steps=min(chosen.steps, 20),
    )
    trainer.fit(Digits(), loader)
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name} {float(value):.4g}")
    print(f"report: {pathlib.Path(trainer.log_dir) / 'backfold-report.txt'}")


if __name__ == "__main__":
    main()
