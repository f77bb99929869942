"""The loss of a global batch as a pure function of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from shoal.chunks import views_beside
from shoal.comm import Group
from shoal.comm.functional import copy_to, reduce_from
from shoal.data import Batch
from shoal.module.functional import call_with
from shoal.training.forward import Forward
from shoal.training.microbatches import Dealing, with_idle


class Objective:
    """Called with all parameters by name it gives the mean loss of `batch` (0-dim), the same on every rank of `group`.

    `groups[name]`: the ranks among whom the gradient of a parameter is summed.
    """

    def __init__(
        self, forward: Forward, dealing: Dealing, batch: Batch, group: Group, groups: Mapping[str, Group]
    ) -> None:
        self._forward, self._dealing, self._batch, self._group, self._groups = forward, dealing, batch, group, groups

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        given, batch = {name: copy_to(value, self._groups[name]) for name, value in parameters.items()}, self._batch
        forward, module = self._forward, self._forward.module
        own = [(each, given[name]) for name, each in module.named_parameters() if name in given]
        views = [pair for each, value in own for pair in views_beside(each, value)]
        given |= {name: value for name, buffer in module.named_buffers() for view, value in views if view is buffer}
        total = count = torch.zeros((), device=next(iter(parameters.values())).device)
        share = self._dealing.cut(batch.ids)
        number = share.most if self._dealing.lockstep else 1
        with (
            forward.rows()
        ):  # a rank without a microbatch runs one that does not count: its collectives are the others'
            for ids, counts in with_idle(share.microbatches, number, batch.ids[:1]):
                if forward.is_keyed:  # else it draws from the global generators, which are the caller's
                    forward.randomness.begin(batch.step, ids)
                # a function leaves nothing behind
                with forward.keyed(seeded=forward.is_keyed), forward.effects.of(counts=False):
                    run = partial(forward.sums, forward.load(batch, ids))
                    sums = call_with(module, given, run, views)
                weight = float(counts)
                total, count = total + weight * sums.total, count + weight * sums.count
        return reduce_from(total, self._group) / reduce_from(count.to(total.dtype), self._group)
