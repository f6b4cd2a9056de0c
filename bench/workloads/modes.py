# SPDX-License-Identifier: Apache-2.0
"""The ways to run a training step that are compared: what each changes, as a context."""

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator

import torch
import torch._dynamo
import torch._functorch.config
from models import Workload, checkpointed
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# Options of backfold.Controller. The default settings are 4 bits on average, planned.
FOLDED: dict[str, dict] = {
    "exact": {"bits": None},
    "fold8": {"bits": 8},
    "fold": {},
    "fold3": {"bits": 3},
    "fold2": {"bits": 2},
    "stored": {"derive": False},
    "uniform": {"adaptive": False},
    "offload": {"offload": True},
    "exact_offload": {"bits": None, "offload": True},
}
BUDGET = 0.5  # of what a compiled graph would save
PRODUCTS = [  # what selective checkpoints keep: the operators that take the time
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
]


class Other(typing.NamedTuple):
    """A way without Backfold."""

    around: Callable[[Workload], contextlib.AbstractContextManager]  # all of its steps
    forward: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    compiles: bool = False
    slow: bool = False  # takes many times plain's time: two steps are enough


def nothing(_workload: Workload) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def selective(workload: Workload) -> contextlib.AbstractContextManager:
    """Checkpoints of every block that run everything again but the products."""
    kept = [getattr(torch.ops.aten, name).default for name in PRODUCTS]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    return checkpointed(workload, context_fn=contexts)


@contextlib.contextmanager
def compiled(workload: Workload, budget: float = 1.0) -> Iterator[None]:
    """The model under torch.compile, with torch's budget for what its graphs save."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        workload.model.compile()
        try:
            yield
        finally:
            workload.model._compiled_call_impl = None
            torch._dynamo.reset()


def save_on_cpu() -> contextlib.AbstractContextManager:
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


OTHERS: dict[str, Other] = {
    "checkpoint": Other(checkpointed),
    "selective": Other(selective),
    "save_on_cpu": Other(nothing, save_on_cpu, slow=True),
    "compile": Other(compiled, compiles=True),
    "compile_budget": Other(functools.partial(compiled, budget=BUDGET), compiles=True),
}
NEED_BLOCKS = ("checkpoint", "selective")
MODES = [*FOLDED, *OTHERS]
ALL = [mode for mode in MODES if mode not in ("stored", "uniform", "exact_offload")]
