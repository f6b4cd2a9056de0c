# SPDX-License-Identifier: Apache-2.0
"""Finds timm and torchvision in build/zoo, where `scripts/setup zoo` puts them.

They live in a separate folder because the registry's torchvision is built for a torch with CUDA.
With a CPU-only torch its library does not load, its operators are missing, and `import torchvision`
raises in whatever imports it, including transformers. Here the operators are defined first.
"""

import importlib
import pathlib
import sys

import torch

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "build" / "zoo"
_library = None


def find_vision_libraries() -> None:
    """Makes `import torchvision` and `import timm` work, if they are installed at all."""
    global _library
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")
