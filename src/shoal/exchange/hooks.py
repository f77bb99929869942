"""Hooks that users have registered on parameters, with torch's meaning.

    parameter.register_hook(fn)                        fn(gradient) of each microbatch: the gradient of the microbatch's
                                                       own mean loss
    parameter.register_post_accumulate_grad_hook(fn)   fn(parameter), whose `grad` is then the gradient of the mean over
                                                       what this rank has counted in the step so far

Both see what a plain loop of `(sum / count).backward()` shows, in fp32 or wider: the power of two that losses are
divided by, and the scale of fp16, are removed for the hook and put back after it. The hooks stay in torch's own dicts,
under their own keys, so that `handle.remove()` works; there they are wrapped, since the engine has hooks of its own
beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.chunks.weakly import is_weak
from shoal.errors import UserError
from shoal.parallel.axis import Axis
from shoal.parallel.layout import Layout

Hook = Callable[[Tensor], Any]


def is_hooked(parameter: Tensor) -> bool:
    """Returns whether the parameter has a hook of a user's."""
    return bool(parameter._backward_hooks or _after(parameter))


def sees_sums(parameter: Tensor) -> bool:
    """Returns whether a user's hook is to see the parameter's accumulated gradient."""
    return bool(_after(parameter))


def no_sum(name: str, rounds: int) -> UserError:
    """Makes the error for a hook on a sum of so many rounds of microbatches that no rank keeps."""
    return UserError(
        f"{name} has a hook of register_post_accumulate_grad_hook, and this plan keeps no whole sum of {rounds} "
        "microbatches: take register_hook, which sees each microbatch's gradient, one microbatch a rank (a larger "
        "microbatch=), or a plan with zero <= 1 and without memory"
    )


def watch(parameter: nn.Parameter, arrived: Hook) -> RemovableHandle:
    """Registers `arrived` on the accumulated gradient, also of a parameter that the caller's loop has frozen for now,
    which torch refuses."""
    learns = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(arrived)
    parameter.requires_grad_(learns)
    return handle


def check_hooks(
    names: Iterable[str], layouts: Mapping[str, Layout], axes: Sequence[Axis], why_none: str | None = None
) -> None:
    """Raises UserError if ranks along `axes` cannot show hooks of these parameters what they are to see. `why_none`:
    why hooks of none can be shown it."""
    for name in names:
        reasons = (axis.why_no_hook(layouts.get(name)) for axis in reversed(axes))
        if (why := next(filter(None, (why_none, *reasons)), None)) is not None:
            raise UserError(
                f"{name} has a hook (register_hook or register_post_accumulate_grad_hook), and {why}. Remove the hook, "
                "or leave that to plan.dp and plan.zero"
            )


class _Unit:
    """The unit of gradients during a backward.

    - `value`: 0-dim factor from a gradient, as it arrives, to that of the microbatch's mean loss; None outside of a
      step's backward
    - `counts`: whether the microbatch has samples that count
    """

    value: Tensor | None = None
    counts = True


class _InUnit:
    """Wraps a user's `hook` on a gradient, which it sees in the unit of the mean."""

    def __init__(self, hook: Hook, unit: _Unit) -> None:
        self.hook, self.unit = hook, unit

    def __call__(self, gradient: Tensor) -> Tensor | None:
        unit = self.unit.value
        if unit is None:
            return self.hook(gradient)
        if not self.unit.counts:
            return None
        shown = _wide(gradient) * unit.to(gradient.device)
        before = _version(shown)
        result = self.hook(shown)
        if result is None:
            if _version(shown) == before:
                return None
            result = shown
        return (result / unit.to(result.device)).to(gradient.dtype)


class _Held:
    """Wraps a user's `hook` on an accumulated gradient: in a step the reducer, which has the sum, runs it."""

    def __init__(self, hook: Hook, unit: _Unit) -> None:
        self.hook, self.unit = hook, unit

    def __call__(self, parameter: Tensor) -> None:
        if self.unit.value is None:
            self.hook(parameter)


class UserHooks:
    """The users' hooks on `parameters`, also those registered later. `axes`: along which there are several ranks.

    `reshaped`: a parameter of which a hook changed a sum in this step, other than by zeros; "" for none.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], axes: Sequence[Axis]
    ) -> None:
        self._parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self._layouts, self._axes, self._unit = layouts, axes, _Unit()
        self._unscale: Tensor | None = None
        self._seen = -1  # torch's number of hooks registered so far in this process, when they were looked at last
        self._hooked: dict[str, nn.Parameter] = {}  # the parameters that had hooks then
        self.reshaped = ""

    def begin(self, rounds: int, borrows: Callable[[str], bool], unscale: Tensor | None) -> None:
        """Begins a step.

        - `rounds`: number of rounds of microbatches
        - `borrows`: returns, for a parameter's name, whether only a stretch of its gradient is kept between rounds
        - `unscale`: as in Reducer.begin

        Raises UserError for a hook on a sum that is not kept.
        """
        self.reshaped, self._unscale = "", unscale
        self._wrap()
        for name, each in self._hooked.items():
            if rounds > 1 and borrows(name) and _after(each):
                raise no_sum(name, rounds)

    @contextmanager
    def seeing(self, expected: float, count: Tensor, counts: bool) -> Iterator[None]:
        """Sets the unit of gradients around the backward of a microbatch.

        - `expected`: what the microbatch's loss sum was divided by
        - `count`: what the microbatch counts (0-dim)
        - `counts`: whether hooks are to see it
        """
        self._wrap()
        if not self._hooked:
            yield
            return
        unit = torch.where(count > 0, expected / count.double(), 1.0)
        self._unit.value, self._unit.counts = unit if self._unscale is None else unit * self._unscale, counts
        try:
            yield
        finally:
            self._unit.value = None

    @property
    def hooked(self) -> bool:
        """Whether there are hooks on sums, as on all ranks or on none."""
        return any(len(each._post_accumulate_grad_hooks or ()) > 1 and _held(each) for each in self._hooked.values())

    def refusal(self) -> UserError:
        """Makes the error for a hook that changes sums whose other parts lie on other ranks."""
        return UserError(
            f"a hook of register_post_accumulate_grad_hook on {self.reshaped or 'a parameter of another rank'} changed "
            "the gradient, other than by zeros: it has the sum of this rank's microbatches alone, so what comes of it "
            "depends on the number of ranks. Take register_hook, which sees each microbatch's gradient, or clip, "
            "clip_value"
        )

    def of_sum(self, parameter: Tensor) -> list[Hook]:
        """Returns the hooks that are to see the sum of the parameter's gradients now."""
        if len(parameter._post_accumulate_grad_hooks) == 1 or not self._unit.counts:  # the reducer's own
            return []
        return _held(parameter)

    def _wrap(self) -> None:
        """Wraps hooks that have come since it was last called, which may be in any forward; where none has been
        registered anywhere it is one comparison."""
        if self._seen == RemovableHandle.next_id:
            return
        self._seen = RemovableHandle.next_id
        # the reducer has one on each, so most are passed over by their number alone
        some = (
            (name, each)
            for name, each in self._parameters.items()
            if each._backward_hooks or len(each._post_accumulate_grad_hooks or ()) > 1
        )
        self._hooked = {name: each for name, each in some if is_hooked(each)}
        for name, each in self._hooked.items():
            hooks, after = each._backward_hooks or {}, each._post_accumulate_grad_hooks or {}
            new = [key for key, hook in hooks.items() if not self._has(hook)]
            held = (
                [key for key, hook in after.items() if not (self._has(hook) or is_weak(hook))] if len(after) > 1 else []
            )
            if new or held:
                check_hooks([name], self._layouts, self._axes)
            for key in new:
                hooks[key] = _InUnit(_of_the_user(hooks[key]), self._unit)
            for key in held:
                after[key] = _Held(_of_the_user(after[key]), self._unit)

    def _has(self, hook: Hook) -> bool:
        """Whether it is wrapped here, not by an engine that has trained the module before."""
        return isinstance(hook, _InUnit | _Held) and hook.unit is self._unit


def _of_the_user(hook: Hook) -> Hook:
    return hook.hook if isinstance(hook, _InUnit | _Held) else hook


def _held(parameter: Tensor) -> list[Hook]:
    return [each.hook for each in (parameter._post_accumulate_grad_hooks or {}).values() if isinstance(each, _Held)]


def run_on_sum(hooks: Iterable[Hook], parameter: Tensor, total: Tensor, unit: Tensor) -> Tensor | None:
    """Shows `hooks` the sum `total`, times `unit`, as the gradient of `parameter`.

    Returns what they made of it: `total` itself if they changed nothing, None if they removed it.
    """
    shown = total.to(torch.promote_types(total.dtype, parameter.dtype)) * unit.to(total.device)
    before = _version(shown)
    if shown.dtype != parameter.dtype:
        parameter.grad_dtype = None  # any
    parameter.grad = shown
    for hook in hooks:
        hook(parameter)
    result, parameter.grad = parameter.grad, None
    if result is shown and _version(shown) == before:
        return total
    return None if result is None else result / unit.to(result.device)


def only_zeroed(result: Tensor, total: Tensor) -> bool:
    """Returns whether `result` differs from `total` by zeros and rounding alone: a mask that all parts share."""
    result, total = (each.to_dense() if each.is_sparse else each for each in (result, total))
    tolerance = 8 * torch.finfo(total.dtype).eps
    return bool(((result == 0) | torch.isclose(result.to(total.dtype), total, rtol=tolerance, atol=0.0)).all())


def _after(parameter: Tensor) -> list[Hook]:
    """Returns the users' hooks among those on the accumulated gradient."""
    return [hook for hook in (parameter._post_accumulate_grad_hooks or {}).values() if not is_weak(hook)]


def _wide(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _version(tensor: Tensor) -> tuple[int, int]:
    """Returns the version counters; a sparse tensor has another one for its values, which may be written alone."""
    return tensor._version, tensor._values()._version if tensor.is_sparse else 0
