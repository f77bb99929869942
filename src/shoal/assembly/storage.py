"""Where an engine's chunks lie: who cuts them, how large they are, and how weights that are not whole come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from shoal.assembly.offload import Offload
from shoal.chunks import Budget, Chunk, ChunkMaker, Executor, Gather, search
from shoal.chunks.activations_on_host import OnHost
from shoal.chunks.allocate import Private, Shared
from shoal.chunks.executor import Pause
from shoal.chunks.make import Keeping
from shoal.chunks.shard import ALIKE, Shards, ask_for_none
from shoal.comm import Group, World
from shoal.errors import UserError
from shoal.exchange import Algorithm
from shoal.exchange.tuning import given_chunk_bytes
from shoal.mesh import Mesh
from shoal.module.compiling import blocks, compiled_parts
from shoal.plan import Plan
from shoal.precision import Precision


class Storage:
    """Storage of the ranks `replicas`, among whom samples are shared, which are some of `everyone`.

    apart: the ranks that have the same experts as this one, where these are spread, and those that have the weights
        that are tied across the stages at the places `tied` (see parallel.layout)
    offload: what `plan.memory` makes of it
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        world: World,
        replicas: Group,
        apart: Mapping[str, Group],
        everyone: Group,
        offload: Offload | None,
        tied: Sequence[int] = (),
    ) -> None:
        self._plan, self._mesh, self._world = plan, mesh, world
        self._replicas, self._apart, self._everyone, self._tied = replicas, apart, everyone, tied
        self._offload, self._lane = offload, world.lane()
        self._meeting = [apart["tied"]] if "tied" in apart else []  # where stages meet

    def keeping(self, exchange: Algorithm, whole: Callable[[], bool]) -> tuple[Keeping, dict[str, Keeping]]:
        """How chunks are kept, and those apart. `whole()`: whether no cut may go through a parameter."""
        apart = {kind: self._keeping(kind, group, exchange, whole) for kind, group in self._apart.items()}
        return self._keeping("", self._replicas, exchange, whole), apart

    def _keeping(self, kind: str, group: Group, exchange: Algorithm, whole: Callable[[], bool]) -> Keeping:
        device = self._world.device
        return Keeping(
            Shared(group, device) if exchange.reduces_in_place else Private(device), self._shards(kind, group, whole)
        )

    def _shards(self, kind: str, group: Group, whole: Callable[[], bool]) -> Shards | None:
        """Among whom of `group` chunks are cut, and where they are at home."""
        stage, home = self._plan.zero, None if self._offload is None else self._offload.home
        within, copies = self._mesh.shards(experts=kind == "experts")
        if kind == "tied":
            copies = self._mesh.on(self._tied, copies)
        if not stage and group.size > 1:
            within, copies = [self._world.rank], group.ranks
        if len(within) == 1 and home is None:
            return None
        inside = group if len(copies) == 1 else self._world.group(f"{group.name}-inside", within)
        across = None if len(copies) == 1 else self._world.group(f"{group.name}-across", copies)
        weights = self._world.group(f"{group.name}-weights", within) if stage == 3 or home is not None else inside
        if kind == "tied":
            self._meeting += [each for each in (inside, across, weights) if each is not None]
        return Shards(weights, inside, across, self._world.device, 3 if home is not None else stage, home, whole())

    def chunk_bytes(
        self,
        exchange: Algorithm,
        maker: ChunkMaker,
        shards: Shards | None,
        precision: Precision,
        keys: Callable[[torch.dtype], list[str]],
    ) -> int | None:
        """Bytes of gradient of a chunk: what the plan fixes, else what suits weights that pass; `keys` gives those of
        the optimizer's state. None where the links decide."""
        allowed = Budget() if self._offload is None else self._offload.allowed
        given = given_chunk_bytes(exchange, allowed.chunk)
        if given is not None or shards is None or not shards.gathers():
            return given
        in_turn = 0 if self._offload is None else self._offload.bytes_in_turn(precision, keys)
        ranks, itemsize = shards.group.size, precision.grad.itemsize
        found = search(
            maker.described, ranks, itemsize, shards.whole_parameters, allowed.device, in_turn
        ).best.chunk_bytes
        return int(self._everyone.broadcast_object(found))  # "auto" may see other memory on each GPU

    def gather(self, module: nn.Module, chunks: Sequence[Chunk]) -> Gather | None:
        """Watches the weights that are whole only while they are used, if there are such."""
        passing = [chunk for chunk in chunks if chunk.passes]
        if not passing:
            return None
        offload = self._offload
        groups = {id(chunk.group): chunk.group for chunk in passing if chunk.group is not None and chunk.group.size > 1}
        agree = alike = None
        if groups:
            group = next(iter(groups.values()))
            if self._apart:  # some are gathered among fewer ranks
                group = self._world.group(f"{self._replicas.name}-movement", self._replicas.ranks)
            agree = partial(_smallest, group)
            alike = partial(_alike, list(groups.values()), passing[0].data.device)
        tier = None if offload is None else offload.tier
        executor = Executor(passing, self._lane, tier, agree=agree, alike=alike)
        on_host = None
        if offload is not None and offload.allowed.activations:
            on_host = partial(OnHost, offload.allowed.activations, self._lane, offload.host)
        together = [*(blocks(module) if self._plan.compile else []), *compiled_parts(module)]
        return Gather(module, passing, executor, together, tier, on_host)

    @torch.no_grad()
    def agree_on_buffers(self, module: nn.Module) -> None:
        """Buffers are those of the first rank: a constructor may have drawn from elsewhere than torch."""
        for buffer in module.buffers():
            self._everyone.broadcast(buffer, purpose="buffers")

    @torch.no_grad()
    def agree(self, chunks: Sequence[Chunk], beside: Group) -> None:
        """Weights are those of the first rank, as buffers are. `beside`: the ranks with other parts of the
        matrices."""
        for chunk in chunks:
            if chunk.is_cut:  # alike within a copy since `adopt`
                chunk.agree()
                continue
            group = self._apart.get(chunk.spec.variant, self._replicas)
            group.broadcast(chunk.master, purpose="weights")
            chunk.publish()
        for chunk in chunks:
            if chunk.spec.tp_copy[1] > 1:  # which the ranks beside this one have too
                beside.broadcast(chunk.owned.master, purpose="weights")
                chunk.publish()

    def leave(self) -> None:
        """Stages that wait for this one, where they share weights, wait no more."""
        for group in self._meeting:
            group.close()

    def close(self) -> None:
        """Ends the lane on which weights travel."""
        self._lane.close()


def _smallest(group: Group, numbers: list[int]) -> list[int]:
    """Returns the smallest of each number that a rank of `group` has; all of them call it. Raises UserError, on all,
    where they have not used weights as often as each other."""
    everywhere = group.all_gather_object(numbers)
    if len({len(each) for each in everywhere}) > 1:
        raise UserError(
            f"ranks need different weights: those of {group.name} have used them {[len(each) for each in everywhere]} "
            f"times in a pass. {ALIKE}"
        )
    return [min(each) for each in zip(*everywhere, strict=True)]


def _alike(groups: Sequence[Group], device: torch.device, pause: Pause) -> None:
    """Raises UserError where another rank of one of `groups` gathers weights that this one does not ask for."""
    for group in groups:
        ask_for_none(group, pause, device)
