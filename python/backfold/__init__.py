# SPDX-License-Identifier: Apache-2.0
"""Backfold folds the activations of PyTorch training away until backward needs them.

At this version the package carries the C++ core alone: its headers and library, for programs that
pack and unpack raw memory. What Python code will hold, ``backfold.Controller``, arrives with the
autograd layer. Importing the package does not import torch.
"""

from importlib.metadata import version as _version

__version__ = _version("backfold")

__all__ = ["__version__"]
