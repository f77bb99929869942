"""Checks that the sizes of the tensors of a collective fit each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_fit(operation: str, group: str, size: int, whole: Tensor | None, cut: Tensor) -> None:
    """Raises ValueError unless `whole` has as many elements as the cuts of `size` ranks; None has no elements."""
    elements = 0 if whole is None else whole.numel()
    if elements != size * cut.numel():
        raise ValueError(
            f"{operation} in group {group} of {size} ranks: the whole has {elements} elements, a rank's cut "
            f"{cut.numel()}; the whole must have {size} x {cut.numel()} = {size * cut.numel()}"
        )


def splits_of(name: str, flat: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Returns the number of elements of `flat` for each rank: `splits`, or even ones for None.

    Raises ValueError, which names the argument `name`, where they do not add up to the tensor.
    """
    if splits is None:
        if flat.numel() % size:
            raise ValueError(f"all_to_all of {flat.numel()} elements over {size} ranks is not even: give {name}")
        return [flat.numel() // size] * size
    if len(splits) != size or sum(splits) != flat.numel():
        raise ValueError(
            f"{name} {list(splits)} must be {size} counts that add up to the tensor's {flat.numel()} elements"
        )
    return list(splits)
