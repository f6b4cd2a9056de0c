# SPDX-License-Identifier: Apache-2.0
"""An ordinary training loop, with one line added: attach().

    python examples/python/plain_loop.py

The loop does not know that activations are folded. demo.py compares memory, time and accuracy with
and without.
"""

import argparse

import backfold
import torch
from char_gpt import Topics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    task = Topics("cuda" if torch.cuda.is_available() else "cpu")
    model = task.model()
    optimizer = task.optimizer(model)

    fold = backfold.attach(model, bits=4)

    for step in range(steps):
        loss = task.loss(model, task.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(fold.report())


if __name__ == "__main__":
    main()
