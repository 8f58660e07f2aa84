"""Memory that ranks share: its visibility, failures to get it, and its cleanup."""

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.forked_ranks import outcomes, run_ranks
from tests.helpers.waiting import eventually
from workbench.engine import CollectiveFailed, StepAborted, process_groups
from workbench.engine.backends.async_work import PendingWork
from workbench.engine.backends.shared import shared_memory
from workbench.engine.backends.shared.shared_memory import SharedMemory, barrier
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.collective_order import Collective

FORK = multiprocessing.get_context("fork")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8)


def all_ranks() -> process_groups.CommGroup:
    return process_groups.group_of(tuple(range(dist.get_world_size())))


def connected() -> SharedMemory:
    shared = SharedMemory.connect(all_ranks())
    assert shared is not None
    OF_READERS.update(mapped())
    return shared


def meet(shared: SharedMemory) -> None:
    pending = shared.group.issue(lambda group, **_: barrier(group), collective=Collective("barrier", None, 0))
    pending.wait()
    pending.finish()


OF_READERS: set[str] = set()
"""Names of the reader counters that this process maps while it is connected."""


def mapped() -> list[str]:
    """Return the names of the shared memory that this process maps, except :data:`OF_READERS`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [line.split("memfd:")[1].split()[0] for line in lines if "memfd:workbench-" in line]
    return [name for name in names if name not in OF_READERS]


def open_files() -> list[str]:
    """Return the shared memory files among this process's descriptors."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
    return [target for target in found if "memfd:" in target]


def holders(name: str) -> list[str]:
    """Return the processes of this machine that map the memory of that name."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_text():
                found.append(maps.parent.name)
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


# ---- properties


def written_and_read(numel: int) -> list[list[float]]:
    shared, seen = connected(), []
    for dtype in DTYPES:
        rows = shared.rows(numel, dtype)
        assert rows.shape == (shared.group.size, numel)
        assert rows.is_contiguous()
        assert rows.dtype == dtype
        assert rows.data_ptr() % 4096 == 0
        assert not rows.any()
        meet(shared)  # all ranks have seen the zeros
        rows[shared.group.rank] = shared.group.rank + 1
        meet(shared)
        seen.append(rows[:, -1].tolist())
        assert len(mapped()) == 1
        assert (rows == rows[:, -1:]).all()
        del rows
        assert mapped() == []
    del shared
    OF_READERS.clear()
    assert mapped() == []
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_sees_what_each_has_written_to_its_row(world_size):
    numel = 2049  # of int8: rows begin in the middle of a page and of a cache line
    wanted = [float(rank + 1) for rank in range(world_size)]
    assert run_ranks(world_size, written_and_read, numel) == [[wanted] * len(DTYPES)] * world_size


def empty_rows() -> tuple[int, ...]:
    shared = connected()
    rows = shared.rows(0, torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    assert mapped() == []
    return tuple(rows.shape)


def test_rows_without_elements():
    assert run_ranks(2, empty_rows) == [(2, 0)] * 2


def side_by_side() -> list[float]:
    """Share separate memory in each row and each column of a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    seen = []
    for axis in ("shard", "replicate"):
        shared = SharedMemory.connect(process_groups.group_of(tuple(mesh[axis].mesh.tolist())))
        rows = shared.rows(1, torch.float32)
        rows[shared.group.rank] = dist.get_rank()
        meet(shared)
        seen += rows.flatten().tolist()
    return seen


def test_groups_side_by_side_share_apart():
    assert run_ranks(4, side_by_side) == [[0, 1, 0, 2], [0, 1, 1, 3], [2, 3, 0, 2], [2, 3, 1, 3]]


@pytest.mark.parametrize("there", [True, False])
def test_memory_of_another_host_or_namespace_is_not_mapped(there, tmp_path):
    """Another host's process may have the same pid and descriptor; the name differs."""
    with (tmp_path / "file").open("wb") as file:
        fd = file.fileno() if there else 10_000
        error, message = (
            (OSError, "is not the other rank's memory: the rank is on another host or in another")
            if there
            else (
                FileNotFoundError,
                "No such file",
            )
        )
        with pytest.raises(error, match=message):
            shared_memory.map_memory(f"{os.getpid()} {fd} workbench-0123 ", 8)


# ---- failures


def answer_without(damage: Callable[[pytest.MonkeyPatch], None], damaged_rank: int) -> list[bool]:
    """Connect with one rank damaged, then with none; return whether each attempt succeeded."""
    went = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == damaged_rank:
            damage(patch)
        went.append(SharedMemory.connect(all_ranks()) is not None)
    assert open_files() == mapped() == []
    went.append(SharedMemory.connect(all_ranks()) is not None)
    return went


def raiser(error: Exception) -> Callable:
    def refuse(*_args, **_named):
        raise error

    return refuse


def no_memfd(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(os, "memfd_create")


def no_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "posix_fallocate", raiser(OSError(errno.ENOSPC, "No space left on device")))


def little_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_memory, "_available_bytes", lambda: 1)


def unreadable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "readlink", raiser(PermissionError(errno.EACCES, "Permission denied")))


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "readlink", lambda _: "/memfd:workbench-of-another-host (deleted)")


def on_another_host(patch: pytest.MonkeyPatch) -> None:
    """It still sees the other ranks' processes, as in another network namespace."""
    patch.setattr(shared_memory, "host", "was told another identity")


def unmappable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "from_file", raiser(RuntimeError("unable to mmap 3 bytes\n frames of C++")))


@pytest.mark.parametrize(
    ("damage", "rank"),
    [
        (no_memfd, 0),
        (no_memory, 0),
        (little_memory, 0),
        (unreadable, 1),
        (elsewhere, 2),
        (unmappable, 0),
        (on_another_host, 1),
    ],
)
def test_if_one_rank_cannot_all_ranks_do_without(damage, rank):
    assert run_ranks(3, answer_without, damage, rank) == [[False, True]] * 3


def refused_rows(damage: Callable[[pytest.MonkeyPatch], None], damaged_rank: int) -> str:
    shared = connected()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == damaged_rank:
            damage(patch)
        with pytest.raises(OSError, match="cannot share") as refused:
            shared.rows(1000, torch.float32)
    assert open_files() == mapped() == []
    shared.rows(1000, torch.float32)[shared.group.rank] = 1
    return str(refused.value)


@pytest.mark.parametrize(
    ("damage", "rank", "why"),
    [
        (no_memory, 0, "[Errno 28] No space left on device"),
        (little_memory, 0, "[Errno 12] only 1 bytes of memory are available"),
        (no_memfd, 0, "[Errno 38] this system has no memfd_create"),
        (unmappable, 1, "unable to mmap 3 bytes"),
    ],
)
def test_lack_of_memory_is_an_error_on_all_ranks_that_explains_why(damage, rank, why):
    messages = run_ranks(2, refused_rows, damage, rank)
    message = f"ranks [0, 1] cannot share 8000 bytes of memory; rank {rank}: {why}. "
    assert messages == [message + "To run without shared memory, set WORKBENCH_COMM=gloo."] * 2


def test_the_memory_of_this_machine_is_known():
    assert 2**20 < shared_memory._available_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- interrupted, killed, ended


def alone(goes_on) -> int:
    """Rank 1 does not connect; rank 0's wait is cancelled."""
    group = all_ranks()
    if dist.get_rank() == 1:
        assert goes_on.wait(60)
        return 0
    thread = threading.Thread(target=lambda: eventually(lambda: bool(open_files())) and cancellation.cancel("enough"))
    thread.start()
    with pytest.raises(StepAborted, match=r"^enough$"):
        SharedMemory.connect(group)
    thread.join()
    assert open_files() == mapped() == []
    cancellation.reset()
    goes_on.set()
    return 1


def test_a_rank_that_connects_alone_can_be_freed():
    assert run_ranks(2, alone, FORK.Event()) == [1, 0]


def killed(victim: int, peer_is_past_the_barrier) -> tuple[str, float]:
    shared = connected()
    rows = shared.rows(1000, torch.float32)
    rows[shared.group.rank] = shared.group.rank + 1
    meet(shared)
    (name,) = mapped()
    if dist.get_rank() == victim:
        assert peer_is_past_the_barrier.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    peer_is_past_the_barrier.set()
    pending = PendingWork(barrier(shared.group.process_group), "barrier")
    pending.wait()
    with pytest.raises(CollectiveFailed, match=r"^barrier failed: "):
        pending.finish()
    total = float(rows.sum())  # includes the rows that the dead rank wrote and created
    assert open_files() == []
    del rows
    assert mapped() == []
    return name, total


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_leaves_nothing_and_its_peers_keep_what_they_share(victim):
    results = outcomes(2, killed, victim, FORK.Event())
    assert results[victim][0] == "died"
    what, message = results[1 - victim]
    assert what == "ok", message
    name, total = message
    assert total == 3000.0
    assert holders(name) == []


def test_processes_that_hold_memory_are_found():
    name = f"workbench-{os.getpid()}"  # unique on this machine
    fd = os.memfd_create(name)
    os.posix_fallocate(fd, 0, 1)
    own = shared_memory.map_memory(f"{os.getpid()} {fd} {name} ", 1)
    assert mapped() == [name]
    assert open_files() == [f"/memfd:{name} (deleted)"]
    assert holders(name) == [str(os.getpid())]
    os.close(fd)
    own.fill_(1)
    del own
    assert holders(name) == mapped() == open_files() == []


def no_file_is_made() -> tuple[set[str], int]:
    before = len(os.listdir("/proc/self/fd"))
    shared = connected()
    descriptors = len(os.listdir("/proc/self/fd")) - before  # sockets of the group
    kept = [shared.rows(10, dtype) for dtype in DTYPES]
    assert len(os.listdir("/proc/self/fd")) - before == descriptors
    assert len(mapped()) == len(kept)
    return {name for name in os.listdir("/dev/shm") if "workbench" in name}, len(open_files())


def test_the_memory_has_neither_descriptor_nor_file():
    assert run_ranks(2, no_file_is_made) == [(set(), 0)] * 2


def alone_at_a_barrier(other_may_come) -> bool:
    group = all_ranks()
    if dist.get_rank() == 1:
        assert other_may_come.wait(60)
    pending = PendingWork(barrier(group.process_group), "barrier")
    early = pending.has_ended
    other_may_come.set()
    pending.wait()
    pending.finish()
    return dist.get_rank() == 0 and early


def test_a_barrier_ends_when_the_last_rank_arrives():
    assert run_ranks(2, alone_at_a_barrier, FORK.Event()) == [False, False]
