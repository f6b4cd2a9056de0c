# SPDX-License-Identifier: Apache-2.0
"""The installed package: its version and contents."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import site
import subprocess
import sys

import backfold
import pytest
import torch

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


@pytest.fixture
def prefix() -> pathlib.Path:
    """What CMake calls the package."""
    (config,) = installed("backfold/lib/cmake/backfold/backfoldConfig.cmake")
    return config.parents[3]


def run(*command, fails: bool = False) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (result.returncode != 0) == fails, result.stdout
    return result.stdout


def test_programs_outside_of_the_tree_build_and_run_with_it(prefix, tmp_path):
    run(
        *("cmake", "-G", "Ninja", "-S", ROOT / "tests" / "package", "-B", tmp_path),
        *(f"-DCMAKE_PREFIX_PATH={prefix}", "-DPROGRAMS=core;torch"),
    )
    run("cmake", "--build", tmp_path)
    run("ctest", "--test-dir", tmp_path, "--output-on-failure", "--no-tests=error")


def configure(tmp_path, prefix, find: str, *options, fails: bool = False) -> str:
    """What CMake says to a project that asks for the package in these words."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        "project(program LANGUAGES CXX)\n"
        f"find_package(backfold {find})\n"
        "foreach(name IN ITEMS core torch)\n"
        "  if(TARGET backfold::${name})\n"
        '    message(STATUS "found ${name}")\n'
        "  endif()\n"
        "endforeach()\n"
    )
    command = ["cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build"]
    output = run(*command, f"-DCMAKE_PREFIX_PATH={prefix}", *options, fails=fails)
    return " ".join(output.split())


@pytest.fixture
def without_torch(prefix, tmp_path) -> pathlib.Path:
    """The package as a build without the torch layer leaves it."""
    copy = tmp_path / "prefix"
    shutil.copytree(prefix, copy)
    for file in copy.glob("lib/cmake/backfold/backfoldTorchTargets*"):
        file.unlink()
    return copy


@pytest.fixture
def other_torch(tmp_path) -> pathlib.Path:
    """A folder that looks like a torch of another release."""
    for name, text in [
        ("share/cmake/Torch/TorchConfigVersion.cmake", 'set(PACKAGE_VERSION "2.0.1")\n'),
        ("lib/libtorch_cpu.so", ""),
    ]:
        file = tmp_path / "torch" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return tmp_path / "torch"


def test_components_are_found_alone(prefix, tmp_path):
    output = configure(tmp_path, prefix, "REQUIRED COMPONENTS torch")
    assert "found torch" in output and "found core" not in output
    output = configure(tmp_path, prefix, "REQUIRED COMPONENTS core")
    assert "found core" in output and "found torch" not in output


def test_without_the_torch_layer_the_core_is_there_and_the_component_is_refused(
    without_torch, tmp_path
):
    output = configure(tmp_path, without_torch, "REQUIRED")
    assert "backfold::torch is not available: this Backfold was built without" in output
    assert "found core" in output and "found torch" not in output
    output = configure(tmp_path, without_torch, "REQUIRED COMPONENTS torch", fails=True)
    assert "backfold::torch cannot be used: this Backfold was built without" in output


def test_where_the_torch_of_the_build_is_gone_python_is_asked(prefix, tmp_path):
    copy = tmp_path / "elsewhere" / "prefix"
    shutil.copytree(prefix, copy)
    config = copy / "lib" / "cmake" / "backfold" / "backfoldConfig.cmake"
    folder = pathlib.Path(torch.__file__).parent
    assert str(folder) in config.read_text()
    config.write_text(config.read_text().replace(str(folder), str(tmp_path / "gone")))
    python = f"-DPython_EXECUTABLE={sys.executable}"
    assert "found torch" in configure(tmp_path, copy, "REQUIRED COMPONENTS torch", python)


def test_a_torch_of_another_release_is_refused_and_the_core_is_there(prefix, other_torch, tmp_path):
    torch_dir = f"-DTorch_DIR={other_torch / 'share' / 'cmake' / 'Torch'}"
    output = configure(tmp_path, prefix, "REQUIRED", torch_dir)
    assert "found core" in output and "found torch" not in output
    output = configure(tmp_path, prefix, "REQUIRED COMPONENTS torch", torch_dir, fails=True)
    assert f"({other_torch} has torch 2.0)" in output
