# SPDX-License-Identifier: Apache-2.0
"""The demo, from its command line to the files it writes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

for needed in ("matplotlib", "sklearn", "tqdm"):
    pytest.importorskip(needed)

DEMO = pathlib.Path(__file__).parents[2] / "examples" / "python" / "demo.py"
ROW = re.compile(
    r"(plain|4 bits) +(?:[\d.]+% right|loss [\d.]+) +([\d.]+) MiB +([\d.]+) MiB +[\d.]+ ms"
)


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    # Two threads sharing a busy core mostly wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, DEMO, *options], capture_output=True, text=True, env=environment
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The output of a quick run on the CPU, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_demo("--quick", "--device", "cpu", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_ends_with_a_table_in_which_folding_saves_memory(demo):
    output, _ = demo
    found = ROW.findall(output)
    assert [name for name, *_ in found] == ["plain", "4 bits"] * 2
    for plain, folded in (found[:2], found[2:]):
        # Exact codecs and small tensors keep the ratio below the 8 of float32 / 4 bits.
        assert float(folded[1]) < float(plain[1]) / 3  # held
        assert float(folded[2]) < float(plain[2])  # peak


def test_writes_the_reports_and_the_picture(demo):
    output, folder = demo
    for name in ("digits", "char_gpt"):
        text = (folder / f"{name}.txt").read_text()
        assert len(text.splitlines()) > 5
        report = json.loads((folder / f"{name}.json").read_text())
        assert 0 < report["held_bytes"] < report["unique_bytes"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("digits.txt", "char_gpt.txt", "loss.png"):
        assert str(folder / name) in output


def test_refuses_steps_below_one():
    done = run_demo("--steps", "0")
    assert done.returncode == 2
    assert "--steps must be at least 1, got 0" in done.stderr
