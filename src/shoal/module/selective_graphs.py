"""Selective recompute of compiled blocks: their graph keeps for backward what some operations give, and computes the
others again.

Torch traces `checkpoint` as an operation of the graph, inside which each operation is marked by what the policy says of
it; the compiler divides forward and backward by these marks. So a block has to be one graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.errors import UserError
from shoal.module.kept_reads import READ, keeping_reads
from shoal.module.selective import saved_by

Forward = Callable[..., Any]
_WARNED = "context_fn is passed to torch.utils.checkpoint under torch.compile"
"""In torch's warning of operations in place, of which a graph has none: it is made functional before it is marked."""


def selective_graph(block: nn.Module, save: Sequence[str], backend: bool | str) -> Forward:
    """Returns the forward of `block` compiled so that backward keeps what the operations `save` give, and what is drawn
    or read of a tensor that the block changes; of all else it keeps nothing. Raises UserError for one that is not
    compiled for itself, and at its first call where it is not one graph."""
    if (own := getattr(block.forward, "_torchdynamo_orig_callable", None)) is None:
        raise UserError(
            'plan.recompute = "selective" beside plan.compile takes a model\'s repeated blocks (nn.ModuleList), and '
            'this model has none: take "full", or compile = false'
        )
    kind: Any = type(block)
    kept, policy, name = tuple(save), partial(_policy, saved_by(save)), kind.__name__
    chosen = keeping_reads("inductor" if backend is True else str(backend))

    def compiled() -> Forward:
        forward: Forward = torch.compile(checkpointed(own, policy, code), backend=chosen, fullgraph=True)
        return forward

    code = _code_of(kind, kept)
    graph = compiled()

    def run(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # here because it takes seconds

        nonlocal code, graph
        try:
            try:
                return graph(*args, **kwargs)
            except FailOnRecompileLimitHit:  # blocks of other sizes, or of other models, have used it up
                code = _code_of(kind, kept, code)
                graph = compiled()
                return graph(*args, **kwargs)
        except TorchDynamoException as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f'plan.recompute = "selective" beside plan.compile: {name} is not one graph for torch.compile ({why}): '
                'take "full", or compile = false'
            ) from error

    return run


def checkpointed(forward: Forward, policy: Callable[..., CheckpointPolicy], code: CodeType | None = None) -> Forward:
    """Returns `forward` in a checkpoint in which `policy` says of each operation whether its results are kept; to be
    compiled. `code`: of those that share what is compiled, of this alone by default. Torch finds a graph again by its
    code and does not ask whether the policy is another; and of one code it compiles eight graphs at most."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_unwarned)  # the same one once
    context_fn = partial(create_selective_checkpoint_contexts, policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda: forward(*args, **kwargs), use_reentrant=False, context_fn=context_fn)

    return FunctionType(code or run.__code__.replace(), globals(), closure=run.__closure__)


_CODES: dict[tuple[Any, tuple[str, ...]], CodeType] = {}


def _code_of(kind: Any, save: tuple[str, ...], full: CodeType | None = None) -> CodeType:
    """Code for the blocks of a class that keep the same: another one than `full`, of which torch has all its graphs."""
    if (known := _CODES.get((kind, save))) is None or known is full:
        empty: Any = checkpointed(_unwarned, _policy)
        known = _CODES[kind, save] = empty.__code__
    return known


def _unwarned(record: logging.LogRecord) -> bool:
    return _WARNED not in record.getMessage()


def _policy(saved: frozenset[Any], _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    keeps = operation in saved or draws or torch.fx.traceback.current_meta.get(READ, False)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
