#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much of a folded gradient's error is bias, which steps do not average out.

    bench/accuracy/bias.py --data DIR                        the character GPT, at 2 bits
    bench/accuracy/bias.py --data DIR --variants adaptive-4  others; variants.py has their names
    bench/accuracy/bias.py --data DIR --json FILE            also as a file of results

Error and bias are shares of the gradient's energy, the worst bias is one of a parameter's own.

Each variant trains for a while, so that its plan is made. Then all of them fold the same batch at
the weights of plain training, many times over. The bias is the product of the mean errors of two
halves of the draws, which leaves no noise in it on average.
"""

import argparse
import contextlib
import itertools
import pathlib
import sys

import torch
import variants
from text_tasks import GptTask
from torch import Tensor, nn
from tqdm import tqdm
from training import Size, step

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "workloads"))
from results import Results, aligned

STEPS, DRAWS = 120, 96
HEAD = ["", "held / saved", "error", "of it bias", "worst bias"]


def train(task: GptTask, variant: str) -> tuple[nn.Module, contextlib.AbstractContextManager]:
    torch.manual_seed(0)
    training = task.training()
    fold = variants.scope(variant, training.model, task.min_bytes, seed=0)
    for batch in itertools.islice(task.batches(0), STEPS):
        step(task, training, fold, batch)
    return training.model, fold


def gradient(task: GptTask, model: nn.Module, batch: Tensor, scope) -> list[Tensor]:
    torch.manual_seed(5)  # the same dropout
    with scope:
        loss = task.loss(model, batch)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def measure(task: GptTask, variant: str, weights: dict[str, Tensor], batch: Tensor) -> list[str]:
    model, fold = train(task, variant)
    model.load_state_dict(weights)
    plain = gradient(task, model, batch, contextlib.nullcontext())
    means = [[torch.zeros_like(part) for part in plain] for _ in range(2)]
    errors = [0.0] * len(plain)
    for draw in tqdm(range(DRAWS), desc=variant, leave=False):
        for i, part in enumerate(gradient(task, model, batch, fold)):
            error = part - plain[i]
            means[draw % 2][i] += error / (DRAWS / 2)
            errors[i] += error.square().sum().item() / DRAWS
    biases = [(a * b).sum().item() for a, b in zip(*means, strict=True)]
    energies = [part.square().sum().item() for part in plain]
    report = fold.report().to_dict()
    worst = max(bias / energy for bias, energy in zip(biases, energies, strict=True))
    shares = [report["held_bytes"] / report["saved_bytes"]]
    shares += [sum(errors) / sum(energies), sum(biases) / sum(energies), worst]
    return [variant, *(f"{share:.4f}" for share in shares)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--variants",
        nargs="+",
        type=variants.variant,
        default=["fixed-2", "ratio-18.4", "ratio-19.0"],
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    task = GptTask(arguments.data, arguments.device, Size(steps=400, width=64))
    weights = train(task, "plain")[0].state_dict()
    batch = next(task.batches(1))
    results, rows = Results("bench/accuracy/bias.py", arguments.json), []
    for variant in arguments.variants:
        rows.append(measure(task, variant, weights, batch))
        results.add("bias", HEAD, rows)
    print(aligned(HEAD, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
