# SPDX-License-Identifier: Apache-2.0
"""What bench/run zoo measures with."""

import os
import pathlib
import random
import sys
import time

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "zoo"))

from errors import Task, measure
from isolation import FAILED, MEASURED, NOT_BUILT, Job, Row, measured


class Restless(torch.nn.Module):
    """Random in three ways, and a buffer that moves."""

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
    assert found.errors == [0.0] * 4  # 0.4 to 1.4 where a generator is not set back


def test_the_error_is_that_of_the_rounding(one_thread):
    wide, narrow = (measure(restless(), bits=bits).worst for bits in (8, 4))
    assert 10 < narrow / wide < 30  # four bits: 17


def that(does) -> Task:
    model = torch.nn.Linear(4, 4)
    return Task(model, lambda: does() or model(torch.ones(2, 4)))


def test_an_architecture_that_ends_badly_takes_no_other_along(one_thread):
    builds = {
        "raises": lambda name: 1 / 0,
        "exits": lambda name: that(lambda: os._exit(3)),
        "hangs": lambda name: that(lambda: time.sleep(60)),
        "devours": lambda name: that(lambda: torch.empty(2**40).fill_(1)),
        "behaves": lambda name: restless(),
    }
    jobs = [Job(Row("zoo", name), build) for name, build in builds.items()]
    rows = {row.name: row for row in measured(jobs, 4, 2, workers=2, timeout=8, gibibytes=12)}
    found = {name: row.status for name, row in rows.items()}
    lost = dict.fromkeys(["exits", "hangs", "devours"], FAILED)
    assert found == {"raises": NOT_BUILT, **lost, "behaves": MEASURED}
    assert rows["exits"].reason == "the process ended with 3"
    assert rows["hangs"].reason == "no end after 8 s"
