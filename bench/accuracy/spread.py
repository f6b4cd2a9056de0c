#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much of each parameter's gradient energy is variance from step to step.

    bench/accuracy/spread.py --data DIR

Plain training of the character GPT. Where it is nearly all of it, errors weighted by a parameter's
variance are errors weighted by its energy.
"""

import argparse
import itertools
import pathlib
import statistics
import sys

import torch
from text_tasks import GptTask
from torch import Tensor
from tqdm import tqdm
from training import Size

WINDOW, STEPS = 50, 300


def share_of_variance(gradients: list[Tensor]) -> float:
    count = len(gradients)
    energy = statistics.fmean(gradient.square().sum().item() for gradient in gradients)
    of_mean = (sum(gradients) / count).square().sum().item()
    return (energy - of_mean) * count / (count - 1) / energy


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, required=True, metavar="DIR")
    task = GptTask(parser.parse_args().data, "cpu", Size(steps=400, width=64))
    torch.manual_seed(0)
    training = task.training()
    batches = task.batches(0)
    for begin in tqdm(range(0, STEPS, WINDOW)):
        found: dict[str, list[Tensor]] = {}
        for batch in itertools.islice(batches, WINDOW):
            task.loss(training.model, batch).backward()
            for name, parameter in training.model.named_parameters():
                found.setdefault(name, []).append(parameter.grad)
            training.optimizer.step()
            training.schedule.step()
            training.optimizer.zero_grad()  # gradients are made anew, not written over
        shares = {name: share_of_variance(gradients) for name, gradients in found.items()}
        least = min(shares, key=shares.__getitem__)
        median = statistics.median(shares.values())
        print(f"from step {begin}: median {median:.3f}, least {shares[least]:.3f} ({least})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
