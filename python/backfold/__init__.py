# SPDX-License-Identifier: Apache-2.0
"""Backfold folds the activations of PyTorch training until backward needs them.

>>> import torch, backfold
>>> model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU())
>>> fold = backfold.Controller(model, bits=4)
>>> with fold:  # forward is exact; what backward needs is folded
...     loss = model(torch.randn(512, 256)).square().mean()
>>> loss.backward()
>>> report = fold.report().to_dict()
>>> report["unique_bytes"] / report["held_bytes"] > 4
True
"""

from backfold._build_info import VERSION as __version__
from backfold._torch_version import require_supported_torch as _require_supported_torch

_require_supported_torch()

from backfold import codecs  # noqa: E402
from backfold._attach import Fold, attach, attached  # noqa: E402
from backfold._C import Packet  # noqa: E402
from backfold._controller import Controller  # noqa: E402
from backfold._gact import controller  # noqa: E402
from backfold._inspect import inspect  # noqa: E402
from backfold._max_batch import MaxBatch, max_batch  # noqa: E402
from backfold._packing import pack, unpack  # noqa: E402
from backfold._report import Report  # noqa: E402

__all__ = [
    "Controller",
    "Fold",
    "MaxBatch",
    "Packet",
    "Report",
    "__version__",
    "attach",
    "attached",
    "codecs",
    "controller",
    "inspect",
    "max_batch",
    "pack",
    "unpack",
]
