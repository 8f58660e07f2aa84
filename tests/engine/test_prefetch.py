"""All-gathers that start ahead: in the order of the last iteration, or by the user's lists."""

import functools
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.helpers.both_engines import call_setter, double_net, one_batch, shard_net_with, sharded, train_all
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.recording_probe import ROOT, Recording, recording
from tests.helpers.small_models import Net, batch, loss_of, make_net
from workbench import engine
from workbench.events import Category, Kind

COUNT = 4
FORWARD = (ROOT, *(f"blocks.{i}" for i in range(COUNT)))
BACKWARD = (ROOT, *reversed(FORWARD[1:]))


def ahead(record: Recording) -> tuple[list[int], list[int]]:
    """Return per pass, for each unit in order, how many later units' all-gathers began before its compute."""
    events = record.events
    middle = events.index("FORWARD END root")
    return (
        _ahead(events[:middle], "FORWARD BEGIN", FORWARD),
        _ahead(events[middle:], "BACKWARD BEGIN", BACKWARD),
    )


def _ahead(events: list[str], begin: str, order: tuple[str, ...]) -> list[int]:
    counts = []
    for i, unit in enumerate(order):
        before = events[: events.index(f"{begin} {unit}")]
        started = [event.split()[-1] for event in before if event.startswith("ALL_GATHER BEGIN")]
        counts.append(len(set(started) & set(order[i + 1 :])))
    return counts


def expected(k: int) -> list[int]:
    return [min(k, len(FORWARD) - 1 - i) for i in range(len(FORWARD))]


def nothing_is_left(record: Recording) -> bool:
    return {Category.UNSHARDED_PARAMS, Category.ALL_GATHER_BUFFERS}.isdisjoint(record.alive)


# ---- automatic


def by_itself(reshard: bool | None) -> list[tuple[list[int], list[int]]]:
    seen = []
    with recording() as record:
        model = shard_net_with(engine, make_net(num_blocks=COUNT), reshard_after_forward=reshard)
        for step in range(3):
            record.clear()
            one_batch(model, step)
            seen.append(ahead(record))
            assert sharded(model)
            assert nothing_is_left(record)
    return seen


def test_one_unit_ahead_in_forward_from_the_second_iteration_and_in_backward_always():
    one, none = expected(1), [0] * len(FORWARD)
    assert run_ranks(2, by_itself, None) == [[(none, one), (one, one), (one, one)]] * 2


def test_kept_parameters_are_not_gathered_ahead_in_backward():
    one, none = expected(1), [0] * len(FORWARD)
    assert run_ranks(2, by_itself, False) == [[(none, none), (one, none), (one, none)]] * 2


class AnyOrder(Net):
    """Runs its blocks in the given order."""

    order: tuple[int, ...] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x * self.scale)


ORDERS = ((0, 1, 2), (0, 1, 2), (0, 2), (2, 1, 0), (1, 1), (0, 1, 2, 0), (0, 1, 2))


def in_changing_order(model: AnyOrder, step: int) -> None:
    model.order = ORDERS[step]
    one_batch(model, step)
    assert not hasattr(model, "unshard") or sharded(model)


def any_order() -> AnyOrder:
    torch.manual_seed(0)
    return AnyOrder().double()


def changing_order(reshard: bool | None) -> None:
    def shard(api: ModuleType, model: nn.Module) -> None:
        shard_net_with(api, model, reshard_after_forward=reshard)

    assert nothing_is_left(train_all(any_order, shard, in_changing_order, len(ORDERS)))


@pytest.mark.parametrize("reshard", [None, True, False])
def test_another_order_than_the_last_iterations_changes_no_number(reshard):
    run_ranks(2, changing_order, reshard)


def gathers_of_a_skipped_block() -> list[int]:
    counts = []
    with recording() as record:
        torch.manual_seed(0)
        model = shard_net_with(engine, AnyOrder())
        for order in ((0, 1, 2), (0, 1, 2), (0, 2), (0, 2)):
            record.clear()
            model.order = order
            one_batch(model, 0)
            counts.append(record.count(Kind.ALL_GATHER)["blocks.1"])
            assert nothing_is_left(record)
    return counts


def test_a_block_that_no_longer_runs_is_gathered_in_vain_once_at_most():
    (counts, same) = run_ranks(2, gathers_of_a_skipped_block)
    assert counts == same
    assert counts[:2] == [2, 2]
    assert counts[2] <= 1
    assert counts[3] == 0


def without_gradients() -> list[list[int]]:
    seen = []
    plain = make_net(num_blocks=COUNT)
    model = shard_net_with(engine, make_net(num_blocks=COUNT))
    with recording() as record, torch.no_grad():
        for step in range(3):
            tokens = batch(dist.get_rank(), step)
            record.clear()
            torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens))
            seen.append(_ahead(record.events, "FORWARD BEGIN", FORWARD))
            model.reshard()  # only the root, which a forward leaves unsharded
            assert sharded(model)
            assert nothing_is_left(record)
    return seen


def test_forwards_without_backwards_are_iterations_too():
    none, *later = run_ranks(2, without_gradients)[0]
    assert none == [0] * len(FORWARD)
    assert all(seen in (none, expected(1)) for seen in later)


# ---- by the user's lists


def set_ahead(model: Net, k: int) -> None:
    """Give each unit the next ``k`` units of each pass."""
    forward = (model, *model.blocks)
    backward = (model, *reversed(model.blocks))
    for order, setter in ((forward, "set_modules_to_forward_prefetch"), (backward, "set_modules_to_backward_prefetch")):
        for i, unit in enumerate(order):
            call_setter(unit, setter, list(order[i + 1 : i + 1 + k]))


def by_lists(counts: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    seen = []
    with recording() as record:
        model = shard_net_with(engine, make_net(num_blocks=COUNT))
        for step, k in enumerate(counts):
            set_ahead(model, k)
            record.clear()
            one_batch(model, step)
            seen.append(ahead(record))
            assert record.count(Kind.ALL_GATHER) == dict.fromkeys(FORWARD, 2) | {ROOT: 1}
            assert nothing_is_left(record)
    return seen


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (3, 1, 2)])
def test_prefetch_lists_may_change_between_iterations(counts):
    assert run_ranks(2, by_lists, counts) == [[(expected(k), expected(k)) for k in counts]] * 2


def test_with_empty_lists_nothing_is_gathered_ahead_in_forward():
    *_, last = run_ranks(2, by_lists, (2, 0))[0]
    assert last == ([0] * len(FORWARD), expected(1))


def lists_given_up() -> tuple[list[int], list[int]]:
    with recording() as record:
        model = shard_net_with(engine, make_net(num_blocks=COUNT))
        for ahead_of_all in ([], [], None):
            for unit in (model, *model.blocks):
                unit.set_modules_to_forward_prefetch(ahead_of_all)
            record.clear()
            one_batch(model, 0)
        return ahead(record)


def test_without_lists_it_is_left_to_the_engine_again():
    assert run_ranks(2, lists_given_up) == [(expected(1), expected(1))] * 2


class LoggedCollective:
    """A collective that logs its unit before it is issued."""

    def __init__(self, plain: object, label: str, sequence: list[str]) -> None:
        self.plain, self.label, self.sequence = plain, label, sequence

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *args, **kwargs):
        self.sequence.append(self.label)
        return self.plain(*args, **kwargs)


def sequence_of(api: ModuleType, k: int | None, reshard: bool | None, micro_batches: int) -> list[str]:
    """Train three steps; return the sequence of all-gathers and reduce-scatters. ``k`` None: torch's default order."""
    model, sequence = double_net(num_blocks=COUNT), []
    shard_net_with(api, model, reshard_after_forward=reshard)
    for name, unit in zip(FORWARD, (model, *model.blocks), strict=True):
        unit.set_custom_all_gather(LoggedCollective(engine.DefaultAllGather(), f"gather {name}", sequence))
        unit.set_custom_reduce_scatter(LoggedCollective(engine.DefaultReduceScatter(), f"reduce {name}", sequence))
        if k is None:
            unit.set_modules_to_forward_prefetch([])
    if k is not None:
        set_ahead(model, k)
    for step in range(3):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            one_batch(model, step)
    return sequence


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("k", quick([None, 1, 2], [2]))
def test_all_gathers_and_reduce_scatters_are_in_torchs_order(k, reshard, micro_batches):
    theirs, *others = (
        sequence for api in (fsdp, engine) for sequence in run_ranks(2, sequence_of, api, k, reshard, micro_batches)
    )
    assert theirs
    assert others == [theirs] * 3


def gathers_of_two_backwards(api: ModuleType) -> list[list[str]]:
    """Run two backwards of one forward; return the gathers and backwards that began in each."""
    model = shard_net_with(api, make_net(num_blocks=COUNT))
    begun = []
    with recording() as record:
        loss = loss_of(model, batch(dist.get_rank(), 0))
        for last in (False, True):
            model.set_is_last_backward(last)
            record.clear()
            loss.backward(retain_graph=not last)
            begun.append([e for e in record.events if e.startswith(("ALL_GATHER BEGIN", "BACKWARD BEGIN"))])
    return begun


def test_the_second_backward_of_a_forward_gathers_ahead_as_the_first():
    for first, second in run_ranks(2, gathers_of_two_backwards, engine):
        begun = [f"ALL_GATHER BEGIN {BACKWARD[1]}", f"BACKWARD BEGIN {ROOT}"]
        for unit, ahead_of_it in pairwise(BACKWARD[1:]):
            begun += [f"ALL_GATHER BEGIN {ahead_of_it}", f"BACKWARD BEGIN {unit}"]
        assert first == [*begun, f"BACKWARD BEGIN {BACKWARD[-1]}"]
        assert second == [f"ALL_GATHER BEGIN {ROOT}", *first]  # the first backward has resharded the root


def far_ahead(model: nn.Module, step: int) -> None:
    set_ahead(model, (2, 1, 3)[step])
    one_batch(model, step)


def mistaken(model: Net, step: int) -> None:
    """Lists with the wrong direction, the unit itself, a repeated unit, or the root."""
    blocks = list(model.blocks)
    lists = [list(reversed(blocks)), [blocks[0]], [blocks[1]] * 2, [model, blocks[2]]][step]
    for unit in (model, *blocks):
        call_setter(unit, "set_modules_to_forward_prefetch", lists)
        call_setter(unit, "set_modules_to_backward_prefetch", lists)
    one_batch(model, step)
    assert not hasattr(model, "unshard") or sharded(model)


def listed(run, steps: int, reshard: bool | None) -> None:
    def shard(api: ModuleType, model: nn.Module) -> None:
        shard_net_with(api, model, reshard_after_forward=reshard)

    record = train_all(functools.partial(double_net, num_blocks=3), shard, run, steps)
    assert nothing_is_left(record)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize(("run", "steps"), [(far_ahead, 3), (mistaken, 4)])
def test_lists_change_no_number(world_size, run, steps, reshard):
    run_ranks(world_size, listed, run, steps, reshard)


def refused_list(setter: str) -> str:
    model = shard_net_with(engine, make_net())
    with pytest.raises(TypeError) as caught:
        getattr(model, setter)([model.blocks[0], model.head])
    one_batch(model, 0)
    return str(caught.value)


@pytest.mark.parametrize("setter", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_only_sharded_modules_can_be_prefetched(setter):
    (message,) = run_ranks(1, refused_list, setter)
    assert "Linear" in message


# ---- with activation checkpointing


def wrapped_net() -> Net:
    """Return a net whose blocks each have a checkpoint wrapper."""
    model = double_net(num_blocks=3)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def shard_and_look_ahead(api: ModuleType, model: Net, *, composable: bool, k: int) -> None:
    for block in model.blocks if composable else ():
        checkpoint(block)
    shard_net_with(api, model)
    set_ahead(model, k)


def checkpointed(kind: str, k: int) -> tuple[dict[str, int], bool]:
    composable = kind == "composable"
    make = functools.partial(double_net, num_blocks=3) if composable else wrapped_net
    shard = functools.partial(shard_and_look_ahead, composable=composable, k=k)
    record = train_all(make, shard)
    return dict(record.count(Kind.ALL_GATHER)), nothing_is_left(record)


@pytest.mark.parametrize("kind", ["composable", "wrapper"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_recomputed_blocks_are_gathered_twice_however_far_ahead(kind, k):
    gathers = dict.fromkeys(FORWARD[:4], 2) | {ROOT: 1}
    assert run_ranks(2, checkpointed, kind, k) == [(gathers, True)] * 2
