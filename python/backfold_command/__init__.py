# SPDX-License-Identifier: Apache-2.0
"""The ``backfold`` command. It says what is wrong where the package itself cannot be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys


def main() -> None:
    # Where allocations are counted, torch logs that older memory is released. It reads this once.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        command = importlib.import_module("backfold.cli").main
    except ImportError as error:
        print(f"backfold: {error}", file=sys.stderr)
        print(f"Python {platform.python_version()}, {sys.executable}", file=sys.stderr)
        for name in ("backfold", "torch", "click", "rich"):
            print(f"{name} {_version(name)}", file=sys.stderr)
        sys.exit(1)
    command()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
