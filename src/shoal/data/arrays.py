"""Samples that are not text: arrays in a file, images in folders by class. Inputs are float32; bytes become 0 to 1.

numbers.npz, numbers.safetensors      arrays `inputs` and `labels` (integers: classes) or `targets` (numbers to predict)
inputs.npy                            with labels.npy or targets.npy beside it; not read into memory
images/cat/1.png, images/dog/7.jpg    a folder for each class, ordered by name; or these inside `train` and `val`
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError
from .split import split_documents

INPUTS, LABELS, TARGETS = ("inputs", "x", "images"), ("labels",), ("targets",)
ANSWERS = (*LABELS, *TARGETS, "y")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
HELD_OUT = ("val", "valid", "validation", "test")


class Samples(Protocol):
    """A map-style dataset of {"inputs": float32, and "labels": int64 or "targets": float32}."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class ArrayData:
    """Two map-style datasets.

    validation: None where nothing was held out.
    classes: number of classes; None where samples have targets.
    names: of the classes, in the order of their numbers, where they are those of folders.
    """

    train: Samples
    validation: Samples | None
    classes: int | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrays:
    """Inputs [N, ...] with one answer each: classes [N] or targets [N, ...]. `answer`: "labels" or "targets"."""

    inputs: NDArray[Any]
    answers: NDArray[Any]
    answer: str

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        answer = np.asarray(self.answers[index], np.int64 if self.answer == "labels" else np.float32)
        return {"inputs": as_inputs(np.asarray(self.inputs[index])), self.answer: torch.from_numpy(answer)}


@dataclass(frozen=True)
class Folder:
    """Image files with their classes, read on access as [channels, H, W]; resized to `size` x `size` unless None."""

    files: Sequence[tuple[Path, int]]
    channels: int
    size: int | None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from PIL import Image  # imported here: the engine runs where only torch is installed

        path, label = self.files[index]
        try:
            with Image.open(path) as file:
                if file.mode in ("F", "I"):
                    raise UserError(
                        f"the image {path} has numbers of 32 bits, of which none says what is white: convert it to 8 "
                        "or 16 bits, or give arrays (.npy)"
                    )
                pixels = _pixels(file, self.channels, self.size)
        except OSError as error:
            raise UserError(
                f"the image {path} cannot be read: {error}. Repair it, or take it out of the folder"
            ) from error
        return {
            "inputs": as_inputs(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1)),
            "labels": torch.tensor(label),
        }


def _pixels(image: Any, channels: int, size: int | None) -> NDArray[Any]:
    """Returns an image [H, W] or [H, W, channels], of bytes; of 16 bits, as numbers from 0 to 1."""
    from PIL import Image

    deep = image.mode.startswith("I;16")
    if deep:  # which a conversion to bytes would cut off at 255
        image = Image.fromarray(np.asarray(image, np.float32) / np.float32(65535))
    else:
        image = image.convert("L" if channels == 1 else "RGB")
    pixels = np.asarray(image if size is None else image.resize((size, size)))
    return np.repeat(pixels[..., None], channels, axis=2) if deep else pixels


@dataclass(frozen=True)
class Part:
    """The samples `numbers` of the dataset `whole`."""

    whole: Samples
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.whole[int(self.numbers[index])]


def as_inputs(values: NDArray[Any]) -> Tensor:
    """Converts an array to a float32 tensor; bytes from 0 to 255 become 0 to 1."""
    scale = 255 if values.dtype == np.uint8 else 1
    return torch.from_numpy(np.ascontiguousarray(values, np.float32) / np.float32(scale))


def open_arrays(source: str, *, validation: float, seed: int, channels: int = 3, size: int | None = None) -> ArrayData:
    """Opens the samples at `source`, a file of arrays or a folder of images.

    validation: the share of samples held out, drawn with `seed`; folders `train` and `val` are taken as they are.
    channels: of images, 3 (RGB) or 1 (grey).
    size: images are resized to this many pixels on each side; None leaves them as they are.

    Raises UserError, with a remedy, for what is missing, unreadable or inconsistent.
    """
    path = Path(os.path.expanduser(source))
    if not os.path.exists(path):
        raise UserError(f"data.source = {source!r:.300}: no such file or folder (from {Path.cwd()})")
    if not path.is_dir():
        if size is not None:
            raise not_a_folder(size, source)
        arrays = _arrays(path)
        classes = int(arrays.answers.max()) + 1 if arrays.answer == "labels" else None
        return held_out(arrays, validation, seed, classes)
    parts = _folders_in(path)
    beside = [name for name in parts if name in HELD_OUT]
    if "train" not in parts or not beside or len(parts) > 2:
        names = tuple(parts)
        return replace(held_out(_folder(path, names, channels, size), validation, seed, len(names)), names=names)
    names, others = tuple(_folders_in(parts["train"])), _folders_in(parts[beside[0]])
    if unknown := [name for name in others if name not in names]:
        raise UserError(
            f"{parts[beside[0]]} has images of {', '.join(unknown)}, and {parts['train']} has no such class: give one, "
            "or take them out"
        )
    train, other = (_folder(parts[name], names, channels, size) for name in ("train", beside[0]))
    return ArrayData(train, other, len(names), names)


def _folders_in(path: Path) -> dict[str, Path]:
    """Returns the folders of a folder by name, in order, without hidden ones."""
    return {each.name: each for each in sorted(path.iterdir()) if each.is_dir() and not each.name.startswith(".")}


def not_a_folder(size: int, source: Any) -> UserError:
    """The error of a size for what is no folder of images."""
    return UserError(
        f"data.size = {size} is of a folder of images, which data.source = {source!r:.100} is not: remove it"
    )


def held_out(whole: Samples, validation: float, seed: int, classes: int | None) -> ArrayData:
    """Splits `whole`: the share `validation` of its samples, drawn with `seed`, is held out."""
    split = split_documents(len(whole), validation, seed)
    return ArrayData(
        Part(whole, split.train), Part(whole, split.validation) if len(split.validation) else None, classes
    )


def _folder(path: Path, classes: Sequence[str], channels: int, size: int | None) -> Folder:
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((path / name).rglob("*"))
        if file.suffix.lower() in IMAGES and file.is_file()
    ]
    if not files:
        raise UserError(
            f"{path} has no folders of images by class, such as {path / 'cat' / '1.png'} ({', '.join(IMAGES)})"
        )
    return Folder(files, channels, size)


def _arrays(path: Path) -> Arrays:
    if path.suffix not in (".npz", ".npy", ".safetensors"):
        raise UserError(
            f"{path}: samples are read from .npz, .npy and .safetensors files, and from a folder of images by class"
        )
    try:
        found = _read(path)
    except UserError:
        raise
    except Exception as error:  # numpy and safetensors raise several types for a broken file
        raise UserError(f"{path} cannot be read: {error}") from error
    return checked_arrays(found, str(path))


def checked_arrays(found: Mapping[str, NDArray[Any]], where: str) -> Arrays:
    """Returns the inputs and answers among the arrays `found`. Raises UserError where they are missing or do not match.

    where: the name of their file, for errors.
    """
    given = next((name for name in INPUTS if name in found), None)
    name = next((name for name in ANSWERS if name in found), None)
    if given is None or name is None:
        raise UserError(
            f"{where} holds {', '.join(found) or 'nothing'}: samples are arrays `inputs` with `labels` or `targets`"
        )
    inputs, answers = found[given], found[name]
    for key, each in ((given, inputs), (name, answers)):
        if each.ndim == 0 or each.dtype.kind not in "biuf":
            raise UserError(
                f"{where}: `{key}` is {each.dtype} of shape {each.shape}: give an array of numbers, by samples along "
                "its first dimension"
            )
    whole = answers.dtype.kind in "iub"
    answer = "labels" if name in LABELS or (name == "y" and whole and answers.ndim == 1) else "targets"
    if len(inputs) != len(answers) or len(inputs) == 0:
        raise UserError(f"{where}: {len(inputs)} inputs with {len(answers)} {name}: give one of each for every sample")
    if answer == "labels" and (not whole or answers.ndim != 1 or int(answers.min()) < 0):
        raise UserError(
            f"{where}: `{name}` is {answers.dtype} of shape {answers.shape}: classes are whole numbers from 0 up, one "
            "a sample"
        )
    return Arrays(inputs, answers, answer)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = load_file(path)
        return {
            name: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for name, each in tensors.items()
        }
    beside = next((file for name in ANSWERS if (file := path.with_name(f"{name}.npy")).is_file()), None)
    if beside is None:
        raise UserError(f"{path}: there is no labels.npy or targets.npy beside it")
    files = {"inputs": path, beside.stem: beside}
    return {name: np.load(file, mmap_mode="r", allow_pickle=False) for name, file in files.items()}
