# SPDX-License-Identifier: Apache-2.0
"""Models of timm and torchvision, attached, and the example that uses timm.

They run in one process of their own: scripts/requirements-zoo.txt says why torchvision needs help.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import runpy
import subprocess
import sys

import backfold
import pytest
import torch
from test_derive_models import check_smaller
from test_examples import EXAMPLES, ROOT, held
from torch.nn import functional

STEPS, SIZE, CLASSES = 4, 64, 10
# timm's own, for tests: a vision transformer, and networks that convolve.
NAMES = {"test_vit": {"img_size": SIZE}, "test_convnext2": {}, "test_resnet": {}}
RESNETS = ["timm", "torchvision"]


def trained(name: str, bits) -> tuple[list[float], list[torch.Tensor], float]:
    """Losses and weights after a few steps, and the bytes held of those that were saved."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, **NAMES[name]).train()
    fold = None
    if bits != "plain":
        fold = backfold.attach(model, bits=bits, min_bytes=0, probe_steps=(2,), probe_every=None)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(STEPS):
        images, labels = torch.randn(8, 3, SIZE, SIZE), torch.randint(CLASSES, (8,))
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    share = 1.0
    if fold is not None:
        assert fold.steps == STEPS
        report = fold.report().to_dict()
        share = report["held_bytes"] / report["unique_bytes"]
    return losses, [parameter.detach() for parameter in model.parameters()], share


def compared(name: str) -> dict:
    (losses, weights, _), (exact_losses, exact, exact_share), (folded, _, share) = (
        trained(name, bits) for bits in ("plain", None, 4)
    )
    pairs = zip(weights, exact, strict=True)
    same = losses == exact_losses and all(torch.equal(a, b) for a, b in pairs)
    return {"same": same, "losses": folded, "shares": [exact_share, share]}


def resnet18(library: str) -> None:
    """Derives, and trains with plain's bits."""
    import timm
    import torchvision

    torch.manual_seed(0)
    if library == "timm":
        model = timm.create_model("resnet18", pretrained=False, num_classes=CLASSES)
    else:
        model = torchvision.models.resnet18(weights=None, num_classes=CLASSES)
    images = torch.randn(2, 3, SIZE, SIZE)
    check_smaller(model.train(), lambda: model(images))


def example() -> str:
    sys.argv = ["timm_vit.py", "--steps", "2"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    return printed.getvalue()


def everything() -> dict:
    torch.set_num_threads(1)
    for library in RESNETS:
        resnet18(library)
    return {"example": example(), **{name: compared(name) for name in NAMES}}


@pytest.fixture(scope="module")
def found() -> dict:
    if not (ROOT / "build" / "zoo" / "timm").is_dir():
        pytest.importorskip("timm")
    folders = [str(ROOT / "bench" / "zoo"), str(pathlib.Path(__file__).parent)]
    program = (
        f"import sys; sys.path[:0] = {folders!r}\n"
        "from vision_libraries import find_vision_libraries\n"
        "find_vision_libraries()\n"
        "import json, test_vision\n"
        "print(json.dumps(test_vision.everything()))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_attached_models_train(found, name):
    one = found[name]
    assert one["same"], "bits=None is not plain"
    assert len(one["losses"]) == STEPS and all(map(math.isfinite, one["losses"]))
    exact, folded = one["shares"]
    assert folded < exact / 3 < exact < 0.8


def test_the_example_of_timm(found):
    assert held(found["example"]) < 0.15
    assert "the average is right on" in found["example"]
