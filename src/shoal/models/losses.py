"""Losses of one microbatch on one device: `loss(model, mb)` returns (sum, count), or (sum, count, auxiliary losses).

The sum is over the elements that count. It is not a mean, so any split of a batch over ranks or microbatches gives the
same loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ArgumentError, UserError, did_you_mean
from shoal.models.adapted import unadapted
from shoal.models.moe import WithLosses

Microbatch = Mapping[str, Tensor]
LossResult = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, dict[str, Tensor]]
Loss = Callable[[nn.Module, Microbatch], LossResult]

IGNORED = -100


def causal_lm(model: nn.Module, mb: Microbatch) -> LossResult:
    """Computes next-token cross-entropy in nats: `input_ids` [B, T], and `labels` [B, T], shifted, -100 ignored.

    `model` returns logits [B, T, V] or an object of `transformers` with `.logits`. `position_ids`, `document_ids` and
    `attention_mask` are passed where the microbatch has them and the model's forward names them. The balance loss of a
    mixture of experts of `transformers` is the auxiliary loss "router", times the model's
    `config.router_aux_loss_coef`; our models return their own auxiliary losses.
    """
    output = model(mb["input_ids"], **_optional_inputs(model, mb))
    total, count = _cross_entropy(getattr(output, "logits", output), mb["labels"])
    if isinstance(output, WithLosses):
        return total, count, {name: value.to(total.dtype) for name, value in output.losses.items()}
    router = getattr(output, "aux_loss", None)
    if router is None:
        return total, count
    config: Any = model.config
    return total, count, {"router": config.router_aux_loss_coef * router.to(total.dtype)}


def masked_lm(model: nn.Module, mb: Microbatch) -> LossResult:
    """Computes cross-entropy at the masked positions, where `labels` [B, T] are not -100 (see `MaskedTokens`)."""
    output = model(mb["input_ids"], **_optional_inputs(model, mb))
    return _cross_entropy(getattr(output, "logits", output), mb["labels"])


def classification(model: nn.Module, mb: Microbatch) -> LossResult:
    """Computes cross-entropy: `inputs` [B, ...], class numbers `labels` [B], -100 ignored; logits [B, classes]."""
    return _cross_entropy(model(mb["inputs"]), mb["labels"])


def regression(model: nn.Module, mb: Microbatch) -> LossResult:
    """Computes the squared error of `model(inputs)` against `targets`, summed over elements; the count is their number.

    Predictions [B, 1] match targets [B]; any other difference of shape raises `UserError`, since broadcasting would
    give a wrong loss.
    """
    predictions, targets = model(mb["inputs"]), mb["targets"]
    if predictions.dim() == targets.dim() + 1 and predictions.shape[-1] == 1:
        predictions = predictions.squeeze(-1)
    if predictions.shape != targets.shape:
        raise UserError(
            f"regression: the model predicts {tuple(predictions.shape)} where the targets are {tuple(targets.shape)}; "
            "make them equal."
        )
    error = _at_least_fp32(predictions) - targets
    return error.square().sum(), torch.full((), targets.numel(), device=targets.device)


OF_TEXT = (causal_lm, masked_lm)
"""The losses that read rows of tokens; the others read inputs with one answer each."""
LOSSES: dict[str, Loss] = {
    "causal_lm": causal_lm,
    "masked_lm": masked_lm,
    "classification": classification,
    "regression": regression,
}


def can_write(loss: Loss) -> bool:
    """Returns whether a model with this loss predicts the next token, so that it can continue a text."""
    return loss is causal_lm


def find_loss(name: str) -> Loss:
    """Returns the loss of that name; an unknown one raises `UserError`."""
    if not isinstance(name, str) or name not in LOSSES:
        hint = did_you_mean(str(name), list(LOSSES))
        raise ArgumentError("loss", f" = {name!r} is not a loss of Shoal ({', '.join(LOSSES)}).{hint}")
    return LOSSES[name]


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(
        _at_least_fp32(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()


def _at_least_fp32(x: Tensor) -> Tensor:
    """Casts bf16 and fp16 to fp32; fp64 stays, so that a test in fp64 is fp64 throughout."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _optional_inputs(model: nn.Module, mb: Microbatch) -> dict[str, Any]:
    # By name only: the **kwargs of transformers would swallow `document_ids` and do nothing with it. There, positions
    # that start again at 0 tell the documents apart.
    accepted = inspect.signature(unadapted(model).forward).parameters
    return {key: mb[key] for key in ("position_ids", "document_ids", "attention_mask") if key in mb and key in accepted}
