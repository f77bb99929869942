"""Operations on fake tensors that have run before on tensors that look the same: what they gave is made again, in a
quarter of the time that torch takes to look it up.

The blocks of a model run the same operations over and over, and finding out what each gives is most of a dry run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Operations whose results depend on values, and those that change what an argument looks like."""

LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What `torch.tensor` does to what it has made."""


class _Result(NamedTuple):
    """How to make a result. Of the arguments and the results before it, it is number `same`, or has the storage of
    number `inside`, or else one of its own."""

    same: int | None
    inside: int | None = None
    shape: Sequence[int] = ()
    stride: Sequence[int] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


Known = tuple[type, tuple[_Result, ...]]
"""The results of an operation, in a tuple or a list, or a single one."""
_KNOWN: dict[Any, Known | None] = {}
"""By operation and what its arguments look like; None where it has to run each time."""
NEW: Any = object()
"""Said of an operation that has not run before."""


class KnownCalls(TorchDispatchMode):
    """Inside, an operation on tensors of `fakes` that has run before is not run again."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes
        self._states: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and telling so at each call takes as long as the call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls: autograd asks each tensor for it
            return args[0].device
        if func in LIFTED and type(args[0]) is Tensor:
            return _lifted(self._fakes, args[0])
        kwargs = kwargs or {}
        if func is torch.ops.aten.bincount.default and (counts := _counts(*args, **kwargs)) is not None:
            return counts
        given: list[FakeTensor] = []
        key, known = self._look_up(func, args, kwargs, given)
        if known is None:
            return func(*args, **kwargs)
        if known is not NEW:
            return self._again(known, given)
        out = func(*args, **kwargs)
        is_as_before = _key(func, args, kwargs, []) == key  # not so for results that were given with another shape
        _KNOWN[key] = self._how(func, out, given) if is_as_before else None
        return out

    def recall(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation gave before, made again; NEW where it has to run. For a mode above this one, to which
        each way to the next takes as long as this."""
        given: list[FakeTensor] = []
        _, known = self._look_up(func, args, kwargs, given)
        return NEW if known is None or known is NEW else self._again(known, given)

    def _look_up(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[FakeTensor]) -> Any:
        """The key of an operation, and what is known of it. Adds its tensors to `given`."""
        try:
            key = _key(func, args, kwargs, given)
            return key, _KNOWN.get(key, NEW)
        except TypeError:  # of an argument that is not compared
            return None, None

    def _again(self, known: Known, given: Sequence[FakeTensor]) -> Any:
        kind, results = known
        made = self._made(results, given)
        return made[0] if kind is FakeTensor else kind(made)

    def _how(self, func: Any, out: Any, given: Sequence[FakeTensor]) -> Known | None:
        """How to make `out`, what `func` gave for the tensors `given`; None where that is not known."""
        if any(tag in func.tags for tag in BY_VALUES):
            return None
        outs = list(out) if type(out) in (tuple, list) else [out]
        found: list[_Result] = []
        for place, each in enumerate(outs):
            result = _of_one(each, given, outs[:place])
            if result is None:
                return None
            found.append(result)
        for again, each in zip(self._made(found, given), outs, strict=True):
            same_keys = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(each)
            same_state = vars(again).keys() == vars(each).keys()
            if not (same_keys and same_state) or again.untyped_storage().nbytes() != each.untyped_storage().nbytes():
                return None
        return type(out), tuple(found)

    def _made(self, results: Sequence[_Result], given: Sequence[FakeTensor]) -> list[FakeTensor]:
        """Makes results of an operation on the tensors `given`."""
        made = list(given)
        for same, inside, shape, stride, offset, dtype, device in results:
            if same is not None:
                made.append(made[same])
                continue
            with no_dispatch():
                empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                if inside is not None:
                    empty.set_(made[inside].untyped_storage(), offset, shape, stride)
                made.append(self._fake(empty, device))
        return made[len(given) :]

    def _fake(self, empty: Tensor, device: torch.device) -> FakeTensor:
        """The fake of a tensor on the meta device. The first on a device is made by torch, the others like it, in a
        third of the time."""
        state = self._states.get(device)
        if state is None:
            first = FakeTensor(self._fakes, empty, device)
            self._states[device] = dict(vars(first))
            return first
        fake = Tensor._make_subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device)
        if self._fakes._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(state)
        return fake


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[FakeTensor]) -> tuple[Any, ...]:
    return func, torch.get_default_dtype(), *_looks(args, given), *_looks(tuple(kwargs.items()), given)


def _looks(value: Any, given: list[FakeTensor]) -> Any:
    """Something that is equal for arguments between which no operation tells a difference, but by values. Adds all
    tensors to `given`. Raises TypeError for what is not compared."""
    kind = type(value)
    if kind is FakeTensor:
        if value.layout is not torch.strided or value.constant is not None or value.is_conj() or value.is_neg():
            raise TypeError
        given.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, value.requires_grad
    if kind is tuple or kind is list:
        return tuple([_looks(each, given) for each in value])
    if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        raise TypeError
    if kind is float and value != value:
        return "NaN"
    return kind, value  # 1, 1.0 and True are equal


def _of_one(out: Any, given: Sequence[FakeTensor], before: Sequence[FakeTensor]) -> _Result | None:
    if type(out) is not FakeTensor or out.layout is not torch.strided or out.constant is not None:
        return None
    all_before = [*given, *before]
    same = next((place for place, each in enumerate(all_before) if each is out), None)
    if same is not None:
        return _Result(same)
    if out.requires_grad:
        return None
    storage = out.untyped_storage()._cdata
    inside = [place for place, each in enumerate(all_before) if each.untyped_storage()._cdata == storage]
    if sum(place < len(given) for place in inside) > 1:  # whose it is may differ the next time
        return None
    at = inside[0] if inside else None
    return _Result(None, at, out.shape, out.stride(), int(out.storage_offset()), out.dtype, out.fake_device)


def _counts(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """What `torch.bincount` gives for numbers below `minlength`, as experts' are; None where its length depends on
    values."""
    return None if weights is not None or minlength == 0 else numbers.new_empty(minlength, dtype=torch.int64)


def _lifted(fakes: FakeTensorMode, real: Tensor) -> Tensor:
    """The fake of a tensor that was just made, which remembers its value where that is a single one. Torch itself
    imports its compiler first, to give it a name."""
    is_kept = fakes.may_turn_const(real)
    with no_dispatch():
        kept = real.clone() if is_kept else None
        empty = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        fake = FakeTensor(fakes, empty, real.device, constant=kept)
    if is_kept:
        fakes.fake_tensor_converter.add_constant_storage_mapping(fake)
    return fake
