# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: its version and what it carries."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import site
import subprocess
import sys

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


def test_is_imported_from_where_cmake_installs_it_without_metadata_of_pip(tmp_path):
    package, others = tmp_path / "prefix" / "backfold", tmp_path / "others"
    shutil.copytree(pathlib.Path(backfold.__file__).parent, package, dirs_exist_ok=True)
    (built,) = installed("backfold/_build_info.py")
    shutil.copytree(built.parent, package, dirs_exist_ok=True)
    others.mkdir()
    for folder in site.getsitepackages():
        for entry in pathlib.Path(folder).iterdir():
            if "backfold" not in entry.name and not (others / entry.name).exists():
                (others / entry.name).symlink_to(entry)
    program = (
        "import importlib.metadata, backfold, torch\n"
        "assert not list(importlib.metadata.distributions(name='backfold'))\n"
        "layer = torch.nn.Linear(64, 64)\n"
        "with backfold.Controller(layer, min_bytes=0):\n"
        "    loss = layer(torch.randn(64, 64)).square().sum()\n"
        "loss.backward()\n"
        "print(backfold.__file__, backfold.__version__)\n"
    )
    # -S: without the site-packages that know of this installation.
    result = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": f"{package.parent}{os.pathsep}{others}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(package / "__init__.py"), backfold.__version__]


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
