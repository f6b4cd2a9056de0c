# SPDX-License-Identifier: Apache-2.0
"""Reports of what a step kept for backward, as text, dict, JSON and HTML."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from backfold import _C
from backfold._page import render


class Report:
    """What autograd alone would keep, and what is held, how and why, by module and operator.

    ``print(report)`` shows the largest lines; ``text(rows=0)`` shows all.
    """

    def __init__(self, core: _C.Report) -> None:
        self._core = core

    @staticmethod
    def from_json(text: str) -> Report:
        """The report that `to_json` wrote. Raises ValueError for anything else.

        >>> report = Report.from_json(Report(_C.Controller({}).report()).to_json())
        >>> report
        Report(step 0: 0 bytes saved, 0 held, 0 sites)
        """
        return Report(_C.Report.from_json(text))

    def text(self, rows: int = 30) -> str:
        """A table that fits a terminal, with the `rows` largest lines, or all for 0."""
        return self._core.text(rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, site by site, largest first, sizes in bytes."""
        return json.loads(self._core.json())

    def to_json(self) -> str:
        return self._core.json()

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with charts and tables: one file, which needs no network.

        Needs Plotly: ``pip install 'backfold[page]'``.
        """
        pathlib.Path(path).write_text(render(self.to_dict()), encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        totals = self.to_dict()
        return (
            f"Report(step {totals['step']}: {totals['unique_bytes']} bytes saved, "
            f"{totals['held_bytes']} held, {len(totals['sites'])} sites)"
        )
