"""A model as the engine would have it on a rank, of fake tensors, on which nothing is computed and nothing
allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from sysconfig import get_paths
from traceback import FrameSummary, extract_tb
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

from shoal import errors
from shoal.assembly.model import Local, localize, whole_model
from shoal.assembly.ranks import ranks
from shoal.chunks.assign import Described
from shoal.chunks.make import described, groups_of
from shoal.comm.silent import SilentWorld
from shoal.errors import ShoalError, UserError
from shoal.module.batchnorm import has_batch_statistics
from shoal.module.build import Built, build_blank
from shoal.module.kept_outside import nothing_kept_outside
from shoal.module.random import host_draws, keyed_functional
from shoal.module.value_checks import values_unchecked
from shoal.optim.groups import GroupRule
from shoal.parallel.context.documents import searching
from shoal.parallel.tensor import Rules, check_placements, check_rules
from shoal.plan import Plan
from shoal.planner.finite import FiniteCalls, causal_seen, masks_seen
from shoal.precision import Precision
from shoal.training.loss import Loss


@dataclass(frozen=True)
class Subject:
    """A model with all that decides what a microbatch of it needs on `rank` of `plan`. `sample`: one row of the data,
    `microbatch` of them a forward."""

    factory: Callable[[], nn.Module]
    loss: Loss
    sample: Mapping[str, Tensor]
    microbatch: int
    precision: Precision
    plan: Plan = field(default_factory=Plan)
    param_groups: GroupRule | None = None
    tensor_rules: Rules | None = None
    rank: int = 0


class Untraced(UserError):
    """A model that cannot be run on fake tensors. `reason`: what happened, and at which line; `remedy`: what to do."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason, remedy)
        self.reason, self.remedy = reason, remedy

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.reason, self.remedy)))


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turns errors of somebody else's code, which is run on fake tensors, into Untraced."""
    try:
        with values_unchecked():
            yield
    except ShoalError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what = "; ".join([str(error), *getattr(error, "__notes__", ())])
        raise Untraced(
            f"{_line_of(error)} decides by values how the model goes on, or makes a shape of them ({what}), so it is "
            "not known beforehand what the model takes",
            "a run shows it, for which a plan that is given needs no prediction (data parallelism takes any way "
            "through a model)",
        ) from error
    except Exception as error:  # somebody else's code; torch's traces of fake tensors have many lines
        raise Untraced(
            f"the model cannot be run without computing it ({type(error).__name__} at {_line_of(error)}): "
            f"{_first_line(error)}"
        ) from error


def blank(factory: Callable[[], nn.Module]) -> Built:
    """Builds a model whose initial values nobody asks for (see `build_blank`). Raises UserError as `making`."""
    with making():
        return build_blank(factory)


@contextmanager
def making() -> Iterator[None]:
    """Turns the error of a factory that fails wherever it runs into UserError, with the line of the user's own: no run
    would show more."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # somebody else's code
        raise UserError(
            f"the model cannot be made: its factory raises {type(error).__name__} at {_own_line_of(error)}: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _line_of(error: BaseException) -> str:
    """The file and line of the user's, or of a library's, that led to `error` in torch; a backward has none."""
    frames = extract_tb(error.__traceback__)
    lines = [each for each in frames if not each.filename.startswith(_folders(torch, errors)) and not _python(each)]
    backward = any(each.name == "_engine_run_backward" for each in frames)
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else "its backward" if backward else "its forward"


def _own_line_of(error: BaseException) -> str:
    """The last file and line on the way to `error` that are of no library; where there are none, those of one."""
    libraries = (*_folders(torch, errors), get_paths()["purelib"], get_paths()["platlib"])
    frames = extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(libraries) and not _python(each)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else _line_of(error)


def _python(frame: FrameSummary) -> bool:
    """Whether a line is of Python's own library, such as of contextlib where a context manager of ours fails."""
    paths = get_paths()
    installed = frame.filename.startswith((paths["purelib"], paths["platlib"]))
    return frame.filename.startswith((paths["stdlib"], "<frozen")) and not installed


def _folders(*packages: ModuleType) -> tuple[str, ...]:
    return tuple(str(Path(package.__file__ or "").parent) for package in packages)


class OneRow(TorchFunctionMode):
    """BatchNorm of a single value in each channel, which torch refuses: what it takes does not depend on that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        given = signature(F.batch_norm).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        x, _, _, weight, bias, training, momentum, eps = given.arguments.values()
        if not training or x.numel() != x.shape[1]:
            return func(*args, **(kwargs or {}))
        return torch.batch_norm(x, weight, bias, None, None, training, momentum, eps, False)


@dataclass(frozen=True)
class Prepared:
    """A module as the engine would have it on a rank, of fake tensors.

    - `local`: what the assembly makes of the module, in a world whose other ranks are not there
    - `parameters`: those of the rank, in the order in which chunks are cut; `options`: of each optimizer group
    - `whole`: elements of the parameters before the module was cut among ranks
    - `buffers`: bytes
    - `calls`: what the operations inside gave before
    """

    local: Local
    world: SilentWorld
    parameters: list[Described]
    options: list[dict[str, Any]]
    whole: int
    buffers: int
    calls: FiniteCalls

    def sent(self) -> dict[str, int]:
        """Bytes of payload so far, by purpose."""
        found: dict[str, int] = {}
        for flow, traffic in self.world.ledger.traffic.items():
            found[flow.purpose] = found.get(flow.purpose, 0) + traffic.payload
        return found


@contextmanager
def prepared(built: Built, subject: Subject) -> Iterator[Prepared]:
    """Makes of `built` what the assembly of an engine would; inside, all tensors are fake."""
    module = built.module
    whole = sum(parameter.numel() for parameter in module.parameters())
    modes = (each.fake_mode for each in (*module.parameters(), *module.buffers()) if isinstance(each, FakeTensor))
    mode = next(modes, None) or FakeTensorMode()
    mode.allow_non_fake_inputs = True
    mode.cache_enabled = False  # KnownCalls keeps more, and sooner
    world, rules, precision = SilentWorld(subject.rank, subject.plan.size), subject.tensor_rules, subject.precision
    check_rules(module, rules or {})
    check_placements(module, subject.plan.placements or {})
    model = whole_model(built, subject.param_groups)
    # what changes only how products are computed stays out: compiled blocks run as they are written, fp8 needs its GPU
    among, plain = ranks(replace(subject.plan, compile=False), world), replace(precision, fp8=False)
    with ExitStack() as stack:
        stack.enter_context(nothing_kept_outside(module))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(host_draws(0))
        local = localize(model, among, plain, rules=rules, in_stages=False)
        parameters = described(module, model.groups.member, precision, groups_of(local.layouts))
        stack.enter_context(mode)
        calls = stack.enter_context(FiniteCalls(mode))
        stack.enter_context(masks_seen(calls))
        stack.enter_context(causal_seen())
        _put_fakes(module, parameters, precision)
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        stack.enter_context(keyed_functional(local.randomness))
        if has_batch_statistics(module):
            stack.enter_context(OneRow())
        if "position_ids" not in subject.sample:  # a row is one document: a real forward finds that, and makes no mask
            stack.enter_context(searching(lambda: True))
        module.train()
        yield Prepared(local, world, parameters, model.groups.options, whole, buffers, calls)


def _put_fakes(module: nn.Module, parameters: Iterable[Described], precision: Precision) -> None:
    """Replaces parameters and buffers by fakes of the dtypes that the module sees, tied ones in all their places."""
    dtypes = {name: key.dtype for name, _, key in parameters}
    fakes: dict[int, nn.Parameter] = {}
    for name, before in list(module.named_parameters(remove_duplicate=False)):
        if id(before) not in fakes:
            fakes[id(before)] = nn.Parameter(
                torch.empty(before.shape, dtype=dtypes[name]), requires_grad=before.requires_grad
            )
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, fakes[id(before)])
    for owner_module in module.modules():
        for name, buffer in owner_module._buffers.items():
            if buffer is not None:
                dtype = precision.buffer_dtype(
                    buffer, owner_module, name not in owner_module._non_persistent_buffers_set
                )
                owner_module._buffers[name] = torch.empty(buffer.shape, dtype=dtype)
