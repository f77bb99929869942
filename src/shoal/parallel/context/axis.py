"""Context parallelism as an axis: ranks have other tokens of the same rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm import World
from shoal.errors import UserError
from shoal.mesh import Mesh
from shoal.parallel.axis import Axis
from shoal.parallel.context.apart import Run
from shoal.parallel.context.context import Context
from shoal.parallel.layout import Layout

OF_ALL_TOKENS = frozenset({"router", "router_z"})
"""Auxiliary losses that routers compute of all tokens of a microbatch, wherever they are."""


class ContextParallel(Axis):
    """Cuts the tokens of each microbatch. `how`: plan.context; `attention`: of one device (see Context).

    context: cuts tokens and attends to those of all ranks, once `watch` was called
    """

    name = "cp"
    shares_tokens = True

    def __init__(self, mesh: Mesh, world: World, how: str, attention: Callable[..., Tensor]) -> None:
        super().__init__(mesh, world)
        self._how, self._attention, self.streams = how, attention, self.size

    def watch(self, module: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Lets the attention of `module` see whole rows. `parts`: modules of all stages.

        Raises UserError, on every rank alike, for a model in which other layers look at several tokens.
        """
        _check_layers(parts)
        self.context = Context(self.group, self._attention, self._lane() if self._how == "ring" else None)
        self.noted = [self.context]
        self.context.watch(module)
        self.context.apart.watch(module)

    def why_no_hook(self, layout: Layout | None) -> str | None:
        return f"plan.cp = {self.size}: each rank has the gradient of its part of the rows alone"

    def take(self, microbatch: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.context.cut(microbatch)

    def check_sample(self, sample: Mapping[str, Tensor]) -> None:
        self.context.check_padding(sample)

    def try_out(self, run: Run, microbatch: Mapping[str, Tensor]) -> None:
        self.context.apart.check(run, microbatch)

    def around_loss(self) -> AbstractContextManager[None]:
        return self.context.looking()

    def ran(self, count: float | None) -> None:
        self.context.attended(count)

    def check_auxiliary(self, names: Collection[str], of_all_tokens: bool) -> None:
        if names and not (of_all_tokens and OF_ALL_TOKENS.issuperset(names)):
            raise UserError(
                f"plan.cp = {self.size} with the auxiliary losses {tuple(names)}: they are means over all tokens of a "
                "microbatch, of which each rank has a part"
            )

    def end(self) -> None:
        self.context.close()


def _check_layers(parts: Iterable[nn.Module]) -> None:
    """Raises UserError for a layer that counts tokens, of which a rank has a part."""
    why = "plan.cp > 1 gives each rank a part of each row: "
    for part in parts:
        if isinstance(part, _BatchNorm):
            raise UserError(f"{why}the model's BatchNorm would count them as samples")
        by_frequency = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.scale_grad_by_freq
        if by_frequency and part.weight.requires_grad:
            raise UserError(
                f"{why}an embedding with scale_grad_by_freq would divide its gradients by how often a token is in "
                "that part. Take plan.cp = 1, or leave scale_grad_by_freq out"
            )
