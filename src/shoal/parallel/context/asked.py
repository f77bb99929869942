"""What is asked of a model whose rows ranks share, and of its loss: that nothing but attention looks from one token to
another, since each rank has other tokens; and where the model would have its tokens stand."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

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
            "know which tokens of a row it has: take plan.cp = 1, or a model that takes them"
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase | nn.modules.conv._ConvNd):
            raise UserError(
                f"plan.cp = {ranks}: {name} ({type(part).__name__}) looks at neighbouring tokens, of which a "
                "rank has a part, and only attention brings them together: take plan.cp = 1"
            )
    _check_attention(module, ranks)
    config = getattr(module, "config", None)
    other = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENDING)
    if other:
        raise UserError(
            f"plan.cp = {ranks}: {type(module).__name__} has layers of kind {', '.join(other)} (config.layer_types), "
            "in which a token sees those before it, of which a rank has a part, and only attention brings them "
            "together: take plan.cp = 1"
        )
    if getattr(config, "token_dropout", False):
        raise UserError(
            f"plan.cp = {ranks}: {type(module).__name__} scales each row by its share of masked tokens "
            "(config.token_dropout), of which a rank sees its part: set token_dropout = False"
        )


def _check_attention(module: nn.Module, ranks: int) -> None:
    """Raises UserError where a model of transformers, or a part of one, computes attention otherwise than by
    F.scaled_dot_product_attention: with the remedy where it can, which not all can that have such a setting."""
    for part in module.modules():
        config = getattr(part, "config", None)
        kind = getattr(config, "_attn_implementation", "sdpa")
        if kind == "sdpa":
            continue
        why = f'plan.cp = {ranks}: attention of {type(part).__name__} is computed as "{kind}", which sees this rank\'s '
        if any(not getattr(each, "_supports_sdpa", True) for each in part.modules()):
            cap = getattr(config, "attn_logit_softcapping", None)
            more = "what this model adds" if cap is None else f"soft-capping of logits (attn_logit_softcapping = {cap})"
            raise UserError(
                f'{why}tokens alone, and which "sdpa" does not stand for: it computes attention without {more}. Take '
                "plan.cp = 1"
            )
        raise UserError(f'{why}tokens alone: build it with attn_implementation="sdpa", or take plan.cp = 1')


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


def check_tokens(tokens: int, pieces: int, ranks: int) -> None:
    """Raises UserError for rows of so many `tokens` that cannot be cut into `pieces` among `ranks`."""
    if tokens % pieces:
        raise UserError(
            f"plan.cp = {ranks}: rows of {tokens} tokens do not come out even in {pieces} pieces; take rows of "
            f"{-(-tokens // pieces) * pieces}"
        )
    if tokens == ranks:
        raise UserError(
            f"plan.cp = {ranks}: rows of {tokens} tokens leave each rank one, whose mask does not show what it sees of "
            f"the others; take rows of {2 * ranks}"
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


def check_attended(calls: Sequence[bool], ranks: int) -> None:
    """Raises UserError for a forward that has called no attention, in which each token would have seen only its own
    rank's. `calls`: of attention."""
    if not calls:
        raise UserError(
            f"plan.cp = {ranks}: the model called no torch.nn.functional.scaled_dot_product_attention (by that name, "
            "so that it can be stood in for), and other ways from token to token see one rank's tokens alone: take "
            "plan.cp = 1"
        )


def check_first(told: Sequence[tuple[Sequence[bool], float | None]], rows: torch.Size) -> None:
    """Raises UserError, on all ranks alike, where ranks took masks of the same calls of attention for different ones in
    the first forward, and for a loss that counts the rows of a microbatch: each of the ranks that share them would.

    told: by each rank, which of the calls are causal, and what the loss has counted, where it gives a plain number
    rows: of a rank's tokens, [B, T / ranks]
    """
    if any(calls != told[0][0] for calls, _ in told):
        raise UserError(
            f"plan.cp = {len(told)}: attention has a mask that looks causal to some of the ranks, by the tokens that "
            "they have, and to others as if all tokens saw each other (a prefix?): only masks that are causal, or "
            "those of documents (document_ids), can be cut by tokens"
        )
    if all(count is not None and 0 < count == rows[0] for _, count in told):
        raise UserError(
            f"plan.cp = {len(told)}: the loss counts {rows[0]}, the rows of the microbatch, which each of the ranks "
            "counts that share them: sum over tokens and count tokens, or take plan.cp = 1"
        )


JOINED = (
    "is over the tokens of a rank and others joined to them (learned ones before a row?), which each rank would join "
    "to its own part: take plan.cp = 1"
)
"""What is said of such attention."""


def check_joined(places: Collection[int], tokens: int, ranks: int) -> None:
    """Raises UserError for causal attention over other numbers of `places` than a rank's `tokens` of a row."""
    if any(number != tokens for number in places):
        raise UserError(f"plan.cp = {ranks}: causal attention {JOINED}")


def check_result(module: nn.Module, output: Any, rows: torch.Size) -> None:
    """Raises UserError for a model whose `output` is a result for each row, made of this rank's tokens, which are
    `rows` [B, T / ranks]."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.dim() != 2 or not found.is_floating_point():
        return
    if 0 < rows[0] == found.shape[0] and found.shape[1] != rows[1]:
        raise UserError(
            f"plan.cp > 1: {type(module).__name__} gives {tuple(found.shape)}, a result for each row, and a rank has "
            "only a part of its tokens: results of tokens [B, T, ..] are needed. Take plan.cp = 1"
        )
