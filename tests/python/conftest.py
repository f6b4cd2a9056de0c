# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests: devices, one option, and the count of operator samples at the end."""

import collections
import sys

import pytest
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

OPERATOR_TALLY = pytest.StashKey[collections.Counter]()


def pytest_addoption(parser):
    parser.addoption(
        "--all-samples",
        action="store_true",
        help="test_operators.py: every sample of every operator, not a fixed tenth",
    )


def pytest_configure(config):
    config.stash[OPERATOR_TALLY] = collections.Counter()


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Where torch.compile was called, modules are not watched: no test does so for the next."""
    yield
    module = sys.modules.get("torch._dynamo.eval_frame")
    if module is not None and any(module.cached_backends.values()):
        torch.compiler.reset()


@pytest.fixture
def one_thread():
    """For tests with many small operations, which take several times as long with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def deterministic(monkeypatch):
    """Makes bitwise comparisons meaningful, and reads of uninitialised memory show as NaN."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def quick_seeds(monkeypatch):
    """Seeds only devices that are there. torch notes each seed with a stack trace for those that
    are not, and operators seed so often that this takes two thirds of the time."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)

    monkeypatch.setattr(torch, "manual_seed", manual_seed)


# Where several processes share the tests, each counts its own, and the first adds up.


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tally"] = dict(session.config.stash[OPERATOR_TALLY])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    node.config.stash[OPERATOR_TALLY].update(node.workeroutput.get("tally", {}))


def pytest_terminal_summary(terminalreporter, config):
    tally = config.stash[OPERATOR_TALLY]
    if tally["samples"]:
        terminalreporter.section("operator samples")
        for what, count in tally.items():
            terminalreporter.write_line(f"{count:10,}  {what}")
