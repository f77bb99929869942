"""What is asked of a model whose rows ranks share, and of its loss: that nothing but attention looks from one token to
another, since each rank has other tokens; and where the model would have its tokens stand."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from shoal.errors import UserError

ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers in a configuration of transformers whose tokens meet in attention alone."""
_OWN_POSITIONS = "create_position_ids_from_input_ids"


def check_model(module: nn.Module, ranks: int) -> None:
    """Raises UserError for a model that cannot be told which tokens of a row it has, and for one in which anything but
    F.scaled_dot_product_attention brings tokens together."""
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise UserError(
            f"plan.cp = {ranks}: the forward of {type(module).__name__} takes no position_ids, so it cannot "
            "know which tokens of a row it has"
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase | nn.modules.conv._ConvNd):
            raise UserError(
                f"plan.cp = {ranks}: {name} ({type(part).__name__}) looks at neighbouring tokens, of which a "
                "rank has a part: only attention brings them together"
            )
    config = getattr(module, "config", None)
    kind = getattr(config, "_attn_implementation", "sdpa")
    if kind != "sdpa":
        raise UserError(
            f'plan.cp = {ranks}: attention of {type(module).__name__} is computed as "{kind}", which sees this '
            'rank\'s tokens alone; "sdpa" is needed'
        )
    other = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENDING)
    if other:
        raise UserError(
            f"plan.cp = {ranks}: {type(module).__name__} has layers of kind {', '.join(other)} (config.layer_types), "
            "in which a token sees those before it, of which a rank has a part: only attention brings them together"
        )
    if getattr(config, "token_dropout", False):
        raise UserError(
            f"plan.cp = {ranks}: {type(module).__name__} scales each row by its share of masked tokens "
            "(config.token_dropout), of which a rank sees its part: set token_dropout = False"
        )


def positions_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns how the model, where it is told none, finds the positions [1, T] or [B, T] of the tokens of `input_ids`
    [B, T]: from 0 on, or, as RoBERTa and its kind do, from behind the number of the padding, which they leave out."""
    for part in module.modules():
        named = "position_ids" in inspect.signature(part.forward).parameters
        number = getattr(part, "padding_idx", None)
        found = getattr(part, _OWN_POSITIONS, None) or getattr(sys.modules[type(part).__module__], _OWN_POSITIONS, None)
        if named and found is not None and isinstance(number, int):
            return partial(found, padding_idx=number)
    return in_order


def in_order(ids: Tensor) -> Tensor:
    """Returns the positions [1, T] of tokens `ids` [B, T] that are counted from 0."""
    return torch.arange(ids.shape[1], device=ids.device)[None]


def check_labels(module: nn.Module, given: dict[str, Any], ranks: int) -> None:
    """Raises UserError where a model of transformers is `given` labels that it would shift: the label of a rank's last
    token is another rank's."""
    if given.get("labels") is None or given.get("shift_labels") is not None:
        return
    loss = getattr(module, "loss_function", None)
    if loss is not None and "shift_labels" in inspect.signature(loss).parameters:
        raise UserError(
            f"plan.cp = {ranks}: {type(module).__name__} is given labels, which it shifts by a token, and a rank has "
            "only its part of a row: give the next tokens as labels in the dataset, and hand them on as model(..., "
            "labels=labels, shift_labels=labels), or compute the loss from the logits"
        )


def check_padding(rows: Mapping[str, Tensor], takes_documents: bool) -> None:
    """Raises UserError where an attention_mask says that `rows`, or a sample, are padded. `takes_documents`: the model
    masks by document_ids."""
    padding = rows.get("attention_mask")
    if padding is None or isinstance(padding, FakeTensor) or bool(padding.all()):
        return
    remedy = (
        "give padding a document of its own (document_ids), and labels of -100"
        if takes_documents
        else "where attention is causal, leave it out and pad rows at their ends, with labels of -100 there; else take "
        "rows without padding, such as several documents in one (position_ids that begin again)"
    )
    raise UserError(f"plan.cp > 1 takes no attention_mask: {remedy}")


class Neighbours(TorchFunctionMode):
    """Refuses in a loss, outside of its model, to pick tokens by their place in a row (`logits[:, :-1]`): this rank has
    other ones.

    ranks: those that share a row
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks, self._rows = ranks, torch.Size()
        self._is_on = self._in_model = False

    @contextmanager
    def looking(self, rows: torch.Size) -> Iterator[None]:
        """Wraps a loss. `rows`: of this rank's tokens, [B, T / ranks]."""
        self._rows, self._in_model = rows, False
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)
            self._rows = torch.Size()

    def into_model(self) -> None:
        """Goes from the loss into the model, where operations are not looked at; off, they cost nothing there."""
        self._in_model = True
        if self._is_on and _get_current_function_mode() is self:  # else another mode of the loss lies above it
            self._switch(False)

    def out_of_model(self) -> None:
        """Comes back to the loss."""
        self._in_model = False
        if self._rows and not self._is_on:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        if on != self._is_on:
            self._is_on = on
            self.__enter__() if on else self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and not self._in_model and self._is_part(*args):
            raise UserError(
                f"plan.cp = {self._ranks}: the loss picks tokens by their place in a row, as logits[:, :-1] does, and "
                "each rank has its own part of a row: take labels that are the next tokens already, with -100 where "
                "there is none, and count all tokens that have one"
            )
        return func(*args, **(kwargs or {}))

    def _is_part(self, x: Tensor, index: Any) -> bool:
        """True if `x[index]` leaves out tokens of [B, T / ranks, ..] by their place."""
        if x.shape[:2] != self._rows:
            return False
        each = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(one, Tensor | list) for one in each):
            return False
        if any(one is ... for one in each):
            at = next(place for place, one in enumerate(each) if one is ...)
            each[at : at + 1] = [slice(None)] * (x.dim() - sum(one is not None for one in each) + 1)
        each = [one for one in each if one is not None]
        if len(each) < 2:
            return False
        tokens = range(x.shape[1])
        return isinstance(each[1], int) or (isinstance(each[1], slice) and len(tokens[each[1]]) < len(tokens))
