"""Ranks on several hosts: shared memory within each host and gloo between them; and the traffic between hosts."""

import copy
import functools
import itertools
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.test_cancellable_waits import FakeWork
from tests.engine.test_shared_comm import begin, drop_some
from tests.helpers import ranks_on_hosts
from tests.helpers.expected_sizes import BLOCK_SHAPES, BLOCKS, FP32, NET, ROOT_SHAPES, slots
from tests.helpers.forked_ranks import RankFailure, in_turn, run_on
from tests.helpers.pairwise import quick, quick_rows
from tests.helpers.parity import assert_same_shards, average_grads, check_parity, shard_net
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import Net, adamw, batch, loss_of, make_net
from tests.helpers.waiting import eventually
from workbench.engine import MixedPrecisionPolicy, StepAborted, process_groups
from workbench.engine.backends.shared import hierarchical_comm, shared_memory
from workbench.engine.backends.shared.hierarchical_comm import (
    Hosts,
    HostsAllGather,
    HostsReduceScatter,
    TwoStepRelay,
    ranks_per_host,
)
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.fsdp_state import states_below, units_of
from workbench.events import COLLECTIVES, Category, Edge, Kind
from workbench.replay.collectives import crossing_bytes

CPU = torch.device("cpu")
SUM = dist.ReduceOp.SUM
PER_HOST = "shared memory, gloo between hosts"

on_hosts = pytest.mark.needs("namespaces")


@pytest.fixture(scope="module")
def network() -> Iterator[ranks_on_hosts.Network]:
    with ranks_on_hosts.network_of(3) as made:
        yield made


@pytest.fixture(autouse=True)
def chosen_by_itself(monkeypatch: pytest.MonkeyPatch, over_gloo: None) -> None:
    monkeypatch.delenv("WORKBENCH_COMM")


def seats(network: ranks_on_hosts.Network, *num_ranks: int) -> list[ranks_on_hosts.Seat]:
    return network.seats(*num_ranks, *[0] * (3 - len(num_ranks)))


AT_ONCE, DTYPES, RESHARD = (1, 2), (torch.float32, torch.bfloat16), (None, False)


def cases(counts: tuple[int, ...]) -> dict[Any, Callable[[], Any]]:
    """Return what to run on so many ranks per host; first what measures memory, of which other cases keep some."""
    gathers = {(dtype, num): functools.partial(collect, NUMELS, dtype, num) for dtype in DTYPES for num in AT_ONCE}
    trains = {reshard: functools.partial(trained, reshard_after_forward=reshard) for reshard in RESHARD}
    of = {
        (2, 2): {"recorded": recorded_step, **gathers, "dropped": dropped, **trains, "bf16": trained_in_bf16},
        (2, 2, 2): gathers | trains,
        (3, 3): gathers,
        (1, 1): {"bf16": trained_in_bf16},
    }
    return of.get(counts, trains)


@pytest.fixture(scope="module")
def results(network: ranks_on_hosts.Network) -> Callable[[tuple[int, ...], Any], list[Any]]:
    """A function that returns the results of a case on so many ranks per host, which run all their cases once."""

    @functools.cache
    def run_all(counts: tuple[int, ...]) -> list[dict[Any, Any]]:
        return run_on(seats(network, *counts), in_turn, cases(counts))

    return lambda counts, case: [rank[case] for rank in run_all(counts)]


# ---- the arrangement of ranks


@given(num_hosts=st.integers(2, 5), num_local=st.integers(2, 5))
def test_equal_blocks_of_neighbours_are_hosts(num_hosts, num_local):
    identities = [f"host {h}" for h in range(num_hosts) for _ in range(num_local)]
    assert ranks_per_host(identities) == num_local
    for a, b in itertools.combinations(range(len(identities)), 2):
        if identities[a] != identities[b]:
            swapped = list(identities)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            assert ranks_per_host(swapped) == 0
    assert ranks_per_host(identities[1:]) == 0


@pytest.mark.parametrize("identities", ["", "a", "aa", "ab", "abc", "abab", "aaab", "aabbb", "aabbaa"])
def test_other_ranks_are_not(identities):
    assert ranks_per_host(identities) == 0


# ---- results of the collectives


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers that depend on the rank; their sizes vary so much that the order of a sum shows."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 2.0 ** torch.randint(0, 12, (count,), generator=generator)).to(
        dtype
    )


def connected() -> Hosts:
    found = Hosts.connect(process_groups.group_of(tuple(range(dist.get_world_size()))))
    assert found is not None
    return found


def collect(numels: list[int], dtype: torch.dtype, at_once: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gather and reduce units of the given sizes, some issued before the first wait."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), connected()
    gather, reduce = HostsAllGather(found, dtype), HostsReduceScatter(found, dtype, at_once)
    results, under_way = [], []

    def end() -> None:
        gathering, output, reducing, total = under_way.pop(0)
        gathering.wait()
        reducing.wait()
        reducing.wait()  # a second wait is a no-op
        results.append((output.clone(), total))
        gather.free(output)

    for numel in numels:
        if len(under_way) == min(at_once, 2):  # the number of all-gather stages
            end()
        output = gather.allocate([size * numel], dtype=dtype, device=CPU)
        row = output.view(size, numel)[rank].copy_(numbers(rank, numel, dtype))
        gathering = gather(output, row, dist.group.WORLD, async_op=True)
        under_way.append((gathering, output, *begin(reduce, numbers(rank, size * numel, dtype))))
    while under_way:
        end()
    return results


def sum_over_hosts(num_hosts: int, num_local: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[F, S]``: sums over the ranks of each host in order, then over the hosts in order."""
    size = num_hosts * num_local
    given = torch.stack([numbers(rank, size * numel, dtype) for rank in range(size)]).unflatten(0, (-1, num_local))
    of_hosts = [functools.reduce(torch.add, ranks) for ranks in given]
    return functools.reduce(torch.add, of_hosts).view(size, numel)


NUMELS = [1000, 7, 0, 1, 4097, 64, 64, 64]


@on_hosts
@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("dtype", quick(DTYPES, DTYPES[:1]))
@pytest.mark.parametrize("counts", quick([(2, 2), (2, 2, 2), (3, 3)], [(2, 2)]))
def test_they_gather_all_and_sum_within_hosts_first(results, counts, dtype, at_once):
    size = sum(counts)
    ranks = results(counts, (dtype, at_once))
    for number, numel in enumerate(NUMELS):
        shards = torch.cat([numbers(rank, numel, dtype) for rank in range(size)])
        sums = sum_over_hosts(len(counts), counts[0], numel, dtype)
        for rank, found in enumerate(ranks):
            gathered, total = found[number]
            assert torch.equal(gathered, shards)
            assert torch.equal(total, sums[rank])  # bit for bit


def dropped() -> list[float]:
    return drop_some(HostsReduceScatter(connected(), torch.float32))


@on_hosts
def test_reductions_without_a_wait_do_no_harm(results):
    assert results((2, 2), "dropped") == [[0.0, 12.0, 24.0]] * 4


# ---- the order of the second steps


class Steps:
    """A group that issues steps; a test ends their work."""

    index = 0

    def __init__(self) -> None:
        self.issued: list[str] = []

    def step(self, issue: Callable[[Any], Any]) -> Any:
        return issue(self)


def start(relay: TwoStepRelay, name: str) -> tuple[FakeWork, FakeWork, Any]:
    """Start a collective; return the work of both steps, and the collective's own."""
    first, second = FakeWork(), FakeWork()

    def issue(group: Steps) -> FakeWork:
        group.issued.append(name)
        return second

    return first, second, relay.start(lambda _group: first, issue)


def test_second_steps_begin_in_the_order_of_the_first_ones():
    relay = TwoStepRelay(Steps(), Steps())
    started = {name: start(relay, name) for name in "abc"}
    for name, issued in (("b", []), ("a", ["a", "b"]), ("c", ["a", "b", "c"])):
        started[name][0].future.set_result(None)
        assert relay.then.issued == issued
    for _, second, steps in started.values():
        assert not steps.get_future().done()
        second.future.set_result(None)
        assert steps.get_future().done()
        steps.wait()


def test_after_a_failure_no_second_step_begins_until_a_rebuild():
    relay = TwoStepRelay(Steps(), Steps())
    (failing, _, failed), (first, _, after) = start(relay, "a"), start(relay, "b")
    first.future.set_result(None)
    failing.future.set_exception(RuntimeError("a peer has left"))
    later, _, even_later = start(relay, "c")
    later.future.set_result(None)
    assert relay.then.issued == []
    for steps, message in (
        (failed, "a peer has left"),
        (after, "an earlier collective failed"),
        (even_later, "an earlier collective failed"),
    ):
        with pytest.raises(RuntimeError, match=message):
            steps.wait()
    relay.then.index += 1
    first, second, steps = start(relay, "d")
    for future in (first.future, second.future):
        future.set_result(None)
    steps.wait()
    assert relay.then.issued == ["d"]


def test_work_from_before_a_rebuild_never_continues():
    relay = TwoStepRelay(Steps(), Steps())
    first, _, steps = start(relay, "a")
    relay.then.index += 1
    relay.begin_anew_if_rebuilt()
    first.future.set_result(None)
    assert relay.then.issued == []
    assert not steps.get_future().done()


def test_a_second_step_that_cannot_be_issued_is_an_error_of_the_collective():
    relay = TwoStepRelay(Steps(), Steps())
    work = FakeWork()

    def refuse(_group: Steps) -> FakeWork:
        raise ValueError("no")

    steps = relay.start(lambda _group: work, refuse)
    work.future.set_result(None)
    with pytest.raises(ValueError, match="no"):
        steps.wait()


# ---- training


def names_of(model: torch.nn.Module) -> set[str]:
    return {unit.comm.name for unit in units_of(states_below(model))}


def trained(**options: object) -> tuple[set[str], list[float]]:
    models: list[torch.nn.Module] = []

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        models.append(shard_net(model, **options))
        return models[0]

    losses = check_parity(make_net, shard, 3)
    return names_of(models[0]), losses


@on_hosts
@pytest.mark.parametrize(
    ("counts", "name"), [((2, 2), PER_HOST), ((2, 2, 2), PER_HOST), ((3, 1), "gloo"), ((1, 1, 1), "gloo")]
)
@pytest.mark.parametrize("reshard", quick(RESHARD, RESHARD[:1]))
def test_training_equals_an_unsharded_copys(results, counts, name, reshard):
    for names, _ in results(counts, reshard):
        assert names == {name}


def trained_in_bf16() -> list[torch.Tensor]:
    """Train two models in turn, one of them with several reductions in flight; return the parameters' shards."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = [shard_net(make_net(seed), mp_policy=policy) for seed in (1, 2)]
    models[1].set_reduce_scatter_max_input_buffers(3)
    optimizers = [adamw(model.parameters()) for model in models]
    for step in range(3):
        losses = [loss_of(model, batch(dist.get_rank(), step)) for model in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.to_local().detach().clone() for model in models for p in model.parameters()]


@pytest.mark.thorough
@on_hosts
def test_models_that_take_turns_train_as_over_gloo(network, results, monkeypatch):
    ours = results((2, 2), "bf16")
    monkeypatch.setenv("WORKBENCH_COMM", "gloo")
    for rank, over_gloo in zip(ours, run_on(seats(network, 2, 2), trained_in_bf16), strict=True):
        torch.testing.assert_close(rank, over_gloo)


@pytest.mark.thorough
@on_hosts
@pytest.mark.parametrize("counts", [(2, 2), (1, 1)])
def test_links_that_are_slow_and_lose_frames_change_no_number(network, results, counts):
    expected, lost = results(counts, "bf16"), network.cables.num_lost()
    with network.cables.over(ranks_on_hosts.LOSSY):
        ranks = run_on(seats(network, *counts), trained_in_bf16)
    assert network.cables.num_lost() > lost
    for rank, params in zip(ranks, expected, strict=True):
        assert all(map(torch.equal, rank, params))


def recorded_step() -> tuple[list[str], Recording]:
    with recording() as record:
        model = shard_net(make_net(**NET))
        for step in range(2):
            record.clear()
            loss_of(model, batch(dist.get_rank(), step)).backward()
            model.zero_grad()
    record.__dict__.pop("_lock")
    return record.events, record


@on_hosts
def test_events_are_those_of_gloo_but_that_shards_are_copied_to_where_they_are_gathered(network, results, monkeypatch):
    ours = results((2, 2), "recorded")
    monkeypatch.setenv("WORKBENCH_COMM", "gloo")
    theirs = run_on(seats(network, 2, 2), recorded_step)
    for (events, record), (others, _) in zip(ours, theirs, strict=True):
        expected = []
        for event in others:
            kind, edge, unit = event.split()
            is_gather = (kind, edge) == ("ALL_GATHER", "BEGIN")
            expected += [f"COPY_IN BEGIN {unit}", f"COPY_IN END {unit}"] if is_gather else []
            expected.append(event)
        assert events == expected
        assert {unit.comm for unit in record.units.values()} == {PER_HOST}
        assert list(record.groups.values()) == [(0, 1, 2, 3)]  # its inner steps are not recorded


@on_hosts
def test_bytes_by_formula(results):
    num_hosts, num_local, size = 2, 2, 4
    root, block = slots(size, ROOT_SHAPES), slots(size, BLOCK_SHAPES)
    largest = max(root, block)
    aligned = -(-largest * (size - 1) * FP32 // mmap.PAGESIZE) * mmap.PAGESIZE
    for _, record in results((num_local, num_local), "recorded"):
        gathered = 2 * size * largest // num_local * FP32  # two stages, shared by the ranks of a host
        reduced = 2 * aligned  # two stages, unused between two units
        in_use = largest * (size - 1 + num_hosts - 1) * FP32  # its input, and the data from the other host
        pages = size * largest * FP32  # of full parameters, spare between two units
        assert record.peak[Category.RESERVED] == gathered + reduced + pages
        assert record.peak[Category.REDUCE_SCATTER_BUFFERS] == in_use
        assert record.peak[Category.ALL_GATHER_BUFFERS] == 0
        assert record.payload(Kind.ALL_GATHER) == (root + 2 * BLOCKS * block) * size * FP32
        assert record.payload(Kind.REDUCE_SCATTER) == (root + BLOCKS * block) * size * FP32


LARGE = {"dim": 64, "num_blocks": 4, "vocab": 100}


def issued(num_copies: int) -> list[tuple[Kind, tuple[int, ...], int, str]]:
    """Train 3 steps; return kind, ranks, payload and carrier of each collective that this rank issued."""
    mesh = init_device_mesh(
        "cpu", (num_copies, dist.get_world_size() // num_copies), mesh_dim_names=("copies", "ranks")
    )
    with recording() as record:
        model = shard_net(make_net(**LARGE), mesh=mesh if num_copies > 1 else mesh["ranks"])
        for step in range(3):
            loss_of(model, batch(dist.get_rank(), step, LARGE["vocab"])).backward()
    return [
        (kind, record.groups[comm.group], num_bytes, record.units[unit].comm)
        for kind, edge, unit, num_bytes, comm, _ in record.rows
        if kind in COLLECTIVES and edge == Edge.BEGIN
    ]


@on_hosts
@pytest.mark.parametrize(
    ("counts", "choice", "num_copies"),
    quick_rows(
        [
            ((2, 2), "", 1),
            ((2, 2, 2), "", 1),
            ((2, 2), "gloo", 1),
            ((3, 1), "", 1),
            ((2, 2, 2), "default", 1),
            ((2, 2, 2), "", 3),
        ],
        [((2, 2), "", 1)],
    ),
)
def test_bytes_between_hosts_match_the_formula(network, monkeypatch, counts, choice, num_copies):
    if choice:
        monkeypatch.setenv("WORKBENCH_COMM", choice)
    hosts_of_ranks = [host for host, count in enumerate(counts) for _ in range(count)]
    before = network.cables.sent()
    ranks = run_on(seats(network, *counts), issued, num_copies)
    sent = [after - b for after, b in zip(network.cables.sent(), before, strict=True)]
    expected: Counter[str] = Counter()
    for rank, collectives in enumerate(ranks):
        for kind, members, payload, carrier in collectives:
            if rank == members[0]:  # count each collective once
                names = [str(hosts_of_ranks[member]) for member in members]
                expected.update(crossing_bytes(kind, payload, names, carrier))
    for host in range(len(counts)):
        payload = expected[str(host)]
        assert payload < sent[host] < 1.15 * payload + 400_000  # headers, and store traffic at the start


# ---- aborted, and refused


def aborted_and_gone_on() -> None:
    """Rank 3 skips a step and the others are aborted; then all train on."""
    plain = make_net(num_blocks=2)
    model = shard_net(copy.deepcopy(plain))
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    for step in range(4):
        if step == 2:
            give_up_a_step(model)
        loss_of(plain, batch(dist.get_rank(), step)).backward()
        average_grads(plain)
        loss_of(model, batch(dist.get_rank(), step)).backward()
        assert_same_shards(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert names_of(model) == {PER_HOST}


def give_up_a_step(model: Net) -> None:
    if dist.get_rank() != 3:
        canceller = threading.Thread(target=cancel_when_unfinished)
        canceller.start()
        with pytest.raises(StepAborted):
            loss_of(model, batch(dist.get_rank(), 9)).backward()
        canceller.join()
        cancellation.reset()
    process_groups.rebuild_all()
    model.reset_iter_state()


def cancel_when_unfinished() -> None:
    eventually(lambda: process_groups.num_unfinished() > 0)
    cancellation.cancel("enough")


@on_hosts
def test_an_aborted_step_leaves_no_late_messages(network):
    run_on(seats(network, 2, 2), aborted_and_gone_on)


def without_memory(host: str) -> set[str]:
    """On one host, shared memory fails beyond the first page."""
    if shared_memory.host == host:
        create = shared_memory.create_memory

        def scarce(num_bytes: int, *args: Any) -> str:
            if num_bytes > 4096:
                raise OSError("no memory here")
            return create(num_bytes, *args)

        shared_memory.create_memory = scarce
    model = shard_net(make_net(dim=64))
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    return names_of(model)


@on_hosts
def test_where_one_host_has_too_little_memory_all_take_gloo(network):
    places = seats(network, 2, 2)
    assert run_on(places, without_memory, places[-1].namespace) == [{"gloo"}] * 4


def refused() -> None:
    hosts_here = connected()
    reduce = HostsReduceScatter(hosts_here, torch.float32)
    reduce(torch.zeros(2), torch.zeros(6), dist.group.WORLD, SUM)


@on_hosts
def test_an_input_that_it_did_not_allocate_is_refused(network):
    with pytest.raises(RankFailure, match="works in place: the input must be the tensor that allocate"):
        run_on(seats(network, 2, 2), refused)


def test_a_host_is_identified_by_the_setting_or_by_its_machine(monkeypatch):
    monkeypatch.setattr(shared_memory, "host", "told")
    assert hierarchical_comm._identity() == "told"
    monkeypatch.setattr(shared_memory, "host", "")
    assert hierarchical_comm._identity() not in {"", "told"}
