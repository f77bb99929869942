"""A model cut into stages, called as one: collectively by all ranks of its pipeline, with the same result on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.comm import Group
from shoal.errors import UserError
from shoal.module.stand_in import StandIn
from shoal.pipeline.interpreter import Work
from shoal.pipeline.runner import Runner


class PipelinedModule(StandIn):
    """Calls a pipelined model without gradients; returns its output tensor, or the `logits` of its output, gathered.

    runner: of the stages of this rank
    alike: group of pipelines whose forwards contain collectives, and which therefore call it together; None: this
        pipeline alone
    flush: ends the steps under way
    """

    def __init__(self, runner: Runner, alike: Group | None, flush: Callable[[], None]) -> None:
        super().__init__(runner.split.module, self._run)
        self.__dict__.update(_runner=runner, _alike=alike, _flush=flush)

    @torch.no_grad()
    def _run(self, *args: Any, **kwargs: Any) -> Tensor:
        self.__dict__["_flush"]()
        runner, module = self.__dict__["_runner"], self.__dict__["_part"]
        kind = repr(
            (
                "whole",
                module.training,
                tree_map_only(Tensor, lambda each: (tuple(each.shape), each.dtype), (args, kwargs)),
            )
        )
        call = _Call(module, args, kwargs)
        runner.learn([kind], call.try_out, self.__dict__["_alike"])
        runner.evaluate([kind], call)
        return runner.of_last_stage(call.result)


class _Call(Work):
    """The work of the one microbatch of such a call (interpreter.Work)."""

    def __init__(self, module: Any, args: Any, kwargs: Any) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self.result: Tensor | None = None

    def try_out(self, place: int) -> Tensor:
        output = self._module(*self._args, **self._kwargs)
        output = getattr(output, "logits", output)
        output = output.whole() if hasattr(output, "whole") else output
        if not isinstance(output, Tensor):
            raise UserError(
                f"a model in stages gives its caller one tensor, or logits; this one gives a {type(output).__name__}"
            )
        return output

    def forward(self, microbatch: int) -> Tensor:
        return self.try_out(microbatch)

    def take(self, microbatch: int, found: Tensor) -> None:
        self.result = found
