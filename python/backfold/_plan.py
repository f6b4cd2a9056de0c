# SPDX-License-Identifier: Apache-2.0
"""Plans as files."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


def read_plan(plan: str | os.PathLike[str] | dict[str, Any]) -> dict[str, Any]:
    """A plan as `Controller.plan` gives it, from a dict or a JSON file."""
    if isinstance(plan, dict):
        given = plan
    else:
        try:
            given = json.loads(pathlib.Path(plan).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"plan={os.fspath(plan)!r} holds no JSON: {error}") from None
    sites = given.get("sites") if isinstance(given, dict) else None
    if not isinstance(sites, dict) or not isinstance(given.get("bits"), int):
        raise ValueError("plan must hold 'bits', an int, and 'sites', by name")
    for name, site in sites.items():
        if not isinstance(site, dict) or not {"bits", "layout"} <= site.keys():
            raise ValueError(f"plan: {name!r} must hold 'bits' and 'layout', got {site!r}")
        if not isinstance(site["bits"], (int, str)) or not isinstance(site["layout"], str):
            raise ValueError(f"plan: {name!r} must hold 'bits' and 'layout', got {site!r}")
    return given


def write_plan(path: str | os.PathLike[str], plan: dict[str, Any]) -> None:
    pathlib.Path(path).write_text(json.dumps(plan, indent=2) + "\n")
