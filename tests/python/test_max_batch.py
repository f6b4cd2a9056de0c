# SPDX-License-Identifier: Apache-2.0
"""backfold.max_batch: the search is tested in C++; here, what a trial does."""

import gc
import weakref

import backfold
import pytest
import torch
from backfold import _max_batch

MIB = 1 << 20


class Meter:
    """Memory of which steps take as much as they say."""

    def __init__(self):
        self.now = self.most = self.retried = 0

    def reset(self):
        self.restart_peak()

    def restart_peak(self):
        self.most = self.now

    def wait(self):
        pass

    def peak(self):
        return self.most

    def reserved(self):
        return None

    def retries(self):
        return self.retried

    def take(self, amount, memory):
        if self.now + amount > memory:
            raise torch.OutOfMemoryError(f"tried to allocate {amount}")
        self.most = max(self.most, self.now + amount)


@pytest.fixture
def meter(monkeypatch):
    made = Meter()
    monkeypatch.setattr(_max_batch, "_meter", lambda device: made)
    return made


def test_finds_the_largest_batch_under_a_peak(meter):
    def make_step(batch):
        return lambda: meter.take((100 + 7 * batch) * MIB, 10**18)

    found = backfold.max_batch(make_step, "2GiB", quiet=True)
    truth = (2048 - 100) // 7
    assert truth * 31 / 32 <= found.batch <= truth
    assert len(found.candidates) <= 12
    for one in found.candidates:
        assert one.fits == (one.peak_bytes <= 2048 * MIB)
        assert one.samples_per_second > 0


def test_recovers_from_running_out_of_memory_in_the_middle_of_a_step(meter):
    alive = weakref.WeakSet()
    kinds = [(torch.OutOfMemoryError, "CUDA out of memory"), (MemoryError, "")]
    kinds += [(RuntimeError, f"{text}: failed") for text in _max_batch.OUT_OF_MEMORY]
    raised = []

    def make_step(batch):
        gc.collect()
        assert not alive, "tensors of an earlier trial are still alive"
        model = torch.nn.Linear(64, 64)
        fold = backfold.Controller(model, bits=4, min_bytes=0)
        x = torch.randn(batch, 64)
        alive.add(x)

        def step():
            with fold:
                y = model(x).relu()
                if batch > 20:
                    raised.append(batch)
                    kind, message = kinds[len(raised) % len(kinds)]
                    raise kind(message)
            y.sum().backward()

        return step

    found = backfold.max_batch(make_step, 1 << 40, start=4, trials=20, quiet=True)
    assert found.batch == 20
    assert len(raised) >= 3
    out = [one for one in found.candidates if one.peak_bytes is None]
    assert all(one.batch > 20 and not one.fits for one in out)
    gc.collect()
    assert not alive


def test_other_errors_of_a_step_are_the_users(meter):
    def make_step(batch):
        def step():
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        return step

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        backfold.max_batch(make_step, "1GiB", quiet=True)


def test_a_step_that_never_fits_says_what_it_takes(meter):
    with pytest.raises(ValueError, match=r"no batch fits into peak='1MiB': .* of 1 takes 3 MiB"):
        backfold.max_batch(lambda batch: lambda: meter.take(3 * MIB, 10**18), "1MiB", quiet=True)
    with pytest.raises(ValueError, match=r"no batch fits: .* of 1 ran out of memory"):
        backfold.max_batch(lambda batch: lambda: meter.take(3 * MIB, MIB), "1MiB", quiet=True)


def test_batches_that_retry_allocations_are_too_large_if_asked(meter):
    def make_step(batch):
        def step():
            meter.take(batch * MIB, 10**18)
            meter.retried += batch > 20

        return step

    found = {
        retries: backfold.max_batch(make_step, "40MiB", start=4, quiet=True, retries=retries)
        for retries in (True, False)
    }
    assert (found[True].batch, found[False].batch) == (40, 20)
    tried = [one for one in found[False].candidates if one.peak_bytes <= 40 * MIB]
    assert all(one.fits == (one.retries == 0) == (one.batch <= 20) for one in tried)
    assert any(one.retries == _max_batch.TIMED for one in tried)
    with pytest.raises(ValueError, match=r"no batch fits: .* of 21 had to retry 4 allocations"):
        backfold.max_batch(
            lambda batch: make_step(21), "40MiB", start=21, trials=1, quiet=True, retries=False
        )


def test_first_and_steady_steps_have_peaks_of_their_own(meter):
    def make_step(batch):
        steps = iter([9, 9, 30, 9])
        return lambda: meter.take(next(steps, 7) * MIB, 10**18)

    one = backfold.max_batch(make_step, "40MiB", trials=1, quiet=True).candidates[0]
    assert (one.peak_bytes, one.steady_bytes) == (30 * MIB, 7 * MIB)


def test_prints_each_candidate(meter, capsys):
    found = backfold.max_batch(lambda b: lambda: meter.take(b * MIB, 40 * MIB), 10**9, trials=4)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    lines = printed.splitlines()
    assert len(lines) == 1 + len(found.candidates) + 1
    assert any("out of memory" in line for line in lines)
    assert lines[-1] == f"largest batch: {found.batch}"


def test_measures_the_memory_of_a_process():
    # 64 MiB for each sample of a step; other parts of the process do not grow meanwhile.
    def make_step(batch):
        return lambda: torch.ones(batch * 16 * MIB).sum()

    before = backfold.max_batch(make_step, 1 << 40, start=1, trials=1, quiet=True, device="cpu")
    base = before.candidates[0].peak_bytes - 64 * MIB
    limit = base + 5 * 64 * MIB + 32 * MIB
    found = backfold.max_batch(make_step, limit, start=1, trials=6, quiet=True, device="cpu")
    assert found.batch == 5
    assert found.candidates[0].peak_bytes - base >= 63 * MIB


def test_trains_with_a_controller():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    steps = []

    def make_step(batch):
        fold = backfold.Controller(model, bits=4)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(batch, 256)

        def step():
            with fold:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append((batch, fold.steps))

        return step

    found = backfold.max_batch(
        make_step, 1 << 40, start=64, multiple=32, trials=3, quiet=True, device="cpu"
    )
    assert found.batch % 32 == 0
    assert [one.batch for one in found.candidates] == sorted({batch for batch, _ in steps})
    assert max(count for _, count in steps) == _max_batch.WARMUPS + _max_batch.TIMED


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"make_step": 3}, TypeError, "make_step must be callable, got int"),
        ({"make_step": lambda batch: None}, TypeError, "make_step must return a function .*None"),
        ({"peak": "2 gigs"}, ValueError, "peak must be a number.*got '2 gigs'"),
        ({"peak": 0}, ValueError, "peak must be at least one byte .*got 0"),
        ({"peak": 1.5}, TypeError, "peak must be a number of bytes.*got 1.5"),
        ({"peak": None}, ValueError, "peak must be given for steps on a CPU"),
        ({"start": 0}, ValueError, "start must be from 1 to .*got 0"),
        ({"start": 2.0}, TypeError, "start must be an int, got 2.0"),
        ({"multiple": -1}, ValueError, "multiple must be from 1 .*got -1"),
        ({"trials": 0}, ValueError, "trials must be from 1 .*got 0"),
        ({"retries": 0}, TypeError, "retries must be True or False, got 0"),
        ({"device": "meta"}, ValueError, "device must be a CPU or a CUDA GPU, got 'meta'"),
    ],
)
def test_bad_input(arguments, error, message):
    given = {"make_step": lambda batch: lambda: None, "peak": "1GiB", "device": "cpu", **arguments}
    with pytest.raises(error, match=message):
        backfold.max_batch(**given, quiet=True)
