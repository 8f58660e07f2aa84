"""Rank and world size from the launcher's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LAUNCHERS = (
    ("torchrun or accelerate", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Launchers, with their variables for the rank, the number of ranks, and the same within a host."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place in its run.

    Attributes:
        rank: global rank.
        world_size: ranks of the run.
        local_rank: number among the ranks of this host.
        local_world_size: ranks of this host.
        launcher: name of the launcher; empty if there is none.
        restart: how often torchrun has restarted the run.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = ""
    restart: int = 0


def place(environ: Mapping[str, str]) -> Place:
    """Return the place that the environment names; without one, that of a run of one rank.

    Raises:
        ValueError: a variable is not a number, or the rank is not below the number of ranks.
    """
    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        if rank in environ and size in environ:
            found = Place(
                rank=_number(environ, rank),
                world_size=_number(environ, size),
                local_rank=_number(environ, local_rank, 0),
                local_world_size=_number(environ, local_size, 1),
                launcher=launcher,
                restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            )
            if not 0 <= found.rank < found.world_size:
                values = f"{rank} is {found.rank} and {size} is {found.world_size}"
                raise ValueError(f"{values}: a rank must be less than the number of ranks")
            return found
    return Place()


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}, expected a whole number")
    return int(text)
