# SPDX-License-Identifier: Apache-2.0
"""A build that cannot succeed stops before it compiles, and says what to install and how."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import backfold
import pytest

ROOT = pathlib.Path(__file__).parents[2]
VERSIONS = dict(
    line.split()
    for line in (ROOT / "cmake" / "torch_versions.txt").read_text().splitlines()
    if not line.startswith("#")
)

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")


def configure(
    folder: pathlib.Path,
    *options: str,
    source: pathlib.Path = ROOT,
    fails: bool = True,
    **environment: str,
) -> str:
    """What CMake prints, on one line."""
    done = subprocess.run(
        ["cmake", "-S", source, "-B", folder / "build", "-DBACKFOLD_CUDA=OFF", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "BACKFOLD_ANY_TORCH": "", **environment},
    )
    assert (done.returncode != 0) == fails, done.stderr
    return re.sub(r"\s+", " ", done.stdout + done.stderr)


def with_torch(folder: pathlib.Path, program: str) -> dict:
    """The environment of a Python whose torch is `program`."""
    (folder / "torch.py").write_text(program)
    return {"PYTHONPATH": str(folder)}


TORCH = ("-DBACKFOLD_TORCH=ON", f"-DPython_EXECUTABLE={sys.executable}")


def version(text: str) -> str:
    return f"class version: cuda = None\n__version__ = '{text}'\n"


def test_without_torch_the_commands_are_named(tmp_path):
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\")"
    found = configure(tmp_path, *TORCH, **with_torch(tmp_path, missing))
    assert f"works with torch {VERSIONS['oldest']} to {VERSIONS['newest']}, and" in found
    assert f"pip install torch=={VERSIONS['installed']}" in found
    assert "pip install --no-build-isolation ." in found


def test_a_torch_that_is_too_old_or_too_new_is_refused_first(tmp_path):
    # First: without a compiler, which would be the next to be missed.
    nowhere = f"-DCMAKE_CXX_COMPILER={tmp_path / 'none'}"
    found = configure(tmp_path, *TORCH, nowhere, **with_torch(tmp_path, version("2.1.0")))
    assert "found 2.1.0. Install a newer one: pip install torch==" in found
    found = configure(tmp_path, *TORCH, nowhere, **with_torch(tmp_path, version("9.0.0")))
    assert "found 9.0.0, which is newer than any version" in found


def test_a_torch_that_is_broken_says_how(tmp_path):
    broken = "raise ImportError('libc10.so: cannot open shared object file')"
    found = configure(tmp_path, *TORCH, **with_torch(tmp_path, broken))
    assert "cannot import torch" in found and "libc10.so: cannot open" in found


def test_without_a_compiler_the_package_is_named(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja", "make", "uname", "sh"):
        if shutil.which(name):
            (tools / name).symlink_to(shutil.which(name))
    found = configure(tmp_path, PATH=str(tools), CXX="", CC="")
    assert "No C++ compiler was found. On Debian or Ubuntu: apt-get install g++." in found


def test_without_highway_the_package_is_named(tmp_path):
    found = configure(tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON")
    assert "Google Highway was not found. On Debian or Ubuntu: apt-get install libhwy-dev." in found


def test_a_torch_with_cuda_and_no_nvcc_is_told(tmp_path):
    program = version(f"{VERSIONS['newest']}.0").replace("None", "'13.0'")
    found = configure(
        tmp_path,
        *TORCH,
        "-DBACKFOLD_CUDA=AUTO",
        "-DCMAKE_CUDA_COMPILER=NOTFOUND",
        "-DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON",  # ends it there
        **with_torch(tmp_path, program),
    )
    assert "has CUDA 13.0, but nvcc was not found: Backfold is built for CPUs alone" in found
    assert "Install NVIDIA's CUDA toolkit 13.0" in found


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> pathlib.Path:
    """The root of what `make sdist` writes, away from the repository."""
    backend = pytest.importorskip("scikit_build_core.build")
    folder = tmp_path_factory.mktemp("sdist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = backend.build_sdist(str(folder))
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


def test_the_source_distribution_has_all_that_a_build_reads(unpacked):
    members = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    needed = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", ROOT / "LICENSE"]
    for folder in ("cmake", "include", "src", "python", "scripts", "tests", "examples", "fuzz"):
        needed += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    names = {str(path.relative_to(ROOT)) for path in needed if path.suffix != ".pyc"}
    assert names - members == set() and len(names) > 300
    listed = re.findall(r"\b(?:src|cmake)/[\w/.]+\w", (ROOT / "CMakeLists.txt").read_text())
    assert set(listed) <= members


def test_the_source_distribution_is_configured_with_tests_and_examples(unpacked, tmp_path):
    # CMake looks at every listed source. The rest of the archive is what is called below.
    parts = ("-DBACKFOLD_TESTS=ON", "-DBACKFOLD_EXAMPLES=ON")
    found = configure(tmp_path, "-GNinja", *TORCH, *parts, source=unpacked, fails=False)
    assert "Build files have been written" in found
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert f"CMAKE_HOME_DIRECTORY:INTERNAL={unpacked}\n" in cache


def test_commands_of_the_readme_begin_in_the_source_distribution(unpacked):
    for name in ("setup", "torch_cuda"):  # make calls them by name, before anything else
        assert os.access(unpacked / "scripts" / name, os.X_OK)
    commands = re.findall(r"^(make \w+)", (unpacked / "README.md").read_text(), re.MULTILINE)
    assert commands == ["make demo", "make test"]
    for command in commands:
        done = subprocess.run(
            [*command.split(), "--dry-run"], cwd=unpacked, capture_output=True, text=True
        )
        assert done.returncode == 0 and "scripts/setup build" in done.stdout, done.stderr


def test_pip_finds_the_project_in_the_source_distribution(unpacked, tmp_path, monkeypatch):
    backend = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(unpacked)
    info = tmp_path / backend.prepare_metadata_for_build_wheel(str(tmp_path))
    metadata = (info / "METADATA").read_text()
    assert f"\nVersion: {backfold.__version__}\n" in metadata
    for extra in ("lightning", "page", "transformers"):
        assert f"\nProvides-Extra: {extra}\n" in metadata
    assert (unpacked / "README.md").read_text().splitlines()[0] in metadata
