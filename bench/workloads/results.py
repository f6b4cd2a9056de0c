# SPDX-License-Identifier: Apache-2.0
"""A file of tables as they were printed, which scripts/evidence puts into documents."""

import importlib.metadata
import json
import pathlib
import sys

import torch


def aligned(head: list[str], rows: list[list[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    padded = [
        [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in (head, *rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


class Results:
    """Is written after each table, so that an interrupted run keeps what it has."""

    def __init__(self, command: str, path: pathlib.Path | None):
        # Results are published: folders of this machine are left out.
        words = [pathlib.Path(argument).name for argument in sys.argv[1:]]
        self._path = path
        self._content = {
            "command": " ".join([command, *words]),
            "device": device_name(),
            "torch": importlib.metadata.version("torch"),
            "tables": {},
        }

    def add(self, name: str, head: list[str], rows: list[list[str]], **more: object) -> None:
        """`more` is kept beside the table: figures before they were rounded, for example."""
        self._content["tables"][name] = {"head": head, "rows": rows, **more}
        if self._path:
            self._path.write_text(json.dumps(self._content, indent=1) + "\n")
