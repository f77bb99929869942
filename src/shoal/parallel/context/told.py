"""What a model is told of the tokens that a rank has of each row, and what it is seen to ask: where they stand in whole
rows, whether some are padding, which documents they are of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.comm import Group
from shoal.parallel.context.asked import check_padding, in_order, positions_of
from shoal.parallel.context.documents import documents_of, searching, stretches

Arguments = tuple[Any, dict[str, Any]]


@dataclass
class Rows:
    """A microbatch, of whose rows this rank has some tokens.

    tokens: of a whole row. shape: of this rank's tokens, [B, T / ranks].
    places: where they stand in whole rows, as the model counts, [1, T / ranks] or [B, T / ranks].
    begins: a number for each stretch of them whose positions follow each other.
    documents: [B, T] of whole rows; None where each is one. masks: by them, by whether they are causal.
    unpadded: the attention_mask of the microbatch, which is of ones.
    """

    tokens: int
    shape: torch.Size
    places: Tensor
    begins: Tensor
    documents: Tensor | None
    unpadded: Tensor | None
    masks: dict[bool, Tensor] = field(default_factory=dict)


class Told:
    """Tells a model of the rows that are open. `group`: the ranks that share them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._takes_padding = self.takes_documents = self._is_of_transformers = False
        self._searches = False  # for documents in positions, by transformers
        self._places_in: dict[str, int] = {}  # of what it is told, among the arguments of the model
        self.positions: Callable[[Tensor], Tensor] = in_order

    def know(self, module: nn.Module, opened: Callable[[], Rows | None]) -> None:
        """Notes what `module` takes, and has it told of the rows that `opened` gives, if any, that none are padded."""
        self._places_in = _arguments(module)
        self._takes_padding, self.takes_documents = (
            name in self._places_in for name in ("attention_mask", "document_ids")
        )
        self._is_of_transformers = any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__)
        self.positions = positions_of(module)
        for part in {module, getattr(module, "base_model", module)} if self._takes_padding else ():
            at = _arguments(part).get("attention_mask")
            part.register_forward_pre_hook(partial(self._without_padding, opened, at), with_kwargs=True)

    def rows(self, whole: Mapping[str, Tensor], own: Mapping[str, Tensor], places: Tensor) -> Rows:
        """Returns the rows of a microbatch, of which this rank has `own`. `places`: where its tokens stand, as the
        model counts."""
        documents = documents_of(whole, self.takes_documents, self._takes_padding)
        positions, tokens = own["position_ids"], whole["input_ids"].shape[1]
        return Rows(tokens, positions.shape, places, stretches(positions), documents, own.get("attention_mask"))

    def tell(self, rows: Rows, args: Any, kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments of the model, with position_ids of this rank's tokens unless the loss gives some."""
        given = {name: _given(name, at, args, kwargs) for name, at in self._places_in.items()}
        told = dict(kwargs)
        if given["position_ids"] is None:
            told["position_ids"] = rows.places
        if given["document_ids" if self.takes_documents else "position_ids"] is None:
            rows.documents = None  # the model, which the loss has not told of them, does not mask by them
        return args, told

    def _without_padding(
        self, opened: Callable[[], Rows | None], at: int | None, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Leaves out a mask of ones, which covers this rank's tokens, where the model would use it for all. Where one
        is given transformers looks for no documents in positions."""
        rows = opened()
        mask = None if rows is None else _given("attention_mask", at, args, kwargs)
        if rows is None or mask is None:
            return None
        if mask is not rows.unpadded and not isinstance(mask, FakeTensor):
            full = [bool(mask.all())] if self._group.size == 1 else self._group.all_gather_object(bool(mask.all()))
            check_padding({"attention_mask": torch.tensor(full)}, self.takes_documents)
        if not self._is_of_transformers:
            return None
        rows.documents = None
        if "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": None}
        assert at is not None
        return (*args[:at], None, *args[at + 1 :]), kwargs

    def seeing(self, is_open: Callable[[], bool]) -> AbstractContextManager[None]:
        """Sees inside the context whether the model looks for documents in its positions, which are those of a part of
        each row: it finds none while rows are open."""

        def found() -> bool:
            self._searches |= is_open()
            return is_open()

        return searching(found)

    def documents(self, rows: Rows, mask: Tensor | None) -> Tensor | None:
        """Returns the documents by which the model masks a call of attention, to which it gives `mask`; None where all
        tokens of a row are one's. Not every model of transformers masks by those that positions show (BERT, OPT)."""
        if self.takes_documents:
            return rows.documents
        return rows.documents if (self._searches if self._is_of_transformers else mask is not None) else None


def _arguments(module: nn.Module) -> dict[str, int]:
    """Returns the places of what a model may be told, among the arguments of its forward."""
    parameters = inspect.signature(module.forward).parameters
    return {
        name: at for at, name in enumerate(parameters) if name in ("position_ids", "document_ids", "attention_mask")
    }


def _given(name: str, at: int | None, args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[at] if at is not None and at < len(args) else kwargs.get(name)
