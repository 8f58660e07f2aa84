"""Waits that can be cancelled, and the state after a cancellation."""

import copy
import os
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import outcomes, run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.unsharded_copy import train_both
from tests.helpers.waiting import eventually
from workbench.engine import CollectiveFailed, RanksDisagreeError, StepAborted, cancellable_waits, process_groups
from workbench.engine.backends.async_work import CollectiveSpan, PendingWork
from workbench.engine.backends.streams import StreamWork
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.collective_order import Collective
from workbench.events import Category, Comm, Edge, Kind

REDUCE = Collective("reduce-scatter", "", 4)


class FakeWork:
    """A collective that ends when the test completes its future."""

    def __init__(self, error: str = "") -> None:
        self.future = torch.futures.Future()
        self.error = error

    def get_future(self) -> torch.futures.Future:
        return self.future

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


def in_a_thread(fn: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=fn)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def no_cancellation_left():
    yield
    cancellation.reset()


def test_a_wait_ends_with_the_collective():
    work = FakeWork()
    pending = PendingWork(work, REDUCE)
    assert pending.end_ns == 0
    before = time.monotonic_ns()
    thread = in_a_thread(lambda: work.future.set_result(None))
    pending.wait()
    pending.finish()
    thread.join()
    assert before <= pending.end_ns <= time.monotonic_ns()


class Slices:
    """An end event that is never set; cancels in the second slice of the wait."""

    def __init__(self) -> None:
        self.seconds = []

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        if len(self.seconds) == 2:
            cancellation.cancel("rank 1 failed")
        return False


def test_a_cancelled_wait_ends_with_its_slice_well_within_a_second():
    pending = PendingWork(FakeWork(), REDUCE)
    pending._done = slices = Slices()
    with pytest.raises(StepAborted, match=r"^rank 1 failed$"):
        pending.wait()
    assert slices.seconds == [cancellable_waits.SLICE_S] * 2
    assert cancellable_waits.SLICE_S < 0.5


def test_a_wait_may_be_cancelled_from_another_thread():
    pending = PendingWork(FakeWork(), REDUCE)
    thread = in_a_thread(lambda: cancellation.cancel("rank 3 failed"))
    with pytest.raises(StepAborted, match=r"^rank 3 failed$"):
        pending.wait()
    thread.join()
    with pytest.raises(StepAborted):
        pending.wait()  # later waits abort too, although the collective has not ended
    cancellation.reset()
    cancellation.check()


def test_a_failed_collective_says_which_one():
    work = FakeWork("Connection closed by peer\n  some C++ frames")
    span = CollectiveSpan(4, Kind.ALL_GATHER, 8, Comm(group=0, seq=1))
    pending = PendingWork(work, Collective("all-gather", "blocks.4", 8), span=span)
    work.future.set_exception(RuntimeError("gone"))
    with recording() as record:
        pending.wait()  # a failed collective has ended, and no view must take that for progress
    assert [row[:2] for row in record.rows] == [(Kind.WAIT, Edge.BEGIN)]
    with pytest.raises(
        CollectiveFailed, match=r"^all-gather of unit blocks\.4 failed: Connection closed by peer$"
    ) as failed:
        pending.finish()
    assert isinstance(failed.value, RuntimeError)
    assert str(failed.value.__cause__) == work.error


@pytest.mark.parametrize("when", ["before", "a moment later"])
def test_a_collective_that_an_abort_broke_reports_the_abort(when, monkeypatch):
    """The cancellation may arrive after the sockets are closed, so a failed collective waits for it briefly."""
    monkeypatch.setattr(cancellable_waits, "GRACE_S", 60)
    work = FakeWork("Connection closed by peer")
    pending = PendingWork(work, REDUCE)
    work.future.set_result(None)
    pending.wait()
    if when == "before":
        cancellation.cancel("aborted")
    else:
        is_waited_for = cancellation._cancelled._cond._waiters
        thread = in_a_thread(lambda: eventually(lambda: bool(is_waited_for)) and cancellation.cancel("aborted"))
    with pytest.raises(StepAborted, match=r"^aborted$"):
        pending.finish()
    if when != "before":
        thread.join()


def test_a_wait_is_not_begun_after_an_abort_even_if_the_collective_has_ended():
    work = FakeWork()
    pending = PendingWork(work, REDUCE)
    work.future.set_result(None)
    cancellation.cancel("aborted")
    with pytest.raises(StepAborted, match=r"^aborted$"):
        pending.wait()


# ---- with real ranks


def rejoin(generation: int) -> None:
    """Make new process groups for all ranks, under a new store prefix, as recovery does."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(f"again{generation}", store), rank=rank, world_size=size)
    process_groups.rebuild_all()


def cancel_at_wait(kind: Kind) -> Callable:
    """Return an event listener that cancels this rank from another thread when its wait for a ``kind`` begins."""
    issued = []

    def listen(event_kind, edge, *_):
        if edge is Edge.BEGIN and event_kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}:
            issued.append(event_kind)
        if event_kind is Kind.WAIT and edge is Edge.BEGIN and issued[-1] is kind:
            in_a_thread(lambda: cancellation.cancel("by the test"))

    return listen


def give_up(model: nn.Module, kind: Kind) -> None:
    """Run a step that the other rank does not run, until this rank is cancelled."""
    with recording() as record:
        record.event = cancel_at_wait(kind)
        record.memory = lambda *_: None  # recording starts in the middle
        with pytest.raises(StepAborted, match=r"^by the test$"):
            loss_of(model, batch(0, 7)).backward()


def abandoned(where: str) -> int:
    plain = make_net(num_blocks=2)
    model = shard_net(copy.deepcopy(plain))
    unfinished = 0
    if where != "first forward":
        train_both(plain, model, 1)
    if dist.get_rank() == 0:
        if where == "first forward":
            is_waited_for = cancellation._cancelled._cond._waiters  # waits for the other rank's vote
            thread = in_a_thread(lambda: (eventually(lambda: bool(is_waited_for)), cancellation.cancel("now")))
            with pytest.raises(StepAborted, match=r"^now$"):
                model(batch(0, 7))
            thread.join()
        else:
            give_up(model, Kind.ALL_GATHER)
        unfinished = process_groups.num_unfinished()
    cancellation.reset()
    rejoin(1)
    model.reset_iter_state()
    assert process_groups.num_unfinished() == 0
    train_both(plain, model, 2)
    return unfinished


@pytest.mark.parametrize("where", ["first forward", "a later forward"])
def test_a_rank_that_waits_for_a_missing_one_is_freed_and_all_continue(where):
    unfinished, _ = run_ranks(2, abandoned, where)
    assert (unfinished > 0) == (where != "first forward")  # a first forward issues nothing before all ranks agree


def abandoned_in_backward() -> tuple[int, list[Category]]:
    """Both ranks run the forward; only rank 0 runs backward, whose first reduction no other rank joins."""
    plain = make_net(num_blocks=2)
    with recording() as record:
        model = shard_net(copy.deepcopy(plain), reshard_after_forward=False)
        train_both(plain, model, 1)
        loss = loss_of(model, batch(dist.get_rank(), 7))
        if dist.get_rank() == 0:
            record.event = cancel_at_wait(Kind.REDUCE_SCATTER)
            with pytest.raises(StepAborted, match=r"^by the test$"):
                loss.backward()
            assert record.alive[Category.REDUCE_SCATTER_BUFFERS] > 0
        unfinished = process_groups.num_unfinished()
        cancellation.reset()
        rejoin(1)
        model.reset_iter_state()
        model.zero_grad()
        alive = list(record.alive)
    train_both(plain, model, 2)
    return unfinished, alive


def test_a_rank_that_waits_in_backward_is_freed_and_all_continue():
    assert run_ranks(2, abandoned_in_backward) == [(1, [Category.SHARDED_PARAMS]), (0, [Category.SHARDED_PARAMS])]


def killed_peer() -> str:
    model = shard_net(make_net(num_blocks=2))
    loss_of(model, batch(0, 0)).backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss_of(model, batch(0, 1)).backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_killed_peer_is_an_exception():
    survivor, dead = outcomes(2, killed_peer)
    assert dead == ("died", "exit code -9")
    assert survivor[0] == "ok"
    assert survivor[1].startswith("CollectiveFailed: all-gather of unit ")


def after_its_group_was_destroyed() -> list[str]:
    model = shard_net(make_net(num_blocks=1))
    group = model._get_fsdp_state()._fsdp_param_group.mesh_info.shard_group
    group.let_go()
    messages = []
    with pytest.raises(RuntimeError, match="its process group was destroyed") as refused:
        model.unshard()
    messages.append(str(refused.value))
    cancellation.cancel("rank 1 failed")
    with pytest.raises(StepAborted) as aborted:
        model.unshard()
    messages.append(str(aborted.value))
    return messages


def test_nothing_is_issued_on_a_destroyed_group_or_after_an_abort():
    message = r"all-gather of unit .+: its process group was destroyed; recover or restart the ranks"
    for first, second in run_ranks(2, after_its_group_was_destroyed):
        assert re.fullmatch(message, first)
        assert second == "rank 1 failed"


def counted() -> list[int]:
    model = shard_net(make_net(num_blocks=2))
    units = (model, *model.blocks)
    for handle in [unit.unshard(async_op=True) for unit in units]:
        handle.wait()  # all ranks agree on the order once; after that no rank waits for another one's vote
    for unit in units:
        unit.reshard()
    process_groups.end_iteration([process_groups.group_of((0, 1))])
    counts = [process_groups.num_unfinished()]
    if dist.get_rank() == 0:
        handles = [unit.unshard(async_op=True) for unit in units]
        counts.append(process_groups.num_unfinished())
        dist.barrier()  # the other rank joins only now
    else:
        dist.barrier()
        handles = [unit.unshard(async_op=True) for unit in units]
    for handle in handles:
        handle.wait()
    counts.append(process_groups.num_unfinished())
    return counts


def test_collectives_in_flight_are_counted():
    assert run_ranks(2, counted) == [[0, 3, 0], [0, 0]]


def dropped_by_a_reset() -> list[int]:
    model = shard_net(make_net(num_blocks=2))
    loss_of(model, batch(0, 0)).backward()
    model.unshard(async_op=True)
    model.reset_iter_state()  # no rank waits for it any more, but it completes
    assert eventually(lambda: process_groups.num_unfinished() == 0)
    loss_of(model, batch(0, 0)).backward()
    return process_groups.num_unfinished()


def test_a_collective_that_ended_by_itself_is_not_unfinished():
    assert run_ranks(2, dropped_by_a_reset) == [0, 0]


class NoFuture(FakeWork):
    """The work of gloo's reduce-scatter."""

    def get_future(self) -> torch.futures.Future:
        raise RuntimeError("Work::getFuture not implemented.")


class Bare:
    """The minimal work of a custom comm."""

    def __init__(self, error: str) -> None:
        self.wait = FakeWork(error).wait


@pytest.mark.parametrize("kind", [NoFuture, Bare])
@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_work_without_a_future_is_waited_for_in_a_thread(kind, error):
    pending = PendingWork(kind(error), REDUCE)
    pending.wait()
    assert pending.has_ended
    assert pending.end_ns > 0
    if not error:
        pending.finish()
        return
    with pytest.raises(CollectiveFailed, match=r"^reduce-scatter of unit \(root\) failed: .*Connection closed by peer"):
        pending.finish()


def test_a_collective_that_was_synchronous_has_ended():
    pending = PendingWork(None, REDUCE)
    assert pending.has_ended
    assert pending.end_ns > 0
    pending.wait()
    pending.finish()


class DeviceWork(FakeWork):
    """Work in stream order; ``wait`` makes the stream wait."""

    waits = 0
    is_done = False

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.waits += 1
        super().wait()


def test_no_host_thread_waits_for_work_on_a_device():
    work = DeviceWork()
    pending = StreamWork(work, REDUCE)
    pending.wait()  # the stream waits; the device has not finished
    assert not pending.has_ended
    pending.finish()
    assert work.waits == 1
    work.is_done = True
    assert pending.has_ended
    assert pending.end_ns == 0  # the host did not observe the end
    cancellation.cancel("aborted")
    with pytest.raises(StepAborted, match=r"^aborted$"):
        pending.wait()


def test_work_on_a_device_without_status_counts_as_ended():
    for work in (None, Bare("")):
        assert StreamWork(work, REDUCE).has_ended


class Watcher:
    """Finds a difference on the second look."""

    def __init__(self) -> None:
        self.looks = 0
        self.given_up = []
        self.finished_with = []

    def check_peers(self) -> None:
        self.looks += 1
        if self.looks == 2:
            raise RanksDisagreeError("something else")

    def give_up(self, error: BaseException) -> None:
        self.given_up.append(type(error))

    def finished(self, pending: PendingWork) -> None:
        self.finished_with.append(pending)


def test_a_wait_polls_for_cancellation_in_every_slice(monkeypatch):
    monkeypatch.setattr(cancellable_waits, "SLICE_S", 0.001)
    watcher = Watcher()
    with pytest.raises(RanksDisagreeError, match=r"^something else$"):
        PendingWork(FakeWork(), REDUCE, watcher).wait()
    assert watcher.looks == 2
    assert watcher.given_up == [RanksDisagreeError]


def test_the_watcher_is_notified_of_every_failed_wait():
    watcher = Watcher()
    failed = FakeWork("gone")
    failed.future.set_result(None)
    pending = PendingWork(failed, REDUCE, watcher)
    pending.wait()
    assert watcher.finished_with == [pending]
    with pytest.raises(CollectiveFailed):
        pending.finish()
    cancellation.cancel("aborted")
    with pytest.raises(StepAborted):
        pending.wait()
    assert watcher.given_up == [RuntimeError, StepAborted]
    assert watcher.finished_with == [pending]  # a cancelled wait leaves it unfinished


def test_a_sleep_ends_with_an_abort():
    cancellation.sleep(0)
    thread = in_a_thread(lambda: cancellation.cancel("now"))
    with pytest.raises(StepAborted, match=r"^now$"):
        cancellation.sleep(60)
    thread.join()


def test_waiting_threads_reach_the_stop_point_and_can_be_interrupted(monkeypatch):
    def stop():
        raise KeyboardInterrupt

    watcher = Watcher()
    pending = PendingWork(FakeWork(), REDUCE, watcher)
    monkeypatch.setattr(cancellable_waits, "SLICE_S", 0.001)
    monkeypatch.setattr(cancellable_waits, "stop_point", stop)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert watcher.given_up == [KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        cancellation.sleep(0)


def refused_until_rebuilt() -> list[str]:
    plain = make_net(num_blocks=1)
    model = shard_net(copy.deepcopy(plain))
    train_both(plain, model, 1)
    cancellation.cancel("rank 1 failed")
    with pytest.raises(StepAborted):
        model(batch(0, 0))
    cancellation.reset()
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was aborted") as refused:
            model(batch(0, 0))
        messages.append(str(refused.value))
    process_groups.end_iteration([process_groups.group_of((0, 1))])  # no iteration to end
    process_groups.rebuild_all()
    model.reset_iter_state()
    train_both(plain, model, 2)
    return messages


def test_after_an_abort_nothing_is_issued_until_the_groups_are_built_again():
    pattern = (
        r"all-gather of unit .*: an earlier collective was aborted \(StepAborted: rank 1 failed\), so the ranks' "
        r"collectives may no longer match; call workbench\.engine\.rebuild_groups\(\) on all ranks and "
        r"reset_iter_state\(\) on the root"
    )
    for messages in run_ranks(2, refused_until_rebuilt):
        assert all(re.fullmatch(pattern, message) for message in messages)


# ---- stream waits outside the engine


class WorkOfC10d(dist.Work):
    """Work for which any stream may wait."""

    def wait(self, *_: object) -> bool:
        return True


def test_foreign_streams_wait_only_for_c10d_work(monkeypatch):
    work = WorkOfC10d()
    wait = StreamWork(work, REDUCE).lets_stream_wait
    assert wait is not None
    assert wait() is True
    assert StreamWork(DeviceWork(), REDUCE).lets_stream_wait is None  # of a custom comm
    assert PendingWork(FakeWork(), REDUCE).lets_stream_wait is None  # on the host
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")  # the host would wait where the collective is issued
    assert StreamWork(work, REDUCE).lets_stream_wait is None


@pytest.mark.parametrize("error", ["", "the communicator was aborted"])
def test_a_stream_waits_for_aborted_work_that_may_still_write(error, monkeypatch):
    work = DeviceWork(error)
    StreamWork(work, REDUCE).abandon()
    assert work.waits == 1
    on_host = FakeWork("a host never waits for what is given up")
    PendingWork(on_host, REDUCE).abandon()
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    StreamWork(work, REDUCE).abandon()
    assert work.waits == 1
