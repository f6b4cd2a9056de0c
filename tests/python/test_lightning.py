# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with the callback."""

import json
import warnings

import backfold
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from backfold.lightning import FoldCallback  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|GPU available|isinstance)"),
]

OPTIONS = {"bits": 3.5, "min_bytes": 0, "probe_steps": (2, 5), "probe_every": None}
BATCHES = 4


class CallsItself(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 8))
        self.losses: list[float] = []

    def forward(self, x):
        return self.net(x)

    def loss(self, y, x):
        loss = functional.cross_entropy(y, x[:, :8].argmax(1))
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class CallsNetwork(CallsItself):
    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[0])


class StepsByHand(CallsItself):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for sign in (1, -1):
            optimizer.zero_grad()
            self.manual_backward(self.loss(self(sign * batch[0]), batch[0]))
            optimizer.step()


def fit(folder, module, *callbacks, epochs=2, resume=None, **options):
    x = torch.randn(BATCHES * 32, 64, generator=torch.Generator().manual_seed(1))
    usual = {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    options = {**usual, **quiet, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        max_epochs=epochs, default_root_dir=folder, callbacks=list(callbacks), **options
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="backfold:")
        trainer.fit(module, DataLoader(TensorDataset(x), 32), ckpt_path=resume)
    return trainer


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("kind", [CallsItself, CallsNetwork])
def test_the_callback_folds_the_step_with_its_loss(tmp_path, kind):
    module, callback = kind(), FoldCallback(**OPTIONS)
    trainer = fit(tmp_path, module, callback)
    fold = callback.fold
    assert fold.steps == 2 * BATCHES and type(module) is kind and not fold.is_attached
    report = json.loads((tmp_path / "backfold-report.json").read_text())
    assert "aten::_log_softmax" in {row["op"] for row in report["sites"]}
    # The probe has run the network again, whoever calls it.
    assert {site["estimate"] for site in fold.plan()["sites"].values()} == {"re-run"}
    assert "net.0" in (tmp_path / "backfold-report.txt").read_text()
    assert "net.0" in (tmp_path / "backfold-report.html").read_text(encoding="utf-8")
    logged = trainer.callback_metrics
    assert 0 < logged["fold_held_mib"] < logged["fold_saved_mib"] / 2
    assert float(logged["fold_held_mib"]) * 2**20 == pytest.approx(report["held_bytes"])
    peak = report["timeline"]["peak"]["folded"]["bytes"]
    assert float(logged["fold_peak_mib"]) * 2**20 == pytest.approx(peak)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str
)
def test_what_is_exact_trains_the_same(tmp_path, options):
    plain, exact, folded = CallsItself(), CallsItself(), CallsItself()
    fit(tmp_path, plain, **options)
    fit(tmp_path, exact, FoldCallback(bits=None, min_bytes=0), **options)
    callback = FoldCallback(**OPTIONS)
    fit(tmp_path, folded, callback, **options)
    assert same(plain, exact) and plain.losses == exact.losses
    assert callback.fold.steps == 2 * BATCHES
    assert not same(plain, folded) and folded.losses[0] == plain.losses[0]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", [CallsItself, CallsNetwork])
def test_a_resumed_run_ends_bit_by_bit_where_an_uninterrupted_one_does(tmp_path, kind):
    first, callback = kind(), FoldCallback(**OPTIONS)
    fit(tmp_path, first, callback, epochs=3)
    half = kind()
    checkpoint = tmp_path / "half.ckpt"
    fit(tmp_path, half, FoldCallback(**OPTIONS), epochs=1).save_checkpoint(checkpoint)
    second, again = kind(), FoldCallback(**OPTIONS)
    fit(tmp_path, second, again, epochs=3, resume=checkpoint)
    assert again.fold.steps == 3 * BATCHES and again.fold.plan() == callback.fold.plan()
    assert same(first, second) and first.losses[BATCHES:] == second.losses


def test_steps_by_hand_are_folded(tmp_path):
    plain, exact, folded = StepsByHand(), StepsByHand(), StepsByHand()
    fit(tmp_path, plain)
    fit(tmp_path, exact, FoldCallback(bits=None, min_bytes=0))
    callback = FoldCallback(**OPTIONS)
    fit(tmp_path, folded, callback)
    assert same(plain, exact) and callback.fold.steps == 2 * BATCHES
    assert callback.fold.report().to_dict()["held_bytes"] > 0


def test_a_module_that_is_attached_already_keeps_its_fold(tmp_path):
    module, callback = CallsNetwork(), FoldCallback()
    fold = backfold.attach(module.net, **OPTIONS)
    fit(tmp_path, module, callback)
    assert callback.fold is fold is backfold.attached(module) and fold.steps == 2 * BATCHES
    with pytest.raises(ValueError, match="FoldCallback was given bits, but the model is attached"):
        fit(tmp_path, module, FoldCallback(bits=2))


def test_an_exception_detaches(tmp_path):
    class Fails(CallsItself):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    module, callback = Fails(), FoldCallback(**OPTIONS)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, module, callback)
    assert type(module) is Fails and callback.fold.steps == 2


def test_a_step_that_torch_compile_replaced_is_refused(tmp_path):
    module = torch.compile(CallsItself(), backend="eager")
    with pytest.raises(ValueError, match=r"compile the networks inside of it instead"):
        fit(tmp_path, module, FoldCallback())


def test_a_network_that_is_compiled_inside_is_folded(tmp_path):
    module, callback = CallsNetwork(), FoldCallback(bits=4, adaptive=False, min_bytes=0)
    module.net = torch.compile(module.net, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        fit(tmp_path, module, callback, epochs=1)
    assert callback.fold.steps == BATCHES
    torch.compiler.reset()
