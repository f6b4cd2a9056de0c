# SPDX-License-Identifier: Apache-2.0
"""Backfold folds the activations of PyTorch training away until backward needs them.

>>> import torch, backfold
>>> x = torch.randn(512, 512)
>>> packet = backfold.pack(x, bits=4)
>>> packet.source_nbytes / packet.nbytes > 7
True
>>> y = backfold.unpack(packet)  # x, up to rounding that is right on average

At this version the package holds the codecs, for tensors on the CPU and on CUDA devices, and the
headers and library of the C++ core. ``backfold.Controller``, which folds what a model saves for
backward, arrives with the autograd layer.
"""

from importlib.metadata import version as _version

from backfold._torch_version import require_supported_torch as _require_supported_torch

__version__ = _version("backfold")

_require_supported_torch()

from backfold._C import Packet  # noqa: E402
from backfold._packing import pack, unpack  # noqa: E402

__all__ = ["Packet", "__version__", "pack", "unpack"]
