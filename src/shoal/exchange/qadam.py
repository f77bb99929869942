"""Adam with compressed momentum: QAdam (Bagua, 8 bits) and 1-bit Adam (https://arxiv.org/abs/2102.02888).

The first `warmup` steps are ordinary Adam on exact sums. Then the variance V = v / (1 - b2^T) is frozen, with its bias
correction (correcting a frozen v by a growing t would raise the learning rate silently), and each replica adds its own
gradient to the momentum:

    m_r = b1 m + (1 - b1) g_r;   m = mean over r of m_r, through the codec with error feedback
    x <- x - lr (m / (1 - b1^t)) / (sqrt(V) + eps), with weight decay as the optimizer has it

The optimizer's state has v = V (1 - b2^t), as under Adam, which so goes on with V where another exchange does.

An element that had no gradient in the warm-up, such as those of a word that had not come yet, has no variance: by 0 +
eps its first gradient, or what the codec makes of none, would throw it away. The mean of its parameter stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.codecs import codec
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds, Replica, State
from shoal.exchange.scatter_gather import Feedback, scatter_gather
from shoal.exchange.sends import CODED, TWICE, Sends, coded
from shoal.optim.fused import FlatOptimizer
from shoal.plan import Option


@dataclass
class QAdam(Algorithm):
    """Exchanges Adam's momentum instead of gradients; needs Adam or AdamW.

    - `warmup`: exact steps before the variance is frozen; a tenth of the run lets it settle
    - `codec`: how the momentum travels
    - `error_feedback`: whether what the codec loses is added in the next step

    Once the momentum is compressed each replica clips its own gradient, before the momentum.
    """

    warmup: int = 100
    codec: Option = "u8"
    error_feedback: bool = True
    chunk_bytes: int | None = 4 * 2**20

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        return Sends(coded(self.codec, itemsize), CODED, handed=TWICE)

    def __post_init__(self) -> None:
        if self.warmup < 1:
            raise UserError(f"plan.exchange: warmup = {self.warmup}: the variance needs at least one exact step")
        self._codec = codec(self.codec)

    def suits(self, make: Callable[[], torch.optim.Optimizer]) -> None:
        _check(make())

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._adam = _check(replica.optimizer.torch)
        self._feedback = Feedback(replica.chunks, replica.group) if self.error_feedback else None
        # of each parameter the T by which its variance is corrected; 0 while that is not frozen
        self._frozen = {slot.name: torch.zeros(1) for chunk in replica.chunks for slot in chunk.slots}

    def holds(self, step: int) -> Holds:
        return Holds.SUM if step < self.warmup else Holds.LOCAL_SUM

    def skips_on_device(self, step: int) -> bool:
        return step < self.warmup and super().skips_on_device(step)

    @torch.no_grad()
    def update(self, step: int, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        if step < self.warmup:
            super().update(step, factor, skip, untouched)
            return
        group, optimizer = self.replica.group, self.replica.optimizer
        options = {id(parameter): options for options in self._adam.param_groups for parameter in options["params"]}
        alone = frozenset(untouched)
        for index, chunk in enumerate(self.replica.chunks):
            momentum = chunk.gradient.mul_(factor)  # clipped as a replica's own mean
            names = [slot.name for slot in chunk.slots if slot.name not in alone]
            new = [name for name in names if not self._frozen[name]]
            for name in names:
                self._take_in(name, optimizer.grad(name), options[id(optimizer.parameters[name])])
            waiting = [] if self._feedback is None else [self._feedback.own[index], self._feedback.summed[index]]
            views = [slot.view(flat) for flat in waiting for slot in chunk.slots if slot.name in alone]
            before = [view.clone() for view in views]  # nothing of an untouched parameter is applied: all of it waits
            self._fill_variance(new)
            # before it is sent: what the codec loses is then of the mean, whatever the number of replicas
            momentum.div_(group.size)
            scatter_gather(momentum, group, self._codec, f"momentum {chunk.index}", *waiting)
            for view, as_it_was in zip(views, before, strict=True):
                view.copy_(as_it_was)
            chunk.clear_padding(momentum)
            if self._feedback is not None:
                self._feedback.clear_padding(index)
            for name in names:
                self._move(name, optimizer.grad(name), options[id(optimizer.parameters[name])])
            chunk.publish()

    def _take_in(self, name: str, gradient: Tensor, options: dict) -> None:
        """Turns the gradient into this replica's momentum, in place."""
        parameter = self.replica.optimizer.parameters[name]
        state = self._adam.state.get(parameter)
        if not state:
            raise UserError(
                f"plan.exchange: {name} got its first gradient after the warm-up, so that it has no variance: "
                f"warm up longer than {self.warmup}"
            )
        if not self._frozen[name]:
            self._frozen[name].fill_(float(state["step"]))
        if not options.get("decoupled_weight_decay") and options["weight_decay"]:
            gradient.add_(parameter, alpha=options["weight_decay"])
        beta = float(options["betas"][0])
        gradient.mul_(1 - beta).add_(state["exp_avg"], alpha=beta)

    def _fill_variance(self, names: Sequence[str]) -> None:
        """Gives elements without a variance the mean of those that have one, of their parameter or else of all
        `names`."""
        states = (self._adam.state[self.replica.optimizer.parameters[name]] for name in names)
        variances = [state["exp_avg_sq"] for state in states]
        seen = [each[each > 0] for each in variances]
        of_all = torch.cat(seen) if seen else torch.empty(0)
        for variance, there in zip(variances, seen, strict=True):
            if there.numel() < variance.numel() and of_all.numel():
                variance.masked_fill_(variance == 0, (there if there.numel() else of_all).mean())

    def _move(self, name: str, momentum: Tensor, options: dict) -> None:
        parameter = self.replica.optimizer.parameters[name]
        state, lr, (beta1, beta2) = self._adam.state[parameter], float(options["lr"]), options["betas"]
        state["step"] += 1
        state["exp_avg"].copy_(momentum)
        if options.get("decoupled_weight_decay") and options["weight_decay"]:
            parameter.mul_(1 - lr * options["weight_decay"])
        before, corrected = (1 - beta2 ** float(at) for at in (self._frozen[name], state["step"]))
        if corrected > before * (1 + 1e-7):
            state["exp_avg_sq"].mul_(corrected / before)
            self._frozen[name].fill_(float(state["step"]))
        denominator = (state["exp_avg_sq"] / corrected).sqrt_().add_(options["eps"])
        parameter.addcdiv_(momentum, denominator, value=-lr / (1 - beta1 ** float(state["step"])))

    def state(self) -> dict[str, State]:
        feedback = {} if self._feedback is None else self._feedback.state()
        return {**feedback, "frozen_steps": State(self._frozen, "mean")}

    def restored(self) -> None:
        if self._feedback is not None:
            self._feedback.restored()


def _check(optimizer: torch.optim.Optimizer) -> torch.optim.Adam:
    """Returns the optimizer, of which the momentum travels. Raises UserError for another than Adam, and for settings
    of it by which the momentum is not all that an update goes by."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Adam):
        raise UserError(
            f"plan.exchange: compressing momentum needs Adam or AdamW, the optimizer is {name}"
            + (" (leave `foreach` and `fused` open)" if isinstance(optimizer, FlatOptimizer) else "")
        )
    for setting in ("amsgrad", "maximize"):
        if any(group[setting] for group in optimizer.param_groups):
            raise UserError(f"plan.exchange: compressing momentum does not go with {setting}=True of {name}")
    return optimizer
