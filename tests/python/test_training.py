# SPDX-License-Identifier: Apache-2.0
"""Training with exact folding is bitwise equal to training without it, over 20 steps.

Compares weights, optimizer state, the generator's state and every logged loss, for each model of a
table and each way to run a step. One wrong bit in one gradient of one step fails.
"""

import contextlib
import copy

import backfold
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_tasks import CLASSES, TASKS, Task

STEPS = 20


class Step:
    """One optimizer step: forward inside the block, backward after it. Subclasses differ."""

    precision: torch.dtype | None = None

    def __init__(self, model, optimizer, device):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.scaler = torch.amp.GradScaler(device, enabled=self.precision == torch.float16)

    def loss(self, batch):
        with torch.autocast(self.device, self.precision, enabled=self.precision is not None):
            scores = self.model(*batch).flatten(0, -2)
            targets = torch.arange(len(scores), device=self.device) % CLASSES
            targets[::3] = -100
            return functional.cross_entropy(scores.float(), targets)

    def __call__(self, fold, batch):
        with fold:
            loss = self.loss(batch)
        self.backward(loss)
        return loss

    def backward(self, loss):
        self.scaler.scale(loss).backward()


class Bfloat16(Step):
    precision = torch.bfloat16


class Float16(Step):
    precision = torch.float16

    def loss(self, batch):
        with torch.backends.mkldnn.flags(enabled=False):  # has no fp16 LSTM on every CPU
            return super().loss(batch)


class BackwardInside(Step):
    def __call__(self, fold, batch):
        with fold:
            loss = self.loss(batch)
            loss.backward()
        return loss


class RetainGraph(Step):
    def backward(self, loss):
        loss.backward(retain_graph=True)
        loss.backward()


class Accumulate(Step):
    def __call__(self, fold, batch):
        losses = []
        for part in range(2):
            with fold:
                losses.append(self.loss([tensor.roll(part, -1) for tensor in batch]))
            losses[-1].backward()
        return sum(losses)


class SeveralForwards(Step):
    def __call__(self, fold, batch):
        with fold:
            losses = [self.loss([tensor.roll(i, -1) for tensor in batch]) for i in range(2)]
        losses[0].backward()
        losses[1].backward()
        return sum(losses)


class Anomaly(Step):
    def __call__(self, fold, batch):
        with torch.autograd.detect_anomaly(check_nan=True):
            return super().__call__(fold, batch)


class GradientPenalty(Step):
    """Double backward: what the first backward saves is folded too."""

    def __call__(self, fold, batch):
        # Neither fused attention nor cuDNN's recurrent layers can be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), fold:
            loss = self.loss(batch)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            loss = loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)
        loss.backward()
        return loss


WAYS = [Step, Bfloat16, Float16, BackwardInside, RetainGraph, Accumulate, SeveralForwards]
WAYS += [Anomaly, GradientPenalty]


def train(task: Task, way: type[Step], device: str, fold_for) -> tuple[dict, object]:
    """Everything a run leaves behind, and the fold it used."""
    torch.manual_seed(7)
    model = task.model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fold = fold_for(model)
    step, rng, losses = way(model, optimizer, device), torch.Generator().manual_seed(1), []
    for number in range(STEPS):
        if task.toggled:
            model.get_submodule(task.toggled).requires_grad_(number // 7 != 1)
        optimizer.zero_grad(set_to_none=True)
        loss = step(fold, [tensor.to(device) for tensor in task.batch(rng)])
        losses.append(loss.detach().clone())
        step.scaler.step(optimizer)
        step.scaler.update()
    left = {
        "losses": losses,
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": optimizer.state_dict()["state"],
        "scaler": step.scaler.state_dict(),
        "generator": torch.get_rng_state(),
        "cuda generator": torch.cuda.get_rng_state() if device == "cuda" else None,
    }
    return left, fold


def refusal(task: Task, way: type[Step], device: str) -> str | None:
    """The error of plain torch if it has no kernels for a low-precision step on this machine.

    A CPU without AVX-512 has none for a bf16 LSTM.
    """
    if way.precision is None:
        return None
    model = task.model().to(device)
    step = way(model, None, device)
    try:
        step(contextlib.nullcontext(), [tensor.to(device) for tensor in task.batch(None)])
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def repeats_itself(task: Task, way: type[Step], device: str, plain: dict) -> bool:
    """Whether plain training ends on the same bits each time, as far as five runs tell.

    On a GPU the double backward of a recurrent layer without cuDNN adds up in any order.
    """
    for _ in range(5):
        again, _ = train(task, way, device, lambda model: contextlib.nullcontext())
        try:
            torch.testing.assert_close(again, plain, rtol=0, atol=0, equal_nan=True)
        except AssertionError:
            return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("deterministic", "one_thread")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", TASKS)
def test_exact_folding_leaves_training_bitwise_as_it_was(device, name, way):
    task = TASKS[name]
    if reason := refusal(task, way, device):
        pytest.skip(f"plain torch cannot run this step here: {reason}")
    plain, _ = train(task, way, device, lambda model: contextlib.nullcontext())
    folded, fold = train(
        task, way, device, lambda model: backfold.Controller(model, bits=None, min_bytes=0)
    )
    try:
        torch.testing.assert_close(folded, plain, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        if not repeats_itself(task, way, device, plain):
            pytest.skip("plain training does not repeat itself bit for bit here")
        raise
    assert fold.steps == STEPS * (2 if way is Accumulate else 1)
    kinds = {site["kind"] for site in fold.report().to_dict()["sites"]}
    assert way is not Step or task.kinds <= kinds  # the test is not empty
