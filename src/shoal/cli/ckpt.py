"""shoal ckpt: what checkpoints there are, whether they are whole, and their weights for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.jobs.imports import imports

app = typer.Typer(help="Lists, verifies and exports checkpoints.", no_args_is_help=True)

JobFile = Annotated[
    Path | None, typer.Option("--job", help="resolved.toml of the run. Default: that of the run around it.")
]


@app.command("ls")
def list_checkpoints(
    directory: Annotated[Path, typer.Argument(help="A run directory, or a directory of checkpoints.", metavar="DIR")],
) -> None:
    """Lists the checkpoints of a directory, judged by the sizes of their files."""
    with imports():
        from shoal import units
        from shoal.checkpoint import listing
        from shoal.checkpoint.directory import is_checkpoint
        from shoal.errors import UserError

    rows = listing(checkpoints_of(directory))
    if not rows and is_checkpoint(directory):
        raise UserError(f"{directory} is one checkpoint: give the directory around it, or see shoal ckpt verify")
    if not rows:
        raise UserError(f"there are no checkpoints in {directory}")
    cells = [("step", "saved", "size", "ranks", "state", "")] + [
        (
            str(row.step),
            f"{row.when:%Y-%m-%d %H:%M:%S}",
            units.size(row.bytes),
            str(row.world_size or "?"),
            row.state,
            row.detail,
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:  # not cut to the terminal's width: the reason at the end has to be readable
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of them.")]) -> None:
    """Reads every byte and says what is damaged. Exit code 5 if anything is."""
    with imports():
        from shoal.checkpoint import listing, verify
        from shoal.checkpoint.directory import is_checkpoint
        from shoal.errors import CheckpointError, UserError

    if not path.is_dir():
        raise UserError(f"no such directory: {path}")
    paths = (
        [path] if is_checkpoint(path) else [row.path for row in listing(checkpoints_of(path)) if row.state != "partial"]
    )
    if not paths:
        raise UserError(f"there are no checkpoints in {path}")
    problems = {each: verify(each) for each in paths}
    for each, found in problems.items():
        print(f"{each.name}: {'ok' if not found else '; '.join(found)}")
    damaged = [each.name for each, found in problems.items() if found]
    if damaged:
        raise CheckpointError(f"damaged: {', '.join(damaged)}")


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a run or directory whose newest good one is taken.")],
    out: Annotated[Path, typer.Argument(help="The directory to write.")],
    job: JobFile = None,
) -> None:
    """Writes the weights as safetensors, in Hugging Face layout where the model has one."""
    with imports():
        from shoal.jobs.export import export_checkpoint

    print(export_checkpoint(path, out, job))


def checkpoints_of(directory: Path) -> Path:
    """Returns the directory of checkpoints of a run, or `directory` itself. Raises UserError where it does not
    exist."""
    with imports():
        from shoal.errors import UserError
        from shoal.jobs.names import checkpoints_in

    if not directory.is_dir():
        raise UserError(f"no such directory: {directory}")
    return checkpoints_in(directory)
