# SPDX-License-Identifier: Apache-2.0
"""The command line: ``backfold`` or ``python -m backfold``."""

from __future__ import annotations

import click

from backfold import __version__
from backfold.cli._bench import bench
from backfold.cli._doctor import doctor
from backfold.cli._inspect import inspect
from backfold.cli._report import report


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="backfold")
def main() -> None:
    """Train PyTorch models in less memory: look, measure, check.

    \b
    Examples:
      backfold doctor                          is this installation sound?
      backfold inspect train.py --epochs 1     what holds the memory of my training, and what helps?
      backfold bench                           how fast are codecs and a training on this machine?
      backfold report run.json --html out.html show a report that a run saved

    \b
    Exit codes: 0 all is well; 1 a check failed, or a script raised; 2 wrong usage, or a file that
    cannot be read; 3 a script that was to be inspected trains nothing.
    """


for command in (doctor, inspect, bench, report):
    main.add_command(command)
