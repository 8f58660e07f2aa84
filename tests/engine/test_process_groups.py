"""The engine's process groups: their backends, and groups released with an unfinished collective."""

import multiprocessing
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.engine.test_collective_order import gather
from tests.helpers.forked_ranks import on_one_rank, outcomes, run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.waiting import eventually
from workbench.engine import CollectiveFailed, StepAborted, process_groups
from workbench.engine.backends.async_work import CombinedWork, Transport
from workbench.engine.backends.streams import StreamTransport, StreamWork
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.collective_order import Collective
from workbench.engine.fsdp_state import states_below, units_of
from workbench.events import Edge, Kind

MIXED = "cpu:gloo,cuda:nccl"


def pretend_mixed() -> None:
    """Rename the default group's backend as if ``init_process_group("cpu:gloo,cuda:nccl")`` had made it."""
    default = distributed_c10d._get_default_group()
    distributed_c10d._world.pg_map[default] = (MIXED, distributed_c10d._world.pg_map[default][1])
    distributed_c10d._world.pg_backend_config[default] = MIXED


def mixed_and_shared() -> set[str]:
    pretend_mixed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", "")
        model = shard_net(make_net(num_blocks=1))
        loss_of(model, batch(dist.get_rank(), 0)).backward()
    return {unit.comm.name for unit in units_of(states_below(model))}


def test_a_cpu_mesh_shares_memory_whatever_the_default_group_has_for_cuda():
    assert run_ranks(2, mixed_and_shared) == [{"shared memory"}] * 2


def mixed_and_interrupted() -> None:
    """Rank 1 skips the last all-gather."""
    pretend_mixed()
    group = process_groups.group_of((0, 1))
    for _ in range(2):
        gather(group, "a")
        process_groups.end_iteration([group])
    if dist.get_rank() == 0:
        canceller = threading.Thread(
            target=lambda: (eventually(process_groups.num_unfinished), cancellation.cancel("enough"))
        )
        canceller.start()
        with pytest.raises(StepAborted, match=r"^enough$"):
            gather(group, "a")
        canceller.join()
        cancellation.reset()
    process_groups.rebuild_all()
    gather(group, "a")


def test_a_cpu_mesh_is_interruptible_whatever_the_default_group_has_for_cuda():
    run_ranks(2, mixed_and_interrupted)


def made_alone(may_come) -> list[float]:
    """Rank 0 makes a group without rank 1, is cancelled, and makes it again."""
    if dist.get_rank() == 0:
        waiting = cancellation._cancelled._cond._waiters
        canceller = threading.Thread(target=lambda: (eventually(lambda: bool(waiting)), cancellation.cancel("enough")))
        canceller.start()
        with pytest.raises(StepAborted, match=r"^enough$"):
            process_groups.group_of((0, 1))
        canceller.join()
        cancellation.reset()
        may_come.set()
    assert may_come.wait(60)
    return gather(process_groups.group_of((0, 1)), "a")


def test_a_rank_that_makes_a_group_alone_can_be_freed():
    assert run_ranks(2, made_alone, multiprocessing.get_context("fork").Event()) == [[0, 1], [0, 1]]


class EndlessWork:
    """A collective on a device whose peer never joins."""

    def wait(self) -> None:
        """Make only the stream wait, not the host."""

    def is_completed(self) -> bool:
        return False


def unfinished(transport: Transport) -> tuple[list[str], int]:
    """Return the calls on a group released with an unfinished collective, and the change in references to it."""
    group = process_groups.CommGroup((0,))
    done: list[str] = []
    group.process_group = dropped = SimpleNamespace(abort=lambda: done.append("abort"))
    group._transport = transport
    group._in_flight.add(StreamWork(EndlessWork(), Collective("all-gather", "a", 0), group))
    references = sys.getrefcount(dropped)
    group.let_go()
    assert group.process_group is None
    return done, sys.getrefcount(dropped) - references


@on_one_rank
def test_a_group_with_a_kernel_that_waits_for_a_peer_is_aborted():
    assert unfinished(StreamTransport()) == (["abort"], -1)


@on_one_rank
def test_one_of_gloo_is_kept_for_good():
    assert unfinished(Transport()) == ([], 0)


def with_one_peer_dead_and_one_that_never_comes(begun, is_free) -> list[object] | None:
    group = process_groups.group_of((0, 1, 2))
    if dist.get_rank() == 2:
        begun.wait()
        os._exit(1)
    if dist.get_rank() == 1:
        is_free.wait()
        return None
    works = [dist.broadcast(torch.ones(1), source, group.process_group, async_op=True) for source in (1, 2)]
    pending = group._transport.pending(CombinedWork(works), "broadcasts", group)
    group._in_flight.add(pending)
    begun.set()
    pending.wait()
    with pytest.raises(CollectiveFailed, match="broadcasts failed: "):
        pending.finish()  # does not wait for rank 1
    found = [pending.has_ended, group.num_unfinished]
    group.let_go()  # does not wait for rank 1 either; only a gloo thread does
    is_free.set()
    return found


def test_a_partial_failure_is_unfinished_while_the_rest_runs():
    begun, is_free = (multiprocessing.get_context("fork").Event() for _ in range(2))
    found = outcomes(3, with_one_peer_dead_and_one_that_never_comes, begun, is_free, timeout_s=20)
    assert found == [("ok", [False, 1]), ("ok", None), ("died", "exit code 1")]


# ---- a group of its own for reduce-scatter


def in_groups(comm: str) -> tuple[list[int], bool]:
    """Train with the setting on, off and on; return the number of groups in each step, and if gradients are equal."""
    with pytest.MonkeyPatch.context() as patch, recording() as record:
        patch.setenv("WORKBENCH_COMM", comm)
        models = [shard_net(make_net(num_blocks=1)) for _ in range(2)]
        steps = []
        for step, enable in enumerate((True, False, True)):
            models[0].set_separate_reduce_scatter_group(enable)
            record.clear()
            for model in models:
                loss_of(model, batch(dist.get_rank(), step)).backward()
            own = {unit.index for unit in units_of(states_below(models[0]))}
            used: dict[Kind, set[int]] = {Kind.ALL_GATHER: set(), Kind.REDUCE_SCATTER: set()}
            for kind, edge, unit, _, number, _ in record.rows:
                if kind in used and edge is Edge.BEGIN and unit in own:
                    used[kind].add(number.group)
            steps.append((len(used[Kind.ALL_GATHER] | used[Kind.REDUCE_SCATTER]), used[Kind.REDUCE_SCATTER]))
            assert all(record.groups[group] == (0, 1) for group in used[Kind.REDUCE_SCATTER])
            process_groups.rebuild_all()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return [count for count, _ in steps], all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)


@pytest.mark.parametrize("comm", ["", "gloo", "default"])
def test_reductions_may_have_a_group_of_their_own(comm):
    assert run_ranks(2, in_groups, comm) == [([2, 1, 2], True)] * 2
