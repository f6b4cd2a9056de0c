# SPDX-License-Identifier: Apache-2.0
"""Each example of examples/python runs, at its smallest size.

test_demo.py has the demo, test_ddp.py the one for several processes, test_vision.py that of timm;
those in C++ are ctest's.
"""

import json
import pathlib
import re
import runpy
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "python"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example with the given arguments and returns what it prints."""

    def run_example(name: str, *arguments: object) -> str:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def held(output: str) -> float:
    """The part that is held of what autograd alone would keep."""
    part, whole = re.search(r"held ([\d,]+) of ([\d,]+) bytes", output).groups()
    return int(part.replace(",", "")) / int(whole.replace(",", ""))


def test_plain_loop(run):
    output = run("plain_loop.py", "--steps", 3)
    assert "step 0: loss" in output and "plan of step 2" in output


def test_trainer_lora_goes_on_from_its_checkpoint(run, tmp_path):
    for needed in ("transformers", "accelerate", "peft"):
        pytest.importorskip(needed)
    assert held(run("trainer_lora.py", "--steps", 3, "--output", tmp_path)) < 0.15
    assert (tmp_path / "backfold-report.txt").exists()
    output = run("trainer_lora.py", "--steps", 4, "--resume", "--output", tmp_path)
    assert held(output) < 0.15 and "fold_held_mib" in output


def test_lightning(run, tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    output = run("lightning_digits.py", "--steps", 3, "--output", tmp_path)
    figures = dict(re.findall(r"^(fold_\w+) ([\d.]+)$", output, re.MULTILINE))
    assert 0 < float(figures["fold_held_mib"]) < float(figures["fold_saved_mib"]) / 5
    assert (tmp_path / "lightning_logs" / "version_0" / "backfold-report.json").exists()


def test_graph(run):
    pytest.importorskip("torch_geometric")
    assert held(run("graph.py", "--steps", 3, "--nodes", 400)) < 0.2


def test_break_even(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    path = tmp_path / "break_even.json"
    output = run("break_even.py", "--tiny", "--repeats", 1, "--device", "cpu", "--json", path)
    tensors, steps = output.split("a step of a transformer")
    assert re.search(r"^ +4,096 +16,384 +2,176 ", tensors, re.MULTILINE)
    memory = re.search(r"^ +64 +256 +\S+ +\S+ +(\S+) +\S+ +(\S+) ", steps, re.MULTILINE)
    exact, default = map(float, memory.groups())
    assert default < exact < 1
    tables = json.loads(path.read_text())["tables"]
    assert [row[:3] for row in tables["tensors"]["rows"]][1] == ["4,096", "16,384", "2,176"]
    cells = dict(zip(tables["steps"]["head"], tables["steps"]["rows"][1], strict=True))
    assert (cells["memory, `bits=None`"], cells["memory, default"]) == memory.groups()


MISSING = {
    "timm_vit.py": ("timm", "needs timm and torchvision"),
    "graph.py": ("torch_geometric.nn", "needs torch-geometric: pip install"),
    "trainer_lora.py": ("peft", "needs transformers, accelerate and peft"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_library_is_named(run, name, monkeypatch):
    library, text = MISSING[name]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit, match=text):
        run(name, "--steps", 1)
    assert torch.is_grad_enabled()
