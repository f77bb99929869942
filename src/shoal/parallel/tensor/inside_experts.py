"""Cuts experts inside: every rank has a part of each expert's matrices."""

from __future__ import annotations

from torch import nn

from shoal.errors import UserError
from shoal.parallel.layout import Layout
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.sizes import set_sizes
from shoal.parallel.tensor.spans import even

_ONE_BY_ONE = "why_one_by_one"


def why_one_by_one(module: nn.Module) -> str:
    """Why experts in `module` are computed one by one since they were cut; "" where they are not."""
    return next((each.__dict__[_ONE_BY_ONE] for each in module.modules() if _ONE_BY_ONE in each.__dict__), "")


def cut_inside(name: str, module: nn.Module, shapes: dict[str, tuple[int, ...]], region: Region) -> dict[str, Layout]:
    """Cuts each expert's matrices among the ranks of `region`; returns their layouts by name.

    The first matrix is cut by rows (gate and up together by the rows of each), the second by columns; by the other dim
    where the module says, as those of `transformers` do, that they are transposed (Aria). `shapes`: of the module's
    parameters, by name. Raises UserError for experts whose matrices are others.
    """
    first = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
    packed = 2 if first == "gate_up_proj" else 1
    wide = shapes.get(first, ())
    rows, columns = (2, 1) if getattr(module, "is_transposed", False) else (1, 2)
    if shapes.keys() != {first, "down_proj"} or len(wide) != 3 or wide[rows] % packed:
        raise UserError(
            f"{name}: experts are cut where they are gate_up_proj [experts, 2 width, in] or up_proj [experts, width, "
            f"in], and down_proj [experts, out, width], not {list(shapes)}"
        )
    width = wide[rows] // packed
    part = even(width, region.size, region.rank, f"the width of {name}")
    set_sizes(module, part.length, "intermediate_dim", "intermediate_size", "expert_dim")
    config = getattr(module, "config", None)
    # grouped products need rows of whole 16 bytes
    if part.length % 8 and getattr(config, "_experts_implementation", "eager") != "eager":
        config._experts_implementation = "eager"  # type: ignore[union-attr]
        why = f"{name} are {width} wide, {part.length} on each of {region.size} ranks along tp, no multiple of 8"
        setattr(module, _ONE_BY_ONE, f"{why}, so experts are computed one by one, those that have tokens")
    stretches = [(part.start + at * width, part.stop + at * width) for at in range(packed)]
    return {
        first: Layout.cut(wide, rows, stretches),
        "down_proj": Layout.cut(shapes["down_proj"], columns, [(part.start, part.stop)]),
    }
