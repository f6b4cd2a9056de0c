# SPDX-License-Identifier: Apache-2.0
"""The controller, the main class of the package."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from backfold import _C
from backfold._call_state import undone
from backfold._check import CheckResult, check_gradients
from backfold._graph_borders import close_borders, open_borders
from backfold._graph_hooks import graph_hooks, program_compiles
from backfold._listing import is_sharded, kept_paths, named_tensors, require_kernels
from backfold._module_hooks import cuda_device, module_hooks
from backfold._options import UNSET, Unset, probe_options, target_options
from backfold._policy import menu_of, places, rules_of, warn_of_unmatched
from backfold._probes import Probes
from backfold._processes import Processes, group_of, is_distributed, is_group, is_uneven
from backfold._report import Report
from backfold.codecs import Codec


class Controller:
    """Folds the tensors that autograd saves inside its block.

    Build it once and enter it every step. The forward pass stays exact; what autograd saves inside
    the block is kept in a few bits per element, or exactly if a few bits are enough for that. At
    some steps the controller measures how much error rounding each tensor adds to the gradient, and
    gives more bits to the tensors that need them.

    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
    >>> fold = Controller(model, bits=4)
    >>> with fold:
    ...     loss = model(torch.randn(128, 256)).sum()
    >>> loss.backward()
    >>> fold.steps
    1

    One of `bits`, `ratio`, `budget`, `peak` and `level` sets how much is kept; the default is 4
    bits. ``bits=None`` may be given with `ratio`, `budget` or `peak`, which are then met without
    rounding.

    Args:
        model: its parameters and buffers are never packed, and its module paths name the places
            that save tensors. Its call is recorded at probe steps and run again after backward. It
            may be left out: parameters that require gradients are recognised anyway, and a coarser
            estimate replaces the probe.
        bits: mean width of a code over the elements of lossy tensors, from 1 to 16; headers add
            0.25 bits per element. ``None`` folds only what can be folded exactly: training is then
            bitwise the same (except for a NaN that enters hardtanh or a shrink on the CPU, see
            docs/backward.md).
        ratio: bytes that autograd alone would keep alive / bytes held.
        budget: bytes held on the device at the end of the block, as a number or a string like
            ``"6GiB"``. If steps differ in size, the largest has to meet it. Where bits alone are
            not enough, matrix products, convolutions and attention are run again in backward, or
            bytes are offloaded, whichever takes less time.
        peak: bytes at any moment of a step, in the same way: all that torch allocates on a GPU, on
            a CPU what is held and what is made for the operation that runs. Kept by measurement
            from the third step on.
        level: a level of GACT, ``"L0"`` to ``"L3"``, ``"paper-L0"`` to ``"paper-L2"``, or, for a
            model with checkpoints, ``"paper-CB1"``, ``"paper-CB2"``; of ActNN, ``"actnn-L0"`` to
            ``"actnn-L5"``; or the method of a paper: ``"pooled"``,
            ``"division"``, ``"mesa"``, ``"exact-project"``.
        adaptive: False keeps one width everywhere: 1, 2, 3, 4, 5, 6, 8 or 16 bits.
        plan: widths that an earlier run saved with `save_plan`, as a path or a dict. Nothing is
            measured then, and none of the above is needed.
        codec: how tensors are kept: a codec of `backfold.codecs` for all of them, or a mapping from
            selectors (a pattern of module paths, a class of modules, the name of an operator, a
            dtype, or a `codecs.Where`) to codecs. The first match wins; the plan decides on all
            other tensors.
        menu: codecs that a plan may choose instead of a width if they give less error for their
            bytes: `PoolResidual`, `Project`, `RunningRange`.
        keep: modules whose saved tensors are not folded, as patterns of paths or as instances.
        derive: make tensors again in backward that a cheap operation makes of what is kept anyway,
            instead of keeping them. A level derives nothing: it folds what its paper does.
        offload: True keeps the bytes, folded or not, in pinned host memory, or for a model on the
            CPU in a file in ``TMPDIR``; they come back before backward reads them. None does so
            with what `budget` cannot be kept without, where no products take less time for it, and
            False with nothing.
        defragment: let segments of torch's allocator on GPUs grow and shrink
            (``expandable_segments``), for memory that is nearly full. It holds for the whole
            process, and stays. On a CPU it changes nothing.
        min_bytes: smaller tensors are not folded.
        seed: of stochastic rounding. torch's own generators are never touched.
        probe_steps: steps at which sensitivities are measured, then every `probe_every` steps, and
            whenever tensors appear that the plan does not know.
        probe_fraction: part of the batch that is run again, at most: with more than four rows
            only as many as need no more memory than a folded step.
        replay: False for a model whose call has side effects that must not happen twice.
        sync: under torch.distributed, the processes that plan together: True for those of the
            model's DistributedDataParallel or else all, or a process group. They must enter the
            block equally often with gradients enabled. False lets each process plan on its own.
        on_noise: called every 100 steps with the error that the plan expects / the gradient's own
            variance from step to step. Above 0.1, a warning says which target is enough.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        bits: float | Unset | None = UNSET,
        ratio: float | None = None,
        budget: int | str | None = None,
        peak: int | str | None = None,
        level: str | None = None,
        adaptive: bool = True,
        plan: str | os.PathLike[str] | dict[str, Any] | None = None,
        codec: Codec | Mapping[Any, Codec] | None = None,
        menu: Iterable[Codec] = (),
        keep: Iterable[str | torch.nn.Module] = (),
        derive: bool = True,
        offload: bool | None = None,
        defragment: bool = False,
        min_bytes: int = 16384,
        seed: int = 0,
        probe_steps: Iterable[int] = (2, 100, 300, 1000),
        probe_every: int | None = 1000,
        probe_fraction: float = 0.25,
        replay: bool = True,
        sync: bool | torch.distributed.ProcessGroup = True,
        on_noise: Callable[[float], None] | None = None,
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        for name, value in (("min_bytes", min_bytes), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        for name, value in (("derive", derive), ("defragment", defragment)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if offload is not None and not isinstance(offload, bool):
            raise TypeError(f"offload must be True, False or None, got {offload!r}")
        if not isinstance(sync, bool) and not is_group(sync):
            raise TypeError(f"sync must be True, False or a process group, got {sync!r}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
        if on_noise is not None and not callable(on_noise):
            raise TypeError(f"on_noise must be callable or None, got {on_noise!r}")
        self._rules = rules_of(codec)
        menu = tuple(menu)
        probes = probe_options(probe_steps, probe_every, probe_fraction)
        given = None if plan is None else _plan_text(plan)
        core = {
            **target_options(bits, ratio, budget, level, adaptive, peak),
            **probes,
            "derive": derive,
            "offload": offload,
            "defragment": defragment,
            "min_bytes": min_bytes,
            "seed": seed,
            "replay": replay,
            "on_noise": on_noise,
            "codec": [rule.for_core() for rule in self._rules],
            "menu": menu_of(menu),
        }
        self._core = _C.Controller(core)
        keep = (keep,) if isinstance(keep, (str, torch.nn.Module)) else tuple(keep)
        # Used to make copies.
        self._options = {
            "model": model,
            "bits": bits,
            "ratio": ratio,
            "budget": budget,
            "peak": peak,
            "level": level,
            "adaptive": adaptive,
            "plan": None if given is None else json.loads(given),
            "codec": codec,
            "menu": menu,
            "keep": keep,
            "derive": derive,
            "offload": offload,
            "defragment": defragment,
            "min_bytes": min_bytes,
            "seed": seed,
            "probe_steps": tuple(probes["probe_steps"]),
            "probe_every": probe_every,
            "probe_fraction": probe_fraction,
            "replay": replay,
            "sync": sync,
            "on_noise": on_noise,
        }
        self._model = model
        self._keep = keep
        self._held_open = 0  # by calibrate(), and by blocks inside it
        self._sync = sync
        self._joined = False  # the other processes, if there are any
        self._list_model()
        self._probes: Probes | None = None
        self._plans_exactly = self._core.exact and given is None
        if given is not None:
            self._core.load_plan(given)
        elif self._core.adaptive:
            self._probes = Probes(self._core, model, replay)
        self._join()

    def _join(self) -> None:
        """Finds the other processes, which may be started after the controller is built."""
        if self._joined or not is_distributed():
            return
        processes = Processes(group_of(self._model, self._sync) if self._sync else None)
        plans = self._probes is not None or self._plans_exactly
        together = self._sync is not False and plans
        self._core.join(processes.rank, processes.size, processes.gather if together else None)
        self._joined = True

    def _list_model(self) -> None:
        modules = dict(self._model.named_modules()) if self._model is not None else {}
        kept = kept_paths(modules, self._keep)
        self._kept = tuple(sorted(kept))
        rules = places(self._rules, modules)
        tensors = named_tensors(self._model)
        require_kernels(tensors)
        self._core.sharded = is_sharded(self._model)
        self._shapes = {tensor.shape for _, tensor, _ in tensors}
        self._core.list_model(
            [(module, path, path in kept, rules[path]) for path, module in modules.items()], tensors
        )

    def _sharded_since(self) -> bool:
        """Whether parameters were replaced by shards after they were listed."""
        return self._core.steps == 0 and not self._core.sharded and is_sharded(self._model)

    # A model may own its controller. Copies and pickles of it continue with the state of the
    # original, as from a checkpoint; fresh ones would measure and round as at step 1. While a copy
    # is made its model is incomplete, so the controller is built when it is first used.

    def __getstate__(self) -> dict[str, Any]:
        # Process groups belong to this process.
        sync = self._options["sync"] is not False
        return {"options": {**self._options, "sync": sync}, "state": self.state_dict()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Controller:
        made = object.__new__(type(self))
        memo[id(self)] = made
        memo[id(self._sync)] = self._sync
        # A pending probe stays with the original; the copy starts another.
        state = {"options": self._options, "state": self._state()}
        made.__setstate__(copy.deepcopy(state, memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__["_to_build"] = state

    def __getattr__(self, name: str) -> Any:
        to_build = self.__dict__.pop("_to_build", None)
        if to_build is None:
            raise AttributeError(f"'Controller' object has no attribute '{name}'")
        options = dict(to_build["options"])
        try:
            self.__init__(options.pop("model"), **options)
            self.load_state_dict(to_build["state"])
        except BaseException:
            self.__dict__ = {"_to_build": to_build}
            raise
        return getattr(self, name)

    def __enter__(self) -> Controller:
        if self._held_open:
            self._held_open += 1
            return self
        self._core.expect_enterable()
        self._join()
        device = cuda_device()
        if self._model is not None and (self._core.stale or self._sharded_since()):
            self._list_model()
        try:
            plans = self._probes is not None or (self._plans_exactly and self._joined)
            self._core.stay_away(uneven := plans and is_uneven(self._model))
            if self._probes is not None and not uneven:
                self._probes.before_step()
            watch = self._core.wants_modules(program_compiles())
            hooks = graph_hooks(self._core.graph_rules(), self._kept)
            self._core.enter(device, hooks)
        except BaseException:
            if self._probes is not None:
                self._probes.cancel()
            raise
        if watch:
            module_hooks.open()
        self._watches = watch
        self._borders = None if hooks is None else open_borders(self._shapes)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._held_open:
            self._held_open -= 1
            return
        self._core.exit()
        if self._borders is not None:
            close_borders(*self._borders)
        if self._watches:
            module_hooks.close()
        if self._probes is not None:
            self._probes.after_block()
        if self._core.unmet_samples and not exception[0]:
            warnings.warn(
                "backfold: no tensor kept with per_sample=True has as many samples as sample_ids() "
                "was given ids",
                stacklevel=2,
            )
        if self._rules and self._core.steps == 1 and not exception[0]:
            warn_of_unmatched(self._rules, self._core.matched)

    @property
    def steps(self) -> int:
        """The number of blocks under grad mode in which something was saved."""
        return self._core.steps

    def report(self) -> Report:
        """What the last step kept for backward: where, how, and why."""
        return Report(self._core.report())

    def sample_ids(self, ids: torch.Tensor, count: int) -> None:
        """Says which samples of a data set of `count` samples the next block's batch holds.

        Places kept with ``per_sample=True`` then rank samples by range and by the gradient that
        each last had there, which takes 4 bytes per sample and place.
        """
        if not isinstance(ids, torch.Tensor):
            raise TypeError(f"ids must be an int64 tensor of one dimension, got {ids!r}")
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"count must be an int of 1 or more, got {count!r}")
        self._core.sample_ids(ids, count)

    def calibrate(self, step: Callable[[], Any], method: str = "probe") -> None:
        """Measures sensitivities over the whole of `step` now, and plans accordingly.

        `step` runs forward and backward, with or without the controller's block around its forward.
        It is called twice, or four times for the first plan below 3 bits, and once more if the
        controller has seen no step yet. With ``method="exact"``, the reference that the probe is
        tested against, it is called several times for every tensor.
        The model, its gradients and the generators are restored afterwards. Processes that plan
        together call it together.
        """
        if not callable(step):
            raise TypeError(f"step must be callable, got {type(step).__name__}")
        if method not in ("probe", "exact"):
            raise ValueError(f"method must be 'probe' or 'exact', got {method!r}")
        if self._probes is None:
            raise ValueError("calibrate needs a Controller with adaptive=True and without plan=")
        self._probes.forget()
        self._join()

        def run() -> None:
            with undone(self._model) if self._model is not None else nullcontext():
                step()

        self._held_open = 1  # entering the block inside `step` does nothing
        try:
            self._core.calibrate_and_plan(run, method == "exact")
        finally:
            self._held_open = 0

    def plan(self) -> dict[str, Any]:
        """Width and layout of every place that saves tensors, and why, as JSON values."""
        return json.loads(self._core.plan())

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Writes `plan()` as JSON, to be read, edited and passed to another Controller."""
        pathlib.Path(path).write_text(self._core.plan() + "\n")

    def state_dict(self) -> dict[str, Any]:
        """What was learned, measured and planned: a run that loads it makes the same packets.

        All values fit into JSON. A pending measurement of a probe step is done now.
        """
        if self._probes is not None:
            self._probes.settle()
        return self._state()

    def _state(self) -> dict[str, Any]:
        self._join()
        if self._probes is not None:
            self._probes.before_state()
        return self._core.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict()` of the same model."""
        if not isinstance(state, dict) or "sites" not in state:
            raise TypeError("state must be a dict returned by state_dict()")
        self._join()
        if self._probes is not None:
            self._probes.before_state()
        self._core.load_state(state)
        if self._probes is not None:
            self._probes.after_load()

    def _probe_due(self) -> bool:
        return self._probes is not None and self._core.probe_is_due(self.steps)

    def check(self, step: Callable[[], torch.Tensor], repeats: int = 8) -> CheckResult:
        """Compares folded gradients with plain ones on the user's own batch.

        `step` runs a forward pass and returns the loss. It is called once without the block, then
        `repeats` times inside it, each time with different rounding. The model, its gradients and
        the generators are restored afterwards.
        """
        self._core.pause_guard(True)  # these are not training steps
        try:
            return check_gradients(self, self._model, step, repeats)
        finally:
            self._core.pause_guard(False)


def _plan_text(plan: str | os.PathLike[str] | dict[str, Any]) -> str:
    return json.dumps(plan) if isinstance(plan, dict) else pathlib.Path(plan).read_text()
