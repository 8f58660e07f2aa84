"""The place of a process in its run, from the environment of each launcher."""

import pytest

from workbench.record.launch import Place, place

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPIEXEC = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [(TORCHRUN, "torchrun or accelerate"), (MPIRUN, "mpirun"), (MPIEXEC, "mpiexec"), (SRUN, "srun")],
)
def test_each_launcher_says_the_rank(environ, launcher):
    expected = Place(rank=5, world_size=8, local_rank=1, local_world_size=4, launcher=launcher)
    assert place(environ) == expected
    rank, size, *_ = environ
    alone = place({rank: "5", size: "8"})  # old versions, or plain Slurm, say nothing of the host
    assert alone == Place(rank=5, world_size=8, launcher=launcher)


def test_a_process_without_a_launcher_is_a_run_of_one_rank():
    assert place({"PATH": "/bin", "RANK": "5"}) == Place() == Place(rank=0, world_size=1, local_world_size=1)


def test_torchrun_within_a_job_of_slurm_counts():
    """srun starts one torchrun a host, whose ranks inherit Slurm's variables."""
    found = place({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", **TORCHRUN})
    assert (found.rank, found.world_size) == (5, 8)


def test_a_restart_is_counted():
    assert place({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).restart == 2
    assert place(TORCHRUN).restart == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"RANK": "one"}, "RANK is 'one', expected a whole number"),
        ({"RANK": "-1"}, "RANK is '-1', expected a whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '', expected a whole number"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK is '1.5', expected a whole number"),
        ({"TORCHELASTIC_RESTART_COUNT": "no"}, "TORCHELASTIC_RESTART_COUNT is 'no', expected a whole number"),
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE is 8: a rank must be less than the number of ranks"),
        ({"WORLD_SIZE": "0"}, "RANK is 5 and WORLD_SIZE is 0: a rank must be less than the number of ranks"),
    ],
)
def test_what_is_no_number_of_a_rank_is_refused(changes, why):
    with pytest.raises(ValueError, match=f"^{why}$"):
        place({**TORCHRUN, **changes})
