# SPDX-License-Identifier: Apache-2.0
"""The same training from C++ and from Python: the same packets, and one checkpoint for both."""

import json
import os
import pathlib
import subprocess

import backfold
import pytest
import torch
from torch.nn import functional

ROOT = pathlib.Path(__file__).parents[2]
STEPS, MIDDLE, PROBED = 6, 4, 2


class Network(torch.nn.Module):
    """As in tests/torch/same_training.cpp."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x):
        return self.head(x + self.down(functional.gelu(self.up(self.norm(x)))))


def controller(model: torch.nn.Module) -> backfold.Controller:
    return backfold.Controller(model, bits=3, min_bytes=0, seed=7, probe_steps=(), probe_every=None)


def train(model, fold, inputs, labels, steps) -> None:
    for step in steps:
        model.zero_grad()
        with fold:
            loss = functional.cross_entropy(model(inputs[step]), labels[step])
        loss.backward()
        if step + 1 == PROBED:
            fold.calibrate(
                lambda x=inputs[step], y=labels[step]: functional.cross_entropy(
                    model(x), y
                ).backward()
            )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)


def without_probe(state: dict) -> dict:
    """C++ names no call that could be run again."""
    return {name: value for name, value in state.items() if name != "probe"}


def read(path: pathlib.Path, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=like.dtype).view_as(like)


def assert_at(model: torch.nn.Module, folder: pathlib.Path, when: str) -> None:
    for name, parameter in model.named_parameters():
        found = read(folder / f"{when}.{name}", parameter)
        assert torch.equal(found, parameter.detach()), f"{name} differs"


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trained(one_thread, tmp_path):
    """What the C++ program left, and what it began with."""
    build = pathlib.Path(os.environ.get("BACKFOLD_BUILD", ROOT / "build" / "python"))
    program = build / "tests" / "torch" / "same_training"
    if not program.is_file():
        pytest.skip(f"needs {program}, which make test-python builds")
    torch.manual_seed(0)
    model = Network()
    inputs, labels = torch.randn(STEPS, 32, 64), torch.randint(8, (STEPS, 32))
    for name, parameter in model.named_parameters():
        (tmp_path / f"begin.{name}").write_bytes(parameter.detach().numpy().tobytes())
    (tmp_path / "inputs").write_bytes(inputs.numpy().tobytes())
    (tmp_path / "labels").write_bytes(labels.numpy().tobytes())
    subprocess.run([program, tmp_path, str(STEPS), str(MIDDLE)], check=True)
    return tmp_path, model, inputs, labels


def test_cpp_and_python_make_the_same_packets(trained):
    folder, model, inputs, labels = trained
    fold = controller(model)
    train(model, fold, inputs, labels, range(STEPS))
    assert fold.plan()["sites"]  # a plan was made, and followed
    assert fold.plan() == json.loads((folder / "plan.json").read_text())
    ours, theirs = fold.report().to_dict(), json.loads((folder / "report.json").read_text())
    for row in (*ours["sites"], *theirs["sites"]):
        del row["module"], row["spared_ms"]  # C++ names no modules; copies are timed
    assert ours["held_bytes"] == theirs["held_bytes"] < ours["unique_bytes"]
    assert ours["sites"] == theirs["sites"]
    state = json.loads((folder / "end.json").read_text())
    assert without_probe(fold.state_dict()) == without_probe(state)
    assert_at(model, folder, "end")


def test_python_takes_up_a_checkpoint_of_cpp(trained):
    folder, model, inputs, labels = trained
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(folder / f"middle.{name}", parameter))
    fold = controller(model)
    fold.load_state_dict(json.loads((folder / "middle.json").read_text()))
    train(model, fold, inputs, labels, range(MIDDLE, STEPS))
    assert_at(model, folder, "end")


def test_other_rounding_would_be_seen(trained):
    """So that the two tests above can fail."""
    folder, model, inputs, labels = trained
    fold = backfold.Controller(model, bits=3, min_bytes=0, seed=8, probe_every=None)
    train(model, fold, inputs, labels, range(STEPS))
    with pytest.raises(AssertionError, match="differs"):
        assert_at(model, folder, "end")
