# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: its version and what it carries."""

import importlib.metadata
import pathlib
import re

import backfold

ROOT = pathlib.Path(__file__).parents[2]


def installed(name: str) -> list[pathlib.Path]:
    """Files of the installed distribution whose path ends in `name`."""
    files = importlib.metadata.files("backfold") or []
    return [pathlib.Path(file.locate()) for file in files if str(file).endswith(name)]


def test_version_is_the_one_in_cmakelists():
    text = (ROOT / "CMakeLists.txt").read_text()
    declared = re.search(r"project\(backfold VERSION ([\d.]+)", text)
    assert declared is not None
    assert backfold.__version__ == declared[1]


def test_version_has_an_entry_in_the_changelog():
    assert f"## [{backfold.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_exports_exist():
    for name in backfold.__all__:
        assert hasattr(backfold, name)


def test_carries_every_public_header():
    for header in (ROOT / "include" / "backfold").glob("*.h"):
        copies = installed(f"backfold/include/backfold/{header.name}")
        assert [copy.read_text() for copy in copies] == [header.read_text()]


def test_carries_the_core_library():
    (library,) = installed("backfold/lib/libbackfold_core.a")
    assert library.stat().st_size > 0
