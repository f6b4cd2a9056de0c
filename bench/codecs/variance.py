#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Effect of widths per tensor and per sample on gradient variance, at 2 bits on average.

    bench/run variance --data DIR                three seeds, CPU
    bench/run variance --data DIR --device cuda  on a GPU

A ResNet-18 of 16 channels is trained for 30 steps on CIFAR-10; then one batch of 32 images is
folded in four ways: one width (Quantize(2)), a plan with a width per tensor (bits=2), a plan with a
width per sample of each tensor (level="actnn-L3"), and the same with samples also ranked by their
last gradients (sample_ids). The variance is the squared distance of a folded gradient from the
plain one, averaged over draws of the rounding, / the energy of the plain gradient. In a mixed batch
the pixels of each image are multiplied by 1, 1/4 or 1/16, so samples differ in range; training uses
the same kind of batch.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import typing

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "plans"), str(HERE.parent / "accuracy")]

try:
    import backfold
    import torch
    from backfold import codecs
    from cases import MIN_BYTES, STEPS, Case, Source, warmed_up
    from datasets import MissingData, cifar10, normalised
    from errors import energy, gradient, true_error
    from networks import ResNet18
    from tables import table
    from torch import Tensor
    from torch.nn import functional
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"bench/codecs/variance.py: {error}. Build the package with make test-python, then run "
        ".venv/bin/pip install --requirement scripts/requirements-models.txt"
    )

BITS = 2
BATCH, WIDTH = 32, 16
DIMMED = (1.0, 0.25, 0.0625)
BATCHES = ("plain", "mixed")
PROBE_STEPS = (2, 4)
SETTLED = 6  # steps after which a plan exists and nothing more is learned
ONE_WIDTH, TENSORS, SAMPLES = "one width", "a width per tensor", "a width per sample"
NAMED_SAMPLES = "the same, ranked by gradients too"
WAYS: dict[str, dict] = {
    ONE_WIDTH: {"bits": BITS, "adaptive": False, "codec": codecs.Quantize(BITS)},
    TENSORS: {"bits": BITS, "probe_steps": PROBE_STEPS, "probe_every": None},
    SAMPLES: {"level": "actnn-L3", "probe_steps": PROBE_STEPS, "probe_every": None},
}
WAYS[NAMED_SAMPLES] = WAYS[SAMPLES]


class Row(typing.NamedTuple):
    """One batch, way and seed."""

    batch: str
    way: str
    seed: int
    variance: float  # relative to the energy of the plain gradient
    uncertainty: float  # relative standard error
    bytes: int  # held for backward


class Batch(typing.NamedTuple):
    case: Case
    ids: Tensor  # which images it holds
    images: int  # in the whole data set


class Named:
    """A controller that is told before each block which images come."""

    def __init__(self, fold: backfold.Controller, batch: Batch):
        self.fold, self.batch = fold, batch

    def __enter__(self) -> None:
        self.fold.sample_ids(self.batch.ids, self.batch.images)
        self.fold.__enter__()

    def __exit__(self, *exception: object) -> None:
        self.fold.__exit__(*exception)


def image_batch(source: Source, seed: int, mixed: bool) -> Batch:
    images = cifar10(source.data, "train", every=25)
    torch.manual_seed(seed)
    model = ResNet18(WIDTH).to(source.device)
    pixels = images.pixels.float()
    if mixed:
        factors = torch.tensor(DIMMED)[torch.randint(len(DIMMED), (len(pixels),))]
        pixels = pixels * factors[:, None, None, None]
    pixels = normalised(pixels).to(source.device)
    labels = images.labels.to(source.device)

    def loss(chosen: Tensor) -> Tensor:
        return functional.cross_entropy(model(pixels[chosen]), labels[chosen])

    batches = [torch.randint(len(pixels), (BATCH,)) for _ in range(STEPS + 1)]
    case = warmed_up(model, loss, batches, 2e-3, seed)
    return Batch(case, batches[-1].to(source.device), len(pixels))


def measure(source: Source, kind: str, seed: int) -> list[Row]:
    batch = image_batch(source, seed, kind == "mixed")
    case = batch.case
    plain = gradient(case, contextlib.nullcontext())
    rows = []
    for way, options in WAYS.items():
        fold = backfold.Controller(case.model, min_bytes=MIN_BYTES, seed=seed, **options)
        scope = Named(fold, batch) if way == NAMED_SAMPLES else fold
        for _ in range(SETTLED):
            case.model.zero_grad(set_to_none=True)
            with scope:
                loss = case.loss()
            loss.backward()
        error = true_error(case, scope, plain)
        held = fold.report().to_dict()["held_bytes"]
        rows.append(Row(kind, way, seed, error.energy / energy(plain), error.uncertainty, held))
    return rows


def mean_and_spread(values: list[float]) -> str:
    spread = f" +- {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3g}{spread}"


def summary(rows: list[Row], markdown: bool) -> str:
    """The factor, variance at one width / variance of the row, is taken seed by seed."""
    widest = {(row.batch, row.seed): row for row in rows if row.way == ONE_WIDTH}
    head = ["batch, 2 bits on average", "variance / gradient", "one width / this", "held, KiB"]
    lines = []
    for batch in BATCHES:
        for way in WAYS:
            found = [row for row in rows if (row.batch, row.way) == (batch, way)]
            factors = [widest[batch, row.seed].variance / row.variance for row in found]
            lines.append(
                [
                    f"{batch}, {way}",
                    mean_and_spread([row.variance for row in found]),
                    mean_and_spread(factors),
                    f"{statistics.mean(row.bytes for row in found) / 1024:.0f}",
                ]
            )
    return table(head, lines, markdown)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("BACKFOLD_DATA")
    parser.add_argument("--data", default=data, help="folder of data sets; default: $BACKFOLD_DATA")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {arguments.seeds}")
    if arguments.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU here")
    return arguments


def main() -> int:
    arguments = parsed()
    source = Source(pathlib.Path(arguments.data or "."), arguments.device)
    work = [(batch, seed) for batch in BATCHES for seed in range(arguments.seeds)]
    rows: list[Row] = []
    try:
        for kind, seed in tqdm(work, unit="case", disable=None):
            rows += measure(source, kind, seed)
    except MissingData as error:
        sys.exit(f"bench/codecs/variance.py: {error}")
    print(summary(rows, arguments.markdown))
    uncertainty = max(row.uncertainty for row in rows)
    print(
        f"\nMean +- standard deviation over {arguments.seeds} seeds; standard error of a variance "
        f"at most {uncertainty:.1%}. torch {torch.__version__}, {arguments.device}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
