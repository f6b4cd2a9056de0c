# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed torch is one that this package works with."""

import importlib
import importlib.metadata
import os
import warnings


def release(version: str) -> tuple[int, int]:
    """Major and minor of a version.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def require_supported_torch() -> None:
    """Raises ImportError unless torch is installed, supported and the one this was built for.

    BACKFOLD_ANY_TORCH=1 in the environment allows a torch newer than any that was tested.
    """
    info = importlib.import_module("backfold._build_info")
    works = f"Backfold works with torch {info.OLDEST_TORCH} to {info.NEWEST_TORCH}"
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{works}, found none; install one of them first.") from None
    if release(found) < release(info.OLDEST_TORCH):
        raise ImportError(f"{works}, found {found}.")
    if release(found) > release(info.NEWEST_TORCH):
        if os.environ.get("BACKFOLD_ANY_TORCH") != "1":
            raise ImportError(
                f"{works}, found {found}, which is newer than any version Backfold was tested "
                "with. To try it, set BACKFOLD_ANY_TORCH=1 in the environment, when building and "
                "when importing."
            )
        warnings.warn(
            f"{works}, found {found}, which is newer; continuing because of BACKFOLD_ANY_TORCH=1.",
            stacklevel=3,
        )
    if release(found) != release(info.TORCH_RELEASE):
        raise ImportError(
            f"This build of Backfold was compiled for torch {info.TORCH_RELEASE}, found {found}. "
            "Build it again: pip install --no-build-isolation ."
        )
    importlib.import_module("torch")  # its libraries must be loaded before ours
