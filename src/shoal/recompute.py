"""`plan.recompute`: which activations backward computes again instead of keeping them. Nothing that is computed changes.

    "full"                                         of every block only the input is kept
    {name = "blocks", which = [0, 2]}              of these blocks; or every = 2: of every second one
    {name = "selective", save = ["matmul", ...]}   inside every block, what is cheap to compute: all but the results of these
    {name = "budget", keep = 0.5}                  of as few blocks as are needed to keep this part of the bytes that backward would keep

Blocks are the repeated parts of the model. BatchNorm counts a forward once, keyed dropout and torch's generators draw the same again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from shoal.buffers import buffers_untouched
from shoal.errors import UserError, did_you_mean
from shoal.plan import Option, option_name, option_parameters

KINDS = ("none", "full", "blocks", "selective", "budget")
_aten = torch.ops.aten
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "matmul": (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default),
    "attention": (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ),
    "convolution": (_aten.convolution.default,),
}
"""What `selective` can save, by name."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


Again = Callable[[nn.Module], AbstractContextManager[None]]
"""Called at a block's forward: within what it returns the block draws and counts as it does in that forward."""


def recompute(blocks: Sequence[nn.Module], option: Option, again: Again | None = None) -> Callable[[], list[int]]:
    """Lets the forwards of `blocks` be computed again in backward, as a plan's `recompute` says; within `again`, where that is needed.

    Returns which blocks are, by their places: of "budget" it is known after their first forwards. Raises UserError for what `option` says wrong.
    """
    name, parameters = option_name(option, "recompute"), option_parameters(option)
    if name not in KINDS:
        raise UserError(f'plan.recompute = "{name}" is not one of {", ".join(KINDS)}.{did_you_mean(name, list(KINDS))}')
    try:
        return _KINDS[name]([_Block(block, again or (lambda _: nullcontext())) for block in blocks], **parameters)
    except TypeError as error:
        raise UserError(f"plan.recompute = {option!r}: {str(error).replace(f'_{name}()', name)}") from error


class _Block:
    """One of the blocks: its forward takes a second one in backward if `flag` says so at the first. Within `contexts`: the first, the second."""

    def __init__(self, module: nn.Module, again: Again) -> None:
        self.module, self.forward = module, module.forward
        self.flag = False
        self.contexts: Callable[[], Contexts] | None = None
        self._again = again
        self._counts = any(True for _ in module.buffers())  # a second forward must not count twice

    @property
    def kind(self) -> Hashable:
        """What blocks that keep as many activations have in common."""
        return type(self.module), tuple(tuple(parameter.shape) for parameter in self.module.parameters())

    def wrap(self, flag: bool = True, contexts: Callable[[], Contexts] | None = None) -> None:
        self.flag, self.contexts = flag, contexts

        @wraps(self.forward)
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or not self.flag:
                return self.forward(*args, **kwargs)
            if torch.compiler.is_compiling():  # the compiler decides what is computed again; it changes no buffer twice
                more: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
                return checkpoint(self.forward, *args, use_reentrant=False, **more, **kwargs)
            first, second = contexts() if contexts is not None else (nullcontext(), nullcontext())
            untouched = buffers_untouched(self.module) if self._counts else nullcontext()
            both = first, _within(self._again(self.module), untouched, second)
            return checkpoint(self._twice(), *args, use_reentrant=False, context_fn=lambda: both, **kwargs)

        self.module.forward = recomputed

    def _twice(self) -> Callable[..., Any]:
        """The forward; from the second call on with the module's hooks, which the first one is inside of."""
        calls = itertools.count()

        def run(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 0:
                return self.forward(*args, **kwargs)
            flag, self.flag = self.flag, False
            try:
                return self.module(*args, **kwargs)
            finally:
                self.flag = flag

        return run


def _none(blocks: Sequence[_Block]) -> Callable[[], list[int]]:
    return list


def _full(blocks: Sequence[_Block]) -> Callable[[], list[int]]:
    return _blocks(blocks, every=1)


def _blocks(blocks: Sequence[_Block], which: Sequence[int] = (), every: int = 0) -> Callable[[], list[int]]:
    if bool(which) == bool(every):
        raise UserError("plan.recompute: of blocks give either which = [places] or every = 2 (every second one)")
    chosen = list(range(0, len(blocks), every)) if every else sorted(set(which))
    if any(place not in range(len(blocks)) for place in chosen):
        raise UserError(f"plan.recompute: which = {list(which)}: the model has the blocks 0 to {len(blocks) - 1}")
    for place in chosen:
        blocks[place].wrap()
    return lambda: chosen


def _selective(blocks: Sequence[_Block], save: Sequence[str] = ("matmul", "attention")) -> Callable[[], list[int]]:
    unknown = [name for name in save if name not in OPERATIONS]
    if unknown or isinstance(save, str):
        raise UserError(f"plan.recompute: save = {save!r}: give a list of {', '.join(OPERATIONS)}")
    saved = {operation for name in save for operation in OPERATIONS[name]}

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    for block in blocks:
        block.wrap(contexts=partial(create_selective_checkpoint_contexts, policy))
    return lambda: list(range(len(blocks)))


def _budget(blocks: Sequence[_Block], keep: float) -> Callable[[], list[int]]:
    if not isinstance(keep, (int, float)) or not 0 <= keep <= 1:
        raise UserError(f"plan.recompute: keep = {keep!r}: give the part of the bytes to keep, 0 to 1")
    kinds: dict[Hashable, list[_Block]] = {}
    for block in blocks:
        block.wrap(keep < 1)
        kinds.setdefault(block.kind, []).append(block)
    sizes: dict[Hashable, tuple[int, int]] = {}

    def choose(kind: Hashable, kept: int, inputs: int) -> None:
        """Takes the blocks that save most for one forward more, until what is kept is little enough."""
        sizes[kind] = kept, inputs
        if len(sizes) < len(kinds):
            return
        left = whole = sum(sizes[block.kind][0] for block in blocks)
        for block in sorted(blocks, key=lambda block: sizes[block.kind][1] - sizes[block.kind][0]):
            saves = sizes[block.kind][0] - sizes[block.kind][1]
            block.flag = left > keep * whole and saves > 0
            left -= saves * block.flag

    for kind, alike in kinds.items():
        _measure_once(alike[0], partial(choose, kind))
    return lambda: [place for place, block in enumerate(blocks) if block.flag]


def _measure_once(block: _Block, found: Callable[[int, int], None]) -> None:
    """Runs the first forward of `block` without recompute, and tells how many bytes backward keeps of it, without parameters, and how many of them
    are the inputs, in any case kept."""
    weights = {parameter.untyped_storage()._cdata for parameter in block.module.parameters()}
    kept: dict[int, int] = {}
    inputs: list[int] = []
    with_hooks = ExitStack()
    before_hook: list[RemovableHandle] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        before_hook.pop().remove()
        block.flag, flag = False, block.flag
        tree_map_only(Tensor, lambda tensor: inputs.append(tensor.nbytes), (args, kwargs))
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_same, _same)

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
            return outer[0](tensor)

        def after(*_: Any) -> None:
            with_hooks.close()
            block.flag = flag
            found(sum(kept.values()), sum(inputs))

        with_hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, outer[1]))
        with_hooks.callback(block.module.register_forward_hook(after, always_call=True).remove)

    before_hook.append(block.module.register_forward_pre_hook(before, with_kwargs=True))


def _same(tensor: Tensor) -> Tensor:
    return tensor


_KINDS: dict[str, Callable[..., Callable[[], list[int]]]] = {
    "none": _none,
    "full": _full,
    "blocks": _blocks,
    "selective": _selective,
    "budget": _budget,
}


@contextmanager
def _within(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
