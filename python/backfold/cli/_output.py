# SPDX-License-Identifier: Apache-2.0
"""How commands print: tables for people on stdout, or JSON, and progress on stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

TRAINS_NOTHING = 3  # exit code


class BadFile(click.ClickException):
    """A file that cannot be read, written or understood."""

    exit_code = 2


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."
)


def console() -> Console:
    """Writes to stdout; 120 characters wide where that is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


def progress() -> Progress:
    """Shown on stderr while a command runs, and only on a terminal."""
    error = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=error,
        transient=True,
        disable=not error.is_terminal,
    )


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=any(columns),
    )
    for index, column in enumerate(columns):
        justify = "right" if column in right else "left"
        # What a row is about and numbers stay on one line.
        whole = index == 0 or column in right
        made.add_column(column, justify=justify, no_wrap=whole, overflow="fold")
    return made


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def mebibytes(count: float) -> str:
    """
    >>> mebibytes(3 << 19), mebibytes(5000 << 20)
    ('1.50', '5,000')
    """
    size = count / 2**20
    return f"{size:,.0f}" if size >= 1000 else f"{size:,.1f}" if size >= 100 else f"{size:.2f}"


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(0.0123), milliseconds(2.5)
    ('12.3', '2,500')
    """
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.3g}"


def threads() -> str:
    """How many threads torch uses on the CPU."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"
