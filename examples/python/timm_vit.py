# SPDX-License-Identifier: Apache-2.0
"""Trains a vision transformer of timm, with an average of its weights and folded activations.

    python examples/python/timm_vit.py

The images are synthetic: the label says in which part of the image there is a bright spot. timm's
copy of the model with averaged weights is a plain model, which is not attached.
"""

import argparse
import sys

import backfold
import torch
from torch.nn import functional

try:
    import timm
    from timm.utils import ModelEmaV3
except ImportError:
    sys.exit(
        "this example needs timm and torchvision, the one for your torch: "
        "pip install --no-deps timm torchvision"
    )

SIZE, GRID = 64, 3


def batch(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.randint(GRID * GRID, (count,))
    spot = functional.one_hot(label, GRID * GRID).float().view(count, 1, GRID, GRID)
    images = torch.randn(count, 3, SIZE, SIZE) + 2 * functional.interpolate(spot, SIZE)
    return images.to(device), label.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = timm.create_model(chosen.model, img_size=SIZE, num_classes=GRID * GRID).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    fold = backfold.attach(model, bits=4)

    average = ModelEmaV3(model, decay=0.9)
    for step in range(chosen.steps):
        images, labels = batch(32, device)
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        if step % 20 == 0 or step == chosen.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    report = fold.report().to_dict()
    print(f"held {report['held_bytes']:,} of {report['unique_bytes']:,} bytes")
    images, labels = batch(64, device)
    with torch.no_grad():
        right = (average(images).argmax(1) == labels).float().mean()
    print(f"the average is right on {right:.0%} of new images")


if __name__ == "__main__":
    main()
