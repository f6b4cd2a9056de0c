# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face, accelerate and Lightning, in two processes."""

import math
import os
import pathlib

import pytest
import torch
from processes import returned, run
from test_transformers import llama, texts
from torch import nn
from torch.nn import functional

pytest.importorskip("lightning")

OPTIONS = {"min_bytes": 0, "probe_steps": (2,), "probe_every": None}
STEPS, ROWS = 5, 4
ROWS_OF_BOTH = 2 * STEPS * ROWS  # samplers give each process its own
SAVED = 2  # the step of a checkpoint, when the measurement of its probe is pending
HOWS = ["trainer", "accelerate", "lightning"]
BITS = ["plain", None, 4]


def with_trainer(bits, folder: pathlib.Path, resume: bool = False) -> tuple:
    import transformers
    from backfold.transformers import FoldCallback

    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVED,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    callback = None if bits == "plain" else FoldCallback(bits=bits, **OPTIONS)
    model = llama()
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=texts(ROWS_OF_BOTH),
        callbacks=[callback] if callback else [],
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    assert type(trainer.model_wrapped) is nn.parallel.DistributedDataParallel
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, losses, callback and callback.fold


def with_accelerate(bits, folder: pathlib.Path) -> tuple:
    import accelerate
    import backfold

    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    fold = None if bits == "plain" else backfold.attach(model, bits=bits, **OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(texts(ROWS_OF_BOTH), ROWS)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert type(prepared) is nn.parallel.DistributedDataParallel
    losses = []
    for batch in loader:
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, fold


def with_lightning(bits, folder: pathlib.Path) -> tuple:
    import lightning.pytorch as pl
    from backfold.lightning import FoldCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8))
            self.losses: list[float] = []

        def training_step(self, batch, batch_idx):
            loss = functional.cross_entropy(self.net(batch[0]), batch[0][:, :8].argmax(1))
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    x = torch.randn(2 * STEPS * 32, 64, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 32)
    callback = None if bits == "plain" else FoldCallback(bits=bits, **OPTIONS)
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback] if callback else [],
    )
    trainer.fit(module, loader)
    return module, module.losses, callback and callback.fold


def train_all(rank: int, folder: pathlib.Path) -> dict:
    """By framework and bits: losses, weights, and what the fold says, of one process."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    train = {"trainer": with_trainer, "accelerate": with_accelerate, "lightning": with_lightning}
    found = {(how, bits): made(*train[how](bits, folder / how)) for how in HOWS for bits in BITS}
    found["resumed"] = made(*with_trainer(4, folder / "trainer", resume=True))
    return found


def made(model: nn.Module, losses: list[float], fold) -> tuple:
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    of_fold = fold and (fold.steps, fold.plan(), fold.report().to_dict()["held_bytes"])
    return losses, weights, of_fold


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def trained(folder) -> list[dict]:
    return returned(run(train_all, 2, folder, timeout=120))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("how", HOWS)
def test_what_is_exact_trains_the_same(trained, how):
    for one in trained:
        (losses, weights, _), (exact, exact_weights, fold) = one[how, "plain"], one[how, None]
        assert len(losses) == STEPS and losses == exact and same(weights, exact_weights)
        assert fold[0] == STEPS and fold[2] > 0


@pytest.mark.parametrize("how", HOWS)
def test_processes_plan_together_and_keep_the_same_weights(trained, how):
    first, second = (one[how, 4] for one in trained)
    for losses, weights, _ in (first, second):
        assert len(losses) == STEPS and all(map(math.isfinite, losses))
        assert not same(weights, trained[0][how, "plain"][1])  # it did round
    assert same(first[1], second[1])
    assert first[2][:2] == second[2][:2] and first[2][1]["sites"]
    assert 0 < first[2][2] < trained[0][how, None][2][2] / 2


def test_the_first_process_saves_and_all_resume(trained, folder):
    for one in trained:
        losses, weights, fold = one["trainer", 4]
        resumed_losses, resumed_weights, resumed = one["resumed"]
        assert resumed_losses[-(STEPS - SAVED) :] == losses[SAVED:]
        assert same(resumed_weights, weights) and resumed[:2] == fold[:2]
    for how in ("trainer", "lightning"):
        assert (folder / how / "backfold-report.json").exists()
