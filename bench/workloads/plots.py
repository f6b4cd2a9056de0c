# SPDX-License-Identifier: Apache-2.0
"""A picture of what bench/run h200 measured: step time against peak memory, both / plain.

bench/workloads/plots.py steps.json steps.png
"""

import json
import pathlib
import sys

from panels import panels, save

MOST = 3.0  # times a plain step: what takes longer is at the top, with its figure
GROUPS = {  # how the modes look, by what they have in common
    "Backfold": ("o", ["exact", "fold8", "fold", "fold3", "fold2"]),
    "Backfold, offload": ("D", ["offload", "exact_offload"]),
    "checkpoint": ("s", ["checkpoint", "selective"]),
    "save_on_cpu": ("v", ["save_on_cpu"]),
    "compile": ("^", ["compile", "compile_budget"]),
}
LABELS = {  # and where: points of 4, 3 and 2 bits are next to each other
    "exact": ("exact", (3, 4)),
    "fold8": ("8", (3, 4)),
    "fold": ("4 bits", (3, -9)),
    "fold2": ("2", (-8, -9)),
    "exact_offload": ("exact", (3, 4)),
    "checkpoint": ("all", (3, 4)),
    "selective": ("selective", (-16, 6)),
    "compile_budget": ("budget", (3, 4)),
}


def points(modes: dict[str, dict[str, float]], names: list[str]) -> list[tuple[str, float, float]]:
    """Name, peak / plain and step / plain of those that were measured."""
    plain = modes.get("plain", {})
    return [
        (
            name,
            modes[name]["peak_mib"] / plain["peak_mib"],
            modes[name]["step_ms"] / plain["step_ms"],
        )
        for name in names
        if "peak_mib" in plain and "peak_mib" in modes.get(name, {})
    ]


def plot(content: dict, path: pathlib.Path) -> None:
    workloads = [one for one in content["workloads"] if "peak_mib" in one["modes"].get("plain", {})]
    if not workloads:
        raise ValueError("nothing to plot: no workload has a peak, which is measured on a GPU only")
    figure, axes = panels(len(workloads))
    for axis, one in zip(axes, workloads, strict=True):
        axis.plot([1], [1], "k*", label="plain")
        for label, (marker, names) in GROUPS.items():
            found = points(one["modes"], names)
            if not found:
                continue
            line = "-" if label == "Backfold" else ""
            heights = [min(y, MOST) for *_, y in found]
            axis.plot([x for _, x, _ in found], heights, marker + line, label=label)
            for name, x, y in found:
                text, offset = LABELS.get(name, ("", (3, 3)))
                if y > MOST:
                    text, offset = f"{text} {y:.1f}".strip(), (6, -3)
                axis.annotate(
                    text, (x, min(y, MOST)), offset, textcoords="offset points", fontsize=7
                )
        axis.set(title=one["name"], xlabel="peak / plain", xlim=(0, 1.05), ylim=(0.85, MOST + 0.15))
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("step / plain")
    save(figure, path)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(pathlib.Path, sys.argv[1:])
    plot(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
