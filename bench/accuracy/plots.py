# SPDX-License-Identifier: Apache-2.0
"""A picture of trainings: the score of each method against what it held / saved.

    bench/accuracy/plots.py cora-gcn.json text-gpt.json trainings.png

Each file of results, as bench/run evidence or bench/accuracy/train.py --json writes it, is a panel.
Points are means over seeds, bars the standard deviation. The line is plain's score, the grey band
its own deviation. What lies to the left of another point holds less.
"""

import json
import pathlib
import statistics
import sys
import typing

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "workloads"))
from panels import panels, save

TICKS = (0.03, 0.1, 0.3, 1)
ABOVE, BELOW, BESIDE = (4, 4), (-9, -10), (5, -9)  # where names stand: many hold about the same


class Group(typing.NamedTuple):
    """How methods look."""

    label: str
    format: str
    offset: tuple[int, int] = ABOVE


GROUPS = {  # by the beginning of their names; the others are methods of other systems
    "exact": Group("Backfold, exact", "C2D"),
    "adaptive-": Group("Backfold, planned bits", "C0o"),
    "ratio-": Group("Backfold, planned bits", "C0o"),
    "fixed-": Group("Backfold, one width", "C1s", BELOW),
    "": Group("methods of other systems", "C3v", BESIDE),
}


class Point(typing.NamedTuple):
    variant: str
    kept: float  # held / saved
    score: float
    spread: float  # standard deviation over the seeds, 0 for one


def points(runs: list[dict]) -> list[Point]:
    found = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        of_variant = [run for run in runs if run["variant"] == variant]
        scores = [run["score"] for run in of_variant]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        kept = statistics.mean(run["kept"] for run in of_variant)
        found.append(Point(variant, kept, statistics.mean(scores), spread))
    return found


def draw(axis: "Axes", point: Point) -> None:
    start = next(start for start in GROUPS if point.variant.startswith(start))
    label, look, offset = GROUPS[start]
    bars = {"markersize": 5, "elinewidth": 0.6, "label": label}
    axis.errorbar(point.kept, point.score, point.spread, fmt=look, **bars)
    bits = start in ("adaptive-", "fixed-")
    text = point.variant.removeprefix(start) if bits else point.variant
    place = (point.kept, point.score)
    axis.annotate(text, place, offset, textcoords="offset points", fontsize=7)


def plot(paths: list[pathlib.Path], target: pathlib.Path) -> None:
    """Leaves out files without a plain run. Raises ValueError if there is no other."""
    contents = {path.stem: json.loads(path.read_text()) for path in paths}
    found = {name: points(content["runs"]) for name, content in contents.items()}
    found = {name: some for name, some in found.items() if any(p.variant == "plain" for p in some)}
    if not found:
        raise ValueError("nothing to plot: no file has a plain run to compare with")
    figure, axes = panels(len(found))
    for axis, (name, some) in zip(axes, found.items(), strict=True):
        (plain,) = (point for point in some if point.variant == "plain")
        axis.axhspan(plain.score - plain.spread, plain.score + plain.spread, color="0.9")
        axis.axhline(plain.score, color="0.4", linewidth=1, label="plain")
        for point in some:
            if point is not plain:
                draw(axis, point)
        scale = contents[name].get("scale", {}).get("name", "accuracy, %")
        worse = ", less is better" if "loss" in scale else ""
        axis.set(title=name, xlabel="held / saved", ylabel=scale + worse, xscale="log")
        axis.set(xlim=(0.022, 1.9), xticks=TICKS, xticklabels=map(str, TICKS))
    save(figure, target)


def main() -> None:
    *sources, target = map(pathlib.Path, sys.argv[1:] or sys.exit(__doc__))
    if not sources or target.suffix == ".json":
        sys.exit(__doc__)
    plot(sources, target)


if __name__ == "__main__":
    main()
