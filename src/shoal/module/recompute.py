"""`plan.recompute`: the activations that backward computes again instead of keeping them. The results do not change.

    "full"                                        only the input of every block is kept
    {name = "blocks", full = 12, selective = 8}   only the input of the first 12 blocks, of the next 8 the results of
                                                  some operations too; or places, see chosen_blocks
    {name = "blocks", every = 2}                  only the input of every second block
    {name = "selective", save = ["matmul", ...]}  inside every block, only the results of these operations are kept
    {name = "budget", keep = 0.5}                 as few blocks are recomputed as needed to keep this fraction of
                                                  the bytes that backward would keep

Blocks are the repeated parts of the model. A second forward finds inputs and buffers as the first did and changes none;
keyed dropout and the generators of torch, numpy and Python repeat their draws; hooks on the block itself, outside of
the recomputed part, run once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from shoal.errors import UserError, check_choice
from shoal.module.anew import Anew
from shoal.module.attributes import attributes_as_found, plain_attributes
from shoal.module.block_inputs import BlockInputs
from shoal.module.buffer_values import replaced
from shoal.module.chosen_blocks import Places, chosen_blocks, over_budget
from shoal.module.compiling import observed
from shoal.module.functional import weights_as_found
from shoal.module.late_noise import runs_to_its_end
from shoal.module.meter import Meter, in_functorch
from shoal.module.random import host_draws, host_state
from shoal.module.scripted import is_scripted
from shoal.module.selective import SAVE, Contexts, keeping
from shoal.module.selective_graphs import selective_graph
from shoal.module.stand_in import modules_here
from shoal.plan import Option, check_parameters, option_name, option_parameters

Again = Callable[[nn.Module], Callable[[], AbstractContextManager[None]]]
"""Called at a block's forward; returns a maker of contexts, each of which repeats the state and the draws of that
forward."""


def without_caches(module: nn.Module) -> None:
    """Turns off the caches of keys and values in models of `transformers`: a second forward would find the first
    one's."""
    transformers: Any = sys.modules.get("transformers")  # imported if the model comes from it
    for part in module.modules() if transformers is not None else ():
        config = getattr(part, "config", None)
        if isinstance(config, transformers.PretrainedConfig) and getattr(config, "use_cache", False):
            config.use_cache = False


class Recompute:
    """Lets the forwards of `blocks` be computed again in backward, as a plan's `recompute` says.

    blocks: the repeated parts of the model that are here
    option: the plan's `recompute`
    again: make the contexts of a second forward, all of which it runs in
    places: the number of each of `blocks` among the `number` that the whole model has; None where these are all
    backend: the plan's `compile`, by which the forwards of blocks are compiled

    Raises UserError for a wrong `option`. With "budget", call `decide` after the first step.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        option: Option,
        again: Sequence[Again] = (),
        places: Sequence[int] | None = None,
        number: int | None = None,
        backend: bool | str = False,
    ) -> None:
        self.again, self._backend = list(again), backend
        self._blocks = [_Block(block, self.again) for block in blocks]
        self._places = range(len(blocks)) if places is None else places
        self._number = len(blocks) if number is None else number
        self._decide: Callable[[Sequence[_Block]], None] | None = None
        name, parameters = option_name(option, "recompute"), option_parameters(option)
        kinds: dict[str, Callable[..., None]] = {
            "none": self._none,
            "full": self._full,
            "blocks": self._some,
            "selective": self._selective,
            "budget": self._budget,
        }
        check_choice(f'plan.recompute = "{name}" is not one of', name, kinds)
        check_parameters("recompute", option, kinds[name])
        try:
            kinds[name](**parameters)
        except TypeError as error:
            raise UserError(f"plan.recompute = {option!r}: a parameter is of the wrong kind ({error})") from error

    @property
    def chosen(self) -> list[int]:
        """Indices of the blocks that are recomputed."""
        return [place for place, block in enumerate(self._blocks) if block.flag]

    @property
    def whole(self) -> list[nn.Module]:
        """The blocks of which all is computed again."""
        return [block.module for block in self._blocks if block.flag and block.whole]

    def decide(self, agree: Callable[[list[int]], list[int]], ranks: Sequence[Collection[nn.Module]] = ()) -> None:
        """Chooses, once and after a step, the blocks that a budget recomputes. `agree` returns the first rank's
        choice. `ranks`: modules of which each set is a rank's own, with a budget of its own; by default all are one's.
        """
        if self._decide is not None:
            for own in [{id(module) for module in each} for each in ranks] or [{id(b.module) for b in self._blocks}]:
                self._decide([block for block in self._blocks if id(block.module) in own])
            chosen, self._decide = agree(self.chosen), None
            for place, block in enumerate(self._blocks):
                block.flag = place in chosen

    def _none(self) -> None:
        pass

    def _full(self) -> None:
        self._some(every=1)

    def _some(
        self,
        which: Sequence[int] = (),
        every: int = 0,
        full: Places = (),
        selective: Places = (),
        save: Sequence[str] = SAVE,
    ) -> None:
        whole, some = chosen_blocks(self._number, which, every, full, selective)
        keep = self._keeping(save)
        for place, block in zip(self._places, self._blocks, strict=True):
            if place in whole:
                block.wrap()
            elif place in some:
                keep(block)

    def _selective(self, save: Sequence[str] = SAVE) -> None:
        keep = self._keeping(save)
        for block in self._blocks:
            keep(block)

    def _keeping(self, save: Sequence[str]) -> Callable[[_Block], None]:
        """Returns what has a block keep what the operations `save` give."""
        contexts = keeping(save)

        def keep(block: _Block) -> None:
            block.wrap(contexts, selective_graph(block.module, save, self._backend) if self._backend else None)

        return keep

    def _budget(self, keep: float) -> None:
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 <= keep <= 1:
            raise UserError(f"plan.recompute: keep = {keep!r}: give the part of the bytes to keep, 0 to 1")
        kinds: dict[Hashable, list[_Block]] = {}
        for block in self._blocks:
            block.wrap()
            kinds.setdefault(block.kind, []).append(block)
        meters = {kind: Meter(alike[0]) for kind, alike in kinds.items()}

        def decide(own: Sequence[_Block]) -> None:
            """Recomputes those that are over the budget; a kind that did not run saves 0."""
            again = over_budget([(meters[block.kind].kept, meters[block.kind].saves) for block in own], keep)
            for place, block in enumerate(own):
                block.flag = place in again

        self._decide = decide


class _Block:
    """A block whose forward is recomputed in backward if `flag` is set at the first one; `whole`: all of it."""

    def __init__(self, module: nn.Module, again: Sequence[Again]) -> None:
        self.module, self.flag, self.whole = module, False, True
        self._again = again
        # a forward set on the instance, such as a compiled one, or that of torch.jit
        self._own = module.forward if is_scripted(module) else vars(module).get("forward")
        self._changing: set[str] | None = None  # names of buffers that forwards have changed; None before the first
        self._in_place: set[int] | None = None  # inputs that forwards change; None before the first

    @property
    def kind(self) -> Hashable:
        """A key that is equal for blocks that keep equally many activations."""
        return type(self.module), tuple(tuple(parameter.shape) for parameter in self.module.parameters())

    def wrap(self, contexts: Callable[[], Contexts] | None = None, graph: Callable[..., Any] | None = None) -> None:
        """Replaces the block's forward; `contexts` makes the contexts of a first forward and of its repetitions, which
        a `graph` that is compiled needs none of."""
        self.flag, self.whole = True, contexts is None

        @wraps(self._own or type(self.module).forward)
        def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = self._own or partial(type(module).forward, module)
            if not self.flag or module is not self.module or not torch.is_grad_enabled() or in_functorch():
                return run(*args, **kwargs)
            if graph is not None and not observed():
                return graph(*args, **kwargs)
            first, second = contexts() if contexts is not None else (nullcontext(), nullcontext)
            failed = False
            found, weights, plain = self._buffers(), weights_as_found(module), plain_attributes(module)
            given = BlockInputs(type(module).__name__, args, kwargs, self._in_place)
            makers = [make(module) for make in self._again]
            draws = partial(host_draws, host_state())
            repeated: list[Callable[[], AbstractContextManager[Any]]] = [partial(attributes_as_found, plain), draws]
            repeated += [*makers, partial(self._as_found, found), weights]
            both = first, Anew([*repeated, given.found_again, second])
            try:
                return checkpoint(
                    lambda *_: given.run(run),
                    *given.devices(),
                    use_reentrant=False,
                    context_fn=lambda: both,
                    early_stop=not runs_to_its_end(module),
                )
            except Exception:
                failed = True
                raise
            finally:  # also where a stage of a pipeline has left a forward in the middle of a block
                if not failed:
                    self._learn(given, found)

        self.module.forward = MethodType(recomputed, self.module)

    def _learn(self, given: BlockInputs, found: dict[str, _Found]) -> None:
        """Lets go of the copies of inputs and buffers that a first forward has left as they were."""
        self._in_place = given.changed() | (self._in_place or set())
        if found:
            self._changing = self._changed(found) | (self._changing or set())
            for name in found.keys() - self._changing:
                del found[name]

    def _buffers(self) -> dict[str, _Found]:
        """Returns what all buffers are now: any may be changed for the first time in any forward."""
        places = [
            (f"{name}.{key}".lstrip("."), owner, key, each)
            for name, owner in modules_here(self.module)
            for key, each in owner._buffers.items()
            if each is not None
        ]
        copies = {id(each): each.clone() for *_, each in places}  # one may have two places
        return {name: _Found(each, copies[id(each)], each._version, owner, key) for name, owner, key, each in places}

    def _changed(self, found: Mapping[str, _Found]) -> set[str]:
        """Returns the names of changed buffers: in the first forward by value, for a change by a kernel need not count
        as a version, and BatchNorm's in any."""
        by_value = self._changing is None and not any(isinstance(each.buffer, FakeTensor) for each in found.values())
        changed = {
            name
            for name, (buffer, copy, version, owner, key) in found.items()
            if owner._buffers.get(key) is not buffer
            or buffer._version != version
            or (by_value and not torch.equal(buffer, copy))
        }
        return changed if by_value else changed | self._statistics()

    def _statistics(self) -> set[str]:
        """Returns the names of the buffers that BatchNorms change."""
        layers = [(name, each) for name, each in modules_here(self.module) if isinstance(each, _BatchNorm)]
        return {f"{name}.{key}".lstrip(".") for name, each in layers if each.training for key in each._buffers}

    def _as_found(self, found: Mapping[str, _Found]) -> AbstractContextManager[None]:
        """Gives buffers the values that the first forward found, inside the context."""
        values = {id(each.copy): each.copy.clone() for each in found.values()}
        return replaced([(each.owner, each.key, values[id(each.copy)]) for each in found.values()])


class _Found(NamedTuple):
    """A buffer as a first forward found it: the tensor, a copy of its values, its version, and where it is: `key` among
    the buffers of `owner`."""

    buffer: Tensor
    copy: Tensor
    version: int
    owner: nn.Module
    key: str
