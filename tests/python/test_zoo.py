# SPDX-License-Identifier: Apache-2.0
"""The nastiest models of bench/run zoo: fresh weights, two samples, 4 bits, four steps."""

import pathlib
import random
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "zoo"))

from errors import Task, measure
from isolation import FAILED, MEASURED, NOT_BUILT
from transformers_models import build

# Error of each in its worst step when inputs of norms were packed without normalising, and why.
NASTY = {
    "beit": 1.5e12,  # layer norm with an eps of 1e-12 beside a class token of zeros
    "vit_mae": 6.6e8,  # the same
    "vivit": 8.9e3,  # the same with an eps of 1e-6
    "vit_msn": 1.2e3,  # the same
    "dinov2_with_registers": 82,  # the same
    "levit": 4.6e10,  # batch norm over two values
    "regnet": 5.8e5,  # the same: maps of 1 x 1
    "resnet": 3.6e5,  # the same
    "swiftformer": 57,  # the same
    "groupvit": 38,  # the same
    "swinv2": 8.9e8,  # rows of padding, zero, times gradients of keys divided by their norms
    "apertus": 5.4,  # embedded padding, zero, times gradients of normalised keys
    "xclip": 2.4,  # attention with logits of 197
    "gemma4_text": 1.1,  # attention of 512 channels with a scale of 1
}


class Restless(torch.nn.Module):
    """Random in three ways, with a buffer that changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)
        self.second = torch.nn.Linear(64, 8)

    def forward(self, x):
        x = torch.nn.functional.dropout(self.norm(self.first(x)), 0.5)
        return self.second(x * random.random() + torch.randn_like(x))


def restless() -> Task:
    torch.manual_seed(0)
    model, x = Restless(), torch.randn(64, 64)
    return Task(model, lambda: model(x))


def test_every_pass_of_a_step_sees_the_same_weights_buffers_and_random_numbers(one_thread):
    found = measure(restless(), bits=None)
    assert found.repeats and found.bitwise
    assert found.errors == [0.0] * 4  # 0.4 to 1.4 if a generator is not reset


def test_the_error_is_that_of_the_rounding(one_thread):
    wide, narrow = (measure(restless(), bits, adaptive=False).worst for bits in (8, 4))
    assert 10 < narrow / wide < 30  # four bits: 17


ENDING_BADLY = """
import functools, os, time, test_zoo, torch
from errors import Task, measure
from isolation import Job, Row, measured

def that(does):
    model = torch.nn.Linear(4, 4)
    return Task(model, lambda: does() or model(torch.ones(2, 4)))

builds = {
    "raises": lambda name: 1 / 0,
    "exits": lambda name: that(lambda: os._exit(3)),
    "hangs": lambda name: that(lambda: time.sleep(600)),
    "devours": lambda name: that(lambda: torch.empty(2**40).fill_(1)),
    "behaves": lambda name: test_zoo.restless(),
}
jobs = [Job(Row("zoo", name), build) for name, build in builds.items()]
two_steps = functools.partial(measure, bits=4, steps=2)
for row in measured(jobs, two_steps, workers=2, timeout=20, gibibytes=12):
    print(row.name, row.status, row.reason, sep="|")
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch's engine has a thread for each GPU, and none may fork"
)
def test_an_architecture_that_ends_badly_takes_no_other_along():
    # In a process of its own: a child has none of the threads that earlier tests have left, and may
    # wait for them.
    done = subprocess.run(
        [sys.executable, "-c", ENDING_BADLY],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    rows = {name: rest for name, *rest in (line.split("|") for line in done.stdout.splitlines())}
    lost = dict.fromkeys(["exits", "hangs", "devours"], FAILED)
    expected = {"raises": NOT_BUILT, **lost, "behaves": MEASURED}
    assert {name: status for name, (status, _) in rows.items()} == expected, (rows, done.stderr)
    assert rows["exits"][1] == "the process ended with 3"
    assert rows["hangs"][1] == "no end after 20 s"


@pytest.mark.parametrize("name", NASTY)
def test_gradients_of_a_nasty_architecture_do_not_explode(name, one_thread):
    torch.manual_seed(0)
    found = measure(build(name))
    assert found.repeats and found.bitwise
    assert all(error < 1.0 for error in found.errors), f"{NASTY[name]:g} before, now {found.errors}"
