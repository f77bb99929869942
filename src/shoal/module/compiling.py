"""Compiles the forward of each block, never a whole module, whose hooks would be traced into the graph; and makes
`torch.cond` work on chunks, compiled or not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from shoal.device import is_accelerator
from shoal.errors import UserError, did_you_mean
from shoal.module.kept_reads import keeping_reads
from shoal.module.repeated import Again, forget, note
from shoal.module.stand_in import StandIn


def recomputable(module: nn.Module) -> list[nn.Module]:
    """Returns the parts whose activations can be recomputed one by one.

    They are the blocks, or, without blocks, the modules that the outermost Sequentials run one after the other, also in
    Sequentials in these (the stages of torchvision's ConvNeXt); a Sequential of plain layers is one part.
    """
    found = blocks(module)
    if found == [module]:
        parts = [part for sequence in _outermost(module, nn.Sequential) for part in _parts(sequence)]
        found = [part for part in parts if not isinstance(part, StandIn)]
    return found


def numbered_parts(module: nn.Module) -> dict[str, int]:
    """Returns the numbers of the parts of a whole model by name: for `numbers_of`, once it has been cut."""
    names = {id(part): name for name, part in module.named_modules()}
    return {name: place for place, name in enumerate(dict.fromkeys(names[id(part)] for part in recomputable(module)))}


def numbers_of(module: nn.Module, parts: Sequence[nn.Module], numbered: Mapping[str, int]) -> list[int]:
    """Returns the number of each of the `parts` of a stage's module in the whole model; a layer of a Sequential that is
    one part there has that one's."""
    names = {id(part): name for name, part in module.named_modules()}

    def number(name: str) -> int:
        return numbered[name] if name in numbered or not name else number(name.rpartition(".")[0])

    return [number(names[id(part)]) for part in parts]


def nothing_to_recompute() -> UserError:
    """Returns the error for plan.recompute with a model that has no such parts."""
    return UserError(
        "plan.recompute takes a model's repeated blocks (nn.ModuleList, nn.Sequential), and this model has none: call "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its forward where it pays"
    )


def _parts(sequence: nn.Module) -> list[nn.Module]:
    """What a Sequential runs one after the other, also in plain Sequentials in it; itself where that is single
    layers."""
    children = list(sequence.children())
    if not any(list(child.children()) or isinstance(child, StandIn) for child in children):
        return [sequence]
    return [part for child in children for part in (_parts(child) if type(child) is nn.Sequential else [child])]


def blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the repeated parts of a model: the children of its outermost ModuleLists, or the model itself without
    any.

    A child without a forward (a container of containers) stands for its own children. Blocks of other pipeline stages
    are left out.
    """
    found = [block for container in _outermost(module, nn.ModuleList) for block in _running(container)] or [module]
    return [block for block in found if not isinstance(block, StandIn)]


def _running(container: nn.Module) -> list[nn.Module]:
    found = []
    for child in container.children():
        found += _running(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """Returns the outermost modules of the type `kind`, in order."""
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def compile_blocks(module: nn.Module, backend: bool | str) -> None:
    """Compiles each block's forward with `backend` (True: torch's default); the compilation happens at the first call.

    Raises UserError for an unknown backend.
    """
    from torch._dynamo.exc import InvalidBackend  # imported here because it takes seconds

    for block in blocks(module):
        try:
            chosen = keeping_reads("inductor" if backend is True else str(backend))
            block.forward = torch.compile(block.forward, backend=chosen)
        except InvalidBackend as error:
            known = torch.compiler.list_backends()
            raise UserError(
                f"plan.compile = {backend!r:.100} is no backend of torch.compile "
                f"({', '.join(known)}).{did_you_mean(str(backend), known)} Give one of them, true or false"
            ) from error


def fuses(device: torch.device) -> bool:
    """Whether torch's own compiler can make kernels for an accelerator here: it needs Triton."""
    from torch.utils._triton import has_triton

    return is_accelerator(device) and has_triton()


_stance, _observers, _forced = threading.Lock(), [0], ExitStack()


@contextmanager
def as_written() -> Iterator[None]:
    """Runs what is compiled as it is written, inside the context, on all threads: for one who observes its operations.

    A graph would hide them, and dynamo never compiles again what it once met under an observer. Torch's stance is one
    of the process: threads that left it in another order than they came would leave all as it is written for good.

    What backward computes again of a forward inside the context is run as it is written there too: a graph keeps other
    tensors for backward than those that it is to find again.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    with _stance:
        if not _observers[0]:
            _forced.enter_context(torch.compiler.set_stance("force_eager"))
            note(_as_written_again)
        _observers[0] += 1
    try:
        yield
    finally:
        with _stance:
            _observers[0] -= 1
            if not _observers[0]:
                forget(_as_written_again)
                _forced.close()


def observed() -> bool:
    """Whether what is compiled runs as it is written, for an observer."""
    return _observers[0] > 0


def _as_written_again() -> Again:
    return as_written


def compiled_parts(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules that the model's author has compiled (`torch.compile(part)`, or of its forward).

    Hooks must stay outside of them, or they would be traced into their graphs. Raises UserError for modules compiled by
    `part.compile()`, which have no outside.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for name, part in module.named_modules():
        if id(part) in inside:
            continue
        if part._compiled_call_impl is not None:
            raise UserError(
                f"{name or 'the model'} ({type(part).__name__}) is compiled by compile(), which would trace the "
                "gathering of weights (plan.zero = 3, plan.memory) into its graph: wrap it, torch.compile(part), "
                "compile its forward, part.forward = torch.compile(part.forward), or set plan.compile"
            )
        if _is_compiled_outside(part):
            found.append(part)
            inside |= {id(inner) for inner in part.modules()}
    return found


def graphs(module: nn.Module, by_plan: bool) -> list[nn.Module]:
    """Returns the modules that run compiled: the blocks where the plan says so, and what the model's author has
    compiled, in any way."""
    own = [part for part in module.modules() if part._compiled_call_impl is not None or _is_compiled_outside(part)]
    return own + (blocks(module) if by_plan else [])


_torch_cond = torch.cond
_lock, _open = threading.Lock(), [0]


@contextmanager
def branching() -> Iterator[None]:
    """Makes `torch.cond` take its branch in Python, inside the context.

    Torch's own refuses operands that lie in one storage, as the parameters of a chunk do. In a compiled block the graph
    breaks there.
    """
    with _lock:
        _open[0] += 1
        torch.cond = _branch  # type: ignore[assignment]
    try:
        yield
    finally:
        with _lock:
            _open[0] -= 1
            if not _open[0]:
                torch.cond = _torch_cond


def _branch(
    pred: Tensor | bool,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: tuple[Any, ...] | list[Any] = (),
) -> Any:
    """Stands in for `torch.cond`; in a dry run, where nothing has values, it takes the first branch."""
    if torch.compiler.is_exporting():
        return _torch_cond(pred, true_fn, false_fn, operands)
    try:
        taken = bool(pred)
    except DataDependentOutputException:
        taken = True
    return (true_fn if taken else false_fn)(*operands)


def _is_compiled_outside(part: nn.Module) -> bool:
    """Whether `torch.compile` has made it, or its forward."""
    return _is_optimized(part) or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")


def _is_optimized(part: nn.Module) -> bool:
    """Whether `torch.compile` has made it. Nothing has where torch._dynamo is not there, which takes a second."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return loaded is not None and isinstance(part, loaded.OptimizedModule)
