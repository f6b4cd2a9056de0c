# SPDX-License-Identifier: Apache-2.0
"""Options for memory and probes: what they mean, and what is refused."""

import doctest
import math
import re

import backfold
import numpy
import pytest
import torch
from backfold import _C, _options
from backfold._options import Target, probe_options, target_of


def test_examples_of_the_documentation_run():
    results = doctest.testmod(_options)
    assert results.failed == 0
    assert results.attempted >= 2


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ({}, Target("bits", 4.0, True)),
        ({"adaptive": False}, Target("bits", 4.0, False)),
        ({"bits": 1}, Target("bits", 1.0, True)),
        ({"bits": 16}, Target("bits", 16.0, True)),
        ({"bits": 3.5}, Target("bits", 3.5, True)),
        ({"bits": numpy.float32(2.5)}, Target("bits", 2.5, True)),
        ({"bits": numpy.int64(8), "adaptive": False}, Target("bits", 8.0, False)),
        ({"bits": None}, Target("exact", 0.0, False)),
        ({"bits": None, "adaptive": False}, Target("exact", 0.0, False)),
        ({"ratio": 8}, Target("ratio", 8.0, True)),
        ({"ratio": 1.01}, Target("ratio", 1.01, True)),
        ({"budget": 1}, Target("budget", 1.0, True)),
        ({"budget": "6GiB"}, Target("budget", 6.0 * 2**30, True)),
        ({"budget": "512 MiB"}, Target("budget", 512.0 * 2**20, True)),
        ({"budget": "1.5e9"}, Target("budget", 1.5e9, True)),
        ({"budget": "800MB"}, Target("budget", 800e6, True)),
        ({"budget": " .5 kib "}, Target("budget", 512.0, True)),
        ({"budget": "3KB"}, Target("budget", 3000.0, True)),
        ({"budget": "2 tib"}, Target("budget", 2.0 * 2**40, True)),
        ({"budget": "7b"}, Target("budget", 7.0, True)),
        ({"level": "L0"}, Target("exact", 0.0, False)),
        ({"level": "L1"}, Target("bits", 4.0, False)),
        ({"level": "L1.1"}, Target("bits", 8.0, False)),
        ({"level": "L1.2"}, Target("bits", 2.0, False)),
        ({"level": "L2"}, Target("bits", 4.0, True)),
        ({"level": "L2.1"}, Target("bits", 3.0, True)),
        ({"level": "L2.2"}, Target("bits", 2.0, True)),
        ({"level": "paper-L0"}, Target("exact", 0.0, False)),
        ({"level": "paper-L1"}, Target("bits", 4.0, True)),
        ({"level": "paper-CB1"}, Target("bits", 4.0, True)),
        ({"level": "paper-CB2"}, Target("bits", 4.0, True)),
    ],
)
def test_one_target_is_named(arguments, target):
    assert target_of(**arguments) == target


def test_every_width_may_be_fixed():
    for bits in (1, 2, 3, 4, 5, 6, 8, 16):
        assert target_of(bits=bits, adaptive=False) == Target("bits", bits, False)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"bits": 0.99}, ValueError, "bits must be from 1 to 16, got 0.99"),
        ({"bits": 17}, ValueError, "bits must be from 1 to 16, got 17"),
        ({"bits": 2**70}, ValueError, "bits must be from 1 to 16"),
        ({"bits": math.nan}, ValueError, "bits must be from 1 to 16, got nan"),
        ({"bits": "4"}, TypeError, "bits must be a number from 1 to 16 or None, got '4'"),
        ({"bits": True}, TypeError, "bits must be a number .*got True"),
        ({"bits": torch.tensor(4)}, TypeError, "bits must be a number"),
        (
            {"bits": 7, "adaptive": False},
            ValueError,
            "one of 1, 2, 3, 4, 5, 6, 8, 16 with adaptive=False, got 7; adaptive=True allows any",
        ),
        ({"bits": 3.5, "adaptive": False}, ValueError, "got 3.5; adaptive=True allows any mean"),
        ({"adaptive": None}, TypeError, "adaptive must be True or False, got None"),
        ({"ratio": 1}, ValueError, "ratio must be above 1 and finite, got 1"),
        ({"ratio": math.inf}, ValueError, "ratio must be above 1 and finite, got inf"),
        ({"ratio": "8"}, TypeError, "ratio must be a number above 1, got '8'"),
        ({"ratio": True}, TypeError, "ratio must be a number above 1, got True"),
        ({"ratio": 8, "adaptive": False}, ValueError, "ratio=8 needs a plan, .*adaptive=False"),
        ({"budget": "1GB", "adaptive": False}, ValueError, "budget=1000000000 needs a plan"),
        ({"budget": 0}, ValueError, "budget must be at least one byte .*got 0"),
        ({"budget": -5}, ValueError, "budget must be at least one byte .*got -5"),
        ({"budget": "0.1B"}, ValueError, "budget must be at least one byte .*got '0.1B'"),
        ({"budget": "1e999"}, ValueError, "budget must be .*below 2.*got '1e999'"),
        (
            {"budget": 1e9},
            TypeError,
            "budget must be a number of bytes, an int, or a string like '6GiB'",
        ),
        ({"budget": True}, TypeError, "budget must be a number of bytes.*got True"),
        (
            {"budget": "6 gigs"},
            ValueError,
            "units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, got '6 gigs'",
        ),
        ({"budget": "-6GiB"}, ValueError, "one of the units .*got '-6GiB'"),
        ({"budget": ""}, ValueError, "one of the units .*got ''"),
        ({"budget": "GiB"}, ValueError, "one of the units .*got 'GiB'"),
        ({"level": 2}, TypeError, "level must be a string like 'L2', got 2"),
        ({"level": ""}, ValueError, "level must be a name like 'L2', got ''"),
        ({"budget": 2**63}, ValueError, "budget must be .*below 2.*got 9223372036854775808"),
        ({"level": "L2", "adaptive": False}, ValueError, "level='L2' plans widths, .*'L1'"),
    ],
)
def test_bad_targets_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        target_of(**arguments)


def test_an_unknown_level_lists_all():
    with pytest.raises(ValueError, match="got 'l2'") as caught:
        target_of(level="l2")
    listed = (
        "L0 L1 L1.1 L1.2 L2 L2.1 L2.2 L3 paper-L0 paper-L1 paper-L2 paper-CB1 paper-CB2 actnn-L5"
    )
    words = set(re.findall(r"[\w.-]+", str(caught.value)))
    assert set(listed.split()) <= words


def test_two_targets_at_once_are_both_named():
    values = {"bits": 4, "ratio": 8, "budget": "1GB", "level": "L2"}
    for first in values:
        for second in values:
            if first == second:
                continue
            pair = {first: values[first], second: values[second]}
            with pytest.raises(ValueError, match="cannot be given together") as caught:
                target_of(**pair)
            for name, value in pair.items():
                assert f"{name}={value!r}" in str(caught.value)
    with pytest.raises(ValueError, match="bits=None and level='L2' cannot be given together"):
        target_of(bits=None, level="L2")


def test_bytes_without_rounding():
    assert target_of(bits=None, ratio=8) == Target("ratio", 8.0, False)
    assert target_of(bits=None, budget="1kB") == Target("budget", 1000.0, False)
    with pytest.raises(ValueError, match="bits=None and ratio=8 and budget=9 cannot be given"):
        target_of(bits=None, ratio=8, budget=9)


def due(steps, every, until: int = 4001) -> list[int]:
    options = probe_options(steps, every, 1)
    schedule = _C.ProbeSchedule(options["probe_steps"], options["probe_every"])
    return [step for step in range(until) if schedule.includes(step)]


def test_probes_come_at_the_listed_steps_and_then_in_periods():
    assert due((2, 100, 300, 1000), 1000) == [2, 100, 300, 1000, 2000, 3000, 4000]
    assert due((2, 100), None) == [2, 100]
    assert due((300, 2, 2), 1500) == [2, 300, 1800, 3300]  # in periods after the last one
    assert due((), 1500) == [1500, 3000]
    assert due((), None) == []
    assert due([1], 1, until=5) == [1, 2, 3, 4]
    assert due(iter((2, 4)), numpy.int64(3), until=11) == [2, 4, 7, 10]


@pytest.mark.parametrize(
    ("steps", "every", "error", "text"),
    [
        (2, 1000, TypeError, "probe_steps must be a sequence of ints, got 2"),
        ("2", 1000, TypeError, "probe_steps must be a sequence of ints, got '2'"),
        ((2.0,), 1000, TypeError, "probe_steps must hold ints, got 2.0"),
        ((True,), 1000, TypeError, "probe_steps must hold ints, got True"),
        ((2, 0), 1000, ValueError, "probe_steps must be 1 .* or more, got 0"),
        ((2,), 0, ValueError, "probe_every must be 1 or more, or None, got 0"),
        ((2,), 10.0, TypeError, "probe_every must be an int or None, got 10.0"),
        ((2,), True, TypeError, "probe_every must be an int or None, got True"),
    ],
)
def test_bad_schedules_are_refused(steps, every, error, text):
    with pytest.raises(error, match=text):
        backfold.Controller(probe_steps=steps, probe_every=every)


def test_a_probe_runs_on_a_part_of_the_batch_or_all_of_it():
    for value in (1, 0.25):
        backfold.Controller(probe_fraction=value)
    for value in (0, -0.5, 1.01, math.nan):
        with pytest.raises(ValueError, match="probe_fraction must be above 0 and at most 1, got"):
            backfold.Controller(probe_fraction=value)
    for value in ("0.5", True, None):
        with pytest.raises(TypeError, match="probe_fraction must be a number, got"):
            backfold.Controller(probe_fraction=value)
