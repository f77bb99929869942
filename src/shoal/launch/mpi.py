"""Ranks that an MPI launcher started: Open MPI, MVAPICH, and MPICH's hydra, which Intel MPI has too."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import UserError
from shoal.launch import slurm
from shoal.launch.identity import DEFAULT_PORT, Identity, Names, meeting, numbers, store_at

NAMES = (
    Names("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Names("MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def identity(environ: Mapping[str, str]) -> Identity | None:
    """Returns the Identity of a rank of `mpirun` or `mpiexec`; None for another process."""
    for names in NAMES:
        srun_speaks_pmi = (
            names.rank == "PMI_RANK" and slurm.is_task(environ) and environ.get(names.rank) == environ["SLURM_PROCID"]
        )
        if names.rank in environ and not srun_speaks_pmi:
            return _identity(names, environ)
    return None


def _identity(names: Names, environ: Mapping[str, str]) -> Identity:
    found = numbers(names, environ)
    one_host = found.local_size == found.size
    if not one_host and not environ.get("MASTER_ADDR"):
        raise UserError(
            f"{names.source}: rank {found.rank} of {found.size} does not know the host of rank 0. "
            f"Give it to every rank, e.g. MASTER_ADDR=$(hostname) MASTER_PORT={DEFAULT_PORT} before mpirun "
            "(Open MPI: and -x MASTER_ADDR -x MASTER_PORT)."
        )
    return meeting(found, store_at(environ, "127.0.0.1", DEFAULT_PORT), rank0_serves=True)
