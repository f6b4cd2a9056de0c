# SPDX-License-Identifier: Apache-2.0
"""``backfold inspect``: what holds the memory of a training script, and what would help."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from typing import Any

import click

from backfold.cli import _findings
from backfold.cli._output import TRAINS_NOTHING, BadFile, json_option, print_json, progress
from backfold.cli._script import run_module, run_script, traceback_of
from backfold.cli._trials import REMEDIES, Outcome, try_remedies
from backfold.cli._watch import Done, Watch


class Inspection:
    """Runs a program until its first steps are done, then tries the remedies on the last one."""

    def __init__(self, steps: int, tries: bool) -> None:
        self._tries = tries
        self.watch = Watch(steps, self._try)
        self.outcomes: list[Outcome] = []

    def run(self, target: str, arguments: tuple[str, ...], is_module: bool) -> int:
        """The exit code of the program; raises what it raises."""
        code: Any = 0
        self.watch.start()
        try:
            if is_module:
                run_module(target, arguments)
            else:
                run_script(pathlib.Path(target), arguments)
        except Done:
            return 0
        except SystemExit as end:
            code = end.code
        finally:
            self.watch.stop()
        if not self.outcomes:
            self._try()  # it ended before all steps were done
        return code if isinstance(code, int) else 0 if code is None else 1

    def _try(self) -> None:
        recorded = self.watch.largest
        if not self._tries or recorded is None or not recorded.calls:
            return
        with progress() as bar:
            task = bar.add_task("trying remedies", total=len(REMEDIES) + 1)

            def tell(what: str) -> None:
                bar.update(task, description=what, advance=1)

            self.outcomes = try_remedies(recorded, tell)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=3,
    show_default=True,
    help="Steps of training to wait for. The last ones are measured.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--no-trials", is_flag=True, help="Only observe, try no remedy.")
@click.option("--rows", type=click.IntRange(min=1), default=20, show_default=True)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, writable=True, path_type=pathlib.Path),
    help="Write the report of the observed step here, for 'backfold report'.",
)
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="ARGS...")
def inspect(
    steps: int,
    is_module: bool,
    no_trials: bool,
    rows: int,
    save: pathlib.Path | None,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Find out what holds the memory of a training script, and what would help.

    SCRIPT runs unchanged, with ARGS, until its first steps of training are done, and is stopped
    then. The calls of modules that one of its last steps made are run again with each remedy:
    exact folding, 8, 4 and 2 bits, derived tensors or stored ones, offloading, checkpoints. What
    is printed was measured in these runs.

    Exits with 1 if the script raises, with 3 if it trains nothing, and with the script's own code
    if it ends with one.

    \b
    Examples:
      backfold inspect train.py
      backfold inspect --steps 5 train.py --batch-size 64 --lr 1e-3
      backfold inspect -m package.train --config small.yaml
      backfold inspect --json train.py > memory.json     the script's own output goes to stderr
      backfold inspect --save run.json train.py && backfold report run.json --html report.html
    """
    if not is_module and not pathlib.Path(script).is_file():
        raise click.UsageError(f"SCRIPT must be a file, got {script!r}")
    inspection = Inspection(steps, tries=not no_trials)
    output = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        with output:
            code = inspection.run(script, arguments, is_module)
    except KeyboardInterrupt:
        raise click.Abort from None
    except BaseException as error:
        click.echo(traceback_of(error), err=True, nl=False)
        click.echo(f"backfold: {script} raised before its steps were done", err=True)
        sys.exit(1)
    if code != 0:
        click.echo(f"backfold: {script} ended with exit code {code}", err=True)
        sys.exit(code)
    watch = inspection.watch
    if watch.largest is None:
        click.echo(f"backfold: {_findings.why_nothing(watch, script)}", err=True)
        sys.exit(TRAINS_NOTHING)
    if save is not None:
        try:
            save.write_text(json.dumps(watch.largest.report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadFile(f"{save} cannot be written: {error.strerror}") from None
    if as_json:
        print_json(_findings.as_dict(watch, inspection.outcomes))
    else:
        _findings.show(watch, inspection.outcomes, rows, tried=not no_trials)
