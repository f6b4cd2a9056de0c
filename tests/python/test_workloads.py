# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of the models of bench/run h200, at tiny sizes on a CPU.

test_evidence.py has those of the diffusion U-Net, in more modes.
"""

import json

import pytest
from test_evidence import ROOT, run

for _needed in ("tqdm", "transformers", "torch_geometric"):
    pytest.importorskip(_needed)

# bert_eager and gpt2_tf32 differ in attention and precision alone; ResNet-50 and Swin-T stay large.
NAMES = ["bert", "gpt2", "llama", "llama_lora", "mixtral", "gcn"]
OF_TORCHVISION = ["vit_b"]
MODES = ["exact", "fold"]


@pytest.fixture(scope="module")
def folded(tmp_path_factory) -> dict[str, dict]:
    names = [*NAMES, *(OF_TORCHVISION if (ROOT / "build" / "zoo" / "torchvision").is_dir() else [])]
    path = tmp_path_factory.mktemp("steps") / "steps.json"
    options = [*names, "--tiny", "--steps", 1, "--modes", *MODES, "--json", path]
    done = run("bench/workloads/h200.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["name"]: one for one in json.loads(path.read_text())["workloads"]}
    assert list(found) == names
    return found


@pytest.mark.parametrize("name", [*NAMES, *OF_TORCHVISION])
def test_steps_keep_gradients(folded, name):
    if name not in folded:
        pytest.skip("needs `scripts/setup zoo`")
    workload = folded[name]
    assert workload["failed"] == [] and list(workload["modes"]) == ["plain", *MODES]
    assert all(cost["step_ms"] > 0 for cost in workload["modes"].values())
    held = {mode: cost["held_mib"] for mode, cost in workload["modes"].items() if mode != "plain"}
    assert 0 < held["fold"] < held["exact"] / 2
    faith = workload["faith"]
    assert faith["exact"]["gradient_error"] == 0 < faith["fold"]["gradient_error"] < 0.2
    assert faith["fold"]["loss"] == faith["fold"]["plain_loss"]
