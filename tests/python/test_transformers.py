# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face with the callback, accelerate, and PEFT's LoRA."""

import importlib
import json
import sys
import warnings

import backfold
import pytest
import torch

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from backfold._page._library import compressed_charts  # noqa: E402
from backfold.transformers import FoldCallback  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

OPTIONS = {"bits": 3.5, "min_bytes": 0, "probe_steps": (2, 4), "probe_every": None}
STEPS = 6


def llama(**options) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def lora(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def texts(count: int = 64) -> list[dict]:
    ids = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def trainer(folder, model, *callbacks, **arguments) -> transformers.Trainer:
    usual = {"max_steps": STEPS, "per_device_train_batch_size": 8, "logging_steps": 1, "seed": 3}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    chosen = transformers.TrainingArguments(str(folder), **{**usual, **quiet, **arguments})
    return transformers.Trainer(model, chosen, train_dataset=texts(), callbacks=list(callbacks))


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_callback_folds_logs_and_reports(tmp_path):
    model, callback = llama(), FoldCallback(**OPTIONS)
    run = trainer(tmp_path, model, callback)
    run.train()
    fold = callback.fold
    assert fold.steps == STEPS and fold.plan()["sites"]
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    for entry in logged:
        assert 0 < entry["fold_held_mib"] < entry["fold_saved_mib"] / 2
        assert entry["fold_held_mib"] <= entry["fold_peak_mib"] < entry["fold_saved_mib"]
        assert ("fold_allocated_mib" in entry) == (model.device.type == "cuda")
    report = json.loads((tmp_path / "backfold-report.json").read_text())
    assert report["held_bytes"] == logged[-1]["fold_held_mib"] * 2**20
    peak = report["timeline"]["peak"]["folded"]["bytes"]
    assert peak == logged[-1]["fold_peak_mib"] * 2**20
    assert "lm_head" in (tmp_path / "backfold-report.txt").read_text()
    assert "lm_head" in (tmp_path / "backfold-report.html").read_text(encoding="utf-8")
    assert type(model) is transformers.LlamaForCausalLM and backfold.attached(model) is None
    run.evaluate(texts(8))
    assert fold.steps == STEPS


class Tracker(transformers.TrainerCallback):
    """Sends each log somewhere, as those of report_to= do."""

    sent: list[dict]

    def on_log(self, args, state, control, logs=None, **_):
        self.sent.append(dict(logs))


@pytest.mark.parametrize("times", [1, 2])
def test_trackers_see_the_figures(tmp_path, monkeypatch, times):
    # The Trainer puts those of report_to= before the callbacks that it is given.
    monkeypatch.setitem(transformers.integrations.INTEGRATION_TO_CALLBACK, "mine", Tracker)
    monkeypatch.setattr(Tracker, "sent", [], raising=False)
    callback = FoldCallback(**OPTIONS)
    run = trainer(tmp_path, llama(), callback, report_to="mine")
    for _ in range(times):
        run.train()
    sent = [logs for logs in Tracker.sent if "loss" in logs]
    assert len(sent) == times * STEPS
    assert all({"fold_held_mib", "fold_saved_mib", "fold_peak_mib"} <= logs.keys() for logs in sent)
    kept = run.callback_handler.callbacks
    assert kept.count(callback) == 1 and len(kept) == len({type(one) for one in kept})


def test_without_the_page_s_libraries_the_other_reports_are_written(tmp_path, monkeypatch):
    compressed_charts.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    trainer(tmp_path, llama(), FoldCallback(**OPTIONS)).train()
    written = sorted(path.name for path in tmp_path.glob("backfold-report*"))
    assert written == ["backfold-report.json", "backfold-report.txt"]


SETTINGS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("setting", "adapted"),
    [
        ("plain", False),
        ("accumulated", True),
        ("bf16", False),
        ("bf16", True),
        ("checkpointed", True),
    ],
)
def test_what_is_exact_trains_the_same_and_what_is_not_holds_less(tmp_path, setting, adapted):
    found, held = {}, {}
    for bits in ("plain", None, 4):
        model = lora(llama()) if adapted else llama()
        callback = (
            FoldCallback(bits=bits, min_bytes=0, probe_steps=(2,)) if bits != "plain" else None
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="backfold:")
            trainer(tmp_path, model, *filter(None, [callback]), **SETTINGS[setting]).train()
        found[bits] = weights(model)
        if callback is not None:
            assert callback.fold.steps == STEPS * (2 if setting == "accumulated" else 1)
            held[bits] = callback.fold.report().to_dict()["held_bytes"]
    assert same(found["plain"], found[None]) and not same(found["plain"], found[4])
    assert 0 < held[4] < held[None]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("step", "restored"), [(2, False), (4, True)])
def test_a_resumed_run_ends_bit_by_bit_where_an_uninterrupted_one_does(tmp_path, step, restored):
    arguments = {"save_strategy": "steps", "save_steps": step}
    arguments["restore_callback_states_from_checkpoint"] = restored
    first, callback = llama(), FoldCallback(**OPTIONS)
    run = trainer(tmp_path, first, callback, **arguments)
    run.train()
    second, again = llama(), FoldCallback(**OPTIONS)
    resumed = trainer(tmp_path, second, again, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    used = [one for one in resumed.callback_handler.callbacks if isinstance(one, FoldCallback)]
    assert used[0].fold.steps == STEPS and used[0].fold.plan() == callback.fold.plan()
    assert same(weights(first), weights(second))
    for a, b in zip(run.state.log_history[step:], resumed.state.log_history[step:], strict=True):
        assert a.get("fold_held_mib") == b.get("fold_held_mib") and a.get("loss") == b.get("loss")


def test_a_checkpoint_without_the_callback_can_be_resumed_with_it(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, llama(), **arguments).train()
    callback = FoldCallback(**OPTIONS)
    trainer(tmp_path, llama(), callback, **arguments).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    assert callback.fold.steps == 3
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["FoldCallback"]["attributes"]["saved"]["sites"]


def test_a_model_that_is_attached_already_keeps_its_fold(tmp_path):
    model, callback = llama(), FoldCallback()
    fold = backfold.attach(model, **OPTIONS)
    trainer(tmp_path, model, callback).train()
    assert callback.fold is fold is backfold.attached(model) and fold.steps == STEPS
    with pytest.raises(ValueError, match="FoldCallback was given bits, but the model is attached"):
        trainer(tmp_path, model, FoldCallback(bits=2)).train()


def test_a_training_that_failed_can_begin_anew(tmp_path):
    model, callback = llama(), FoldCallback(**OPTIONS)
    run = trainer(tmp_path, model, callback)

    def fails(module, args):
        if callback.fold.steps == 2:
            raise RuntimeError("out of luck")

    handle = model.lm_head.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        run.train()
    handle.remove()
    run.train()
    assert callback.fold.steps == STEPS and backfold.attached(model) is None


def test_a_model_that_is_adapted_later_is_still_folded(tmp_path):
    base = llama()
    fold = backfold.attach(base, **OPTIONS)
    trainer(tmp_path, lora(base), FoldCallback()).train()
    assert fold.steps == STEPS
    assert any("lora_A" in row["module"] for row in fold.report().to_dict()["sites"])


def test_a_model_that_is_never_called_is_told(tmp_path):
    model = llama()
    model.unused = torch.nn.Linear(2, 2)
    backfold.attach(model.unused)
    with pytest.warns(UserWarning, match="no call of the attached model was folded yet"):
        trainer(tmp_path, model, FoldCallback()).train()


@pytest.mark.parametrize(("precision", "first"), [("no", True), ("bf16", True), ("bf16", False)])
def test_accelerate_prepares_an_attached_model(precision, first):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = llama()
    fold = backfold.attach(model, **OPTIONS) if first else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    fold = fold or backfold.attach(prepared, **OPTIONS)
    batch = torch.stack([row["input_ids"] for row in texts(8)])
    for _ in range(5):
        accelerator.backward(prepared(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert fold.steps == 5 and fold.plan()["sites"]
    unwrapped = accelerator.unwrap_model(prepared)
    assert unwrapped is model and backfold.attached(model) is fold
    accelerate.state.AcceleratorState._reset_state(True)


def test_a_saved_model_is_one_of_its_own_class(tmp_path):
    model = llama()
    backfold.attach(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert same(weights(loaded), weights(model))


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_missing_library_names_the_extra(library, monkeypatch):
    for name in (library, f"{library}.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"backfold.{library}", raising=False)
    expected = rf"backfold\.{library} needs {library}, which is not .*'backfold\[{library}\]'"
    with pytest.raises(ImportError, match=expected):
        importlib.import_module(f"backfold.{library}")
