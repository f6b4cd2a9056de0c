# SPDX-License-Identifier: Apache-2.0
"""What the tables say: every number that a chart shows, for readers who do not see it."""

from __future__ import annotations

import collections
from typing import Any

from backfold._page import _tree
from backfold._page._families import ALIVE, AS_IT_IS, family_of
from backfold._page._figures import is_measured
from backfold._page._format import number, place_name, size, times

Row = dict[str, Any]


def tree(report: Row) -> _tree.Node:
    return _tree.grow(report)


def summary(report: Row) -> list[dict[str, str]]:
    """The numbers at the top: a label, a value, and what it means."""
    kept = report["held_bytes"]
    cards = [
        ("autograd alone", size(report["unique_bytes"]), "kept for backward, each storage once"),
    ]
    if report["folded"]:
        ratio = times(report["unique_bytes"], kept)
        cards.append(("held", size(kept), f"autograd alone / held: {ratio}"))
        if report["timeline"]:
            peak = report["timeline"]["peak"]["folded"]
            cards.append(("peak", size(peak["bytes"]), f"in {peak['phase']}, with what it decodes"))
    if report["offloaded_bytes"]:
        cards.append(("offloaded", size(report["offloaded_bytes"]), "kept off the device"))
    if report["plan"]:
        cards.append(
            ("bits", number(report["plan"]["mean_bits"]), "of a rounded value, on average")
        )
    if report["noise"] is not None:
        cards.append(("noise", f"{100 * report['noise']:.2g}%", "of the gradient's own variance"))
    if report["device_peak_bytes"] is not None:
        cards.append(("device peak", size(report["device_peak_bytes"]), "allocated, of all kinds"))
    return [{"label": label, "value": value, "note": note} for label, value, note in cards]


def _place(report: Row, index: int | None) -> str:
    return "an earlier step" if index is None else place_name(report["sites"][index])


def peaks(report: Row) -> list[Row]:
    if report["timeline"] is None:
        return []
    labels = {
        "plain": "autograd alone",
        "held": "held",
        "folded": "held and decoded",
    }
    return [
        {"curve": labels[name], **peak, "place": _place(report, peak["site"])}
        for name, peak in report["timeline"]["peak"].items()
    ]


def events(report: Row) -> list[Row]:
    recorded = report["timeline"]
    if recorded is None:
        return []
    starts = {phase["from"]: phase["phase"] for phase in recorded["phases"]}
    rows, phase = [], ""
    columns = ("site", "plain_bytes", "held_bytes", "made_bytes")
    for index, values in enumerate(zip(*(recorded[name] for name in columns), strict=True)):
        phase = starts.get(index, phase)
        site, plain, held, made = values
        rows.append(
            {
                "phase": phase,
                "place": _place(report, site),
                "plain": plain,
                "held": held,
                "made": made,
            }
        )
    return rows


def measured(report: Row) -> list[Row]:
    """The most sensitive first."""
    found = [site for site in report["sites"] if is_measured(site)]
    return sorted(found, key=lambda site: -site["sensitivity"] / site["elements"])


def derived(report: Row) -> list[Row]:
    """In the report of inspect(): what could be derived."""
    found = [site for site in report["sites"] if site["recipe"]]
    return sorted(found, key=lambda site: -site["unique_bytes"])


def untouched(report: Row) -> list[Row]:
    """What was passed through, by reason, with its places; the largest first."""
    reasons = collections.defaultdict(list)
    for site in report["sites"]:
        if family_of(site["kind"]) in (AS_IT_IS, ALIVE):
            reasons[site["kind"], site["reason"]].append(site)
    groups = [
        {
            "kind": kind,
            "reason": reason or "its backward reads it exactly",
            "places": sorted(sites, key=lambda site: -site["saved_bytes"]),
            "saved": sum(site["saved_bytes"] for site in sites),
            "held": sum(site["held_bytes"] for site in sites),
        }
        for (kind, reason), sites in reasons.items()
    ]
    return sorted(groups, key=lambda group: (-group["held"], -group["saved"]))
