"""The data of models that do not read text: arrays, images or a generated set, in the shape that the model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shoal.data import ArrayData, Samples, held_out, open_arrays
from shoal.data.arrays import not_a_folder
from shoal.data.digits import CLASSES, digits
from shoal.errors import UserError
from shoal.jobs.config import Data, Job
from shoal.jobs.generated import GENERATED, generated
from shoal.models import ModelSpec, classification, regression

DEFAULT = {"resnet": "shapes", "mlp": "spirals", "chess": "positions"}
"""The models that do not read text, with the generated set that is their default data.source."""


@dataclass(frozen=True)
class Shaped:
    """A map-style dataset that applies `shape` to the inputs of `samples`."""

    samples: Samples
    shape: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        return {**sample, "inputs": self.shape(sample["inputs"])}


def open_samples(job: Job) -> ArrayData:
    """Opens the samples that data.source names; in Python it may be a map-style dataset.

    Raises UserError for keys of `[data]` that apply only to text.
    """
    data, name = job.data, job.model["name"]
    for key in ("tokenizer", "attend", "field", "sequence"):
        if getattr(data, key) != getattr(Data, key):
            raise UserError(
                f'data.{key} = {getattr(data, key)!r} is of text, which model.name = "{name}" does not read: remove it'
            )
    made = isinstance(data.source, str) and data.source in ("digits", *GENERATED)
    if data.size is not None and (made or not isinstance(data.source, str)):
        raise not_a_folder(data.size, data.source)
    if isinstance(data.source, str) and data.source == "digits":
        return held_out(digits(), data.validation, job.train.seed, CLASSES)
    if isinstance(data.source, str) and data.source in GENERATED:
        whole = generated(data.source, seed=job.train.seed)
        return held_out(whole, data.validation, job.train.seed, GENERATED[data.source][2])
    if isinstance(data.source, str):
        channels = job.model.get("channels", 3)
        return open_arrays(
            data.source,
            validation=data.validation,
            seed=job.train.seed,
            channels=1 if channels == 1 else 3,
            size=data.size,
        )
    first = _first(data.source)
    classes = job.model.get("classes") or (job.model.get("sizes") or [None])[-1]
    return held_out(data.source, data.validation, job.train.seed, classes if "labels" in first else None)


def _first(source: Any) -> Mapping[str, Any]:
    """Returns the first sample of a dataset that was given in Python. Raises UserError for what is none."""
    indexed = isinstance(source, Sized) and hasattr(source, "__getitem__") and not isinstance(source, Mapping)
    if indexed and len(source):
        first = source[0]
        if isinstance(first, Mapping) and "inputs" in first:
            return first
    raise UserError(
        f"data.source = {source!r:.100}: give the path of a file or a folder, or the name of a generated set; in "
        'Python also a dataset of dicts with "inputs"'
    )


def settings_from(data: ArrayData, job: Job) -> dict[str, Any]:
    """Returns the settings of the model that follow from the data and that the job leaves open."""
    if job.model["name"] != "resnet":
        return {}
    shape = tuple(data.train[0]["inputs"].shape)
    channels = 1 if len(shape) == 2 else shape[-1] if _channels_last(shape) else shape[0] if len(shape) == 3 else None
    found = {"classes": data.classes, "channels": channels}
    return {key: value for key, value in found.items() if value is not None and key not in job.model}


def fitted(data: ArrayData, model: ModelSpec, source: Any) -> ArrayData:
    """Returns the data in the shape that `model` takes. Raises UserError where data and model do not match.

    source: data.source, for errors.
    """
    wants = {classification: "labels", regression: "targets"}.get(model.loss)  # type: ignore[arg-type]
    has = "targets" if data.classes is None else "labels"
    if wants is not None and wants != has:
        remedy = (
            'give model.task = "regression"' if model.name == "mlp" and has == "targets" else f"give data with {wants}"
        )
        raise UserError(
            f"data.source = {source!r} has {has}, and model.name = {model.name!r} is trained on {wants}: {remedy}"
        )
    sizes = model.values.get("sizes")
    most = model.values.get("classes", sizes[-1] if sizes else None)
    if data.classes is not None and most is not None and data.classes > most:
        key = "model.classes" if "classes" in model.values else "the last of model.sizes"
        raise UserError(f"data.source = {source!r} has {data.classes} classes, {key} is {most}: give {data.classes}")
    shape = _image(model.values["channels"]) if model.name == "resnet" else Tensor.flatten
    first = data.train[0]["inputs"]
    _check(tuple(first.shape), tuple(shape(first).shape), model, source)
    held = None if data.validation is None else Shaped(data.validation, shape)
    return replace(data, train=Shaped(data.train, shape), validation=held)


def _check(there: tuple[int, ...], shaped: tuple[int, ...], model: ModelSpec, source: Any) -> None:
    if model.name == "resnet":
        channels = model.values["channels"]
        wanted, fits = f"images of {channels} channels", len(shaped) == 3 and shaped[0] == channels
    else:
        inputs = model.values["sizes"][0] if model.name == "mlp" else 773
        wanted, fits = f"{inputs} numbers", shaped == (inputs,)
    if not fits:
        raise UserError(
            f"data.source = {source!r} has inputs of shape {there}, model.name = {model.name!r} takes {wanted}"
        )


def _image(channels: int) -> Callable[[Tensor], Tensor]:
    def shape(image: Tensor) -> Tensor:
        if image.dim() == 2:
            return image[None]
        return image.permute(2, 0, 1).contiguous() if _channels_last(tuple(image.shape), channels) else image

    return shape


def _channels_last(shape: tuple[int, ...], channels: int | None = None) -> bool:
    """Returns whether `shape` is [H, W, C], as in most image files, and not torch's [C, H, W].

    channels: the C of the model; by default any of 1, 3 and 4.
    """
    known = (1, 3, 4) if channels is None else (channels,)
    return len(shape) == 3 and shape[0] not in known and shape[-1] in known
