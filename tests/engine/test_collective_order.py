"""Ranks that are about to diverge all raise before any byte moves; equal ranks never raise."""

import copy
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.forked_ranks import run_ranks, simulated_rank, simulating
from tests.helpers.parity import shard_net
from tests.helpers.small_models import Block, batch, loss_of, make_net
from tests.helpers.unsharded_copy import train_both
from tests.helpers.waiting import eventually
from workbench.engine import CollectiveFailed, RanksDisagreeError, StepAborted, collective_order, process_groups
from workbench.engine._torch import default_store
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.collective_order import END, Collective, MessageBoard, OrderCheck
from workbench.engine.process_groups import CommGroup

A, B, C, D = (Collective("all-gather", name, 64) for name in "abcd")


@pytest.fixture(autouse=True)
def no_cancellation_left():
    yield
    cancellation.reset()


@pytest.fixture(autouse=True)
def nobody_answers_late(monkeypatch):
    """Wait long enough that even a slow rank's part is in the message; a wait in vain would exceed the test."""
    monkeypatch.setattr(collective_order, "ANSWERS_S", 600.0)


def test_how_a_call_reads():
    assert str(Collective("all-gather", "blocks.0", 12)) == "all-gather of unit blocks.0"
    assert str(Collective("reduce-scatter", "", 12)) == "reduce-scatter of unit (root)"
    assert str(END) == END.sized() == "end of the iteration"
    assert Collective("all-gather", "blocks.0", 12608).sized() == "all-gather of unit blocks.0 (12,608 bytes)"
    assert str(Collective("barrier", None, 0)) == "barrier"


# ---- ranks that are threads


class Memory:
    """A store in this process that counts operations and votes."""

    def __init__(self) -> None:
        self.values = {}
        self.num_done = 0
        self.num_votes = 0
        self._lock = threading.Lock()

    def check(self, keys):
        with self._lock:
            self.num_done += 1
            return all(key in self.values for key in keys)

    def set(self, key, text):
        with self._lock:
            self.num_done += 1
            self.values[key] = text

    def get(self, key):
        with self._lock:
            self.num_done += 1
            return self.values[key].encode()

    def add(self, key, number):
        with self._lock:
            self.num_done += 1
            self.num_votes += "tally" in key and number != 0
            self.values[key] = self.values.get(key, 0) + number
            return self.values[key]

    def delete_key(self, key):
        with self._lock:
            self.num_done += 1
            self.values.pop(key, None)


class Rank:
    """A rank that issues calls while the others join; it may be one call ahead, as with a prefetch."""

    looks_on = True

    def __init__(self, store, rank: int, ranks: list["Rank"], program: list[Collective]) -> None:
        self.program = program
        self.ranks = ranks
        self.issued = []
        self.outcome = "running"
        self.order = OrderCheck(MessageBoard(store, rank, len(PLACES)), PLACES, rank, is_part=False)

    def run(self) -> None:
        try:
            self.order._board.barrier()
            for call in self.program:
                self.do(call)
            self.wait_for(len(self.issued))
            self.outcome = "done"
            while self.looks_on and any(rank.outcome == "running" for rank in self.ranks):
                self.order.check_peers()  # as before its next collective
            if self.looks_on:
                self.order.check_peers()
        except RanksDisagreeError as error:
            self.order.leave(str(error))
            self.outcome = str(error)

    def do(self, collective: Collective) -> None:
        if collective is END:
            self.order.end_iteration()
            return
        self.order.before(collective)
        self.issued.append(collective)
        self.wait_for(len(self.issued) - 1)

    def wait_for(self, number: int) -> None:
        while any(len(rank.issued) < number for rank in self.ranks):
            self.order.check_peers()


PLACES = (4, 7)


def go(programs: list[list[Collective]], store=None) -> list[Rank]:
    """Run one program on each of two ranks, ranks 4 and 7 of a larger world."""
    ranks: list[Rank] = []
    store = store or Memory()
    ranks += [Rank(store, number, ranks, program) for number, program in enumerate(programs)]
    threads = [threading.Thread(target=rank.run) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks


def both(program: list[Collective], store=None) -> list[str]:
    return [rank.outcome for rank in go([program, list(program)], store)]


def requests_per_iteration(*iterations: list[Collective]) -> list[int]:
    """Return the number of questions that a lone rank asks in each iteration."""
    store = Memory()
    counts = []
    lone = OrderCheck(MessageBoard(store, 0, 1), (0,), 0, is_part=False)
    lone._board.barrier()
    for calls in iterations:
        before = store.num_votes
        for call in calls:
            lone.before(call)
        lone.end_iteration()
        counts.append(store.num_votes - before)
    return counts


def test_a_rank_in_the_known_order_sends_no_request():
    assert requests_per_iteration([A, B, C], [A, B, C], [A, B, C]) == [4, 0, 0]


def test_a_known_branch_is_checked_only_where_it_begins():
    train, evaluate = [A, B, C, D], [A, B]
    # first: its calls and its end; first evaluation: its end; then one question each, after B
    assert requests_per_iteration(train, evaluate, train, evaluate, train) == [5, 1, 1, 1, 1]


def test_a_branch_that_no_one_takes_any_more_is_forgotten():
    counts = requests_per_iteration([A, B, C], [A, D], *[[A, B, C]] * (collective_order.REMEMBERED + 3))
    assert counts[:2] == [4, 2]
    assert set(counts[2:-2]) == {1}
    assert counts[-2:] == [0, 0]
    assert (
        requests_per_iteration([A], *[[A, B]] * (collective_order.REMEMBERED + 3))[-1] == 0
    )  # a sequence that ends along another one


def test_an_iteration_without_collectives_does_not_count():
    assert requests_per_iteration([A], [], [A], []) == [2, 0, 0, 0]


def test_orders_that_do_not_recur_are_checked_and_not_stored():
    store = Memory()
    lone = OrderCheck(MessageBoard(store, 0, 1), (0,), 0, is_part=False)
    lone.ask(D)
    lone.before(A)
    lone.end_iteration()
    before = store.num_done
    lone.before(A)
    assert store.num_done == before
    lone.ask(D)
    assert store.num_done > before


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_every_kind_of_store_serves(kind):
    path = Path(tempfile.mkdtemp()) / "store"
    store = dist.PrefixStore("prefix", dist.HashStore() if kind == "hash" else dist.FileStore(str(path), 1))
    assert both([A, B, END, A, B, END, A, C, END], store) == ["done", "done"]
    assert (
        "rank 4 all-gather of unit b (64 bytes); rank 7 all-gather of unit c" in go([[A, B], [A, C]], store)[0].outcome
    )


MESSAGES = [  # programs of two ranks, and the message on both
    ([A, B], [A, C], "collective 2 of this iteration: rank 4 {b}; rank 7 {c}."),
    ([A, END, A, B], [A, END, A, END], "collective 2 of this iteration: rank 4 {b}; rank 7 end of the iteration."),
    ([A, B, END] * 2, [A, B, END, A, C, END], "collective 2 of this iteration: rank 4 {b}; rank 7 {c}."),
    ([A, B, END] * 3, [A, B, END, A, B, B, END], "collective 3 of this iteration: rank 4 {e}; rank 7 {b}."),
    (
        [A, B, C, END] * 3,
        [A, B, C, END, A, B, END],
        "collective 3 of this iteration: rank 4 {c}; rank 7 {e}.",
    ),
    (
        [A, B, C, END] * 2 + [A, C],
        [A, B, C, END] * 2 + [A, D],
        "collective 2 of this iteration: rank 4 {c}; rank 7 {d}.",
    ),
    ([A, END, C], [A, END, Collective("all-gather", "c", 8)], "rank 4 {c}; rank 7 all-gather of unit c (8 bytes)."),
]


@pytest.mark.parametrize(("first", "second", "message"), MESSAGES)
@pytest.mark.parametrize("exchanged", [False, True])
def test_all_ranks_raise_the_same_message(first, second, message, exchanged):
    words = {name: f"all-gather of unit {name} (64 bytes)" for name in "abcd"} | {"e": "end of the iteration"}
    programs = [second, first] if exchanged else [first, second]
    ranks = go(programs)
    assert ranks[0].outcome == ranks[1].outcome
    begin, end = message.format(**words).split("rank 4 ")
    one, other = end.rstrip(".").split("; rank 7 ")
    if exchanged:
        one, other = other, one
    assert f"{begin}rank 4 {one}; rank 7 {other}. Run the same" in ranks[0].outcome
    assert ranks[0].outcome.startswith("ranks disagree on collective ")


def test_a_rank_with_more_collectives_fails_although_the_other_never_polls_again(monkeypatch):
    monkeypatch.setattr(Rank, "looks_on", False)
    outcomes = [rank.outcome for rank in go([[A, END, A, B], [A, END, A, END]])]
    assert outcomes[1] in {"done", outcomes[0]}  # it looks once more if the other rank was first
    assert "rank 4 all-gather of unit b (64 bytes); rank 7 end of the iteration." in outcomes[0]


def iterations_of(program: list[list[Collective]]) -> list[Collective]:
    return [call for calls in program for call in [*calls, END]]


PROGRAMS = st.lists(st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(PROGRAMS)
def test_law_equal_ranks_never_fail(program):
    ranks = go([iterations_of(program)] * 2)
    assert [rank.outcome for rank in ranks] == ["done", "done"]
    assert ranks[0].issued == [call for calls in program for call in calls]


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, PROGRAMS, PROGRAMS)
def test_law_no_two_ranks_ever_join_in_different_collectives(alike, first, second):
    """Run two programs with a common start that then diverge, at the latest at their end."""
    ranks = go([iterations_of([*alike, *first, [D]]), iterations_of([*alike, *second, [D, D]])])
    joined = min(len(rank.issued) for rank in ranks)
    assert ranks[0].issued[:joined] == ranks[1].issued[:joined]
    assert ranks[0].outcome == ranks[1].outcome
    assert ranks[0].outcome.startswith("ranks disagree on collective")


# ---- cost


class ThreadRanks:
    """Ranks as threads; none polls again before all others wait too."""

    def __init__(self, size: int) -> None:
        self.store = Memory()
        self._size = size
        self._running = size
        self._waiting = self._round = 0
        self._changed = threading.Condition()

    def pause(self, _delay_s: float) -> float:
        with self._changed:
            self._waiting += 1
            self._wake_if_all_wait()
            now = self._round
            self._changed.wait_for(lambda: self._round != now or not self._waiting)
        return 0.0

    def _wake_if_all_wait(self) -> None:
        if self._waiting == self._running:
            self._waiting = 0
            self._round += 1
            self._changed.notify_all()

    def run(self, do) -> list:
        results = [None] * self._size

        def main(rank: int) -> None:
            try:
                mine = OrderCheck(
                    MessageBoard(self.store, rank, self._size), tuple(range(self._size)), rank, is_part=False
                )
                mine._board.barrier()
                results[rank] = do(mine)
            finally:
                with self._changed:
                    self._running -= 1
                    self._wake_if_all_wait()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


SIZES = [2, 4, 8, 16, 32]
EACH = 13  # operations per question: a vote, a deletion where due, at most three polls of three reads


def done_by_each(monkeypatch, size: int, do) -> tuple[float, list]:
    crowd = ThreadRanks(size)
    monkeypatch.setattr(collective_order, "_pause", crowd.pause)
    crowd.run(lambda mine: mine.ask(D))
    before = crowd.store.num_done
    assert before <= (EACH + 10) * size  # includes the rendezvous
    again = ThreadRanks(size)
    monkeypatch.setattr(collective_order, "_pause", again.pause)
    results = again.run(lambda mine: (mine.ask(D), do(mine))[1])
    return (again.store.num_done - before) / size, results


@pytest.mark.parametrize("size", SIZES)
def test_store_requests_of_a_rank_do_not_grow_with_the_number_of_ranks(monkeypatch, size):
    """Run an iteration that asks about every call, then one that asks about none."""

    def iterate(mine: OrderCheck) -> bool:
        for _ in range(2):
            for call in (A, B, C, D):
                mine.before(call)
            mine.end_iteration()
            mine.check_peers()
        return True

    each, results = done_by_each(monkeypatch, size, iterate)
    assert results == [True] * size
    assert each <= 5 * EACH + 6  # plus two looks and a note


@pytest.mark.parametrize("size", SIZES)
def test_the_cost_of_an_equal_comparison_does_not_grow_with_the_number_of_ranks(monkeypatch, size):
    each, results = done_by_each(monkeypatch, size, lambda mine: (mine.tell(A, f"{mine._rank}"), mine.compare(B, "x")))
    assert results == [("0", ["x"] * size)] * size
    assert each <= 2 * EACH + 5


@pytest.mark.parametrize("size", SIZES)
def test_ranks_with_different_texts_get_all_of_them(monkeypatch, size):
    crowd = ThreadRanks(size)
    monkeypatch.setattr(collective_order, "_pause", crowd.pause)
    texts = [["x", str(rank // (size // 2))] for rank in range(size)]
    results = crowd.run(lambda mine: [mine.compare(A, text) for text in texts[mine._rank]])
    assert results == [[[t[0] for t in texts], [t[1] for t in texts]]] * size


@pytest.mark.parametrize("size", SIZES[1:])
def test_one_of_many_that_differs_is_named_to_all(monkeypatch, size):
    crowd = ThreadRanks(size)
    monkeypatch.setattr(collective_order, "_pause", crowd.pause)

    def differ(mine: OrderCheck) -> str:
        mine.before(A)
        with pytest.raises(RanksDisagreeError) as refused:
            mine.before(C if mine._rank == 2 else B)
        return str(refused.value)

    messages = set(crowd.run(differ))
    assert len(messages) == 1
    others = ", ".join(str(rank) for rank in range(size) if rank != 2)
    assert f"ranks {others} {B.sized()}; rank 2 {C.sized()}." in messages.pop()


def test_a_missing_rank_is_waited_for_until_an_abort(monkeypatch):
    store = Memory()
    store.values = {"note/1": "[]", "met": 1}
    lone = OrderCheck(MessageBoard(store, 0, 2), (0, 1), 0, is_part=False)
    lone._board.barrier()
    waiting = cancellation._cancelled._cond._waiters
    thread = threading.Thread(target=lambda: (eventually(lambda: bool(waiting)), cancellation.cancel("now")))
    thread.start()
    with pytest.raises(StepAborted, match=r"^now$"):
        lone.before(A)
    thread.join()
    cancellation.reset()
    # rank 1 is at B, and rank 2 never answers
    monkeypatch.setattr(collective_order, "ANSWERS_S", 0.0)
    store = Memory()
    store.values = {"note/2": "[]", "left": 0}
    said_by_one = collective_order.BoardEntry(0, (0, 0), B)
    MessageBoard(store, 1, 3).ask(said_by_one)
    MessageBoard(store, 1, 3).publish(said_by_one.text())
    three = OrderCheck(MessageBoard(store, 0, 3), (0, 1, 2), 0, is_part=True)
    with pytest.raises(RanksDisagreeError) as refused:
        three.before(A)
    message = "among ranks 0, 1, 2: rank 0 all-gather of unit a (64 bytes); rank 1 all-gather of unit b (64 bytes); "
    assert message + "rank 2 did not answer." in str(refused.value)


def test_a_lost_store_is_a_failure():
    class Gone(Memory):
        def set(self, *_):
            raise dist.DistNetworkError("Broken pipe\n frames")

        check = get = add = delete_key = set

    board = MessageBoard(Gone(), 0, 1)
    for use in (lambda: board.publish("[]"), board.barrier, board.question, lambda: board.tally(0)):
        with pytest.raises(CollectiveFailed, match=r"^cannot reach the ranks' store: Broken pipe; the process"):
            use()
    board.withdraw()  # its keys died with the store


class Ending(Memory):
    """A store whose host ends: after ``num_left`` more operations it is gone; None: it stays."""

    num_left: int | None = None

    def _done(self):
        if self.num_left == 0:
            raise dist.DistNetworkError("Broken pipe")
        self.num_left = None if self.num_left is None else self.num_left - 1

    def __getattribute__(self, name):
        if name in {"check", "set", "get", "add", "delete_key"}:
            self._done()
        return super().__getattribute__(name)


def late(first: list[Collective]) -> tuple[OrderCheck, Ending]:
    """Return the check of rank 1, whose peer has issued ``first``, and their store."""
    store = Ending()
    store.values = {"note/0": "[]", "met": 1, "left": 0, "question": "[]"}
    checks = [OrderCheck(MessageBoard(store, rank, 2), (0, 1), rank, is_part=False) for rank in (0, 1)]
    checks[1]._board.barrier()
    for serial, collective in enumerate(first):
        checks[0]._board.ask(collective_order.BoardEntry(serial, (0, serial), collective))
    return checks[1], store


def test_a_rank_that_is_late_in_the_last_step_ends_it_without_the_store():
    for num_left in (0, 1):  # gone before the vote for the end, and after it
        check, store = late([A, END] if num_left else [A])
        check.before(A)
        check.check_peers()
        store.num_left = num_left
        check.end_iteration()
        assert check._tree.place == (1, 0)
        check.check_peers()
        with pytest.raises(CollectiveFailed, match="cannot reach the ranks' store"):
            check.before(B)


def test_a_late_rank_reads_no_tally_twice_and_says_in_what_it_differs():
    check, store = late([])
    check._board._add("same/0", collective_order._vote("text"))
    check._board.ask(collective_order.BoardEntry(0, (0, 0), A))
    store.num_left = 2  # its two votes
    assert check.compare(A, "text") == ["text", "text"]
    check, store = late([A])
    store.num_left = 1
    with pytest.raises(RanksDisagreeError, match=r"rank 1 all-gather of unit b \(64 bytes\); rank 0 did not answer"):
        check.before(B)


def test_a_dispute_older_than_the_record_is_still_reported():
    store = Memory()
    lone = OrderCheck(MessageBoard(store, 0, 1), (0,), 0, is_part=False)
    for _ in range(collective_order.REMEMBERED + 3):
        lone.before(A)
        lone.end_iteration()
    tree = lone._tree
    assert (
        tree.collective_at((tree.iteration - 1, 0))
        == tree.collective_at((tree.iteration - collective_order.REMEMBERED, 0))
        == A
    )
    assert tree.collective_at((tree.iteration - 1, 1)) == END
    assert tree.collective_at((0, 0)) is None


# ---- ranks that are processes


class DivergingModel(nn.Module):
    """One rank deviates: another order of blocks, fewer or more of them, or no gradients."""

    def __init__(self, *, unequal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(4))
        if unequal:
            self.blocks[2].mlp = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 5))
        self.head = nn.Linear(5, 7)
        self.order = [0, 1, 2, 3]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


ORDERS = {"swapped": [0, 2, 1, 3], "skipped": [0, 2, 3], "twice": [0, 1, 1, 2, 3], "unequal": [0, 2, 1, 3]}


@contextmanager
def unlike(model: nn.Module, how: str):
    model.order = ORDERS.get(how, model.order)
    with torch.set_grad_enabled(how != "no backward"):
        yield
    model.order = [0, 1, 2, 3]


def steps(model: nn.Module) -> None:
    step(model)
    step(model)  # a rank that has finished the first step waits for the others here


def step(model: nn.Module) -> None:
    loss = loss_of(model, batch(dist.get_rank(), 0))
    if torch.is_grad_enabled():
        loss.backward()


def differ(how: str, num_before: int) -> str:
    plain = DivergingModel(unequal=how == "unequal")
    model = shard_net(copy.deepcopy(plain))
    if num_before:
        train_both(plain, model, num_before)
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    with unlike(model, how if is_odd else ""), pytest.raises(RanksDisagreeError) as refused:
        steps(model)
    with pytest.raises(RuntimeError, match="was aborted \\(RanksDisagreeError: ranks disagree on collective"):
        model(batch(0, 0))
    process_groups.rebuild_all()
    model.reset_iter_state()
    model.zero_grad()
    train_both(plain, model, 3)
    return str(refused.value)


SAID = {
    "swapped": (" of unit ", "all-gather of unit blocks."),
    "skipped": (" of unit ", ""),
    "twice": (" of unit ", ""),
    "unequal": (" of unit ", "all-gather of unit blocks."),
    "no backward": (" of unit ", "end of the iteration"),
}


def check_told(messages: list[str], how: str) -> None:
    assert len(set(messages)) == 1
    most = len(messages) - 1
    others = "rank 0" if most == 1 else "ranks 0, 1, 2"
    common, odd = SAID[how]
    parts = messages[0].partition(" of this iteration: ")[2].partition(". Run the same")[0].split("; ")
    assert parts[0].startswith(others)
    assert common in parts[0]
    assert parts[1].startswith(f"rank {most} {odd}")


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("how", SAID)
def test_two_ranks_that_diverge_fail_and_continue_after_a_rebuild(how, num_before):
    check_told(run_ranks(2, differ, how, num_before), how)


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "num_before"), [("swapped", 2), ("unequal", 0), ("no backward", 2)])
def test_four_ranks_too(how, num_before):
    check_told(run_ranks(4, differ, how, num_before), how)


def iterations(num: int) -> int:
    """Train and evaluate in turn, sometimes with several forwards per backward; return the number of store keys."""
    model = shard_net(make_net(num_blocks=2))
    for number in range(num):
        with torch.set_grad_enabled(number % 3 != 0):
            losses = [loss_of(model, batch(dist.get_rank(), number)) for _ in range(1 + number % 2)]
        model.set_requires_gradient_sync(number % 4 != 1)
        for loss in losses if number % 3 else []:
            loss.backward()
    return default_store().num_keys()


def test_the_store_does_not_grow_and_equal_ranks_never_fail():
    short, long = run_ranks(2, iterations, 3), run_ranks(2, iterations, 30)
    assert max(long) <= max(short) + 1  # a rank that looks for a question creates its tally


def notes_left() -> list[dict[str, set[str]]]:
    """Return the key names by incarnation of the group, for each of three incarnations."""
    model = shard_net(make_net(num_blocks=1))
    left = []
    for _ in range(3):
        step(model)
        dist.barrier()
        names = [key.rsplit("workbench/cpu/0-1/")[1] for key in default_store().list_keys() if "0-1/" in key]
        keys = [name.partition("/") for name in names if "/cpu/" not in name]  # without gloo's addresses
        left.append({number: {name for n, _, name in keys if n == number} for number, _, _ in keys})
        dist.barrier()
        process_groups.rebuild_all()
    return left


def test_a_rebuild_removes_old_keys_from_the_store():
    left = run_ranks(2, notes_left)
    assert left[0] == left[1]
    for number, keys in enumerate(left[0]):
        assert {"met", "left", "question", "note/0", "note/1"} <= keys.pop(str(number))
        assert keys == {}


def gather(group: CommGroup, unit: str) -> list[float]:
    """All-gather this rank's number and wait for the result."""
    own, rows = torch.full((4,), float(dist.get_rank())), torch.zeros(group.size, 4)
    pending = group.issue(
        lambda *tensors, async_op: dist.all_gather(list(tensors[0].unbind(0)), *tensors[1:], async_op),
        rows,
        own,
        collective=Collective("all-gather", unit, rows.nbytes),
    )
    pending.wait()
    pending.finish()
    return rows[:, 0].tolist()


def rows_and_columns() -> tuple[CommGroup, CommGroup]:
    rank = dist.get_rank()
    return process_groups.group_of((rank // 2 * 2, rank // 2 * 2 + 1)), process_groups.group_of(
        (rank % 2, rank % 2 + 2)
    )


def gather_in_both(shard: CommGroup, unit: str, replicate: CommGroup) -> None:
    gather(shard, unit)
    gather(replicate, "a")


def told_by_others() -> tuple[str, list[list[float]]]:
    shard, replicate = rows_and_columns()
    for _ in range(2):
        seen = [gather(shard, "a"), gather(replicate, "a")]
        process_groups.end_iteration([shard, replicate])
    with pytest.raises(RanksDisagreeError) as refused:
        gather_in_both(shard, "b" if dist.get_rank() == 3 else "a", replicate)
    process_groups.rebuild_all()
    assert seen == [gather(shard, "b"), gather(replicate, "b")]
    return str(refused.value), seen


def test_a_rank_that_waits_in_another_group_for_a_failed_rank_fails_too():
    results = run_ranks(4, told_by_others)
    (message,) = {message for message, _ in results}
    text = "collective 1 of this iteration among ranks 2, 3: rank 2 all-gather of unit a (32 bytes); rank 3 all-gather"
    assert text in message
    assert [seen for _, seen in results] == [
        [[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]],
    ]  # fmt: skip


def groups_of_their_own() -> dict[tuple[int, ...], tuple[int, list[float]]]:
    """Make a group on ranks that have made different numbers of groups before."""
    rank = dist.get_rank()
    members = [m for m in ((0, 1), (0, 1, 2, 3), (0, 2), (1, 2, 3)) if rank in m]
    mine = [process_groups.group_of(ranks) for ranks in members]
    process_groups.rebuild_all()
    for group in mine:
        gather(group, "a")
    if rank in {0, 2}:
        process_groups.group_of((0, 2)).rebuild()
    return {group.ranks: (group.incarnation, gather(group, "a")) for group in mine}


def test_incarnations_are_equal_on_all_members_of_a_group():
    for seen in run_ranks(4, groups_of_their_own):
        for ranks, (incarnation, rows) in seen.items():
            assert rows == list(ranks)
            assert incarnation == (2 if ranks == (0, 2) else 1)


def interrupted_while_asking() -> list[str]:
    """Interrupt a rank that waits for votes; the others may have issued the collective meanwhile."""
    group = process_groups.group_of((0, 1))
    if dist.get_rank() == 0:
        real = collective_order._pause

        def interrupt(_delay_s: float) -> float:
            raise KeyboardInterrupt

        collective_order._pause = interrupt
        with pytest.raises(KeyboardInterrupt):
            gather(group, "a")
        collective_order._pause = real
        with pytest.raises(RuntimeError, match="an earlier collective was aborted \\(KeyboardInterrupt: \\)"):
            gather(group, "a")
    dist.barrier()
    process_groups.rebuild_all()
    return gather(group, "a")


def test_an_interrupt_during_a_request_counts_as_an_abort():
    assert run_ranks(2, interrupted_while_asking) == [[0, 1], [0, 1]]


@simulating
def test_a_simulated_world_sends_no_request():
    with simulated_rank(1, 4):
        group = process_groups.group_of((0, 1, 2, 3))
        assert group.rank == 1
        assert group.issue(lambda _, async_op: None, collective=A).has_ended
        process_groups.end_iteration([group])
        group.check_peers()
