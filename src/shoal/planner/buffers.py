"""Which replicas can keep the buffers of a model as one process would, and whether stages can: on fake tensors."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.block_inputs import MODIFIED
from shoal.module.buffers import OtherBuffers
from shoal.pipeline.interpreter import CHANGED_MEANWHILE
from shoal.plan import Plan
from shoal.planner.degrees import Spread
from shoal.planner.dry_run import loss_of
from shoal.planner.prepare import Subject, Untraced, blank, in_one_line, prepared
from shoal.planner.workspace import Called

REPLICAS = Spread(copies=2), Spread(tokens=2)
"""Replicas that have other samples, and that have other tokens of a row."""


def why_not_kept(subject: Subject) -> dict[str, str]:
    """Why replicas that divide the copies, or the tokens of a row, cannot keep the model's buffers as one process
    would, by what they divide; "" where they can. What a forward computes may depend on them (spectral_norm), or each
    rank sees a part of a row. And why "stages" cannot, which run forwards of later microbatches before a backward. Of a
    forward that cannot be watched nothing is said: the engine looks at the first
    step."""
    found = {_divided(each): "" for each in REPLICAS} | {"stages": ""}
    try:
        with in_one_line():
            built = blank(subject.factory)
            if not _of(built.module):
                return found
            subject = replace(subject, plan=Plan(), rank=0)
            with prepared(built, subject) as ready:
                buffers = _of(ready.local.module)
                with Called(), buffers.watching() as passed:
                    passed(first := loss_of(ready, subject))
                if buffers.rules:  # some are written
                    with Called():
                        loss_of(ready, subject)  # the forward of a later microbatch
                        found["stages"] = _why_not_backward(first)
    except Untraced:
        return found
    for each in REPLICAS:
        try:
            buffers.agree([buffers.rules], each.replicas, streams=each.tokens)
        except UserError as error:
            found[_divided(each)] = str(error)
    return found


def _why_not_backward(loss: Tensor) -> str:
    """Why the backward of `loss` cannot come after what ran since its forward; "" where it can."""
    try:
        loss.backward()
    except RuntimeError as error:  # what else goes wrong in a backward, the traces of parts say
        return CHANGED_MEANWHILE if MODIFIED in str(error) else ""
    return ""


def _divided(spread: Spread) -> str:
    return "copies" if spread.copies > 1 else "tokens"


def _of(module: nn.Module) -> OtherBuffers:
    return OtherBuffers(module, 2, averages=False, whole_shares="")
