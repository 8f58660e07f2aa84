"""Explanations: the verdict of each kind, what they name, and what they abstain from."""

import html
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.aborted_steps import aborted
from tests.helpers.device_trace import on_devices
from tests.helpers.long_trace import long_trace
from tests.helpers.trace_strategies import Setup, example_trace, simulate, traces
from tests.replay import test_unreduced
from tests.replay.test_process import loaded
from tests.replay.test_step_parts import with_hold
from workbench.base.text_formats import format_bytes, format_duration
from workbench.errors import UsageError
from workbench.events import OWN_ENGINE, TORCH_CLASSIC, TORCH_DDP, TORCH_FULLY_SHARD, Kind, UnitState, unit_words
from workbench.protocol.policy import ModelPolicy
from workbench.protocol.rank_messages import ModelInfo, WrapClass
from workbench.replay.exposed_waits import WaitReason
from workbench.replay.peak_savings import Knob
from workbench.replay.step_parts import Group
from workbench.replay.training import summary
from workbench.reports.explain_report import ExplainReport, linked
from workbench.reports.explanations import ANSWERS, explain
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.schema import ClockReading, HostClock
from workbench.views import draw
from workbench.views.mark_buttons import marked

MS = 1_000_000
KEPT = Setup(num_ranks=2, num_units=8, steps=7, reshard_after_forward=False)
CLEAN = Setup(num_ranks=2, steps=7)
NET = ModelInfo(
    name="net",
    class_name="Net",
    is_sharded=True,
    num_params=1,
    num_elements=1,
    num_bytes=4,
    classes=(),
    suggested=(),
    units=tuple(range(8)),
)


def with_units(trace, **changes):
    units = tuple(replace(unit, **changes) for unit in trace.header.units)
    return Trace(replace(trace.header, units=units), trace.ranks)


def without(trace, *kinds):
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows[~np.isin(rank.rows["kind"], kinds)].copy()
        rows["seq"] = np.arange(len(rows))
        ranks.append(RankTrace(rank.rank, rows))
    return Trace(trace.header, tuple(ranks))


def shown_to(rank, end):
    """Return the rows of a rank before a position."""
    return RankTrace(rank.rank, rank.rows[:end])


def without_step(trace, step):
    """Return the trace before a step began."""
    return Trace(trace.header, tuple(shown_to(each, each.places_of(step, step)[0]) for each in trace.ranks))


def with_nan(trace, first, ranks):
    """Return the trace with a loss of NaN from a step on."""
    parts = []
    for part in trace.ranks:
        rows = part.rows.copy()
        is_late = (rows["kind"] == Kind.METRIC) & (rows["step"] >= first)
        rows["value"][is_late & (part.rank in ranks)] = np.nan
        parts.append(replace(part, rows=rows))
    return Trace(trace.header, tuple(parts))


SLOW = Setup(num_ranks=2, steps=8, slow=1)


@pytest.mark.parametrize(
    ("rule", "trace", "subject", "models"),
    [
        ("not-finite", with_nan(simulate(SLOW), 4, (1,)), "", ()),  # with the evidence of the slow rank below
        ("no-zero-grad", simulate(SLOW), "", (replace(NET, never_cleared=("opt",)),)),
        ("slow-rank", simulate(SLOW), "", ()),
        ("no-sync-left-on", test_unreduced.without(simulate(test_unreduced.SETUP), 2), "", ()),
        ("wait", simulate(CLEAN), "wait", ()),
        ("peak", simulate(KEPT), "peak", ()),
        ("step", simulate(CLEAN), "step", ()),
        ("nothing", simulate(CLEAN), "", ()),
        ("rank", simulate(CLEAN), "0", ()),
        ("unit", simulate(CLEAN), "blocks.1", ()),
    ],
)
def test_the_picture_of_each_answer_is_drawn(rule, trace, subject, models):
    found = explain(trace, subject, models=models, is_live=True)
    assert found.answer.rule == rule
    assert draw(found.picture.view, trace, **found.picture.options, marks=found.marks).data


# ---- a slow rank


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("before", "slow before forward (input or host)"),
        ("forward", "slow in forward (compute, or host code inside it)"),
        ("loss", "slow between forward and backward (loss)"),
        ("backward", "slow in backward (compute, or host code inside it)"),
        ("optimizer", "slow in the optimizer (compute)"),
        ("after", "slow after backward or between passes (host)"),
        ("between", "slow between the steps (input or host)"),
    ],
)
def test_a_straggler_is_the_first_answer(where, words):
    trace = simulate(Setup(num_ranks=2, steps=8, slow=1, slow_in=where))
    found = explain(trace, is_live=True)
    assert found.answer.rule == "slow-rank"
    assert re.match(rf"rank 1 is {re.escape(words)}: others wait (19|20)\d ms of each step of", found.headline)
    assert found.problem == found.headline
    assert found.faults == (found.answer,)
    assert found.answer.fix == "%fsdp step 5 --background, then %fsdp where --stacks"
    assert explain(trace).answer.fix == ""  # of a recording
    for subject in ("step", "1"):
        assert explain(trace, subject).headline == found.headline
    other = explain(trace, "0")
    assert other.answer.rule == "rank"
    assert other.faults[0].verdict == found.headline
    assert "also" in str(other)


def test_the_evidence_of_a_straggler_names_part_unit_and_wait():
    found = explain(simulate(Setup(num_ranks=2, steps=8, slow=1, slow_in="forward")))
    first, second, third, fourth, *parts = found.answer.evidence
    assert re.match(r"median of steps 1-7: others wait \S+ ms for rank 1 in a step of \S+ ms", first)
    assert re.match(r"in forward .*: rank 1 takes 20\d ms, the others \S+ (µs|ms)", second)
    assert re.match(r"most of it in blocks.0: rank 1 takes 20\d ms, the others \S+ (µs|ms)", third)
    assert re.match(r"longest wait in step 7: rank 0 up to (19|20)\d ms for the (all-gather|reduce-scatter) of", fourth)
    assert [line[:7] for line in parts] == ["rank 0:", "rank 1:"]


@pytest.mark.parametrize("setup", [CLEAN, KEPT, Setup(num_ranks=4, copies=2, steps=7), Setup(num_ranks=1, steps=7)])
def test_nothing_is_wrong_with_a_clean_run(setup):
    trace = simulate(setup)
    for subject in ("", *ANSWERS, "0", "blocks.1"):
        found = explain(trace, subject)
        assert (found.faults, found.problem) == ((), "")
    assert "is slow" not in explain(trace).headline


def test_gradients_that_nothing_clears_come_before_a_straggler():
    trace = simulate(Setup(num_ranks=2, steps=8, slow=1))
    found = explain(trace, models=[replace(NET, never_cleared=("opt",))], is_live=True)
    assert found.problem == "nothing clears the gradients that opt has used, and the next backward adds to them"
    assert [fault.rule for fault in found.faults] == ["no-zero-grad", "slow-rank"]
    assert found.answer.fix.endswith("opt.zero_grad()")


@pytest.mark.parametrize(("num_steps", "there"), [(2, "there is 1"), (3, "there are 2"), (6, "")])
def test_with_few_steps_no_rank_is_called_slow(num_steps, there):
    found = explain(simulate(Setup(num_ranks=2, steps=num_steps, slow=1)), is_live=True)
    assert (len(found.faults), found.num_checks) == ((0, 0) if there else (1, 1))
    reason = f"which rank is slow: that takes 5 ended steps after the first, and {there}: %fsdp step 10"
    assert found.abstained == ((reason,) if there else ())


def test_steps_with_a_hold_are_left_out():
    trace = simulate(Setup(num_ranks=2, steps=7))
    held = trace.ranks[0]
    for step in (3, 4):
        held = with_hold(held, int(np.flatnonzero(held.rows["step"] == step)[9]), 500 * MS)
    found = explain(Trace(trace.header, (held, trace.ranks[1])), "step", step=4)
    assert found.faults == ()
    assert found.abstained[0].endswith("and there are 2, without 2 steps with a hold")
    assert max(each.step_ns for each in found.ranks) < 100 * MS  # holds are not time of the step


def test_within_the_clock_error_no_rank_is_called_slow():
    trace = simulate(Setup(num_ranks=2, steps=8, slow=1))
    reading = ClockReading(t_ns=int(trace.ranks[0].rows["t_ns"][0]), offset_ns=0, error_ns=10_000 * MS)
    far = Trace(replace(trace.header, clocks=(HostClock(ranks=(1,), readings=(reading,)),)), trace.ranks)
    found = explain(far, "step")
    assert found.faults == ()
    assert "which rank was last, where that is within 10.0 s, the clock error" in found.abstained


# ---- the events that evidence names


def rows_at(trace, mark):
    rows = trace.rank(mark.rank).rows
    return rows[(rows["seq"] >= mark.first_seq) & (rows["seq"] <= mark.last_seq)]


def test_the_evidence_of_a_straggler_is_marked_on_it():
    trace = simulate(Setup(num_ranks=2, steps=8, slow=1, slow_in="forward"))
    found = explain(trace)
    whole, forward, unit, wait, *ranks = (found.marks[line] for line in found.answer.evidence)
    assert [mark.rank for mark in (whole, forward, unit, wait, *ranks)] == [1, 1, 1, 0, 0, 1]
    assert rows_at(trace, whole)["kind"][[0, -1]].tolist() == [Kind.STEP, Kind.STEP]
    assert rows_at(trace, forward)["kind"][[0, -1]].tolist() == [Kind.FORWARD, Kind.FORWARD]
    assert rows_at(trace, unit)["unit"][[0, -1]].tolist() == [0, 0]
    assert rows_at(trace, wait)["kind"][[0, -1]].tolist() == [Kind.WAIT, Kind.WAIT]
    begin, end = wait.times_ns(trace.rank(0).rows)
    assert end - begin > 190 * MS  # the long one


def test_each_wait_is_marked_where_a_rank_waited_longest():
    trace = simulate(KEPT)
    found = explain(trace, "wait")
    for line, wait in zip(found.answer.evidence, found.waits[:6], strict=False):
        mark = found.marks[line]
        rows = rows_at(trace, mark)
        assert (rows["kind"][0], rows["edge"][0]) == (Kind.WAIT, 0)
        assert mark.rank in wait.ranks
    assert len(found.marks) == 6
    assert {wait.unit for wait in found.waits} == {unit_words(unit.name) for unit in trace.header.units}


def test_units_are_marked_from_their_gather_to_the_peak():
    trace = simulate(KEPT)
    found = explain(trace, "peak")
    moment, *units = found.marks.values()
    assert moment.first_seq == moment.last_seq
    assert units
    for mark in units:
        assert mark.last_seq == moment.last_seq
        assert rows_at(trace, mark)["kind"][0] == Kind.UNSHARD


def test_the_history_of_a_unit_is_marked_in_its_row():
    trace = simulate(CLEAN)
    found = explain(trace, "blocks.1")
    first, mark = next(iter(found.marks.items()))
    assert first == found.answer.evidence[0]
    assert mark.unit == 1
    assert rows_at(trace, mark)["kind"][[0, -1]].tolist() == [Kind.UNSHARD, Kind.RESHARD]
    assert next(iter(marked(draw("states", trace, unit="blocks.1", step=6, marks=found.marks)))) == first


def test_each_marked_line_is_a_button_and_names_are_text():
    trace = simulate(CLEAN)
    evil = "<img src=x onerror=alert(1)>');alert(2)//\"{place}"
    unit = replace(trace.header.units[0], name=evil)
    trace = Trace(replace(trace.header, units=(unit, *trace.header.units[1:])), trace.ranks)
    found = explain(trace, "wait")
    text = linked(found, draw("timeline", trace, step=found.step, marks=found.marks))["text/html"]
    assert "<img" not in text
    buttons = re.findall(r'<button type="button" style="[^"]*" onclick="([^"]*)">([^<]*) \[(\d+)\]</button>', text)
    assert [html.unescape(line) for _, line, _ in buttons] == list(found.marks)
    assert any(evil in html.unescape(line) for _, line, _ in buttons)
    assert {script.replace(f"[{place}]", "[]") for script, _, place in buttons} == {
        buttons[0][0].replace("[1]", "[]")
    }  # the number of the button is the only difference
    assert "<button" not in found._repr_html_()  # no picture is below it


# ---- the step, and the waits


@settings(deadline=None, max_examples=40)
@given(trace=traces(whole=True), data=st.data())
def test_any_subject_of_any_trace_is_explained_and_drawn(trace, data):
    if not steps(trace):
        return
    names = [unit_words(unit.name) for unit in trace.header.units]
    subject = data.draw(st.sampled_from(["", *ANSWERS, "0", *names]))
    step = data.draw(st.none() | st.sampled_from(steps(trace)))
    found = explain(trace, subject, step=step)
    assert found.headline
    assert str(found).startswith(found.headline)
    for each in found.ranks:
        assert sum(each.groups_ns.values()) == sum(each.parts_ns.values()) == each.step_ns
        assert sum(each.waited_for_ns.values()) == each.groups_ns[Group.LATE]
    assert step is None or found.step == step
    if found.picture is not None:
        draw(found.picture.view, trace, **found.picture.options, marks=found.marks)


@pytest.mark.parametrize("setup", [CLEAN, Setup(num_ranks=4, steps=7, late=2)], ids=["even", "one late"])
def test_a_step_has_one_duration_wherever_it_is_named(setup):
    trace = simulate(setup)
    found = explain(trace, "step", step=steps(trace)[-1])
    times = summary(trace).step_times
    duration = format_duration(times.high[times.steps == found.step][0])
    (shown,) = re.findall(r"^Step \d+: ([\d.]+ \S+),", draw("timeline", trace, step=found.step).layout.title.text)
    (written,) = re.findall(r"step \d+ took ([\d.]+ \S+):", str(found)) or [duration]
    assert shown == written == duration
    assert max(each.step_ns for each in found.ranks) == times.high[times.steps == found.step][0]


def test_the_parts_of_a_step_are_a_line_for_each_rank():
    found = explain(simulate(CLEAN), "step")
    assert re.match(
        r"step 6 took \S+ ms: compute \d+%, transfers and copies \d+%, waiting for a slower rank \d+%, host \d+% "
        r"\(of the time of 2 ranks together\); no rank is slow$",
        found.headline,
    )
    assert re.match(
        r"rank 0: \S+ ms = compute \S+ ms \+ transfers and copies \S+ [µm]s \+ waiting for a slower rank \S+.* \+ ",
        found.answer.evidence[0],
    )
    assert found.picture.line == "%fsdp timeline --step 6"


def test_of_many_ranks_those_that_waited_least_and_most_are_listed():
    found = explain(example_trace(num_ranks=10), "step")
    assert len(found.answer.evidence) == 7
    assert found.answer.evidence[-1] == "4 other ranks waited for slower ranks in between"
    assert len(found.ranks) == 10


def test_waits_that_prefetching_avoids_have_a_fix():
    trace = simulate(Setup(num_ranks=2, steps=7, prefetch=False, width=16, num_units=8))
    found = explain(trace, "wait", models=(NET,))
    assert {wait.cause for wait in found.waits} >= {WaitReason.ISSUED_LATE, WaitReason.NOTHING}
    assert found.answer.fix == "%fsdp reshard net --prefetch 1"
    assert any(f"by formula, {found.answer.fix} saves at most" in line for line in found.answer.evidence)
    assert explain(trace).answer.rule == "wait"
    torch = with_units(trace, engine=TORCH_FULLY_SHARD)
    assert explain(torch, "wait").answer.fix == ""  # on the CPU, its collectives do not run beside compute


def test_large_transfers_get_shorter_with_fewer_bytes():
    trace = simulate(Setup(num_ranks=2, steps=7, width=160, num_units=3))
    found = explain(trace, "wait", models=(NET,))
    assert any(wait.cause is WaitReason.BANDWIDTH for wait in found.waits)
    precise = with_units(trace, compute_itemsize=2)
    assert "--mp" not in explain(precise, "wait").answer.fix


def test_a_wait_of_one_rank_alone_is_none():
    found = explain(example_trace(num_ranks=1), "wait")
    assert found.headline == "compute waited for no collective in step 2"


# ---- the peak


def test_the_peak_names_rank_moment_units_and_knob():
    trace = simulate(KEPT)
    found = explain(trace, "peak", models=(NET,))
    assert re.match(
        r"the peak of step 6 is \S+ [KM]iB on rank [01]: (forward|backward|end of backward) of", found.headline
    )
    text = "\n".join(found.answer.evidence)
    assert "kept after forward (reshard_after_forward is False)" in text
    assert found.answer.fix == "%fsdp reshard net --reshard-after-forward auto"
    first = found.savings[0]
    assert (first.knob, first.more_calls) == (Knob.RESHARD, 7)
    assert f"by formula, {first.line} saves" in text
    freed = explain(simulate(replace(KEPT, reshard_after_forward=True)), "peak")
    peak = max(each.peak_bytes for each in explain(simulate(KEPT), "step").ranks)
    assert first.peak_bytes + first.saved_bytes == peak
    there = explain(simulate(replace(KEPT, reshard_after_forward=True)), "step")
    measured = max(each.peak_bytes for each in there.ranks)
    assert first.peak_bytes == pytest.approx(measured, rel=0.01)
    assert freed.answer.fix == ""
    assert explain(simulate(replace(KEPT, num_units=24))).answer.rule == "peak"  # what stands out of this run


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (OWN_ENGINE, "%fsdp reshard MODEL --reshard-after-forward auto"),
        (TORCH_FULLY_SHARD, "MODEL.set_reshard_after_forward(True)"),
        (TORCH_CLASSIC, "sharding_strategy=ShardingStrategy.FULL_SHARD"),
    ],
)
def test_the_knob_is_the_line_of_the_engine(engine, line):
    assert explain(with_units(simulate(KEPT), engine=engine), "peak").answer.fix == line


@pytest.mark.parametrize(("after", "is_named"), [(9 * 2**30, True), (2**30, False)])
def test_a_process_that_used_most_while_it_loaded_is_named_with_what_to_type(after, is_named):
    header, ranks = loaded(simulate(replace(CLEAN, samples=True)), [(after, 2**30), (2**30, 2**30)])
    lines = [line for line in explain(Trace(header, ranks), "peak").answer.evidence if "loaded" in line]
    assert [re.sub(" shows .*", "", line) for line in lines] == [
        "the whole process of rank 0 used most while it loaded: 9.00 GiB after reading model.pt, and at most 1.00 GiB "
        "otherwise; %fsdp memory --process"
    ] * is_named


def test_many_kept_units_share_a_line():
    found = explain(simulate(replace(KEPT, num_units=20)), "peak")
    assert len(found.answer.evidence) < 10
    assert any(line.startswith("17 units, ") or line.startswith("18 units, ") for line in found.answer.evidence)


# ---- a step without an end


@pytest.mark.parametrize("subject", ["", *ANSWERS, "0"])
@pytest.mark.parametrize("how", ["aborted", "not ended"])
def test_a_step_without_an_end_is_named_and_the_newest_with_one_is_explained(how, subject):
    whole = simulate(CLEAN)
    trace = aborted(whole, 6, 0.5)
    if how == "not ended":
        trace = Trace(trace.header, tuple(shown_to(each, each.places_of(6, 6)[1]) for each in trace.ranks))
    state = f"step 6 {'was aborted' if how == 'aborted' else 'has not ended'}"
    found, alone = explain(trace, subject), explain(without_step(whole, 6), subject)
    *others, line = found.answer.evidence
    assert (found.step, found.headline, tuple(others)) == (5, alone.headline, alone.answer.evidence)
    typed = " ".join(filter(None, ("%fsdp explain", "rank 0" if subject == "0" else subject, "--step 6")))
    peak = max(each.peak_bytes for each in explain(trace, "step", step=6).ranks)
    until = f", with a peak of {format_bytes(peak)} until then" if subject == "peak" else ""
    assert line == f"{state}{until}; to explain what ran of it: {typed}"
    chosen = explain(trace, subject, step=6)
    assert chosen.step == 6
    assert f"step 6 ({how})" in chosen.headline
    assert chosen.answer.evidence[-1] == f"{state}: this is what ran of it"
    assert draw("timeline", trace, step=6).layout.title.text.startswith(state.capitalize())


def test_an_aborted_first_step_is_explained():
    found = explain(aborted(simulate(Setup(num_ranks=2, steps=1)), 0, 0.5), "peak")
    assert found.step == 0
    assert found.headline.startswith("the peak of step 0 (aborted) is")
    assert found.answer.evidence[-1] == "step 0 was aborted: this is what ran of it"


# ---- a unit, a rank


def test_why_a_unit_is_unsharded_while_a_step_is_stopped():
    trace = simulate(KEPT)
    rank = trace.ranks[0]
    loss = np.flatnonzero((rank.rows["kind"] == Kind.FORWARD) & (rank.rows["unit"] == 7) & (rank.rows["step"] == 6))[-1]
    stopped = Trace(trace.header, tuple(each.cut(0, int(loss) + 1) for each in trace.ranks))
    found = explain(stopped, "blocks.1", models=(NET,))
    assert found.headline == ("blocks.1 is unsharded: kept after forward (reshard_after_forward is False) in step 6")
    assert found.answer.evidence[0] == "gathered ahead, in forward by blocks.0 in step 6"
    assert found.answer.evidence[1].startswith("full parameters: ")
    assert found.answer.fix == "%fsdp reshard net.blocks.1 --reshard-after-forward true"
    assert found.picture.line == "%fsdp states --unit blocks.1 --step 6"
    assert [(each.ranks, each.state) for each in found.units] == [((0, 1), UnitState.UNSHARDED)]
    earlier = explain(stopped, "blocks.1", step=4)
    assert earlier.headline == "blocks.1 was, at the end of step 4, sharded: freed after backward in step 4"


def test_ranks_that_differ_in_a_unit_are_named():
    trace = simulate(CLEAN)
    rank = trace.ranks[1]
    begin = np.flatnonzero((rank.rows["kind"] == Kind.FORWARD) & (rank.rows["unit"] == 1) & (rank.rows["step"] == 6))[0]
    found = explain(Trace(trace.header, (trace.ranks[0], rank.cut(0, int(begin) + 1))), "unit", "blocks.1")
    assert found.headline == "rank 0: blocks.1 is sharded: freed after backward in step 6"
    assert "rank 1: unsharded: its forward runs in step 6" in found.answer.evidence


def test_a_rank_is_compared_with_the_others():
    found = explain(simulate(Setup(num_ranks=2, steps=4, slow=1)), "rank", "0")
    assert re.search(r"it waited (19|20)\d ms for slower ranks, and the others at most \S+.* for it", found.headline)
    assert any(re.match(r"waiting for a slower rank: \S+ ms, the others", line) for line in found.answer.evidence)
    assert found.picture.line == "%fsdp timeline --step 3 --rank 0"


def test_times_of_a_device_are_explained():
    slow = on_devices(simulate(Setup(num_ranks=2, steps=8, slow=1, slow_in="forward")))
    found = explain(slow)
    assert found.headline.startswith("rank 1 is slow in forward")
    assert any(line.startswith("most of it in blocks.0: rank 1 takes 20") for line in found.answer.evidence)
    clean = on_devices(simulate(CLEAN))
    assert explain(clean).answer.rule == "nothing"
    assert explain(clean).savings == explain(clean, "peak").savings != ()
    assert explain(clean, "peak").answer.fix == "%fsdp reshard MODEL --offload"


def test_a_number_that_is_a_unit_and_a_rank_is_refused():
    """On fewer ranks the same line would be about the unit."""
    trace = simulate(CLEAN)
    units = tuple(replace(unit, name=f"{unit.index + 1}") for unit in trace.header.units)
    numbered = Trace(replace(trace.header, units=units), trace.ranks)
    with pytest.raises(UsageError, match="1 is a unit and a rank: %fsdp explain unit 1, or %fsdp explain rank 1"):
        explain(numbered, "1")
    assert explain(numbered, "0").subject == "rank 0"
    assert explain(numbered, "unit", "1").subject == "1"
    assert explain(numbered, "2").subject == "2"


@pytest.mark.parametrize(
    ("classes", "lines"),
    [
        ({"Sequential": 7 * 32_768}, ["%fsdp reshard net --wrap Block,Sequential"]),
        ({"Linear": 32_768}, []),
        ({"Sequential": 7 * 32_768, "Mlp": 7 * 32_768}, []),
    ],
)
def test_smaller_units_are_all_of_a_class_that_is_known(classes, lines):
    known = tuple(WrapClass(name=name, count=7, num_elements=size) for name, size in classes.items())
    words = {"api": "fully_shard", "strategy": "full", "mesh": "2", "reshard_after_forward": "auto", "mp": "off"}
    policy = ModelPolicy(**words, orig_params=False, wrap=("Block",), offload=False, prefetch=0)
    found = explain(simulate(KEPT), "peak", models=(replace(NET, classes=known, policy=policy),))
    assert [each.line for each in found.savings if each.knob is Knob.SMALLER_UNITS] == lines
    assert any(f"by formula, {line} saves about " in text for line in lines for text in found.answer.evidence) == any(
        lines
    )


def test_a_step_is_explained_by_its_own_policy():
    trace = simulate(KEPT)
    units = tuple(
        replace(unit, reshard_after_forward=True).following(unit.following(None, 0), 5) for unit in trace.header.units
    )
    later = Trace(replace(trace.header, units=units), trace.ranks)
    assert explain(later, "peak", step=4).answer == explain(trace, "peak", step=4).answer
    assert explain(later, "peak", step=5).answer != explain(trace, "peak", step=5).answer


def test_forwards_without_a_step_are_told_from_a_trace_without_any():
    trace = simulate(replace(CLEAN, steps=1))
    parts = []
    for part in trace.ranks:
        rows = part.rows[part.rows["kind"] != Kind.STEP].copy()
        rows["step"], rows["seq"] = -1, np.arange(len(rows))
        parts.append(RankTrace(part.rank, rows))
    with pytest.raises(UsageError, match=r"only forwards without a training step .*%fsdp explain .*%fsdp step 5"):
        explain(Trace(trace.header, tuple(parts)), "", is_live=True)


def test_the_size_of_what_ranks_keep_after_forward_is_told():
    trace = simulate(replace(CLEAN, num_ranks=4))
    units = tuple(replace(unit, reshard_after_forward=2) for unit in trace.header.units)
    resharded = explain(Trace(replace(trace.header, units=units), trace.ranks), "blocks.1").answer.evidence
    whole = explain(trace, "blocks.1").answer.evidence
    assert any("; from forward to backward, 1 of 2: " in line for line in resharded)
    assert not any("from forward to backward" in line for line in whole)


# ---- what is missing


def test_missing_signals_are_named():
    trace = simulate(CLEAN)
    assert "no memory is recorded" in explain(without(trace, Kind.ALLOC, Kind.FREE), "peak").headline
    unworked = explain(without(trace, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER), "step")
    assert any("no forward or backward is recorded" in reason for reason in unworked.abstained)
    alone = explain(Trace(trace.header, trace.ranks[:1]), "step")
    assert any("for 100% of the collectives it is not recorded when all" in reason for reason in alone.abstained)
    replicated = with_units(trace, engine=TORCH_DDP, shard_size=1, replicate_size=2, comm="c10d")
    found = explain(replicated, "step")
    assert any("are not measured; they count as compute" in reason for reason in found.abstained)
    assert "no rank is slow" not in found.headline
    unseen = without(replicated, Kind.WAIT, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    assert "why compute waited is unknown: waits of DistributedDataParallel" in explain(unseen, "wait").headline
    assert explain(unseen, "blocks.0").headline.startswith("blocks.0 is on each of its ranks in full")
    bare = with_units(trace, params=(), compute_dtype="", compute_itemsize=0)
    assert "its parameters are not recorded; 1 shard of 2 is on each rank" in explain(bare, "blocks.0").answer.evidence
    assert "%fsdp reshard" not in str(explain(bare, "wait"))


def test_without_times_of_the_gpu_only_memory_is_explained():
    trace = simulate(KEPT)
    ranks = tuple(replace(info, device="cuda:0") for info in trace.header.ranks)
    enqueued = Trace(replace(trace.header, ranks=ranks), trace.ranks)
    for subject, name in (("step", "step"), ("wait", "wait"), ("0", "rank 0")):
        unknown = explain(enqueued, subject)
        assert (unknown.subject, unknown.step) == (name, 6)
        assert "times of the GPU are not recorded" in unknown.headline
    found = explain(enqueued)
    assert found.answer.rule == "peak"
    assert "times of the GPU are not recorded" in found.abstained[0]
    assert {saving.knob for saving in explain(enqueued, "peak").savings} >= {Knob.OFFLOAD}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("9",), "the trace has no rank 9; its ranks are 0-1: %fsdp explain 0"),
        (("rank", "x"), "the trace has no rank x; its ranks are 0-1"),
        (("rank",), "explain rank needs to know which one: %fsdp explain rank 1"),
        (("pek",), "there is no unit 'pek', did you mean 'peak'?"),
        (("blocks.7",), "there is no unit 'blocks.7'; the units, nearest first: blocks."),
        (("blocks.*",), "explain takes one unit, and 3 are called 'blocks.*': %fsdp explain blocks.0"),
        (("peak", "1"), "explain takes one unit or rank, not 'peak' and '1'"),
    ],
)
def test_wrong_subjects_say_what_to_type(args, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        explain(simulate(CLEAN), *args)


def test_nothing_to_explain_says_what_to_type():
    with pytest.raises(UsageError, match=r"nothing is recorded yet, .*%fsdp shard MODEL, then %fsdp step 5"):
        explain(Trace.empty())
    unstepped = simulate(replace(CLEAN, steps=0))
    with pytest.raises(UsageError, match=r"no training step is recorded yet, .*: %fsdp step 5"):
        explain(unstepped, "peak", is_live=True)
    with pytest.raises(UsageError, match="the trace has no training step; only units can be explained"):
        explain(unstepped, "1")
    assert explain(unstepped, "blocks.1").headline == "blocks.1 is sharded: was never gathered in this record"
    unsharded = Trace(replace(unstepped.header, units=()), unstepped.ranks)
    with pytest.raises(UsageError, match=r"nothing is sharded yet, .*first %fsdp shard MODEL"):
        explain(unsharded, "blocks.1")
    with pytest.raises(UsageError, match="the trace has no step 99; its steps are: 0-6"):
        explain(simulate(CLEAN), "step", step=99)


def test_texts_are_escaped():
    trace = simulate(CLEAN)
    named = with_units(trace, name="<b>")
    assert "<b>" not in explain(named, "wait")._repr_html_()


def test_a_long_run_of_many_units_takes_little_time():
    trace = long_trace(num_ranks=2, rows_per_rank=500_000, num_units=100)
    assert len(steps(trace)) > 100
    begin = time.process_time()
    found = explain(trace)
    assert isinstance(found, ExplainReport)
    assert time.process_time() - begin < 3  # about 0.3 s where nothing else runs


@pytest.mark.parametrize(
    ("ranks", "first", "words"),
    [
        ((0, 1), 4, "the loss is NaN or infinite since step 4"),
        ((1,), 5, "the loss is NaN or infinite since step 5, first on rank 1"),
        ((), 0, ""),
    ],
)
def test_a_loss_that_is_not_finite_is_said_first(ranks, first, words):
    found = explain(with_nan(simulate(CLEAN), first, ranks), is_live=True)
    assert (found.answer.verdict == words) == bool(words)
    assert [fault.rule for fault in found.faults] == ["not-finite"] * bool(words)
    if words:
        assert "then %fsdp break add nan" in found.answer.fix
