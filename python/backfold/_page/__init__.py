# SPDX-License-Identifier: Apache-2.0
"""A report as one page of HTML that needs no network."""

from __future__ import annotations

import json
from typing import Any

from backfold._page import _figures, _format, _tables
from backfold._page._library import compressed_charts, templates

_FORMAT = 1


def render(report: dict[str, Any]) -> str:
    """The page of a report, as ``Report.to_dict()`` or a JSON file of it has it."""
    if not isinstance(report, dict):
        raise TypeError(f"report must be a dict of Report.to_dict(), got {type(report).__name__}")
    if report.get("format") != _FORMAT:
        raise ValueError(
            f"report must be of format {_FORMAT}, got {report.get('format')!r}: "
            "another version of Backfold wrote it"
        )
    figures = {
        "tree": _figures.tree(report),
        "timeline": _figures.timeline(report),
        "bits": _figures.bits(report),
        "noise": _figures.noise(report),
    }
    environment = templates(_format.FILTERS)
    return environment.get_template("page.html").render(
        report=report,
        tree=_tables.tree(report),
        summary=_tables.summary(report),
        peaks=_tables.peaks(report),
        events=_tables.events(report),
        measured=_tables.measured(report),
        derived=_tables.derived(report),
        untouched=_tables.untouched(report),
        name=_format.place_name,
        # "</script>" in a name must not end the element.
        figures=json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c"),
        charts=compressed_charts(),
    )
