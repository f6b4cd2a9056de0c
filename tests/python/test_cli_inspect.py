# SPDX-License-Identifier: Apache-2.0
"""backfold inspect: scripts that are watched while they train, and what is tried on them."""

import json
import pathlib
import textwrap

import backfold
import pytest
import torch
from backfold.cli import _watch, main
from click.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")

LOOP = """
    import argparse, pathlib
    import torch
    from torch import nn
    from sibling import batch

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, required=True)
        parser.add_argument("--log", type=pathlib.Path, required=True)
        options = parser.parse_args()
        torch.manual_seed(0)
        width = options.width
        model = nn.Sequential(
            *(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU()),
            *(nn.Linear(width, 64), nn.Tanh()),
        )
        optimizer, criterion = torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss()
        steps = 0
        try:
            while True:
                x, y = batch()
                loss = criterion(model(x).exp(), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
                print("step", steps)
        except Exception:
            options.log.write_text("caught")
        finally:
            with options.log.open("a") as log:
                log.write(f"stopped after {steps}")

    if __name__ == "__main__":
        main()
"""
SIBLING = """
    import torch

    def batch():
        return torch.randn(256, 64), torch.randn(256, 64)
"""


@pytest.fixture
def script(tmp_path):
    """Writes a program, and returns its path."""

    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def invoke(*arguments: str):
    originals = torch.autograd.backward, torch.autograd.grad
    result = CliRunner().invoke(main, ["inspect", *arguments])
    assert (torch.autograd.backward, torch.autograd.grad) == originals
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return result


def found_by(*arguments: str) -> dict:
    result = invoke("--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def observed(script: str, *options: str) -> dict:
    return found_by("--no-trials", *options, script)


def kept(found: dict) -> dict[str, int]:
    """Bytes by module."""
    sums: dict[str, int] = {}
    for place in found["places"]:
        sums[place["module"]] = sums.get(place["module"], 0) + place["kept_bytes"]
    return sums


@pytest.fixture
def loop(script, tmp_path) -> list[str]:
    script(SIBLING, "sibling.py")
    return [script(LOOP), "--width", "512", "--log", str(tmp_path / "log.txt")]


def test_a_plain_loop_is_stopped_after_its_steps_and_each_remedy_is_measured(loop, tmp_path):
    found = found_by(*loop)
    assert (tmp_path / "log.txt").read_text() == "stopped after 2"  # inside of the third
    assert found["steps"] == 3 and found["steps_are"] == "optimizer steps"
    hidden, small = 256 * 512 * 4, 256 * 64 * 4
    by_module = kept(found)
    assert by_module["1"] == hidden and by_module["2"] == hidden  # GELU, and the next layer
    assert by_module["(outside of modules)"] == small  # exp
    assert found["outside_bytes"] == small
    remedies = {one["remedy"]: one for one in found["remedies"]}
    plain = remedies["plain"]
    # The script has its batch anyway; the result of tanh stays alive as the model's output.
    assert plain["held_bytes"] == pytest.approx(4 * hidden + small, rel=0.1)
    for name, most in (("exact", 0.6), ("8 bits", 0.2), ("4 bits", 0.1), ("2 bits", 0.08)):
        assert 0 < remedies[name]["held_bytes"] < most * plain["held_bytes"], name
        assert remedies[name]["peak_bytes"] < plain["peak_bytes"]
    assert remedies["exact"]["held_bytes"] < remedies["exact, stored"]["held_bytes"]
    assert remedies["4 bits"]["held_bytes"] < remedies["4 bits, stored"]["held_bytes"]
    offload = remedies["offload"]
    assert offload["offloaded_bytes"] > 0.4 * remedies["exact"]["held_bytes"]
    for name in ("plain", "exact", "exact, stored", "offload"):
        assert remedies[name]["gradient_error"] == 0
    errors = [remedies[f"{bits} bits"]["gradient_error"] for bits in (8, 4, 2)]
    assert 1e-5 < errors[0] < errors[1] < errors[2] < 1
    assert "no repeated blocks" in remedies["checkpoint"]["failed"]
    assert all(one["seconds"] > 0 for one in found["remedies"] if not one["failed"])
    gelu = next(place for place in found["places"] if place["module"] == "2")
    assert gelu["how"] == "derived by gelu" and gelu["held_bytes"]["4 bits"] == 0


def test_tables_name_places_and_remedies(loop):
    result = invoke(*loop, "--rows")  # an argument of the script, which refuses it
    assert result.exit_code == 2 and "ended with exit code 2" in result.output
    result = invoke("--steps", "2", "--rows", "2", *loop)
    assert result.exit_code == 0, result.output
    for words in ("step 1", "2 steps", "gelu", "other places", "derived by gelu", "checkpoint"):
        assert words in result.output
    assert "bits=None, offload=True" in result.output


def test_a_saved_report_can_be_shown(loop, tmp_path):
    path = str(tmp_path / "run.json")
    result = invoke("--no-trials", "--save", path, *loop)
    assert result.exit_code == 0 and "remedies" not in result.output
    shown = CliRunner().invoke(main, ["report", path])
    assert shown.exit_code == 0 and "kept by autograd alone" in shown.output
    result = invoke("--no-trials", "--save", str(tmp_path / "no" / "run.json"), *loop)
    assert result.exit_code == 2 and "cannot be written" in result.output


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("print('hello')", 3, "trains nothing"),
        ("import torch\ntorch.nn.Linear(2, 2)(torch.ones(2))", 3, "trains nothing"),
        ("import torch\ntorch.ones(2, requires_grad=True).sum().backward()", 3, "no torch.nn"),
        ("import sys\nsys.exit(5)", 5, "ended with exit code 5"),
        ("import sys\nsys.exit('no data')", 1, "ended with exit code 1"),
        ("def train():\n    raise OSError('no data')\ntrain()", 1, "OSError: no data"),
        ("this is no Python", 1, "SyntaxError"),
    ],
)
def test_scripts_that_do_not_train(script, text, code, words):
    path = script(text)
    result = invoke(path)
    assert result.exit_code == code and words in result.stderr
    if "raise" in text:
        assert f'File "{path}", line 2, in train' in result.stderr
        assert "runpy" not in result.stderr and "_script.py" not in result.stderr


def test_a_file_that_is_not_there_is_refused(tmp_path):
    result = invoke(str(tmp_path / "none.py"))
    assert result.exit_code == 2 and "SCRIPT must be a file" in result.output
    assert invoke("--steps", "1", __file__).exit_code == 2


def test_a_module_with_relative_imports(script, tmp_path, monkeypatch):
    script("", "package/__init__.py")
    script(SIBLING, "package/sibling.py")
    script(LOOP.replace("from sibling", "from .sibling"), "package/train.py")
    monkeypatch.chdir(tmp_path)
    options = ["--width", "64", "--log", str(tmp_path / "log.txt")]
    found = found_by("--no-trials", "-m", "package.train", *options)
    assert found["steps"] == 3


def test_steps_by_hand_are_backward_passes(script):
    path = script("""
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh())
        for _ in range(5):
            loss = model(torch.randn(64, 32)).square().mean()
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters()))
            ):
                parameter.data -= 0.1 * gradient
    """)
    found = observed(path)
    assert found["steps"] == 5 and found["steps_are"] == "backward passes"
    assert found["calls_run_again"] == 1
    endless = script(pathlib.Path(path).read_text().replace("range(5)", "iter(int, 1)"))
    assert observed(endless)["steps"] == _watch.LONGEST_ACCUMULATION


def test_a_script_that_ends_before_its_steps_are_done(script):
    text = """
        import torch
        model = torch.nn.Linear(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range({steps}):
            model(torch.randn(64, 32)).square().mean().backward()
            optimizer.step()
    """
    found = found_by("--steps", "9", script(text.format(steps=2)))
    assert found["steps"] == 2 and found["remedies"]
    result = invoke(script(text.format(steps=1)))
    assert result.exit_code == 0 and "No remedy could be tried" in result.output


def test_the_largest_pass_of_two_models_and_accumulated_gradients(script):
    found = observed(
        script("""
        import torch
        from torch import nn
        small, large = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 256)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (small, large)]
        while True:
            for optimizer, rows in zip(optimizers, (4, 64)):
                for _ in range(3):
                    x = torch.randn(rows, 8)
                    (large(small(x)).sin().sum() / 3).backward()
                optimizer.step()
        """)
    )
    assert found["steps"] == 3
    assert kept(found)["(outside of modules)"] == 64 * 256 * 4
    assert {"Sequential.1", "Linear"} <= kept(found).keys()


def test_parts_that_are_called_alone_have_the_paths_of_their_model(script):
    found = observed(
        script("""
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.decoder = nn.Linear(8, 64), nn.Linear(64, 8)

            def encode(self, x):
                return self.encoder(x).tanh()

            def decode(self, z):
                return self.decoder(z)

        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model.decode(model.encode(torch.randn(32, 8))).sum().backward()
            optimizer.step()
        """)
    )
    assert {"encoder", "decoder", "(outside of modules)"} == kept(found).keys()
    assert found["calls_run_again"] == 2


HOOKED = """
    import torch
    from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        {loop}
        optimizer.step()
"""


def test_hooks_of_the_script_around_its_model_hide_it(script):
    loop = "with save_on_cpu(): loss = model(torch.randn(16, 32)).sum()\n        loss.backward()"
    result = invoke(script(HOOKED.format(loop=loop)))
    assert result.exit_code == 3 and "saved-tensor hooks of its own" in result.output


def test_hooks_of_the_script_beside_its_model_are_left_alone(script):
    loop = (
        "y = model(torch.randn(16, 32))\n"
        "        with saved_tensors_hooks(lambda t: t, lambda t: t): y.exp().sum().backward()"
    )
    # Backward begins while the script's hooks are on top: these passes cannot be told apart.
    result = invoke(script(HOOKED.format(loop=loop)))
    assert result.exit_code == 3


def test_autocast_checkpoints_and_batch_norm_are_run_again_as_they_were(script):
    found = found_by(
        "--steps",
        "2",
        script("""
        import torch
        from torch import nn

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

            def forward(self, x, *, scale):
                return x + scale * torch.nn.functional.dropout(self.norm(self.layer(x)).relu(), 0.1)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(3))

            def forward(self, batch):
                x = batch["x"]
                for block in self.blocks:
                    x = block(x, scale=0.5)
                return {"loss": x.float().square().mean(), "x": x}

        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model({"x": torch.randn(256, 64)})["loss"]
            loss.backward()
            optimizer.step()
        """),
    )
    remedies = {one["remedy"]: one for one in found["remedies"]}
    assert not any(one["failed"] for one in remedies.values()), remedies
    assert remedies["checkpoint"]["how"] == "torch.utils.checkpoint around each of 3 Block"
    assert remedies["checkpoint"]["gradient_error"] == remedies["exact"]["gradient_error"] == 0
    assert remedies["checkpoint"]["held_bytes"] < 0.7 * remedies["plain"]["held_bytes"]
    assert "blocks.*.norm" in kept(found) and "(model)" in kept(found)
    read = backfold.Report.from_json(json.dumps(found["report"])).to_dict()
    assert read["held_bytes"] == found["report"]["held_bytes"] > 0


def test_graphs_of_torch_geometric(script):
    found = found_by(
        "--steps",
        "2",
        script("""
        import torch
        from torch_geometric.data import Data
        from torch_geometric.nn import GAE, GCNConv

        class Encoder(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv1, self.conv2 = GCNConv(16, 32), GCNConv(32, 8)

            def forward(self, x, edge_index):
                return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

        data = Data(x=torch.randn(200, 16), edge_index=torch.randint(200, (2, 1000)))
        model = GAE(Encoder())
        optimizer = torch.optim.Adam(model.parameters())
        while True:
            optimizer.zero_grad()
            z = model.encode(data.x, data.edge_index)
            model.recon_loss(z, data.edge_index).backward()
            optimizer.step()
        """),
    )
    remedies = {one["remedy"]: one for one in found["remedies"]}
    assert not any(one["failed"] for one in remedies.values()), remedies
    assert remedies["exact"]["held_bytes"] < remedies["plain"]["held_bytes"]
    assert remedies["4 bits"]["gradient_error"] < 0.5


def test_the_trainer_of_transformers(script, tmp_path):
    pytest.importorskip("accelerate")
    found = found_by(
        "--steps",
        "2",
        script(f"""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
        config.bos_token_id = config.eos_token_id = 0
        words = torch.randint(64, (64, 32))
        data = [{{"input_ids": one, "labels": one}} for one in words]
        options = TrainingArguments(
            {str(tmp_path)!r}, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            use_cpu=True, disable_tqdm=True, report_to=[],
        )
        Trainer(GPT2LMHeadModel(config), options, train_dataset=data).train()
        """),
    )
    remedies = {one["remedy"]: one for one in found["remedies"]}
    assert not any(one["failed"] for one in remedies.values()), remedies
    assert "checkpointing_enable()" in remedies["checkpoint"]["how"]
    assert remedies["checkpoint"]["gradient_error"] == remedies["exact"]["gradient_error"] == 0
    assert "transformer.h.*.mlp.act" in kept(found)
