"""An axis of the mesh, as all rooms above see it: one small protocol whose defaults do nothing.

Assembly, step, evaluation and loop go over the axes along which a plan has several ranks, and never ask which ones
these are. Each axis has its class beside its mechanism: `tensor/axis.py`, `expert/axis.py`, `context/axis.py`, and
`pipeline/axis.py`. Data parallelism, which cuts nothing, is what is left: samples are dealt to the replicas
(`training/microbatches.py`), whose gradients an exchange reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from shoal.comm import Group, Lane, World
from shoal.mesh import Mesh
from shoal.parallel.layout import Layout


class Remembers(Protocol):
    """State of a running forward that modules share besides their arguments: the number of tokens, the documents."""

    def state(self) -> Any: ...
    def recall(self, state: Any) -> None: ...


@runtime_checkable
class StaysHere(Protocol):
    """What a layer may give that other ranks of its axis hold a part of, so that it is not sent to further layers."""

    def why_it_stays(self, layer: str) -> str:
        """Why what `layer` gives is not sent, and what would do."""
        ...


class Axis:
    """The ranks along one axis, and what they do together.

    name: of the axis in the mesh
    group: the ranks along it
    """

    name: ClassVar[str]
    cuts_matrices = False
    """Whether ranks have parts of the same parameters, so that decisions about whole ones are made together."""
    cuts_layers = False
    """Whether ranks have other layers of the model."""
    shares_tokens = False
    """Whether each rank has its own tokens of a row."""
    sums_gradients = False
    """Whether gradients of parameters that all ranks have are summed along the axis."""
    lockstep = False
    """Whether ranks that have other samples meet in the forwards."""
    sees_loss = True
    """Whether this rank computes the loss; else another one along the axis does."""
    flushes = True
    """Whether a step ends with all its backwards."""
    streams = 1
    """The number of ranks that share each row of a microbatch."""
    noted: Sequence[Remembers] = ()
    """State that is set for a microbatch before its forward."""
    carried: Sequence[Remembers] = ()
    """State that earlier layers leave for later ones."""

    def __init__(self, mesh: Mesh, world: World) -> None:
        self.group, self._world = world.group(self.name, mesh.ranks(self.name)), world
        self._lanes: list[Lane] = []

    @property
    def size(self) -> int:
        return self.group.size

    def further(self, name: str) -> Group:
        """Makes a further group of the same ranks, for what goes on beside the use of `group`; all of them call it."""
        return self._world.group(f"{self.name}-{name}", self.group.ranks)

    def beside(self, name: str) -> Self:
        """Returns this axis over such a group."""
        other = copy(self)
        other.group = self.further(name)
        return other

    def _lane(self) -> Lane:
        self._lanes.append(self._world.lane())
        return self._lanes[-1]

    def close(self) -> None:
        """Ends what goes on beside the computation; no microbatch may follow."""
        for lane in self._lanes:
            lane.close()

    # the model

    @property
    def variants(self) -> Mapping[str, Group]:
        """The ranks with which this one shares each variant of parameters (see Layout.apart)."""
        return {}

    @property
    def tied(self) -> Sequence[int]:
        """The indices along the axis of ranks that have some of this one's layers' weights too; empty for none."""
        return ()

    def relaid(self, layouts: Mapping[str, Layout]) -> Mapping[str, Layout]:
        """Returns the `layouts` of this rank's parameters, with what this axis changes of them."""
        return layouts

    @property
    def silent_buffers(self) -> Sequence[str]:
        """The buffers of this rank that another one along the axis writes to checkpoints."""
        return ()

    def whole(self, model: nn.Module, lockstep: Group | None, flush: Callable[[], None]) -> nn.Module:
        """Returns what can be called without gradients, by all ranks alike, for the whole of `model`.

        lockstep: the replicas that must call it together; None if this one calls it alone
        flush: ends the steps under way
        """
        return model

    def why_no_hook(self, layout: Layout | None) -> str | None:
        """Returns why a user's hook cannot see its gradient of a parameter; None if it can.

        layout: the parameter's; None for one that other ranks have
        """
        return None

    # a microbatch

    def take(self, microbatch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Begins a microbatch, which was loaded whole; returns this rank's part of it."""
        return microbatch

    def check_sample(self, sample: Mapping[str, Tensor]) -> None:
        """Raises UserError where the values of `sample`, a row of the data, say that its ranks cannot share rows."""

    def try_out(self, run: Callable[[Mapping[str, Tensor]], object], microbatch: Mapping[str, Tensor]) -> None:
        """Called before a step with its first microbatch, this rank's part of it, where ranks share rows. Raises
        UserError for what forwards of it, of which nothing is left, show that cannot be computed of a part.

        run: makes such a forward
        """

    def around_loss(self) -> AbstractContextManager[None]:
        """Wraps the call of the loss on it. Raises UserError inside for what a loss cannot do with a rank's part."""
        return nullcontext()

    def ran(self, count: float | None) -> None:
        """Called after its forward. Raises UserError if ranks that share rows have not met in it, or each counts them.

        count: what the loss has counted, where it gives a plain number
        """

    def check_auxiliary(self, names: Collection[str], of_all_tokens: bool) -> None:
        """Raises UserError for auxiliary losses that cannot be computed of a rank's part.

        of_all_tokens: routers compute theirs of all tokens of the microbatch
        """

    def end(self) -> None:
        """Ends the microbatches: a forward is of whole rows again."""

    # a step: what ranks know of each other's part of the model

    def add_squares(self, squares: Tensor) -> Tensor:
        """Adds up exact sums of squares of the gradients that ranks have."""
        return squares

    def add_sums(self, sums: Sequence[Tensor], purpose: str) -> Sequence[Tensor]:
        """Adds up sums that only some ranks have seen: of losses, of tokens per expert (fp64)."""
        return sums

    def check_sums(self, sums: Tensor) -> None:
        """Raises UserError, on all ranks alike, where those that compute the same loss (its sum, count and auxiliary
        sums, fp64) have other ones: then it reads weights of which each has a part."""

    def gather_seen(self, seen: Any) -> list[Any]:
        """Gathers what only ranks with some of the layers can tell: of losses, of forwards, of their modules."""
        return [seen]

    def untouched(self, names: list[str], here: Collection[str]) -> list[str]:
        """Returns those of `names`, parameters that no backward here has reached, that none has on other ranks either.

        here: all parameters that are trained here
        """
        return names

    def gather_names(self, names: list[str], order: Iterable[str]) -> list[str]:
        """Gathers names of parameters, in the order of the model. `order`: the names of all that are here."""
        return names

    def gather_squares(self, squares: Mapping[str, float], layouts: Mapping[str, Layout]) -> Mapping[str, float]:
        """Gathers squared norms by name."""
        return squares


def in_order(told: Iterable[Collection[str]], order: Iterable[str]) -> list[str]:
    """Returns the names that any rank has told, in `order`."""
    found = {name for theirs in told for name in theirs}
    return [name for name in order if name in found]


def together(told: Iterable[Mapping[str, float]], summed: Collection[str] = ()) -> dict[str, float]:
    """Merges what ranks have told by name: the sum of those `summed`, of others what the first one says that knows."""
    found: dict[str, float] = {}
    for theirs in told:
        for name, value in theirs.items():
            if name not in found:
                found[name] = value
            elif name in summed:
                found[name] += value
    return found
