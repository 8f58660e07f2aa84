"""Why a stalled run does not continue: each cause, with its evidence."""

from dataclasses import replace
from typing import get_args

import pytest

from tests.replay.test_run_positions import FORWARD, OWN, TORCH, WALL, S, gather, rank, recording, row
from tests.reports.test_run_where import UNITS, alive, quiet, report
from workbench.events import TORCH_DDP, Edge, Kind, Phase
from workbench.replay.run_positions import live_positions
from workbench.reports.parted_ranks import LEAVE_TOGETHER, SAME_BATCHES, SAME_CALLS
from workbench.reports.run_where import where
from workbench.reports.stall_cause import stall_cause
from workbench.trace.columns import Trace
from workbench.trace.recording import AFTER, Activity, RunEnd, SilentStack
from workbench.trace.schema import RankInfo

CLOSED = (
    "RuntimeError: [/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:1. This is typically caused by x"
)
TIMED_OUT = "RuntimeError: [/x/gloo/transport/tcp/buf.cc:7] Timed out waiting 9ms for recv operation to complete"


def cause_of(*ranks, **more):
    return report(*ranks, **more).cause


def test_a_run_that_continues_has_no_cause():
    assert cause_of(alive(0, gather(1)), alive(1, row(Kind.FORWARD, Edge.BEGIN, 29, unit=3))) is None


def test_ranks_that_part_and_go_on_are_told_too():
    runs = row(Kind.FORWARD, Edge.BEGIN, 29, unit=3)
    found = report(alive(0, gather(1, unit=1), runs), alive(1, gather(1, unit=2), runs))
    assert not found.is_stalled
    assert found.cause.verdict == "ranks 0-1 part: rank 0 issued all-gather of blocks.0, rank 1 all-gather of blocks.1"


def test_a_rank_that_issued_something_else():
    other = gather(2, kind=Kind.ALL_REDUCE, unit=-1)
    found = cause_of(
        alive(0, gather(1)), alive(1, other, **quiet(*OWN, TORCH)), alive(2, gather(1)), groups=((0, 1, 2),)
    )
    assert found.verdict == "rank 1 issued all-reduce (model.py:9) where ranks 0, 2 issued all-gather of blocks.2"
    assert found.evidence == (
        "number 4 of group 0 of step 0: rank 1 all-reduce, ranks 0, 2 all-gather of blocks.2",
        f"rank 1 is in {OWN[-1]} (called from train.py:31)",
    )
    assert (found.rule, found.fix) == ("other-collective", SAME_CALLS)


BARRIER = {"kind": Kind.BARRIER, "unit": -1}
IN_HELPER, PAST_HELPER = ("/x/train.py:40 in run: prepare()", OWN[-1]), ("/x/train.py:42 in run: model = DDP(net)",)
IN_LINE, IN_TURN = ("/x/train.py:40 in run: dist.barrier()",), ("/x/train.py:42 in run, loop 39: step()",)


@pytest.mark.parametrize("rank_in", [0, 1])
@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        (IN_HELPER, PAST_HELPER, "rank {0} issued barrier (model.py:9), which rank {1} left out (train.py:42)"),
        # a branch of one of them, perhaps, or an earlier turn
        (IN_LINE, PAST_HELPER, "ranks 0-1 part: "),
        (IN_HELPER, IN_TURN, "ranks 0-1 part: "),
        (PAST_HELPER, IN_LINE, "ranks 0-1 part: "),
        ((), PAST_HELPER, "ranks 0-1 part: "),
    ],
)
def test_of_two_ranks_the_one_is_the_exception_whose_call_the_other_has_passed(one, other, verdict, rank_in):
    ranks = [alive(rank_in, gather(1, **BARRIER), **quiet(*one)), alive(1 - rank_in, gather(1), **quiet(*other))]
    found = cause_of(*sorted(ranks, key=lambda each: each[0].rank))
    assert found.verdict.startswith(verdict.format(rank_in, 1 - rank_in))
    assert found.rule == "other-collective"


def test_of_two_ranks_without_the_third_none_is_the_exception():
    small, large = ({**gather(1, kind=Kind.ALL_REDUCE, unit=-1), "num_bytes": each} for each in (8, 16))
    found = cause_of(alive(0), alive(1, large), alive(2, small), groups=((0, 1, 2),))
    assert found.rule == "other-payload"
    assert found.verdict.startswith(
        "ranks 1-2 differ, and the call of rank 0 is not recorded: rank 2 issued all-reduce"
    )


@pytest.mark.parametrize(("device", "ranks"), [("cpu", (1, 2)), ("cpu", (2, 1)), ("cuda:0", None)])
def test_a_rank_that_gloo_aborted_brought_less_than_the_larger_payload(device, ranks):
    few, many = ({**gather(1, kind=Kind.ALL_REDUCE, unit=-1), "num_bytes": size, "module": 0} for size in (1024, 2048))
    large, small = ranks or (1, 2)
    by_rank = {large: many, small: few}
    found = recording(
        rank(0, end=RunEnd(t_ns=2 * S, reason="SIGABRT")),
        *(failed(n, 2.1, CLOSED, call=by_rank[n]) for n in (1, 2)),
        groups=((0, 1, 2),),
    )
    infos = tuple(RankInfo(rank=n, host="a", device=device, pid=1) for n in range(3))
    header = replace(found.trace.header, strings=("float32",), ranks=infos)
    cause = where(replace(found, trace=Trace(header, found.trace.ranks)), WALL + 30 * S).cause
    if ranks is None:
        assert cause.verdict.startswith("ranks 1-2 differ, and the call of rank 0 is not recorded")
        return
    assert cause.verdict == (
        f"rank {large} issued all-reduce with 512 elements of float32 (2.00 KiB), rank {small} with 256 elements of "
        "float32 (1.00 KiB); gloo aborted rank 0 as it received more than it expected"
    )


def test_ranks_in_another_order():
    first = [gather(1, number=4, unit=1), gather(2, number=5, unit=2)]
    second = [gather(1, number=4, unit=2), gather(2, number=5, unit=1)]
    found = cause_of(alive(0, *first), alive(1, *second))
    assert found.rule == "wrong-order"
    assert found.verdict == (
        "rank 1 issued all-gather of blocks.1 before all-gather of blocks.0, rank 0 the other way round"
    )
    assert found.fix == "let all ranks run the same units in the same order"


def test_a_call_more_and_a_call_less():
    extra = [gather(1, number=4, kind=Kind.BARRIER, unit=-1), gather(2, number=5)]
    found = cause_of(alive(0, gather(1)), alive(1, *extra))
    assert found.verdict == "rank 1 issued barrier, which rank 0 left out"
    found = cause_of(alive(0, *extra), alive(1, gather(1)))
    assert found.verdict == "rank 1 left out barrier, which rank 0 issued"
    assert found.fix == SAME_CALLS


def test_another_payload():
    found = cause_of(alive(0, {**gather(1), "num_bytes": 8}), alive(1, {**gather(1), "num_bytes": 2048}))
    assert found.verdict == "rank 1 issued all-gather of blocks.2 with 2.00 KiB, rank 0 with 8 B"
    assert found.rule == "other-payload"


ROOTS = [
    (Kind.BROADCAST, "rank 1 issued broadcast with source rank 1, rank 0 with rank 0"),
    (Kind.GATHER, "rank 1 issued gather with destination rank 1, rank 0 with rank 0"),
]


@pytest.mark.parametrize(("kind", "verdict"), ROOTS)
def test_another_source_or_destination(kind, verdict):
    found = cause_of(*(alive(n, {**gather(1, kind=kind, unit=-1), "value": float(n)}) for n in (0, 1)))
    assert (found.rule, found.verdict) == ("other-root", verdict)
    assert found.fix == "pass the same src or dst on all ranks"


def test_a_payload_is_told_with_its_dtype():
    calls = [{**gather(1, unit=-1), "num_bytes": 2048 >> n, "module": n} for n in (0, 1)]
    found = recording(*(alive(n, call) for n, call in enumerate(calls)))
    header = replace(found.trace.header, strings=("float32", "float16"))
    cause = where(replace(found, trace=Trace(header, found.trace.ranks)), WALL + 30 * S).cause
    assert cause.verdict == (
        "rank 1 issued all-gather with 512 elements of float16 (1.00 KiB), "
        "rank 0 with 512 elements of float32 (2.00 KiB)"
    )


def test_a_rank_whose_batches_were_fewer():
    forwards = [row(Kind.FORWARD, Edge.BEGIN, at, unit=0) for at in (1, 2)]
    done = row(Kind.OPTIMIZER, Edge.BEGIN, 3)
    found = cause_of(alive(0, *forwards, done, gather(4)), alive(1, *forwards[:1], done, end=RunEnd(t_ns=9 * S)))
    assert found.rule == "uneven-batches"
    assert found.verdict == "rank 1 has ended, while rank 0 still issued collectives: all-gather of blocks.2"
    assert found.evidence == (
        "rank 1: 1 forward, 0 backwards, 1 step of the optimizer",
        "rank 0: 2 forwards, 0 backwards, 1 step of the optimizer",
    )


BATCH = [row(kind, Edge.BEGIN, 0.1, unit=0) for kind in (Kind.FORWARD, Kind.BACKWARD)]
BATCH += [row(kind, Edge.END, 0.1, unit=0) for kind in (Kind.FORWARD, Kind.BACKWARD)]
STEP = [*BATCH[::2], *BATCH[1::2], row(Kind.OPTIMIZER, Edge.BEGIN, 0.1)]
EXIT = "/x/train.py:9 in main, loop 4: sys.exit(0)"


def forward(t_s):
    return {**gather(t_s, unit=0), "phase": Phase.FORWARD}


@pytest.mark.parametrize(
    ("frames", "verdict", "fix"),
    [
        ((EXIT,), "rank 1 ended by sys.exit in train.py:9, while rank 0 still issued", LEAVE_TOGETHER),
        ((EXIT, "/x/stop.py:2 in stop: sys.exit()"), "rank 1 ended by sys.exit in stop.py:2, while", LEAVE_TOGETHER),
        # of a thread
        (("/x/stop.py:2 in run: os._exit(0)",), "rank 1 ended by os._exit in stop.py:2, while", LEAVE_TOGETHER),
        # the end of the script
        (("/x/train.py:20 in <module>: sys.exit(main())",), "rank 1 has ended, while rank 0 still", SAME_BATCHES),
        (
            (),
            "rank 1 has ended, while rank 0 still",
            f"{SAME_BATCHES}; or, if rank 1 decided to end, let all",
        ),
    ],
)
def test_a_rank_that_left_its_loop_by_an_exit(frames, verdict, fix):
    found = cause_of(alive(0, *STEP, forward(1)), alive(1, *STEP, end=RunEnd(t_ns=9 * S, frames=frames)))
    assert found.rule == ("dead-rank" if "os._exit" in verdict else "uneven-batches")
    assert found.verdict.startswith(verdict)
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(("turns", "rule"), [(1, "other-collective"), (3, "uneven-batches")])
def test_a_call_of_no_model_is_of_a_further_turn_only_if_each_turn_had_it(turns, rule):
    """Both ranks have run the same passes; one has ended, and the other waits in a call of its own."""
    calls = [gather(at + 0.1 * n, kind=kind, unit=-1, number=2 * at + n)
             for at in range(turns) for n, kind in enumerate((Kind.BROADCAST, Kind.ALL_REDUCE))]  # fmt: skip
    *both, last = calls
    ends = [{**call, "edge": Edge.END} for call in both]
    found = cause_of(alive(0, *both, *ends, last), alive(1, *both, *ends, end=RunEnd(t_ns=9 * S)))
    assert found.rule == rule
    assert found.fix.startswith(SAME_CALLS if turns == 1 else SAME_BATCHES)


def test_a_rank_that_failed_because_another_had_ended_early():
    """The sockets of the one that has ended are closed, and so the other one raises."""
    ended = alive(1, FORWARD, gather(2), gather(3, Edge.END), end=RunEnd(t_ns=9 * S))
    calls = [gather(1), gather(2, Edge.END), gather(3, number=5)]
    found = cause_of(alive(0, *calls, end=RunEnd(t_ns=9 * S, reason=CLOSED)), ended)
    assert found.rule == "uneven-batches"
    found = cause_of(alive(0, *calls[:2], end=RunEnd(t_ns=9 * S, reason="ValueError: x")), ended)
    assert found.verdict == "rank 0 failed: ValueError: x"


def test_ranks_that_wait_for_each_other_in_two_groups():
    groups = ((0, 1), (1, 0))
    found = cause_of(alive(0, gather(1)), alive(1, gather(1, group=1)), groups=groups)
    assert found.rule == "crossed-groups"
    assert found.verdict == (
        "rank 0 issued all-gather of blocks.2 in group 0 where rank 1 issued all-gather of blocks.2 in group 1"
    )
    assert found.evidence == (
        "rank 0 waits for all-gather of blocks.2 in group 0, which rank 1 has not started",
        "rank 1 waits for all-gather of blocks.2 in group 1, which rank 0 has not started",
    )


def test_a_rank_that_does_not_come():
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD, **quiet(*OWN, TORCH)))
    assert found.rule == "late-rank"
    assert found.evidence == (f"rank 1 has recorded no event for 21.0 s, in {OWN[-1]}",)
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD))
    assert found.evidence == ("rank 1 has recorded no event for 21.0 s; it has written no stack since",)


WITHIN = "/x/train.py:9 in save, with 8 `lock`: dist.all_reduce(x)"
AT_LOCK = "/x/train.py:8 in save: with lock:"
HELD = "rank 1 is at `with lock` of train.py:8, within which rank 0 waits for others"


def test_a_lock_that_is_held_in_a_collective():
    holds = alive(0, gather(1), **stack(WITHIN, 1))
    found = cause_of(holds, alive(1, FORWARD, **quiet(AT_LOCK)))
    assert (found.rule, found.verdict.partition("; ")[2]) == ("late-rank", HELD)
    crossed = cause_of(holds, alive(1, gather(1, group=1), **stack(AT_LOCK, 1)), groups=((0, 1), (1, 0)))
    assert (crossed.rule, crossed.evidence[0]) == ("crossed-groups", HELD)
    assert found.fix == crossed.fix == "issue no collective while a lock is held: leave its block first"


def test_a_rank_that_waits_for_a_worker_of_its_loader():
    called = "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py:9 in _get_data: self._try_get_data()"
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD, **quiet(OWN[0], called)))
    assert found.fix.startswith("see why a worker of its DataLoader does not answer")


def test_a_rank_that_waits_for_a_key_of_a_store():
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD, **quiet("/x/data.py:44 in get: self.store.wait([key])")))
    assert found.fix.startswith("it waits for a key of a store: see that another rank sets it")


def test_what_a_rank_does_after_an_error_alone():
    retry = "/x/train.py:9 in main, after 7 `OSError: no, raised in data.py:3`: again()"
    other = alive(1, gather(1, kind=Kind.ALL_REDUCE, unit=-1), **stack(retry, 1))
    found = cause_of(alive(0, gather(1), **stack("/x/train.py:7 in main: step()", 1)), other)
    assert found.verdict.endswith("; rank 1 handles OSError: no, raised in data.py:3")
    assert found.fix.startswith("let all ranks know of an error")


@pytest.mark.parametrize("activity", [each for each in get_args(Activity) if each])
def test_it_is_said_what_a_rank_does_that_does_not_come(activity):
    (silent,) = quiet(*OWN)["quiet"]
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD, quiet=(replace(silent, activity=activity),)))
    assert found.evidence == (f"rank 1 has recorded no event for 21.0 s, {activity}, in {OWN[-1]}",)
    assert "it sleeps, waits for data, or computes" not in found.fix


def test_a_collective_that_all_have_started_and_that_does_not_end():
    found = cause_of(alive(0, gather(1)), alive(1, gather(2)))
    assert found.rule == "stuck-collective"
    assert found.verdict == "ranks 0-1 wait for all-gather of blocks.2, which all of its ranks have started"
    source = {"kind": Kind.BROADCAST, "unit": -1}
    ended = [gather(1, **source), gather(2, Edge.END, **source), gather(3, number=5, **source)]
    found = cause_of(alive(0, *ended), alive(1, gather(2, **source)))
    assert found.verdict == (
        "rank 1 waits for broadcast number 4 of group 0, which all of its ranks have started, and rank 0 has ended"
    )
    assert found.fix.startswith("pass the same src or dst on all ranks")
    found = cause_of(*(alive(n, {**gather(n, **source), "value": 0.0}) for n in (0, 1)))
    assert found.fix.startswith("see the standard error")


def test_a_collective_is_not_stuck_as_soon_as_its_last_rank_has_come():
    assert cause_of(alive(0, gather(1)), alive(1, gather(28))) is None
    job = recording(rank(0, gather(1)), rank(1, gather(8))).trace
    for quiet_s, rule in ((2, None), (4.9, None), (5, "stuck-collective")):
        found = stall_cause(job, live_positions(job, {0: 9 * S, 1: int(quiet_s * S)}, {}, {}, {}))
        assert (found and found.rule) == rule


def test_of_live_ranks_that_raised_the_first_one_is_the_cause():
    trace = recording(alive(0, FORWARD), alive(1, FORWARD)).trace
    raised = live_positions(trace, {}, {0: "OSError: index", 1: "KeyError: 'lang'"}, {0: 0, 1: 0}, {})
    found = stall_cause(trace, [replace(each, ago_ns=ago_ns) for each, ago_ns in zip(raised, (1, 2), strict=True)])
    assert found.verdict == "rank 1 failed first: KeyError: 'lang'; rank 0 failed: OSError: index"


def test_the_cause_is_the_headline_and_stands_below_the_headline_and_is_escaped():
    found = report(alive(0, gather(1)), alive(1, FORWARD, **quiet("<b>")))
    headline, evidence, fix, *_ = str(found).splitlines()
    assert headline == found.cause.verdict
    assert headline.startswith("rank 1 does not come: the others wait for what it does outside of collectives, in <b>")
    assert evidence == "  evidence: rank 1 has recorded no event for 21.0 s, in <b>"
    assert fix.startswith("  fix: look at that line")
    assert "<b>" not in found._repr_html_()


# ---- the same verdict before and after the end

IN_LOOP, PAST_LOOP = "/x/train.py:5 in main, loop 4: step()", "/x/train.py:6 in main: dist.barrier()"
IF_RANK = "/x/train.py:6 in main, loop 4: evaluate()"
PAIRS = ((0, 1), (0, 1), (1, 0))
RECEIVES = {"kind": Kind.RECV, "unit": -1, "number": 0}


def stack(frame, seq, *called):
    return {"quiet": (SilentStack(t_ns=9 * S, seq=seq, frames=(frame, *called)),)}


STALLS = {
    "other-collective": [(0, [gather(1)], {}), (1, [gather(1, kind=Kind.ALL_REDUCE, unit=-1)], {})],
    "other-payload": [(0, [{**gather(1), "num_bytes": 8}], {}), (1, [{**gather(1), "num_bytes": 64}], {})],
    "crossed-groups": [(0, [gather(1)], {}), (1, [gather(1, group=1)], {})],
    "late-rank": [(0, [gather(1)], {}), (1, [row(Kind.FORWARD, Edge.BEGIN, 1, unit=3)], stack(OWN[0], 1))],
    "uneven-batches": [
        (0, [*BATCH, forward(1)], stack(IN_LOOP, 5)),
        (1, [*BATCH, gather(1, **BARRIER)], stack(PAST_LOOP, 5)),
    ],
    "uneven-passes": [
        (0, [*BATCH[:2], {**gather(1), "phase": Phase.BACKWARD}], {}),
        (1, [BATCH[0], BATCH[2], row(Kind.FORWARD, Edge.BEGIN, 0.5, unit=0), gather(1, unit=1)], {}),
    ],
    "unpaired-calls": [(0, [gather(1, group=2, **RECEIVES)], {}), (1, [gather(1, group=1, **RECEIVES)], {})],
}


def ended_as(how, number):
    """Return what is known of a rank that stands at 10 s, and what ended it."""
    reasons = {"timed out": [TIMED_OUT, CLOSED], "first killed, then closed": ["", CLOSED], "stopped": [STOPPED] * 2}
    reason = reasons.get(how, ["", ""])[number]
    return {"alive_s": 10, **({"end": RunEnd(t_ns=10 * S + number, reason=reason)} if reason else {})}


STOPPED = "KeyboardInterrupt"


@pytest.mark.parametrize("how", ["stands", "killed", "timed out", "first killed, then closed", "stopped"])
@pytest.mark.parametrize("rule", STALLS)
def test_the_verdict_is_the_same_before_and_after_the_end(rule, how):
    ranks = [rank(number, *fields, **known, **ended_as(how, number)) for number, fields, known in STALLS[rule]]
    standing = [rank(number, *fields, **known) for number, fields, known in STALLS[rule]]
    before = report(*standing, now_s=10, groups=PAIRS).cause
    found = report(*ranks, now_s=10 if how == "stands" else 40, groups=PAIRS).cause
    assert (before.rule, found.rule) == (rule, rule)
    assert (found.verdict, found.fix) == (before.verdict, before.fix)
    assert found.evidence[: len(before.evidence)] == before.evidence
    assert len(found.evidence) == len(before.evidence) + (how != "stands")  # what ended the ranks comes last


def test_what_a_rank_does_after_the_first_end_is_not_what_it_waited_in():
    """The launcher ends the other ranks, whose handlers of SIGTERM enter the barrier too."""
    barrier = {**BARRIER, "number": 0, "group": 1}
    waits = rank(
        0,
        *(forward(1), gather(10.5, **barrier)),
        quiet=(SilentStack(t_ns=9 * S, seq=1, frames=OWN[:1]),),
        end=RunEnd(t_ns=11 * S, reason=CLOSED, frames=OWN[1:]),
    )
    alone = rank(1, gather(1, **barrier), end=RunEnd(t_ns=10 * S, reason=TIMED_OUT))
    found = report(waits, alone, now_s=40, groups=((0, 1), (0, 1)))
    verdict = "rank 1 issued barrier after 0 forwards, where rank 0 began forward 1 (train.py:31)"
    assert found.cause.verdict == verdict
    assert [each.kind for each in found.positions] == [Kind.BARRIER] * 2  # what they did last is shown


def test_the_other_groups_of_an_engine_are_compared_too():
    """The engine's own group and c10d's have separate numbers."""
    ranks = [alive(0, gather(1, kind=Kind.ALL_REDUCE, unit=-1)), *(alive(n, gather(1, group=1)) for n in (1, 2))]
    found = cause_of(*ranks, groups=((0, 1, 2), (0, 1, 2)))
    assert found.rule == "other-collective"
    assert found.verdict == "rank 0 issued all-reduce where ranks 1-2 issued all-gather of blocks.2"


# ---- forwards and backwards


@pytest.mark.parametrize(
    ("frame", "rule", "fix"),
    [
        (PAST_LOOP, "uneven-batches", SAME_BATCHES),
        (IF_RANK, "other-collective", SAME_CALLS),
        (
            "/x/other.py:9 in f: g()",
            "other-collective",
            f"{SAME_CALLS}; if rank 1 had no further batch, {SAME_BATCHES}",
        ),
    ],
)
def test_uneven_batches_are_told_from_a_further_collective_by_the_loop(frame, rule, fix):
    ranks = [
        alive(0, *BATCH, forward(1), **stack(IN_LOOP, 5)),
        alive(1, *BATCH, gather(1, **BARRIER), **stack(frame, 5)),
    ]
    found = cause_of(*ranks)
    assert (found.rule, found.fix) == (rule, fix)
    place = frame.partition(" in ")[0].rpartition("/")[2]
    assert (
        found.verdict == f"rank 1 issued barrier ({place}) after 1 forward, where rank 0 began forward 2 (train.py:5)"
    )
    assert found.evidence[1:3] == (
        "rank 1: 1 forward, 1 backward, 0 steps of the optimizer",
        "rank 0: 2 forwards, 1 backward, 0 steps of the optimizer",
    )


def test_a_backward_that_one_rank_left_out():
    (_, fields, _), (_, others, _) = STALLS["uneven-passes"]
    found = cause_of(alive(0, *fields), alive(1, *others), alive(2, *fields), groups=((0, 1, 2),))
    assert found.verdict == "rank 1 left out the backward of step 0, which ranks 0, 2 ran"


@pytest.mark.parametrize("saves", [0, 1])
def test_a_save_of_one_rank_that_pairs_with_the_forward_of_another(saves):
    calls = [gather(0.2, unit=unit, number=number) for number, unit in enumerate((1, 2))]
    both = [each for call in calls for each in (call, {**call, "edge": Edge.END})]
    saving = [*STEP, *both, BATCH[0], gather(0.5, unit=1, number=2)]
    training = [*STEP, BATCH[0], *both, BATCH[2], BATCH[1], gather(0.5, unit=2, number=2)]
    found = cause_of(*(alive(rank, *(saving if rank == saves else training)) for rank in (0, 1)))
    assert found.verdict == (
        f"rank {saves} gathered blocks.0, blocks.1 outside of forward and backward, as state_dict(), full_tensor() and "
        f"a save do, and rank {1 - saves} did not"
    )
    assert found.evidence[0].startswith(f"all-gathers 0 to 1 of group 0: those of rank {saves} paired with the next")
    assert found.fix.startswith("let all ranks save and gather parameters, or none")


SKIPPED = [BATCH[0], BATCH[2]]
REDUCED = {**gather(1, kind=Kind.ALL_REDUCE, unit=0), "phase": Phase.BACKWARD}
SEVERAL_STEPS = [*STEP] * 4


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("fields", "others", "verdict"),
    [
        # replicas meet in backwards only: the rest of the epoch follows, and the barrier at its end
        (
            [*SEVERAL_STEPS, *SKIPPED, *STEP, gather(1, **BARRIER)],
            [*SEVERAL_STEPS, *STEP, *SKIPPED, BATCH[1], REDUCED],
            "rank {0} left out the backward of step 0, which rank {1} ran",
        ),
        # in the first steps no pass is usual: as many forwards, and a backward less
        (
            [*SKIPPED, *STEP, gather(1, **BARRIER)],
            [*STEP, *SKIPPED, BATCH[1], REDUCED],
            "rank {0} left out the backward of step 0, which rank {1} ran",
        ),
        # each step has two forwards
        (
            [*[*SKIPPED, *STEP] * 4, *STEP, gather(1, **BARRIER)],
            [*[*SKIPPED, *STEP] * 4, *SKIPPED, *SKIPPED, BATCH[1], REDUCED],
            "rank {0} left out the forward of step 0, which rank {1} ran",
        ),
        # a forward more and a backward less: of a rank that left a backward out, or of one whose step has two forwards
        (
            [*SKIPPED, *SKIPPED, gather(1, kind=Kind.BROADCAST, unit=0)],
            [*SKIPPED, BATCH[1], REDUCED],
            "rank 0 ran the {2} of step 0 where rank 1 ran the {3} of step 0",
        ),
    ],
)
def test_of_two_ranks_the_one_is_the_exception_whose_passes_are_new_or_lack_a_backward(
    fields, others, verdict, culprit
):
    ranks = (alive(culprit, *fields), alive(1 - culprit, *others))
    found = cause_of(*sorted(ranks, key=lambda each: each[0].rank))
    kinds = ("backward", "forward") if culprit else ("forward", "backward")
    assert (found.rule, found.verdict) == ("uneven-passes", verdict.format(culprit, 1 - culprit, *kinds))


def test_a_forward_of_a_rank_that_has_gone_on_is_no_backward_left_out():
    """As where rank 0 alone decodes after a step: its forwards pair with what the step of rank 1 issues."""
    above, train = "/x/train.py:6 in fit, loop 3: step()", "/x/train.py:20 in step: loss.backward()"
    calls = [f"/x/train.py:{line} in fit, loop 3: decode()" for line in (7, 5)]
    decode = "/x/train.py:31 in decode, if 30 `rank == 0`: model(x)"
    ranks = [[*SEVERAL_STEPS, *SKIPPED, *SKIPPED], [*SEVERAL_STEPS, *SKIPPED, BATCH[1], REDUCED]]
    later, before = (
        cause_of(
            alive(0, *ranks[0], gather(1, kind=Kind.BROADCAST, unit=0), **stack(call, len(ranks[0]) + 1, decode)),
            alive(1, *ranks[1], **stack(above, len(ranks[1]), train)),
        ).verdict
        for call in calls
    )
    ran = "rank 0 ran the forward of step 0 where rank 1 ran the backward of step 0"
    assert later == f"{ran}, and is in train.py:31, under `if rank == 0` of train.py:30"
    assert before == "rank 0 left out the backward of step 0, which rank 1 ran"


@pytest.mark.parametrize(("of_rank", "words"), [("rank == 0", "0 began forward 2"), ("rank == 1", "1 issued barrier")])
def test_who_is_under_a_condition_that_others_are_not_is_named_first(of_rank, words):
    is_first = of_rank == "rank == 0"
    under = f"/x/train.py:9 in main, loop 4, if 8 `{of_rank}`: evaluate()"
    frames = (under, IF_RANK) if is_first else (IF_RANK, under)
    ranks = [
        alive(0, *BATCH, forward(1), **stack(frames[0], 5)),
        alive(1, *BATCH, gather(1, **BARRIER), **stack(frames[1], 5)),
    ]
    verdict = cause_of(*ranks).verdict
    assert verdict.startswith(f"rank {words} (train.py:9, under `if {of_rank}` of train.py:8)")
    assert "(train.py:6)" in verdict


def test_a_backward_that_the_last_batch_of_one_rank_lacks():
    """The program's own reduce begins no pass, nor does what follows a backward."""
    reduces = {**gather(1, kind=Kind.REDUCE, unit=-1), "phase": Phase.FORWARD}
    after = {**gather(1, kind=Kind.REDUCE_SCATTER, unit=0), "phase": Phase.POST_BACKWARD}
    ranks = [alive(0, *STEP[:4], after, **stack(IN_LOOP, 5)), alive(1, *SKIPPED, reduces, **stack(PAST_LOOP, 3))]
    found = cause_of(*ranks)
    assert found.verdict == "rank 1 left out the backward of step 0, which rank 0 ran (train.py:5)"
    assert found.evidence[1:3] == tuple(
        f"rank {n}: 1 forward, {words}, 0 steps of the optimizer"
        for n, words in ((1, "0 backwards"), (0, "1 backward"))
    )
    ranks[1] = alive(1, *SKIPPED, reduces, **stack(IF_RANK, 3))  # still in its loop: a call more, perhaps
    assert cause_of(*ranks).verdict.startswith("ranks 0-1 part: ")


def test_micro_batches_of_which_one_rank_has_fewer():
    reduces = {**gather(1, kind=Kind.REDUCE_SCATTER, unit=0), "phase": Phase.BACKWARD}
    found = cause_of(alive(0, *BATCH, forward(1)), alive(1, *BATCH[:2], reduces))
    assert found.rule == "uneven-batches"
    assert found.verdict == "rank 1 issued reduce-scatter of (root) after 1 forward, where rank 0 began forward 2"


def test_a_unit_that_one_rank_gathers_before_its_forward_is_no_sign_of_fewer_batches():
    """The other is in its forward, and gathers another unit there."""
    found = cause_of(alive(0, forward(1)), alive(1, gather(1)))
    assert found.rule == "other-collective"
    assert found.verdict == "ranks 0-1 part: rank 0 issued all-gather of (root), rank 1 all-gather of blocks.2"


def test_a_step_in_which_one_rank_has_fewer_micro_batches():
    further, done = row(Kind.FORWARD, Edge.BEGIN, 1, unit=0), row(Kind.OPTIMIZER, Edge.BEGIN, 1)
    found = cause_of(alive(0, *BATCH, done, gather(2, **BARRIER)), alive(1, *BATCH, further, gather(2)))
    assert found.rule == "uneven-batches"
    assert found.verdict == "rank 0 ran 1 forward before the optimizer in step 0, rank 1 began forward 2"


# ---- sends and receives


def messages(calls, step_of=lambda turn: turn, frames=None):
    """Return why ranks stand in the last of their ``calls``, which are as ``"s1 r1/b"``.

    That is a send to rank 1, a receive from it, and, in the next turn, a barrier of all.
    """
    groups, ranks = {tuple(calls): 0}, []
    for number, own in calls.items():
        fields, seen = [], {}
        for turn, told in enumerate(own.split("/")):
            for kind, *peer in told.split():
                pair = (number, *map(int, peer))
                group = groups.setdefault({"s": pair, "r": pair[::-1]}.get(kind, tuple(calls)), len(groups))
                seen[group] = seen.get(group, -1) + 1
                what = {"kind": {"s": Kind.SEND, "r": Kind.RECV, "b": Kind.BARRIER}[kind], "unit": -1}
                call = gather(0.01 * len(fields), **what, number=seen[group], group=group, step=step_of(turn))
                fields += [call, {**call, "edge": Edge.END}]
        fields.pop()
        ranks.append(alive(number, *fields, **(quiet(*frames[number], seq=len(fields)) if frames else {})))
    return cause_of(*ranks, groups=tuple(groups))


STAGE, LAST = "r0 s2 r0 s2 r2 r2/", "r1 r1 s1 s1/"


@pytest.mark.parametrize("first", [0, -1])  # no step is known before the end of the first
@pytest.mark.parametrize(
    ("calls", "left_out"),
    [
        # stage 1 forwards each of two micro-batches, then receives two gradients; so it did in the turns before
        ({1: f"{STAGE * 3}r0 r0 s2 r2", 2: f"{LAST * 3}r1 r1"}, "rank 1 left out a send to rank 2"),
        ({1: f"{STAGE * 3}r0 s2 r0 r2", 2: f"{LAST * 3}r1 r1"}, "rank 1 left out a send to rank 2"),
        # the first stage receives only what follows
        ({0: f"{'s1 s1 r1 r1/' * 4}s1 r1", 1: f"{'r0 r0 s0 s0/' * 4}r0 r0"}, "rank 0 left out a send to rank 1"),
        # the last one drops the tail of the last batch
        ({0: f"{'s1 s1 r1 r1/' * 4}s1 s1", 1: f"{'r0 r0 s0 s0/' * 4}r0 s0"}, "rank 1 left out a receive from rank 0"),
    ],
)
def test_a_call_that_one_stage_of_a_pipeline_left_out(calls, left_out, first):
    found = messages(calls, lambda turn: first + turn)
    assert found.verdict.startswith(f"{left_out} in step {first + calls[1].count('/')}: rank")
    assert found.evidence[0].endswith(", one less than at this place of earlier steps")
    assert "part: " in messages(calls, lambda _: -1).verdict or calls[1].startswith(STAGE)  # no step at all is known


ONE, OTHER = (
    ("/x/train.py:20 in front, loop 18: dist.send(h, 1)",),
    ("/x/train.py:40 in back, loop 39: dist.send(g, 0)",),
)
AFTER_ALL = ("/x/train.py:50 in front: dist.send(x, 1)", "/x/train.py:51 in back: dist.send(x, 0)")
ORDER, NUMBER = "let one of two ranks send first", "let each rank send as often as its peer receives"


@pytest.mark.parametrize(
    ("calls", "frames", "verdict", "evidence", "fix"),
    [
        # an exchange
        (
            {0: "s1", 1: "s0"},
            (ONE, OTHER),
            "ranks 0-1 wait for each other: all send first, in train.py:20, tr",
            "",
            ORDER,
        ),
        ({0: "s1 r1 r1", 1: "r0 s0 r0"}, None, "ranks 0-1 wait for each other: all receive first", "", ORDER),
        ({0: "b s1", 1: "b s2", 2: "b s0"}, None, "ranks 0-2 wait for each other: all send first", "", ORDER),
        # after rounds of another kind: in no loop, or in the same line
        (
            {0: f"{'s1 r1/' * 4}s1", 1: f"{'r0 s0/' * 4}s0"},
            (AFTER_ALL[:1], AFTER_ALL[1:]),
            "ranks 0-1 wait for each other: all send first, in train.py:50, train.py:51",
            "",
            ORDER,
        ),
        (
            {0: f"{'s1 r1/' * 4}r1", 1: f"{'r0 s0/' * 4}r0"},
            (OTHER, OTHER),
            "ranks 0-1 wait for each other: all receive first, in train.py:40",
            "",
            ORDER,
        ),
        # the front has four micro-batches, the back three
        (
            {0: "s1 s1 s1 s1", 1: "r0 r0 r0 s0"},
            (ONE, OTHER),
            "ranks 0-1 part: rank 0 issued send 4 to rank 1 (train.py:20), which has received 3; "
            "rank 1 issued send 1 to rank 0 (train.py:40), which has received 0",
            "from rank 0 to rank 1: 4 sends, 3 receives; in step 0: 4 sends, 3 receives",
            NUMBER,
        ),
        (
            {0: "s1 r1/s1 s1 r1", 1: "r0 s0/r0 r0 r0"},
            None,
            "ranks 0-1 part: rank 1 issued receive 4 from rank 0, which has sent 3; rank 0 issued receive 2 from rank",
            "from rank 0 to rank 1: 3 sends, 4 receives; in step 1: 2 sends, 3 receives",
            NUMBER,
        ),
        # a helper of both sends
        (
            {0: "s1 s1", 1: "r0 s0"},
            ((*ONE, AFTER_ALL[0]), (*OTHER, AFTER_ALL[0])),
            "ranks 0-1 part: rank 0 issued send 2 to rank 1 (train.py:20), which has received 1; rank 1 issued send 1 "
            "to rank 0 (train.py:40)",
            "",
            NUMBER,
        ),
        # the middle stage drops a tail: rank 0 waits for it too
        (
            {0: "s1 s1", 1: "r0 s2 r2", 2: "r1 r1"},
            None,
            "ranks 1-2 part: rank 2 issued receive 2 from rank 1, which has sent 1; rank 1 issued receive 1 from rank",
            "from rank 0 to rank 1: 2 sends, 1 receive; in step 0: 2 sends, 1 receive",
            NUMBER,
        ),
        # settings, then an exchange: all send in the same line
        ({0: "s1 s1", 1: "r0 s0"}, (ONE, ONE), "ranks 0-1 part: rank 0 issued send 2 to rank 1 (tr", "from", ORDER),
        # a rank has gone on
        (
            {0: "b r1 r1", 1: "b s0 b"},
            None,
            "rank 0 receives from rank 1 once more than that rank sent: it sent 1, and waits for barrier number 1 of",
            "",
            NUMBER,
        ),
        (
            {0: "b", 1: "r0 s2 s2", 2: "r1 s3 b", 3: "r2 r2"},
            None,
            "rank 2 issued fewer sends and receives than its peers, and waits for barrier number 0 of group 0: "
            "rank 1 sends to rank 2 once more than that rank received: it received 1; rank 3 receives from rank 2 once",
            "",
            NUMBER,
        ),
        # tags
        (
            {0: "s1 s1", 1: "r0 r0"},
            (ONE, OTHER),
            "ranks 0-1 wait for message 2 from rank 0 to rank 1, whose send and receive are issued, in train.py:20",
            "",
            "pass the same tags, which are not recorded",
        ),
    ],
)
def test_sends_and_receives_that_do_not_pair(calls, frames, verdict, evidence, fix):
    found = messages(calls, frames=frames)
    assert found.rule == "unpaired-calls"
    assert found.verdict.startswith(verdict)
    assert any(each.startswith(evidence) for each in found.evidence)
    assert found.fix.startswith(fix)


def test_a_first_receive_beside_a_collective_of_more_ranks_than_take_part():
    found = messages({0: "b", 1: "b", 2: "r0"})
    assert (found.rule, found.verdict) == ("other-collective", "rank 2 issued recv where ranks 0-1 issued barrier")
    assert found.fix.endswith("; or, if rank 2 has no part in that barrier, pass it the group of ranks 0-1")


def test_a_receive_from_a_rank_that_has_ended():
    ended = alive(1, end=RunEnd(t_ns=9 * S))
    found = cause_of(alive(0, gather(2, **{**RECEIVES, "number": 1}, group=1)), ended, groups=((0, 1), (1, 0)))
    assert found.verdict == "rank 0 receives from rank 1 more often than that rank sent: it sent 0, and has ended"


# ---- what torch does not announce


MAKING = "/x/site-packages/torch/distributed/utils.py:300 in _verify_param_shape_across_processes"


def of_ddp(*ranks, **more):
    """Return the report on ranks whose torch does not announce collectives that C++ issues."""
    found = recording(*ranks, **more)
    infos = tuple(RankInfo(rank=number, host="a", device="cpu", pid=1, sees_cpp=False) for number in range(len(ranks)))
    header = replace(found.trace.header, units=(replace(UNITS[0], engine=TORCH_DDP),), ranks=infos)
    return where(replace(found, trace=Trace(header, found.trace.ranks)), WALL + 30 * S)


def test_a_rank_that_makes_a_replicated_model_is_not_called_late():
    found = of_ddp(alive(0, **stack(MAKING, 0)), alive(1, gather(1, **BARRIER, number=0)))
    assert found.cause is None
    assert "rank 0 is in torch's C++ code" in found.notes[-1]


def test_a_rank_that_makes_a_group_waits_for_others_to_make_it():
    making = "/x/site-packages/torch/distributed/distributed_c10d.py:757 in _create_gloo_process_group: backend_class"
    read = recording(alive(0, gather(1)), alive(1, FORWARD, **stack(making, 1)))
    found = where(read, WALL + 30 * S).cause
    assert (found.rule, found.fix[:43]) == ("late-rank", "let all ranks make the same groups in the s")
    (both,) = read.trace.header.comm_groups
    header = replace(read.trace.header, comm_groups=(both, replace(both, ranks=(1,))))
    told = where(replace(read, trace=Trace(header, read.trace.ranks)), WALL + 30 * S).cause
    assert told.verdict == f"{found.verdict}; rank 1 made a group of its own before, which rank 0 did not make"
    own = "/home/me/train.py:9 in setup: dist.new_group([0, 1])"
    makes = {"quiet": (SilentStack(t_ns=9 * S, seq=0, frames=(own, making)),)}
    found = cause_of(*(alive(number, **makes) for number in (0, 1)))
    assert (found.rule, found.fix[:43]) == ("crossed-groups", "let all ranks make the same groups in the s")
    assert "ranks 0-1 wait for each other to make a process group, in train.py:9" in found.verdict
    assert cause_of(alive(0, **makes), alive(1)) is None


@pytest.mark.parametrize("reason", [TIMED_OUT, CLOSED])
@pytest.mark.parametrize(("in_barrier", "accused"), [((1, 2), "rank 0 waited in"), ((0,), "rank 0 waited for barrier")])
def test_a_rank_whose_unseen_collective_failed_waited_in_it(reason, in_barrier, accused):
    barrier, making = ("/x/train.py:9 in load: dist.barrier()",), ("/x/train.py:19 in main: model = DDP(net)",)
    ranks = []
    for number in range(3):
        call, own = ([gather(1, **BARRIER, number=0)], barrier) if number in in_barrier else ([], making)
        silent = SilentStack(t_ns=6 * S, seq=len(call), frames=(*own, MAKING))
        why = TIMED_OUT if number in in_barrier else reason
        end = RunEnd(t_ns=9 * S, reason=why, frames=own)
        ranks.append(rank(number, *call, alive_s=9, world=3, quiet=(silent,), end=end))
    found = of_ddp(*ranks, groups=((0, 1, 2),))
    assert (found.cause.rule, found.cause.verdict[: len(accused)]) == ("other-collective", accused)
    assert "train.py:19" in found.cause.verdict
    assert found.notes == ()


def test_a_rank_that_may_wait_unseen_is_not_called_late():
    """One rank loads its batch; the other is in a backward whose all-reduces are not announced."""
    found = of_ddp(alive(0, *BATCH[:2]), alive(1, BATCH[0], BATCH[1], *BATCH[2:], **stack(OWN[0], 4)))
    assert (found.cause.rule, found.cause.verdict[:6]) == ("late-rank", "rank 1")
    assert found.notes[-1].startswith("rank 0 is in torch's C++ code or a backward of DistributedDataParallel")
    found = of_ddp(alive(0, *BATCH[:2]), alive(1, gather(1, **BARRIER, number=0)))
    assert found.cause.rule == "uneven-batches"
    assert found.cause.evidence[:2] == (
        "rank 1: 0 forwards, 0 backwards, 0 steps of the optimizer",
        "rank 0: 1 forward, 1 backward, 0 steps of the optimizer",
    )
    assert of_ddp(*(alive(number, *BATCH[:2]) for number in (0, 1))).cause is None


# ---- which program ended first


def failed(number, t_s, reason, *frames, call=None):
    return rank(number, call or gather(1), alive_s=t_s, end=RunEnd(t_ns=int(t_s * S), reason=reason, frames=frames))


def killed(number, t_s):
    return rank(number, gather(t_s - 0.2), alive_s=t_s)


BOOM = ("/home/me/train.py:12 in main: raise ValueError", TORCH)


@pytest.mark.parametrize(
    ("ranks", "verdict", "fix"),
    [
        (
            [failed(0, 3.1, CLOSED), failed(1, 3, "ValueError: boom", *BOOM), failed(2, 3.1, CLOSED)],
            "rank 1 failed first: ValueError: boom, train.py:12; "
            "ranks 0, 2 failed 100 ms later because their peer was gone",
            "correct the error of rank 1 at train.py:12; the others ended because of it",
        ),
        (
            [failed(0, 3.1, f"KeyError: 1{AFTER}{CLOSED}"), failed(1, 3, "exit status 3")],
            "rank 1 failed first: exit status 3; rank 0 failed 100 ms later because its peer was gone",
            "see why rank 1 ended the program; the others ended because of it",
        ),
        (
            [failed(0, 3.1, CLOSED), killed(1, 3)],
            "rank 1 was killed first; rank 0 failed 100 ms later because its peer was gone",
            "find out what killed rank 1: ",
        ),
        # the last sign of life of a process that is killed is earlier than its end
        (
            [failed(0, 3, "ValueError: boom"), killed(1, 2.5)],
            "rank 0 failed first: ValueError: boom; rank 1",
            "correct",
        ),
        ([failed(0, 9, "ValueError: boom"), killed(1, 2.5)], "rank 1 was killed first", "find out what killed rank 1"),
        ([failed(n, 3, "ValueError: boom") for n in (0, 1)], "ranks 0-1 failed: ValueError: boom", "correct the error"),
        # so it may also be earlier than what ended the others
        (
            [failed(0, 3.1, "SIGTERM", BOOM[0]), killed(1, 3), failed(2, 3.2, CLOSED)],
            "ranks 0-1 ended within 100 ms, and which of them first is not recorded: rank 1 was killed; "
            "rank 0 was terminated: SIGTERM, train.py:12; rank 2 failed 200 ms later because its peer was",
            "find out what killed rank 1: ",
        ),
        # but a rank that is terminated after others have lost a peer was not that peer
        (
            [failed(0, 3.2, "SIGTERM", BOOM[0]), killed(1, 3), failed(2, 3.1, CLOSED)],
            "rank 1 was killed first; rank 2 failed 100 ms later because its peer was gone; "
            "rank 0 was terminated 200 ms later",
            "find out what killed rank 1: ",
        ),
        (
            [failed(0, 3.2, "SIGTERM"), failed(2, 3.1, CLOSED)],
            "rank 2 failed first: RuntimeError: Connection closed by peer [::1]:1; rank 0 was terminated 100 ms later",
            "see what ended the process that rank 2 waited for, which is not recorded",
        ),
        ([failed(0, 3, "SIGTERM"), killed(1, 3.1)], "rank 0 was terminated first: SIGTERM; rank 1 was killed", "see "),
        ([failed(n, 3, "SIGTERM") for n in (0, 1)], "ranks 0-1 were terminated: SIGTERM", "see what sent SIGTERM"),
        (
            [failed(0, 3, "SIGTERM"), failed(1, 3.1, "SIGTERM")],
            "rank 0 was terminated first: SIGTERM; rank 1 was terminated 100 ms later",
            "see what sent SIGTERM to rank 0",
        ),
        ([killed(n, 3) for n in (0, 1)], "ranks 0-1 were killed", "find out"),
        ([failed(0, 3, CLOSED), rank(1, alive_s=3)], "rank 1 was killed first", "find out what killed rank 1"),
        ([failed(0, 3, "MemoryError"), failed(1, 3.5, CLOSED)], "rank 0 failed first: MemoryError;", "let rank 0 need"),
        (
            [
                failed(
                    0, 3, "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
                )
            ],
            "rank 0 failed: RuntimeError: DefaultCPUAllocator: can't allocate memory",
            "let rank 0 need less memory",
        ),
        (
            [failed(0, 3, CLOSED)],
            "rank 0 failed: RuntimeError: Connection closed by peer [::1]:1",
            "see what ended the process that rank 0 waited for",
        ),
        (
            [failed(n, 3, STOPPED) for n in (0, 1)],
            "ranks 0-1 were interrupted: KeyboardInterrupt",
            "start the run again",
        ),
    ],
)
def test_the_program_that_ended_first(ranks, verdict, fix):
    found = cause_of(*ranks, groups=((0, 1, 2),))
    assert found.rule == "dead-rank"
    assert found.verdict.startswith(verdict)
    assert found.fix.startswith(fix)
    assert "gloo" not in str(found)


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        (
            {0: "KeyError: 'a'", 1: "StepAborted: rank 2: ValueError: boom", 2: "ValueError: boom"},
            "rank 2 failed first: ValueError: boom; rank 0 failed: KeyError: 'a'; rank 1 failed because its peer was",
        ),
        (
            {0: "KeyError: 'a'", 1: CLOSED, 2: "ValueError: boom"},
            "ranks 0, 2 ended, and which of them first is not recorded: rank 0 failed: KeyError: 'a'; "
            "rank 2 failed: ValueError: boom; rank 1 failed because its peer was gone",
        ),
        ({0: CLOSED, 1: CLOSED, 2: "ValueError: boom"}, "rank 2 failed first: ValueError: boom; ranks 0-1 failed be"),
    ],
)
def test_of_a_request_the_rank_for_which_others_were_aborted_failed_first(errors, verdict):
    job = recording(*(rank(number) for number in errors), groups=((0, 1, 2),)).trace
    assert stall_cause(job, live_positions(job, {}, errors, {}, {})).verdict.startswith(verdict)
