# SPDX-License-Identifier: Apache-2.0
"""``backfold report``: a report that a run saved, as text, JSON or a page."""

from __future__ import annotations

import importlib
import json
import pathlib

import click

from backfold._report import Report
from backfold.cli._output import BadFile, json_option, print_json


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Write a page of its own to this file instead of printing.",
)
@click.option(
    "--rows", type=click.IntRange(min=0), default=30, show_default=True, help="0 prints all."
)
@json_option
def report(file: pathlib.Path, html: pathlib.Path | None, rows: int, as_json: bool) -> None:
    """Show a report that a run saved with fold.report().to_json().

    \b
    Examples:
      backfold report run.json                    the 30 largest lines
      backfold report run.json --rows 0           all lines
      backfold report run.json --html report.html a page to open in a browser
      backfold report run.json --json             the file, once it was found to be a report

    \b
    In the run:
      pathlib.Path("run.json").write_text(fold.report().to_json())
    """
    if html is not None and as_json:
        raise click.UsageError("--html and --json exclude each other")
    text = _read(file)
    try:
        found = Report.from_json(text)
    except ValueError as error:
        raise BadFile(f"{file} is no report that can be shown: {error}") from None
    if as_json:
        print_json(json.loads(text))
    elif html is None:
        click.echo(found.text(rows))
    else:
        # The file may hold more than this version's Report reads.
        try:
            page = importlib.import_module("backfold._page").render(json.loads(text))
        except ImportError as error:  # of what charts need
            raise click.ClickException(str(error)) from None
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise BadFile(f"{html} cannot be written: {error.strerror}") from None
        click.echo(f"wrote {html}")


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{file} cannot be read as text: {error}") from None
