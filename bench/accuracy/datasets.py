# SPDX-License-Identifier: Apache-2.0
"""Reads the data sets for training runs and plans from one folder.

cifar10-half.zip        JPEGs under train/<class>/ and test/<class>/
cora.npz                a citation graph with its public split
sst2/{train,dev}.tsv    a header line, then sentence TAB label
tinyshakespeare.txt     text
"""

import functools
import io
import pathlib
import typing
import zipfile

import numpy
import torch
from torch import Tensor


class MissingData(Exception):
    """Names the missing file and its folder, and says what to do."""


def find(folder: pathlib.Path, name: str) -> pathlib.Path:
    path = folder / name
    if not path.is_file():
        raise MissingData(
            f"{name} not found in '{folder}': point --data or BACKFOLD_DATA at the folder that "
            "holds the data sets"
        )
    return path


class Images(typing.NamedTuple):
    pixels: Tensor  # uint8, [count, 3, 32, 32]
    labels: Tensor


@functools.cache  # two tasks read the same images
def cifar10(folder: pathlib.Path, split: str, every: int = 1) -> Images:
    """The images of a split, ordered by class; one in `every`."""
    from PIL import Image

    pixels, labels = [], []
    with zipfile.ZipFile(find(folder, "cifar10-half.zip")) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith(f"{split}/"))
        classes = sorted({name.split("/")[1] for name in names})
        for name in names[::every]:
            image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            pixels.append(numpy.asarray(image))
            labels.append(classes.index(name.split("/")[1]))
    stacked = torch.from_numpy(numpy.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return Images(stacked, torch.tensor(labels))


def normalised(pixels: Tensor) -> Tensor:
    """As floats around zero, by roughly the mean and deviation of CIFAR-10's pixels."""
    return (pixels.float() - 121.0) / 64.0


class Graph(typing.NamedTuple):
    features: Tensor  # [nodes, features], each row sums to one
    labels: Tensor
    edges: Tensor  # [2, edges] from and to, including an edge from each node to itself
    train: Tensor  # nodes
    test: Tensor


def cora(folder: pathlib.Path) -> Graph:
    with numpy.load(find(folder, "cora.npz")) as content:
        arrays = {name: torch.from_numpy(content[name]) for name in content.files}
    nodes = int(arrays["num_nodes"])
    features = torch.zeros(nodes, int(arrays["num_features"]))
    places = (arrays["feature_row"].long(), arrays["feature_col"].long())
    features[places] = arrays["feature_value"]
    features /= features.sum(dim=1, keepdim=True).clamp_min(1)
    loops = torch.arange(nodes).expand(2, nodes)
    edges = torch.cat([arrays["edge_index"].long(), loops], dim=1)
    return Graph(features, arrays["label"], edges, arrays["train_idx"], arrays["test_idx"])


class Sentences(typing.NamedTuple):
    texts: list[str]
    labels: list[int]


def sst2(folder: pathlib.Path, split: str, count: int | None = None) -> Sentences:
    """The sentences of a split, or the first `count` of them."""
    lines = find(folder, f"sst2/{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    lines = lines[:count]
    rows = [line.rsplit("\t", 1) for line in lines]
    return Sentences([text.strip() for text, _ in rows], [int(label) for _, label in rows])


class Text(typing.NamedTuple):
    codes: Tensor  # one number per character
    characters: int  # size of the alphabet


def shakespeare(folder: pathlib.Path) -> Text:
    text = find(folder, "tinyshakespeare.txt").read_text(encoding="utf-8")
    alphabet = {character: code for code, character in enumerate(sorted(set(text)))}
    return Text(torch.tensor([alphabet[character] for character in text]), len(alphabet))
