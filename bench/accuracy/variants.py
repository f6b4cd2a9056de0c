# SPDX-License-Identifier: Apache-2.0
"""Variants of a training run, by name: which saved tensors are folded, and how.

plain          nothing is folded
exact          bits=None: only what stays exact is folded
fixed-N        one width of N bits everywhere
adaptive-N     N bits on average, by a plan made during training; N need not be whole
ratio-R        the same, with 1/R of the bytes that autograd alone would hold
pool-N         averages of N x N positions for convolutions, everything else exact
pool-N+B       the same, with a residual of B bits
project-R+B    inputs of linear layers projected to 1/R of their width, in B bits, the rest exact
a level        of backfold.Controller: actnn-L1 to actnn-L3, pooled, division, mesa, exact-project
stored-V       variant V with every saved tensor stored and none derived
"""

import argparse
import contextlib
import re

import backfold
import torch
from backfold import codecs

LEVELS = ["actnn-L1", "actnn-L2", "actnn-L3", "pooled", "division", "mesa", "exact-project"]
FORMS = {
    "plain": r"plain",
    "exact": r"exact",
    "fixed": r"fixed-(\d+)",
    "adaptive": r"adaptive-(\d+(?:\.\d+)?)",
    "ratio": r"ratio-(\d+(?:\.\d+)?)",
    "pool": r"pool-(\d+)(?:\+(\d+))?",
    "project": r"project-(\d+)\+(\d+)",
}
DEFAULT = ["plain", "fixed-4", "fixed-2", "adaptive-4", "adaptive-2", "adaptive-1.5"]


def options(name: str) -> dict:
    """The Controller arguments that a variant stands for; plain has none."""
    if name.startswith("stored-") and name != "stored-plain":
        return {**options(name.removeprefix("stored-")), "derive": False}
    if name in LEVELS:
        return {"level": name}
    for kind, form in FORMS.items():
        found = re.fullmatch(form, name)
        if not found:
            continue
        if kind == "plain":
            return {}
        if kind == "exact":
            return {"bits": None}
        if kind == "fixed":
            return {"bits": int(found[1]), "adaptive": False}
        if kind == "adaptive":
            return {"bits": float(found[1])}
        if kind == "ratio":
            return {"ratio": float(found[1])}
        if kind == "pool":
            block, bits = int(found[1]), found[2]
            codec = codecs.PoolResidual(block, int(bits)) if bits else codecs.Pool(block)
            return {"bits": None, "codec": {"aten::convolution": codec}}
        codec = codecs.Project(int(found[1]), int(found[2]))
        return {"bits": None, "codec": {torch.nn.Linear: codec}}
    raise ValueError(
        f"{name!r} is none of plain, exact, fixed-N, adaptive-N, ratio-R, pool-N, pool-N+B, "
        f"project-R+B, {', '.join(LEVELS)}, or stored- before one of these"
    )


def variant(text: str) -> str:
    """Checks a value of --variants."""
    try:
        options(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def scope(
    name: str, model: torch.nn.Module, min_bytes: int, seed: int
) -> contextlib.AbstractContextManager:
    """The context in which a variant's forward runs."""
    if name == "plain":
        return contextlib.nullcontext()
    return backfold.Controller(model, min_bytes=min_bytes, seed=seed, **options(name))
