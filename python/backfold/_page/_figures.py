# SPDX-License-Identifier: Apache-2.0
"""What the charts draw, by columns; page.js turns it into Plotly's figures."""

from __future__ import annotations

from typing import Any

from backfold._page import _tree
from backfold._page._families import ROUNDED, family_of
from backfold._page._format import place_name


def tree(report: dict[str, Any]) -> dict[str, list]:
    columns: dict[str, list] = {
        name: [] for name in ("id", "parent", "name", "before", "after", "family", "depth")
    }

    def add(node: _tree.Node, parent: str | None, depth: int) -> None:
        # Plotly takes an empty parent for none, so that the root has a name of its own.
        id = node.id or "model"
        columns["id"].append(id)
        columns["parent"].append(parent or "")
        columns["name"].append(node.name)
        columns["before"].append(node.before)
        columns["after"].append(node.after)
        columns["family"].append(node.family)
        columns["depth"].append(depth if node.children else -1)  # -1: shows its colour anywhere
        for child in node.children:
            add(child, id, depth + 1)

    add(_tree.grow(report), None, 1)
    return columns


def timeline(report: dict[str, Any]) -> dict[str, Any] | None:
    recorded = report["timeline"]
    if recorded is None:
        return None
    names = [place_name(site) for site in report["sites"]]
    return {
        "plain": recorded["plain_bytes"],
        "held": recorded["held_bytes"],
        "made": recorded["made_bytes"],
        "place": ["" if site is None else names[site] for site in recorded["site"]],
        "phases": recorded["phases"],
        "peak": {
            name: {**peak, "place": "" if peak["site"] is None else names[peak["site"]]}
            for name, peak in recorded["peak"].items()
        },
    }


def is_measured(site: dict[str, Any]) -> bool:
    """Whether a place has packets whose width was chosen by what they do to the gradient."""
    return bool(site["sensitivity"] and site["elements"] and family_of(site["kind"]) == ROUNDED)


def bits(report: dict[str, Any]) -> dict[str, list]:
    measured = [site for site in report["sites"] if is_measured(site)]
    return {
        "sensitivity": [site["sensitivity"] / site["elements"] for site in measured],
        "bits": [site["bits"] for site in measured],
        "bytes": [site["unique_bytes"] for site in measured],
        "place": [place_name(site) for site in measured],
    }


def noise(report: dict[str, Any]) -> dict[str, Any]:
    history = report["history"]
    plans = [plan for plan in history["plans"] if plan["gradient_energy"] and plan["error"]]
    return {
        "step": [one["step"] for one in history["noise"]],
        "noise": [one["noise"] for one in history["noise"]],
        "plan_step": [plan["step"] for plan in plans],
        "plan_error": [plan["error"] / plan["gradient_energy"] for plan in plans],
    }
