# SPDX-License-Identifier: Apache-2.0
"""Whether the torch that is installed is one this package works with."""

import importlib
import importlib.metadata

SUPPORTED = ("2.11", "2.12", "2.13")


def release(version: str) -> str:
    """Major and minor of a version.

    >>> release("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def require_supported_torch() -> None:
    """Raises ImportError unless torch is there, supported and what the package was built for."""
    works = f"Backfold works with torch {SUPPORTED[0]} to {SUPPORTED[-1]}"
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{works}, found none: install one of them first.") from None
    if release(found) not in SUPPORTED:
        raise ImportError(f"{works}, found {found}.")
    built = importlib.import_module("backfold._build_info").TORCH_RELEASE
    if release(found) != built:
        raise ImportError(
            f"This build of Backfold was compiled for torch {built}, found {found}. "
            "Build it again: pip install --no-build-isolation ."
        )
    importlib.import_module("torch")  # its libraries must be loaded before ours
