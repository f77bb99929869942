"""Forwards that write to weights: an average of other weights that is renewed there, rows that are scaled, values of a
first batch.

One process has what a forward writes from then on. A copy that is gathered for its use is dropped after it, masters do
not hear of it, and ranks make other numbers of forwards than one process. So it is refused there, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.chunks.chunk import Chunk
from shoal.comm.outside import outside_checkpoints
from shoal.errors import UserError
from shoal.module.attributes import AT_ONCE, bits

GATHERED = "weights come together for each use here (plan.zero = 3, plan.memory), and what is written is dropped"

SWITCH_OFF = (
    "Switch that off in the model (RWKV of transformers: config.rescale_every = 0; layers of loralib: "
    "merge_weights = False), or keep what it changes in a buffer (register_buffer)"
)


def written(name: str, lost: str) -> UserError:
    """Returns the error for a forward of a step that writes to the parameter `name`. `lost`: why that goes wrong."""
    return UserError(
        f"a forward writes to the weight {name}: {lost}. Keep what a forward changes in a buffer (register_buffer), or "
        "take one rank in fp32 without plan.memory"
    )


def inside_whole_weights(written: str = "") -> UserError:
    """Returns the error for a step where all weights are there already, as they were before it, or for one that was
    `written` there."""
    if written:
        return UserError(
            f"{written} was written inside engine.whole_weights(), whose weights are to be read, and are dropped "
            "after it. Change them before the engine is made, or train under plan.zero = 0 without plan.memory"
        )
    return UserError("a step inside engine.whole_weights(): it would not see what it updates. Train outside")


def one_of(names: Sequence[str]) -> str:
    """Names one of the weights `names`, of which no more is known than that it is one of these."""
    if len(names) < 3:
        return " or ".join(names)
    return f"{names[0]}, or one of the {len(names) - 1} others up to {names[-1]}"


def written_aside(name: str) -> UserError:
    """Returns the error for a forward without gradients that writes to the parameter `name`."""
    return UserError(
        f"a forward without gradients writes to the weight {name}, and an evaluation leaves weights as they are: a "
        f"checkpoint after it would have others. {SWITCH_OFF}"
    )


def blank(parameter: Tensor) -> Tensor:
    """NaN (0 of integers) of the parameter's shape, in the memory of one element."""
    value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


@contextmanager
def left_blank(shown: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Wraps what has nothing to do with weights, such as `module.eval()`. Raises UserError where it writes to one that
    is not there.

    `shown`: by name the parameter, and the blank that it shows. torch writes to none of more than one element.
    """
    failed = None
    try:
        yield
    except RuntimeError as error:
        if "single memory location" not in str(error):
            raise
        failed = error
    moved = (name for name, (parameter, none) in shown.items() if _is_other(parameter, none))
    if failed is not None or (name := next(moved, None)) is not None:
        which = "a weight" if failed is not None else f"the weight {name}"
        raise UserError(
            f"{which} is written to as the model changes between training and evaluation mode: {GATHERED}. {SWITCH_OFF}"
        ) from failed


def _is_other(parameter: Tensor, none: Tensor) -> bool:
    """Whether a parameter that shows `none` was bound to another tensor, or was written to."""
    return parameter.data_ptr() != none.data_ptr() or (
        none.is_floating_point() and not none.flatten()[:1].isnan().all()
    )


class Copies:
    """Sees to it that nobody writes to the gathered copies of `chunks`.

    `found`: a parameter to which somebody has in this pass, as far as this rank can tell.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.found = ""
        self._passes = {True: 0, False: 0}
        self._compared: set[int] | None = None
        for chunk in chunks:
            chunk.before_let_go = self.look

    def begin(self) -> None:
        """Begins a pass. The first, and ever fewer later ones, compare the values of each chunk once: autograd counts
        most writes, not those to `parameter.data`."""
        self.found = ""
        kind = torch.is_grad_enabled()
        self._passes[kind] += 1
        few = not self._passes[kind] & (self._passes[kind] - 1)
        self._compared = set() if few else None

    def look(self, chunk: Chunk) -> None:
        """Looks at `chunk`, whose copy is about to go."""
        counted = chunk.data._version != chunk.filled
        compares = self._compared is not None and chunk.index not in self._compared
        if compares and self._compared is not None:
            self._compared.add(chunk.index)
        if (counted or compares) and not self.found:
            with outside_checkpoints():  # weights come and go in the middle of blocks that are computed again
                changed = _changed(chunk)
            self.found = changed or (one_of([slot.name for slot in chunk.slots]) if counted else "")

    def check(self) -> None:
        """Raises UserError where somebody has written."""
        found, self.found = self.found, ""
        if found:
            raise written(found, GATHERED) if torch.is_grad_enabled() else written_aside(found)


@torch.no_grad()
def _changed(chunk: Chunk) -> str:
    """Names a parameter of which the stretch that this rank keeps differs from the copy; "" for none.

    They are compared where the stretch is kept, a piece at a time: a budget of the device has no room for more.
    """
    shards, kept = chunk.shards, chunk.owned
    assert shards is not None
    copy, own = bits(chunk.data[shards.stretch(chunk.size)]), bits(kept.data)
    pieces = zip(copy.split(AT_ONCE), own.split(AT_ONCE), strict=True)
    if not any((each.to(other.device) != other).any() for each, other in pieces):
        return ""
    differs = copy.to(own.device) != own
    return next((slot.name for slot in kept.slots if slot.view(differs).any()), "")
