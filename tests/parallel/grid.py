"""Threads as the ranks of a mesh with axes of any name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, product
from math import prod
from typing import TypeVar

import torch

from shoal.comm import Group
from shoal.comm.emulate import Room, Simulated, in_threads
from shoal.parallel.placement import Placement, piece

Result = TypeVar("Result")


class Grid:
    """What a redistribution wants to know of a mesh: `sizes[axis]` ranks along each axis, the last one innermost."""

    def __init__(self, sizes: Mapping[str, int], rank: int, rooms: Mapping[tuple, Room]) -> None:
        self.sizes, self._rooms = sizes, rooms
        self.at = coordinates(sizes, rank)

    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        return self.at[axis]

    def group(self, *axes: str) -> Group:
        names = tuple(axis for axis in self.sizes if axis in axes)
        return Group.of(Simulated(self._rooms[names, self._beside(names)], self.number(names)))

    def number(self, axes: tuple[str, ...]) -> int:
        """This rank's place among those along `axes`."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + self.at[axis]
        return number

    def _beside(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.at[axis] for axis in self.sizes if axis not in axes)


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    return {
        axis: int(at)
        for axis, at in zip(sizes, torch.unravel_index(torch.tensor(rank), tuple(sizes.values())), strict=True)
    }


def on_grid(sizes: Mapping[str, int], fn: Callable[[Grid], Result]) -> list[Result]:
    """fn(grid) on each rank of the mesh."""
    rooms = {}
    for number in range(1, len(sizes) + 1):
        for names in combinations(sizes, number):
            others = [range(size) for axis, size in sizes.items() if axis not in names]
            for at in product(*others):
                rooms[names, at] = Room(prod(sizes[axis] for axis in names), 20.0)

    def leave(rank: int, error: BaseException | None) -> None:
        for room in rooms.values() if error is not None else ():
            room.leave(0, error)

    return in_threads(prod(sizes.values()), lambda rank: fn(Grid(sizes, rank, rooms)), leave)


def given_out(whole: torch.Tensor, placement: Placement, grid: Grid) -> torch.Tensor:
    """This rank's piece, by brute force. Summands are random whole numbers that add up to the values."""
    axes = tuple(sorted(placement.partial))
    parts = prod(grid.size(axis) for axis in axes)
    draw = torch.Generator().manual_seed(parts)
    summands = [torch.randint(-4, 5, whole.shape, generator=draw).to(whole.dtype) for _ in range(parts - 1)]
    summands.append(whole - sum(summands, torch.zeros_like(whole)))
    value = summands[grid.number(axes)]
    for dim, cuts in enumerate(placement.dims):
        for axis in cuts:
            value = value.narrow(dim, *piece(value.shape[dim], grid.size(axis), grid.rank(axis)))
    return value.clone()


def check_placed(
    placement: Placement, sizes: Mapping[str, int], held: list[torch.Tensor], wanted: list[torch.Tensor]
) -> None:
    """`held` by the ranks are the pieces `wanted`: of summands their sums are."""
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    keys = []
    for rank, value in enumerate(held):
        at = coordinates(sizes, rank)
        keys.append(tuple(at[axis] for axis in sizes if axis not in placement.partial))
        assert value.shape == wanted[rank].shape
        sums[keys[-1]] = sums[keys[-1]] + value if keys[-1] in sums else value
    for key, value in zip(keys, wanted, strict=True):
        assert torch.equal(sums[key], value), f"{placement}"
