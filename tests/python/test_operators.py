# SPDX-License-Identifier: Apache-2.0
"""torch's own operator samples, folded.

For each operator that has a gradient: gradients with exact folding are bitwise those of plain
autograd, and gradients at 4 bits have the right geometry and are finite wherever plain ones are.
A fixed tenth of the samples runs by default, and the first of each operator and type;
``pytest tests/python/test_operators.py --all-samples`` runs them all.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import sys
import types
import unittest
import zlib
from collections.abc import Callable

import backfold
import pytest
import torch
from conftest import OPERATOR_TALLY
from torch.utils._pytree import tree_flatten, tree_unflatten


def load_operators():
    """torch's table of operators.

    Its module imports expecttest for assertions that are not used here. If that package is missing,
    an empty class stands in for it during the import and is removed again.
    """
    stand_in = importlib.util.find_spec("expecttest") is None
    if stand_in:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        if stand_in:
            del sys.modules["expecttest"]
    return op_db


# Complex tensors are passed through; one such type shows that they are.
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]

# Operators whose plain gradients differ from one run to the next, so that nothing can be compared.
EXCLUDED = {}

OPERATORS = sorted(
    (op for op in load_operators() if op.supports_autograd and op.full_name not in EXCLUDED),
    key=lambda op: op.full_name,
)
CHUNKS = [OPERATORS[len(OPERATORS) * i // 27 : len(OPERATORS) * (i + 1) // 27] for i in range(27)]

# Kinds of sites that keep the tensor itself, or have no packet of their own.
NOT_FOLDED = {"passed", "parameter", "alive", "raw", "shared"}


@dataclasses.dataclass
class Case:
    """One call of an operator and its gradients in plain autograd."""

    op: object
    sample: object
    seed: int
    plain: list[torch.Tensor | None] | None = None
    after: Callable[[torch.Tensor], torch.Tensor] | None = None  # what is called with each result

    def arguments(self) -> tuple[list, object]:
        return tree_flatten((self.sample.input, self.sample.args, self.sample.kwargs))

    def results(self) -> list[torch.Tensor]:
        values, structure = self.arguments()
        # Samples are leaves and alive in backward, so nothing would be folded. Only copies of the
        # results are returned, so that the results themselves are freed too.
        values = [value.clone() if differentiable(value) else value for value in values]
        first, args, kwargs = tree_unflatten(values, structure)
        out = self.sample.output_process_fn_grad(self.op(first, *args, **kwargs))
        found = [value for value in tree_flatten(out)[0] if differentiable(value)]
        if self.after is not None:
            found = [self.after(value) for value in found]
        return [value.clone() for value in found]

    def gradients(self, fold) -> list[torch.Tensor | None]:
        """Gradients of all inputs when the operator runs under `fold`."""
        leaves = [value for value in self.arguments()[0] if differentiable(value)]
        torch.manual_seed(self.seed)  # some operators draw
        with fold:
            results = self.results()
        generator = torch.Generator().manual_seed(self.seed)
        weights = [
            torch.randn(result.shape, dtype=result.dtype, generator=generator).to(result.device)
            for result in results
        ]
        if not results or not leaves:
            return []
        torch.manual_seed(self.seed)
        found = torch.autograd.grad(results, leaves, weights, allow_unused=True)
        return [g.to_dense() if g is not None and g.layout != torch.strided else g for g in found]


def differentiable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.resolve_conj().resolve_neg() for x in (a, b))
    a, b = (x.clone(memory_format=torch.contiguous_format).reshape(-1) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def as_finite(plain: torch.Tensor, folded: torch.Tensor) -> bool:
    return not (plain.isfinite() & ~folded.isfinite()).any()


def nearly(plain: torch.Tensor, folded: torch.Tensor) -> bool:
    """Equal up to the order of additions, whose error is relative to the terms."""
    rough = 1e-2 if plain.dtype in (torch.bfloat16, torch.float16) else 1e-4
    largest = plain.abs().nan_to_num(0, 0, 0).max().item() if plain.numel() else 0.0
    return torch.allclose(plain, folded, rtol=rough, atol=rough * max(largest, 1), equal_nan=True)


def geometry(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)


def differences(plain: list, folded: list, holds) -> list[str]:
    """What is wrong with folded gradients. `holds` is same_bits, nearly or as_finite."""
    found = []
    for i, (a, b) in enumerate(zip(plain, folded, strict=True)):
        if (a is None) != (b is None):
            found.append(f"gradient {i} is {a}, folded it is {b}")
        elif a is not None and geometry(a) != geometry(b):
            found.append(f"gradient {i} has {geometry(a)}, folded it has {geometry(b)}")
        elif a is not None and not holds(a, b):
            found.append(f"gradient {i} fails {holds.__name__}")
    return found


def cases(op, device: str, dtype: torch.dtype, every: bool) -> list[Case]:
    """Samples of an operator, all or a fixed tenth of them, each seeded with its number."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs(device, dtype, requires_grad=True))
    if every:
        return [Case(op, sample, i) for i, sample in enumerate(samples)]
    start = zlib.crc32(f"{op.full_name} {dtype}".encode()) % 10
    chosen = {*range(start, len(samples), 10), *range(min(1, len(samples)))}
    return [Case(op, samples[i], i) for i in sorted(chosen)]


def varies(case: Case) -> bool:
    """Whether plain gradients differ from run to run, as they do where CUDA adds atomically: torch
    says so of most such operators, the others are tried."""
    plain = contextlib.nullcontext()
    torch.use_deterministic_algorithms(True)
    try:
        case.gradients(plain)
    except RuntimeError as error:
        if "does not have a deterministic implementation" in str(error):
            return True
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
    return any(differences(case.plain, case.gradients(plain), same_bits) for _ in range(5))


def wrong_by_itself(case: Case) -> bool:
    """Whether plain gradients on a GPU are not those of the CPU: torch's kernel reads or writes
    where it should not (reflection with a negative padding), and what it finds there varies."""
    values, structure = case.arguments()
    moved = [
        v.detach().cpu().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for v in values
    ]
    first, args, kwargs = tree_unflatten(moved, structure)
    sample = copy.copy(case.sample)
    sample.input, sample.args, sample.kwargs = first, args, kwargs
    on_cpu = dataclasses.replace(case, sample=sample).gradients(contextlib.nullcontext())
    return not all(
        nearly(a.cpu(), b) for a, b in zip(case.plain, on_cpu, strict=True) if a is not None
    )


def problems(case: Case, fold: backfold.Controller, holds, tally) -> list[str]:
    try:
        folded = case.gradients(fold)
        found = differences(case.plain, folded, holds)
        if found and holds is same_bits and varies(case):
            tally["samples whose plain gradients differ from run to run"] += 1
            found = differences(case.plain, folded, nearly)
        if found and holds is same_bits and wrong_by_itself(case):
            tally["samples whose plain gradients are not those of the CPU"] += 1
            return []
        return found
    except Exception as error:  # one failure must not hide those of the other samples
        return [f"{type(error).__name__}: {error}"]


def tensors_folded(fold: backfold.Controller) -> int:
    sites = fold.report().to_dict()["sites"]
    return sum(site["saves"] for site in sites if site["kind"] not in NOT_FOLDED)


@pytest.mark.parametrize(
    "operators", CHUNKS, ids=lambda ops: f"{ops[0].full_name}..{ops[-1].full_name}"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("deterministic", "one_thread", "quick_seeds")
def test_gradients_of_operators(device, operators, request):
    every = request.config.getoption("--all-samples")
    tally = request.config.stash[OPERATOR_TALLY]
    wrong, folded = [], 0
    for op in operators:
        tally[f"operators on {device}"] += 1
        for dtype in (dtype for dtype in DTYPES if dtype in op.supported_backward_dtypes(device)):
            # One controller for all samples: what it learns from one must not hurt the next.
            exact = backfold.Controller(bits=None, min_bytes=0)
            # Probes accompany only one of the types; with all of them they would take minutes.
            adaptive = dtype is torch.float32
            lossy = backfold.Controller(bits=4, adaptive=adaptive, min_bytes=0)
            for case in cases(op, device, dtype, every):
                try:
                    case.plain = case.gradients(contextlib.nullcontext())
                except Exception:
                    tally["samples that plain autograd refuses"] += 1
                    continue
                tally["samples"] += 1
                for fold, holds in ((exact, same_bits), (lossy, as_finite)):
                    steps = fold.steps
                    where = f"{op.full_name} {dtype} sample {case.seed}"
                    found = problems(case, fold, holds, tally)
                    wrong += [f"{where}: {problem}" for problem in found]
                    if fold.steps > steps:
                        folded += tensors_folded(fold)
    tally["tensors folded"] += folded
    assert not wrong, "\n".join([f"{len(wrong)} differences", *wrong[:40]])
    assert folded > 0  # a fold that keeps every tensor would pass all checks above
