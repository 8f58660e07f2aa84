"""Over shared memory no writer changes a shard that another rank still reads."""

import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine import CollectiveFailed, StepAborted, unit_collectives
from workbench.engine.backends.shared import shared_memory
from workbench.engine.backends.shared.shared_memory import PARAMETERS, Readers
from workbench.engine.cancellable_waits import cancellation
from workbench.events import Edge

FORK = multiprocessing.get_context("fork")


# ---- the counters


class Group:
    """The part of a group of two that readers use."""

    ranks = (4, 7)

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.index = 0
        self.given_up = []

    def check_peers(self) -> None:
        """Report no disagreement."""

    def give_up(self, error: BaseException) -> None:
        self.given_up.append(error)


@pytest.fixture
def two() -> list[Readers]:
    numbers = torch.zeros(2, 3, dtype=torch.int64)
    return [Readers(Group(rank), numbers, PARAMETERS) for rank in range(2)]


@pytest.fixture(autouse=True)
def no_cancellation_left():
    yield
    cancellation.reset()


def waits(readers: Readers) -> bool:
    """Return whether ``readers`` would have to wait; cancel the wait."""
    cancellation.cancel("enough")
    try:
        readers.wait()
    except StepAborted:
        return True
    finally:
        cancellation.reset()
    return False


def test_a_reader_waits_for_those_that_have_not_read(two):
    first, second = two
    numbers = [(first.issue(), second.issue()) for _ in range(2)]
    assert not waits(first)  # it has read nothing, so the other one's reads do not concern its shard
    first.done(numbers[0][0])
    assert waits(first)
    assert not waits(second)
    second.done(numbers[1][1])  # another all-gather
    second.done(numbers[0][1])
    assert not waits(first)
    assert first._group.given_up


def test_a_ranks_own_unread_data_does_not_block_its_write(two):
    first, second = two
    first.done(first.issue())
    second.issue()
    assert waits(first)
    second.wait()
    assert not waits(first)


def test_a_rank_that_is_ahead_is_not_waited_for(two):
    first, second = two
    first.done(first.issue())
    second.issue()
    assert waits(first)
    second.issue()
    assert not waits(first)


def test_a_rebuilt_group_begins_again(two):
    first, second = two
    first.issue()
    first.done(first.issue())
    second.issue()
    for readers in two:
        readers._group.index = 1
    assert not waits(first)
    assert (first.issue(), second.issue()) == (0, 0)
    first.done(0)
    assert waits(first)
    second.done(0)
    second.done(0)  # a second call is a no-op
    assert not waits(first)


def test_a_wait_is_announced_with_the_rank_that_ends_it(two, monkeypatch):
    first, second = two

    def announced(wait, act) -> list[tuple[Edge, int]]:
        monkeypatch.setattr(shared_memory, "cancellation", SimpleNamespace(sleep=lambda _: act()))
        with recording() as record:
            wait()
            wait()  # no rank is behind any more
        return record.reads

    waited = [(Edge.BEGIN, -1), (Edge.END, 7)]
    number = first.issue()
    assert announced(lambda: first.wait_until_issued(number), second.issue) == waited
    assert announced(lambda: first.wait_for(number), lambda: second.done(number)) == waited
    first.done(first.issue())
    assert announced(first.wait, lambda: second.done(second.issue())) == waited


def test_a_rank_that_has_ended_is_not_waited_for(two, monkeypatch):
    monkeypatch.setattr(shared_memory, "SLICE_S", 0.0)
    first, second = two
    child = FORK.Process(target=os._exit, args=(0,))
    child.start()
    second._numbers[3] = child.pid
    first.done(first.issue())
    second.issue()
    with pytest.raises(CollectiveFailed, match=r"^rank 7 ended before it read its gathered parameters$"):
        first.wait()  # the child has not been reaped
    child.join()
    with pytest.raises(CollectiveFailed, match=r"^rank 7 ended"):
        first.wait()
    child.close()
    assert not shared_memory._has_ended(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", lambda _: os.open("/nowhere", os.O_RDONLY))
    assert not shared_memory._has_ended(os.getpid())  # the system cannot tell


def test_a_rank_that_diverges_gets_the_error(two, monkeypatch):
    monkeypatch.setattr(shared_memory, "SLICE_S", 0.0)
    first, second = two
    first.done(first.issue())
    second.issue()

    def look() -> None:
        raise RuntimeError("something else")

    first._group.check_peers = look
    with pytest.raises(RuntimeError, match="something else"):
        first.wait()


# ---- a model


def forward_alone(model: nn.Module) -> None:
    loss_of(model, batch(dist.get_rank(), 0))


def without_sync(model: nn.Module) -> None:
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(dist.get_rank(), 0)).backward()


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        loss_of(model, batch(dist.get_rank(), 0))


def by_hand(model: nn.Module) -> None:
    for block in model.blocks:
        block.unshard()
        block.reshard()


def inner_alone(model: nn.Module) -> None:
    model.blocks[1](torch.ones(1, model.blocks[1].norm.weight.shape[0]))


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(value, 9) for name, value in model.state_dict().items()})


def read_late(act, write, may_read) -> bool:
    """Rank 1 is slow to copy out its last all-gather; rank 0 is done and writes its shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", "")
        model = shard_net(make_net(num_blocks=2))
        loss_of(model, batch(dist.get_rank(), 0)).backward()
        real, copies = unit_collectives.foreach_all_gather_copy_out, []

        def copy_out(gathered: list[torch.Tensor], targets, unit) -> None:
            copies.append(unit.name)
            if len(copies) == last and dist.get_rank() == 1:
                before = torch.cat(gathered).clone()
                assert may_read.wait(60)
                unchanged.append(torch.equal(torch.cat(gathered), before))
            real(gathered, targets, unit)

        last, unchanged = -1, []
        patch.setattr(unit_collectives, "foreach_all_gather_copy_out", copy_out)
        act(model)  # a root stays unsharded after the first forward
        copies.clear()
        act(model)
        last = len(copies)
        copies.clear()
        if dist.get_rank() == 0:  # a wait for readers means that it writes nothing yet
            patch.setattr(shared_memory, "cancellation", SimpleNamespace(sleep=lambda _: may_read.set()))
        act(model)
        write(model)
        may_read.set()
        assert len(unchanged) == dist.get_rank()
        return all(unchanged)


@pytest.mark.parametrize("write", [in_place, loaded])
@pytest.mark.parametrize("act", [forward_alone, without_sync, evaluated, by_hand, inner_alone])
def test_a_shard_is_written_when_the_others_have_read_it(act, write):
    assert run_ranks(2, read_late, act, write, FORK.Event()) == [True, True]
