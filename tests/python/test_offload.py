# SPDX-License-Identifier: Apache-2.0
"""offload=True: what is kept leaves its device, and training is bitwise what it was."""

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import time

import backfold
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 256, 512


def perceptron(device="cpu"):
    torch.manual_seed(0)
    body = []
    for _ in range(4):
        body += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)]
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return nn.Sequential(*body).to(device), x.to(device)


def convolutions(device="cpu"):
    torch.manual_seed(0)
    body, channels = [], 3
    for _ in range(3):
        body += [nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        channels = 32
    x = torch.randn(20, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    return nn.Sequential(*body, nn.MaxPool2d(2)).to(device), x.to(device)


class Autocast(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.body(x).float()


def transformer(device="cpu"):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(8, 96, 128, generator=torch.Generator().manual_seed(1))
    return Autocast(body).to(device), x.to(device)


MODELS = [perceptron, convolutions, transformer]


def train(build, device, options, steps=4):
    """Parameters after some steps of SGD, and the controller; plain training without options."""
    model, x = build(device)
    fold = None if options is None else backfold.Controller(model, **options)
    continue_training(model, fold, x, steps)
    return list(model.parameters()), fold


def continue_training(model, fold, x, steps):
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        if fold is None:
            loss = model(x).square().mean()
        else:
            with fold:
                loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad


def settled(fold, pause=0.05):
    """The report, once no copy is under way: none has ended for so many seconds."""
    before = None
    for _ in range(200):
        report = fold.report().to_dict()
        if report["offloaded_bytes"] == before:
            return report
        before = report["offloaded_bytes"]
        time.sleep(pause)
    raise AssertionError("copies do not end")


def offloads(fold, build, device):
    """Whether something leaves when backward takes its time; a GPU's may come before any copy."""
    model, x = build(device)
    with fold:
        loss = model(x).square().mean()
    if x.is_cuda:
        torch.cuda.synchronize()
    found = settled(fold)["offloaded_bytes"] > 0
    loss.backward()
    return found


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def mapped_bytes():
    """Of files that a controller offloads to."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/backfold-" in line:
                begin, end = line.split()[0].split("-")
                total += int(end, 16) - int(begin, 16)
    return total


def threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("derive", [True, False])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("build", MODELS)
def test_training_is_bitwise_the_same(device, deterministic, build, bits, derive):
    options = {"bits": bits, "derive": derive, "probe_steps": (2,)}
    away, fold = train(build, device, {**options, "offload": True})
    here, _ = train(build, device, options)
    assert same(away, here)
    if bits is None:
        assert same(away, train(build, device, None)[0])
    assert offloads(fold, build, device)


@pytest.mark.parametrize("bits", [None, 4])
def test_little_is_held_on_the_device(device, bits):
    model, x = perceptron(device)
    held = {}
    for offload in (False, True):
        fold = backfold.Controller(model, bits=bits, adaptive=False, offload=offload, derive=False)
        continue_training(model, fold, x, 2)
        with fold:
            loss = model(x).square().mean()
        held[offload] = settled(fold)
        loss.backward()
    assert held[False]["offloaded_bytes"] == 0
    on, off = held[True], held[False]
    assert on["held_bytes"] + on["offloaded_bytes"] == off["held_bytes"]
    assert on["offloaded_bytes"] == sum(row["offloaded_bytes"] for row in on["sites"])
    assert all(row["held_bytes"] >= 0 for row in on["sites"])
    # What is asked for first stays, two of the largest; 1 if nothing leaves.
    assert on["held_bytes"] < 0.45 * off["held_bytes"]


def test_memory_of_the_process_falls():
    # Of the process itself, without the pages of files.
    def resident():
        with open("/proc/self/status") as status:
            return int(re.search(r"RssAnon:\s+(\d+) kB", status.read())[1]) << 10

    x = torch.randn(1 << 21, requires_grad=True)
    grown = {}
    for offload in (False, True):
        fold = backfold.Controller(bits=None, derive=False, offload=offload)
        before = resident()
        with fold:
            y = x
            for _ in range(24):
                y = torch.tanh(y)
            loss = y.sum()
        if offload:
            assert settled(fold)["offloaded_bytes"] >= 20 << 23
        grown[offload] = resident() - before
        loss.backward()
        del y, loss
    assert grown[False] > 20 << 23
    assert grown[True] < 12 << 23


@pytest.mark.parametrize("bits", [None, 4])
def test_memory_that_is_taken_again_at_once_does_no_harm(device, deterministic, bits):
    # A copy that outlives its memory, or a stream that does not wait, brings NaN to the gradients.
    def churn(*_):
        for rows in (ROWS, ROWS // 2, ROWS // 8):
            torch.full((rows, WIDTH), torch.nan, device=device)
            torch.full((rows * WIDTH // 2,), 255, dtype=torch.uint8, device=device)

    found = []
    for offload in (False, True):
        model, x = perceptron(device)
        for module in model:
            module.register_forward_hook(churn)
            module.register_full_backward_hook(churn)
        fold = backfold.Controller(model, bits=bits, adaptive=False, offload=offload)
        for _ in range(3):
            model.zero_grad()
            with fold:
                loss = model(x).square().mean()
            for _ in range(5):
                churn()
            loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(gradient.isfinite().all() for gradient in found[1])
    assert same(*found)


def test_the_report_shows_what_is_where():
    model, x = perceptron()
    fold = backfold.Controller(model, bits=None, derive=False, offload=True)
    with fold:
        loss = model(x).square().mean()
    settled(fold)
    text = str(fold.report())
    assert re.search(r"held +offloaded +how", text)
    assert re.search(r"held now [\d.]+, offloaded [\d.]+", text)
    loss.backward()
    with backfold.Controller(model) as plain:
        model(x)
    assert "offloaded" not in str(plain.report())


def test_gradients_accumulate_over_blocks(device):
    model, x = perceptron(device)
    found = []
    for offload in (False, True):
        fold = backfold.Controller(model, adaptive=False, offload=offload)
        model.zero_grad()
        for _ in range(2):
            losses = []
            for part in x.chunk(2):
                with fold:
                    losses.append(model(part).square().mean())
            for loss in losses:  # both graphs at once, in the order of forward
                loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert same(*found)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_graph_that_is_kept_is_read_again(device, bits):
    model, x = perceptron(device)
    fold = backfold.Controller(model, bits=bits, adaptive=False, offload=True)
    with fold:
        loss = model(x).square().mean()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for _ in range(3):
        assert same(first, torch.autograd.grad(loss, parameters, retain_graph=True))
    assert same(first, torch.autograd.grad(loss, parameters))


def test_double_backward(device):
    model, x = perceptron(device)
    x.requires_grad_()
    found = []
    for offload in (None, False, True):
        fold = offload is not None and backfold.Controller(model, bits=None, offload=offload)
        if fold:
            with fold:
                loss = model(x).square().mean()
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                penalty = slope.square().sum()
        else:
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            penalty = slope.square().sum()
        found.append(torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True))
        found[-1] = [one for one in found[-1] if one is not None]
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_a_change_in_place_is_found(device):
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    fold = backfold.Controller(bits=None, offload=True)
    with fold:
        y = torch.exp(x)
        y.mul_(2)
        loss = y.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_exact_memory_that_serves_a_rounded_reader_stays(device):
    # GELU has a packet, and is given its input itself while the logarithm's graph keeps that.
    x = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).add_(1).to(device)
    x.requires_grad_()
    found = []
    for offload in (False, True):
        fold = backfold.Controller(bits=4, adaptive=False, derive=False, offload=offload)
        with fold:
            y = x * 3
            loss = nn.functional.gelu(y).sum() + torch.log(y).sum()
        del y
        rows = {row["op"]: row for row in settled(fold)["sites"]}
        found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
    assert torch.equal(*found)  # false if the input leaves
    assert rows["aten::gelu"]["offloaded_bytes"] > 0
    assert rows["aten::log"]["offloaded_bytes"] == 0


def test_memory_of_others_stays_where_it_is():
    np = pytest.importorskip("numpy")
    array = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    weight = torch.ones(ROWS, WIDTH, requires_grad=True)
    fold = backfold.Controller(bits=None, offload=True)
    with fold:
        loss = (torch.from_numpy(array) * weight).sum()
    assert settled(fold)["offloaded_bytes"] == 0  # dropping the tensor would free nothing
    loss.backward()
    assert torch.equal(weight.grad, torch.from_numpy(array))


@pytest.mark.parametrize("build", MODELS)
def test_steps_that_are_aborted_leave_nothing(deterministic, build):
    gc.collect()
    before, threads_before = mapped_bytes(), threads()
    model, x = build()
    fold = backfold.Controller(model, adaptive=False, offload=True)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    layers = [module for module in model.modules() if not list(module.children())]
    sizes = []
    for i in range(12):
        hook = layers[-1 - i % 3].register_forward_hook(stop)
        with pytest.raises(Stop), fold:
            model(x)
        hook.remove()
        with fold:
            model(x)  # backward never runs
        sizes.append(mapped_bytes())
    assert max(sizes[2:]) <= 2 * sizes[1] + (4 << 20)
    continue_training(model, fold, x, 2)
    del fold
    gc.collect()
    assert mapped_bytes() == before
    assert threads() <= threads_before + 1  # torch's own may have begun meanwhile
    # What they rounded depends on how many steps there were, and on nothing else of them.
    plain, _ = build()
    fold = backfold.Controller(plain, adaptive=False)
    for _ in range(24):
        with fold:
            plain(x)
    continue_training(plain, fold, x, 2)
    assert same(list(model.parameters()), list(plain.parameters()))


def test_a_thousand_aborted_steps_leave_nothing():
    x = torch.randn(ROWS, 128, requires_grad=True)
    fold = backfold.Controller(bits=None, derive=False, offload=True)
    graphs, sizes, counts = [], set(), set()
    for i in range(1000):
        try:
            with fold:
                graphs.append(torch.tanh(torch.tanh(torch.tanh(x))))
                if i % 2:
                    raise KeyError
        except KeyError:
            pass
        if i > 20:
            sizes.add(mapped_bytes())
            counts.add(threads())
        graphs.clear()
    assert max(sizes) <= 8 << 20  # 384 MiB were sent
    assert max(counts) - min(counts) <= 1
    with fold:
        loss = torch.tanh(torch.tanh(x)).sum()
    loss.backward()
    wanted = torch.autograd.grad(torch.tanh(torch.tanh(x)).sum(), x)[0]
    assert torch.equal(x.grad, wanted)


def test_an_exception_in_backward_leaves_the_next_step_alone():
    model, x = perceptron()
    fold = backfold.Controller(model, bits=None, offload=True)

    def fail(_):
        raise KeyError("backward")

    for _ in range(3):
        with fold:
            hidden = model[:6](x)
            hidden.register_hook(fail)
            loss = model[6:](hidden).square().mean()
        with pytest.raises(KeyError, match="backward"):
            loss.backward()
        del loss, hidden
    model.zero_grad()
    with fold:
        loss = model(x).square().mean()
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    assert same(found, [parameter.grad for parameter in model.parameters()])


FULL_DISK = """
import resource, sys, warnings
sys.path.insert(0, {folder!r})
import torch, backfold
from test_offload import perceptron, train, same, settled
torch.set_num_threads(1)
here, _ = train(perceptron, "cpu", {{"bits": None, "derive": False}})
limit = {limit}
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    away, fold = train(perceptron, "cpu", {{"bits": None, "derive": False, "offload": True}})
told = [str(one.message) for one in caught if "could not be offloaded" in str(one.message)]
assert len(told) == 1 and "stay where they are" in told[0], caught
assert same(away, here)
report = settled(fold)
assert report["offloaded_bytes"] == 0 and report["held_bytes"] > 0, report
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
model, x = perceptron()
with fold:
    loss = model(x).square().mean()
assert settled(fold)["offloaded_bytes"] > 0
loss.backward()
"""


@pytest.mark.parametrize("limit", [0, 100_000])
def test_on_a_full_disk_everything_stays(limit):
    code = FULL_DISK.format(folder=os.path.dirname(__file__), limit=limit)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_two_controllers_and_two_threads():
    builders = (perceptron, convolutions)
    wanted = [train(build, "cpu", {"adaptive": False})[0] for build in builders]
    models = [build() for build in builders]

    def run(model, x):
        torch.set_num_threads(1)
        fold = backfold.Controller(model, adaptive=False, offload=True)
        continue_training(model, fold, x, 4)

    both = [threading.Thread(target=run, args=one) for one in models]
    for one in both:
        one.start()
    for one in both:
        one.join()
    for (model, _), parameters in zip(models, wanted, strict=True):
        assert same(list(model.parameters()), parameters)


FORKING = """
import os, sys
sys.path.insert(0, {folder!r})
import torch, backfold
from test_offload import perceptron, train, same, settled, continue_training
torch.set_num_threads(1)
wanted, _ = train(perceptron, "cpu", {{"adaptive": False}}, 1)
model, x = perceptron()
fold = backfold.Controller(model, adaptive=False, offload=True)
with fold:
    loss = model(x).square().mean()
settled(fold)
child = os.fork()
if child == 0:
    try:
        loss.backward()
        os._exit(1)
    except RuntimeError as error:
        if "only the process that ran forward" not in str(error):
            os._exit(2)
    del loss
    model.zero_grad()
    with fold:  # goes on with room and a thread of its own
        again = model(x).square().mean()
    if settled(fold)["offloaded_bytes"] == 0:
        os._exit(3)
    again.backward()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
loss.backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.05 * parameter.grad
assert same(list(model.parameters()), wanted)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch with a GPU may not fork")
def test_a_forked_process_is_told_and_has_its_own():
    code = FORKING.format(folder=os.path.dirname(__file__))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_copies_of_a_controller_offload_as_well():
    model, x = perceptron()
    fold = backfold.Controller(model, adaptive=False, offload=True)
    continue_training(model, fold, x, 1)
    _, deep = copy.deepcopy((model, fold))
    copied, pickled = pickle.loads(pickle.dumps((model, fold)))
    for one in (deep, pickled):
        with one:
            loss = copied(x).square().mean()
        assert settled(one)["offloaded_bytes"] > 0
        loss.backward()


def test_a_run_that_is_resumed_is_bitwise_the_same():
    whole, _ = train(perceptron, "cpu", {"bits": 3, "probe_steps": (2,), "offload": True}, 6)
    model, x = perceptron()
    first = backfold.Controller(model, bits=3, probe_steps=(2,), offload=True)
    continue_training(model, first, x, 3)
    second = backfold.Controller(model, bits=3, probe_steps=(2,), offload=True)
    second.load_state_dict(first.state_dict())
    continue_training(model, second, x, 3)
    assert same(whole, list(model.parameters()))


@pytest.mark.parametrize("value", [1, 0, "yes", 0.5])
def test_offload_is_true_false_or_none(value):
    with pytest.raises(
        TypeError, match="offload must be True, False or None, got " + re.escape(repr(value))
    ):
        backfold.Controller(offload=value)


@pytest.mark.parametrize(
    ("level", "without"), [("L3", "L2"), ("paper-L2", "paper-L1"), ("actnn-L4", "actnn-L3")]
)
def test_levels_with_swap_are_the_same_without_it(device, deterministic, level, without):
    swapped, fold = train(convolutions, device, {"level": level, "probe_steps": (2,)})
    assert offloads(fold, convolutions, device)
    assert same(swapped, train(convolutions, device, {"level": without, "probe_steps": (2,)})[0])
