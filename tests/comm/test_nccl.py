"""What is asked of NCCL, on a stand-in that records it: there is no GPU here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.comm.nccl import Nccl


class StandIn:
    """A ProcessGroupNCCL of three ranks, this one the second: keeps each call, and whether its work was waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.waited = 0

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def wait(self) -> None:
        self.waited += 1

    def __getattr__(self, name: str):
        def call(*args):
            self.calls.append((name, *(plain(arg) for arg in args)))
            return self

        return call


def plain(arg):
    if isinstance(arg, torch.Tensor):
        return arg.tolist()
    if isinstance(arg, list):
        return [plain(each) for each in arg]
    return arg.reduceOp if isinstance(arg, dist.ReduceScatterOptions) else arg


def asked(operation: str, *args) -> tuple[list[tuple], int]:
    pg = StandIn()
    getattr(Nccl(pg, torch.device("cpu")), operation)(*args)
    return pg.calls, pg.waited


a, b, abc = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("operation", "args", "calls"),
    [
        ("all_reduce", (a, "avg"), [("allreduce", [[1]], dist.ReduceOp.AVG)]),
        ("reduce_scatter", (a, abc, "max"), [("_reduce_scatter_base", [1], [1, 2, 3], dist.ReduceOp.MAX)]),
        ("all_gather", (abc, a), [("_allgather_base", [1, 2, 3], [1])]),
        (
            "all_to_all",
            (abc, abc, [1, 2, 0], (3, 0, 0)),
            [("alltoall_base", [1, 2, 3], [1, 2, 3], [1, 2, 0], [3, 0, 0])],
        ),
        ("broadcast", (a, 2), [("broadcast", [1], 2)]),
        ("scatter", (a, abc, 1), [("alltoall_base", [1], [1, 2, 3], [0, 1, 0], [1, 1, 1])]),
        ("scatter", (a, None, 2), [("alltoall_base", [1], [], [0, 0, 1], [0, 0, 0])]),
        ("gather", (abc, a, 1), [("alltoall_base", [1, 2, 3], [1], [1, 1, 1], [0, 1, 0])]),
        ("gather", (None, a, 0), [("alltoall_base", [], [1], [0, 0, 0], [1, 0, 0])]),
        ("send", (a, 2), [("send", [[1]], 2, 0)]),
        ("recv", (a, 0), [("recv", [[1]], 0, 0)]),
    ],
)
def test_each_operation_is_one_call_that_is_waited_for(operation, args, calls):
    assert asked(operation, *args) == (calls, 1)


def test_an_exchange_is_one_group_of_a_send_and_a_receive():
    names = [call[0] for call in asked("exchange", a, 0, b, 2)[0]]
    assert names == ["_start_coalescing", "send", "recv", "_end_coalescing"]


def test_its_name_tells_what_the_environment_sets(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert Nccl(StandIn(), torch.device("cpu")).carrier == "NCCL 2.27.5"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert Nccl(StandIn(), torch.device("cpu")).carrier == "NCCL 2.27.5 (NCCL_P2P_DISABLE=1)"


def test_an_exchange_with_oneself_is_a_copy():
    out = torch.zeros(1)
    assert asked("exchange", out, 1, b, 1) == ([], 0) and out.item() == 2
