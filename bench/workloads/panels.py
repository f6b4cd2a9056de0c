# SPDX-License-Identifier: Apache-2.0
"""Pictures of several panels that share one legend."""

import math
import pathlib
import typing

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3


def panels(count: int) -> tuple["Figure", list["Axes"]]:
    """`count` panels in rows of at most three."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 3.2 * rows), squeeze=False
    )
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis in axes.flat:
        axis.tick_params(labelsize=7, which="both")
    return figure, list(axes.flat[:count])


def save(figure: "Figure", path: pathlib.Path) -> None:
    """Adds a legend of all labels, each once: a panel may lack some."""
    shown: dict[str, object] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown, loc="upper center", ncols=len(shown), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=150)
