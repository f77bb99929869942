"""A process group in the place of NCCL's: collectives on the device's tensors, in the order of streams.

A call is two pieces of work on a communication stream. The first one *posts* what this rank gives, as a file in a
folder that the ranks share; the second one, which cannot begin before the posts of the others are there, reads them and
writes the result. Posts are urgent: they are made as soon as their stream can get there, also where streams are lazy.
So a collective can begin once all ranks have made the call, as on real devices, and no rank waits for a lazy one.

Ranks that call different operations, or the same one on other shapes, would hang or get garbage with NCCL. Here they
are reported with both calls ("mismatch"), as is a rank that ended, or did not come in `patience` seconds.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_simulator = torch.ops.sim
_numbers = itertools.count()
_waiting: dict[int, Callable[[], None]] = {}
_groups: list[Group] = []
_folder, _patience = Path(), 30.0

REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def meet_in(folder: str, patience: float) -> None:
    """Says where the ranks of this run meet, and for how many seconds of waiting a call is taken to hang."""
    global _folder, _patience
    _folder, _patience = Path(folder), patience


def leave() -> None:
    """Tells the other ranks that this one makes no further calls."""
    for group in _groups:
        group.path("ended", group.rank()).touch()


class Mismatch(RuntimeError):
    """Ranks make calls that do not go together."""


@dataclass(frozen=True)
class Call:
    """One operation as this rank calls it.

    - `name`: with what all ranks have to agree on
    - `post`: where what it gives is put; `given` are those tensors
    - `others`: the posts that it needs, by rank
    - `written`: the tensors that `finish` writes on the host's view of them, given what the others posted, by rank
    """

    name: str
    post: Path
    given: list[Tensor]
    others: dict[int, Path]
    written: list[Tensor]
    finish: Callable[[list[Tensor], dict[int, list[Tensor]]], None]

    def alone(self) -> Call:
        """Returns it without its tensors, which a piece of work keeps from nobody."""
        return replace(self, given=[], written=[])


class Options:
    """What `ProcessGroupNCCL.Options` takes."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


class Work(dist.Work):
    """A call under way. `wait` lets the current stream wait, not the host; until then it is among `under_way` and holds
    the tensors. From then on they may be given up, as with NCCL, although other streams have not waited."""

    def __init__(self, tensors: list[Tensor], stream: torch.Stream, host_waits: bool, under_way: set[Work]) -> None:
        super().__init__()
        self._tensors, self._host_waits, self._under_way = tensors, host_waits, under_way
        under_way.add(self)
        self._event = stream.record_event()
        self._future: Future[Any] = Future(devices=[stream.device])
        with stream:  # what is then done with the result comes behind this stream
            self._future.set_result(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._event.device).wait_event(self._event)
        if self._host_waits:
            self._event.synchronize()
        self._tensors = []
        self._under_way.discard(self)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> list[Tensor]:
        return self._tensors


class Group(dist.ProcessGroup):
    """The operations of `ProcessGroupNCCL`. Each kind of traffic has its own stream, as there: the collectives, and
    each pair of ranks."""

    Options = Options
    supports_coalescing, supports_splitting = True, False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        if rank == 0:
            store.set("simulated", uuid.uuid4().hex)
        self._token = store.get("simulated").decode()
        self._calls: Counter[str] = Counter()
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}
        self._coalesced: list[Call] | None = None
        self._under_way: set[Work] = set()
        self._awaited: set[Path] = set()  # what messages of other ranks put where, and has not come
        self._aborted = False
        _groups.append(self)

    def path(self, *parts: Any) -> Path:
        """A file that ranks of this group know by the same name."""
        return _folder / ".".join(map(str, (self._token, *parts)))

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "nccl"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def _get_backend(self, device: torch.device) -> Group:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(torch.accelerator.current_accelerator().type)]

    def _set_sequence_number_for_group(self) -> None: ...

    def shutdown(self) -> None:
        self._under_way.clear()

    def abort(self) -> None:
        """Cuts messages under way short, on this rank alone: their memory keeps what is there."""
        self._aborted = True
        for path in list(self._awaited):
            path.touch()
        self.shutdown()

    # ---- collectives ----

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        op = _reduction(options)

        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            for i, tensor in enumerate(out):
                tensor.copy_(_reduced([posts[rank][i] for rank in range(self._size)], op))

        return self._collective("all_reduce", tensors, tensors, finish, options, op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], options: Any) -> Work:
        op, root = _reduction(options), options.rootRank

        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            for i, tensor in enumerate(out):
                tensor.copy_(_reduced([posts[rank][i] for rank in range(self._size)], op))

        return self._collective("reduce", tensors, tensors * (self._rank == root), finish, options, op, root)

    def broadcast(self, tensors: list[Tensor] | Tensor, options: Any = 0) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root = options if isinstance(options, int) else options.rootRank
        given = tensors if self._rank == root else []
        written = tensors if self._rank != root else []

        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            if self._rank != root:
                _copy(out, posts[root])

        return self._collective("broadcast", given, written, finish, options, root, agreed=tensors)

    def allgather(self, out: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> Work:
        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            for rank in range(self._size):
                _copy(out[rank : rank + 1], posts[rank])

        return self._collective("all_gather", tensors, out[0], finish, options)

    def _allgather_base(self, out: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return self._all_gather_flat([out], [tensor], options)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, out: list[Tensor], tensors: list[Tensor], options: Any = None) -> Work:
        return self._all_gather_flat(out, tensors, options)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_flat(self, out: list[Tensor], tensors: list[Tensor], options: Any) -> Work:
        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            for i, tensor in enumerate(out):
                for rank, part in enumerate(tensor.view(self._size, -1)):
                    part.copy_(posts[rank][i].flatten())

        return self._collective("all_gather", tensors, out, finish, options)

    def reduce_scatter(self, out: list[Tensor], tensors: list[list[Tensor]], options: Any) -> Work:
        op = _reduction(options)

        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            out[0].copy_(_reduced([posts[rank][self._rank] for rank in range(self._size)], op))

        return self._collective("reduce_scatter", tensors[0], out, finish, options, op)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([out], [tensor], options)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(self, out: list[Tensor], tensors: list[Tensor], options: Any = None) -> Work:
        op = _reduction(options)

        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            for i, tensor in enumerate(out):
                mine = [posts[rank][i].view(self._size, -1)[self._rank] for rank in range(self._size)]
                tensor.copy_(_reduced(mine, op).view_as(tensor))

        return self._collective("reduce_scatter", tensors, out, finish, options, op)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, out: list[list[Tensor]], tensors: list[Tensor], options: Any) -> Work:
        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            for rank, tensor in enumerate(out):
                _copy([tensor], posts[rank])

        return self._collective("gather", tensors, out[0] if out else [], finish, options, options.rootRank)

    def scatter(self, out: list[Tensor], tensors: list[list[Tensor]], options: Any) -> Work:
        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            out[0].copy_(posts[options.rootRank][self._rank])

        given = tensors[0] if tensors else []
        return self._collective("scatter", given, out, finish, options, options.rootRank, agreed=out)

    def alltoall(self, out: list[Tensor], tensors: list[Tensor], options: Any = None) -> Work:
        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            for rank, tensor in enumerate(out):
                _copy([tensor], [posts[rank][self._rank]])

        return self._collective("all_to_all", tensors, out, finish, options, agreed=tensors[:0])

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, out_splits: list[int], in_splits: list[int], options: Any = None
    ) -> Work:
        even = [1] * self._size
        gets = out.split(out_splits or [len(out) // self._size * one for one in even])
        gives = tensor.split(in_splits or [len(tensor) // self._size * one for one in even])
        return self.alltoall(list(gets), list(gives), options)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Work:
        """As NCCL's: an all-reduce, for which the host waits too."""
        zero = torch.zeros(1, device=torch.accelerator.current_accelerator())
        return self._collective("barrier", [zero], [], _nothing, opts, host_waits=True)

    # ---- between two ranks ----

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        """Done when the other one receives: NCCL's sends need not be buffered."""
        name, here = self._pair(self._rank, to)
        post, others = self.path(*here, "data"), {to: self.path(*here, "ready")}
        self._awaited.update(others.values())
        return self._run(Call(_described("message", tensors), post, tensors, others, [], _nothing), name)

    def recv(self, tensors: list[Tensor], of: int, tag: int = 0) -> Work:
        name, here = self._pair(of, self._rank)

        def finish(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None:
            _copy(out, posts[of])

        post, others = self.path(*here, "ready"), {of: self.path(*here, "data")}
        self._awaited.update(others.values())
        return self._run(Call(_described("message", tensors), post, [], others, tensors, finish), name)

    def _pair(self, source: int, target: int) -> tuple[str, tuple[str, int]]:
        """The stream of a pair of ranks, and the parts of a file's name for the next message from one to the other."""
        way = f"{source}-{target}"
        self._calls[way] += 1
        return f"{min(source, target)}-{max(source, target)}", (way, self._calls[way])

    # ---- how calls are made ----

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        calls, self._coalesced = self._coalesced or [], None
        return self._launch(calls, "coalesced", True, False)

    def _collective(
        self,
        name: str,
        given: list[Tensor],
        written: list[Tensor],
        finish: Callable[[list[Tensor], dict[int, list[Tensor]]], None],
        options: Any,
        *also: Any,
        agreed: Sequence[Tensor] | None = None,
        host_waits: bool = False,
    ) -> Work:
        self._calls["collective"] += 1
        number = self._calls["collective"]
        called = _described(name, given if agreed is None else agreed, *also)
        others = {rank: self.path(number, rank) for rank in range(self._size)}
        call = Call(called, others[self._rank], given, others, written, finish)
        return self._run(call, "collectives", getattr(options, "asyncOp", True), host_waits)

    def _run(self, call: Call, traffic: str, aside: bool = True, host_waits: bool = False) -> Any:
        if self._coalesced is not None:
            self._coalesced.append(call)
            return None  # what counts is the work of all
        return self._launch([call], traffic, aside, host_waits)

    def _launch(self, calls: list[Call], traffic: str, aside: bool, host_waits: bool) -> Work:
        tensors = [tensor for call in calls for tensor in (*call.given, *call.written)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        device = tensors[0].device
        current = torch.accelerator.current_stream(device)
        stream = current
        if aside:
            if (device, traffic) not in self._streams:
                self._streams[device, traffic] = torch.Stream(device)
            stream = self._streams[device, traffic]
            stream.wait_stream(current)
        self.path("at", self._rank).write_text(", ".join(call.name for call in calls))
        with stream:
            for call in calls:
                _on_stream(call.given, [], partial(_post, call.alone()), f"{call.name} gives", [], urgent=True)
            for call in calls:
                files = [str(path) for rank, post in call.others.items() for path in (post, self.path("ended", rank))]
                _on_stream([], call.written, partial(self._finish, call.alone()), call.name, files, urgent=False)
        return Work(tensors, stream, host_waits, self._under_way)

    def _finish(self, call: Call, written: list[Tensor]) -> None:
        self._awaited.difference_update(call.others.values())
        if self._aborted:
            return
        posts: dict[int, list[Tensor]] = {}
        for rank, path in call.others.items():
            if not path.exists():
                raise Mismatch(f"{call.name} on rank {self._rank}\t{self._whereabouts(rank)}")
            name, posts[rank] = _read(path)
            if name != call.name:
                raise Mismatch(f"{call.name} on rank {self._rank}\t{name} on rank {rank}")
        call.finish(written, posts)

    def _whereabouts(self, rank: int) -> str:
        """What a rank does that did not come."""
        latest = self.path("at", rank)
        last = f"last called {latest.read_text()}" if latest.exists() else "made no call in this group"
        ended = self.path("ended", rank).exists()
        return f"rank {rank} {last}" + (" and has ended" if ended else f", and did not come in {_patience} s")


def install(name: str) -> None:
    """Puts `Group` in the place of `ProcessGroupNCCL`, which torch's CPU build lacks; on a device that is not CUDA's it
    is the backend "simulated"."""
    c10d: Any = dist.distributed_c10d
    c10d.batch_isend_irecv = dist.batch_isend_irecv = _batch_isend_irecv
    if name == "cuda":
        c10d._NCCL_AVAILABLE, c10d.default_pg_nccl_timeout = True, timedelta(minutes=10)
        torch.cuda.nccl.version = lambda: (2, 27, 0)  # which torch logs
        c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = Group
    else:
        dist.Backend.register_backend(
            "simulated", lambda store, rank, size, _: Group(store, rank, size), devices=[name]
        )


def _batch_isend_irecv(operations: list[dist.P2POp]) -> list[Work]:
    group: Any = operations[0].group or dist.group.WORLD
    group._start_coalescing()
    for each in operations:
        peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
        each.op(each.tensor, group=group, tag=each.tag, **peer)
    return [group._end_coalescing()]


def _nothing(out: list[Tensor], posts: dict[int, list[Tensor]]) -> None: ...


def _copy(out: list[Tensor], posted: list[Tensor]) -> None:
    for tensor, value in zip(out, posted, strict=True):
        tensor.copy_(value.view_as(tensor))


def _described(name: str, tensors: Sequence[Tensor], *also: Any) -> str:
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors]
    return f"{name}({', '.join([*shapes, *(str(getattr(each, 'name', each)) for each in also)])})"


def _reduction(options: Any) -> Any:
    if options is None:
        return dist.ReduceOp.SUM
    op = getattr(options, "reduceOp", options)
    return next(known for known in REDUCTIONS if op == known)


def _reduced(parts: list[Tensor], op: Any) -> Tensor:
    """In the order of ranks, so that all ranks get the same bits."""
    total = parts[0]
    for part in parts[1:]:
        total = REDUCTIONS[op](total, part)
    return total / len(parts) if op == dist.ReduceOp.AVG else total


def _post(call: Call, views: list[Tensor]) -> None:
    parts = [(view.dtype, view.shape, view.flatten().view(torch.uint8).numpy().tobytes()) for view in views]
    fresh = call.post.with_suffix(f".new{os.getpid()}")
    fresh.write_bytes(pickle.dumps((call.name, parts)))
    fresh.replace(call.post)


def _read(path: Path) -> tuple[str, list[Tensor]]:
    name, parts = pickle.loads(path.read_bytes())
    tensors = [
        torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
        for dtype, shape, data in parts
    ]
    return name, tensors


def _on_stream(
    reads: list[Tensor],
    writes: list[Tensor],
    do: Callable[[list[Tensor]], None],
    name: str,
    files: list[str],
    urgent: bool,
) -> None:
    """Gives `do` to the current stream; it gets the host's views of the tensors, which the caller keeps alive.

    - `files`: pairs of which one must be there before
    - `urgent`: it is run as soon as may be, also where streams are lazy
    """
    number = next(_numbers)
    _waiting[number] = partial(do, [_simulator.host_view(tensor) for tensor in (*reads, *writes)])
    address = ctypes.cast(_called, ctypes.c_void_p).value
    _simulator.launch_on_host(reads, writes, address, number, name, files, _patience, urgent)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def _called(number: int) -> int:
    """What the simulator calls when a stream gets to a piece of work of `_on_stream`."""
    try:
        _waiting.pop(number)()
    except Mismatch as error:
        _simulator.report(f"mismatch\t{error}")
        _simulator.fail(str(error).replace("\t", ", but ") + ": NCCL would hang")
        return 1
    except BaseException:
        _simulator.fail(traceback.format_exc())
        return 1
    return 0
