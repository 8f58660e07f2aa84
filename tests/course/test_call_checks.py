"""Findings about the number, the bytes and the order of collectives."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.simulated_job import Setup, simulate
from workbench.course import counts, order, payload, sent
from workbench.errors import UsageError
from workbench.events import COLLECTIVES, Edge, Kind
from workbench.replay.collectives import closed_form, ring_bytes
from workbench.trace.columns import RankTrace, Trace

CALLS = {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 0}


@pytest.fixture(scope="module")
def run():
    return simulate(Setup())


def without(trace, rank, chosen):
    """Return a trace without some rows of one rank."""
    rows = trace.rank(rank).rows
    rows = rows[~chosen(rows)].copy()
    rows["seq"] = range(len(rows))
    return Trace(trace.header, (*(r for r in trace.ranks if r.rank != rank), RankTrace(rank, rows)))


def test_the_right_numbers_pass_and_are_said(run):
    finding = counts(run, CALLS)
    assert finding.ok
    assert finding.sentence == "each rank issued 7 all-gathers, 4 reduce-scatters and 0 all-reduces in step 2"


def test_a_unit_has_its_own_numbers(run):
    assert counts(run, {"all-gather:blocks.1": 2, "all_gather:(root)": 1, "reduce_scatter:(root)": 1}).ok
    wrong = counts(run, {"all_gather:blocks.1": 1})
    assert wrong.sentence.startswith("ranks 0-3 issued 2 all-gathers of blocks.1 in step 2, not 1")


def test_bytes_are_those_of_the_closed_form(run):
    forms = [form for form in closed_form(run.header) if form.kind == Kind.ALL_GATHER]
    assert payload(run, {"all_gather": sum(form.num_bytes for form in forms)}).ok
    assert payload(run, {"all_gather:blocks.0": forms[0].num_bytes}).ok
    wrong = payload(run, {"all_gather:blocks.0": 7})
    assert wrong.sentence == f"ranks 0-3 issued {forms[0].num_bytes:,} B in all-gathers of blocks.0 in step 2, not 7"


def test_what_a_rank_sends_is_that_of_a_ring(run):
    number = sum(
        ring_bytes(form.kind, form.num_bytes, len(run.ranks)) for form in closed_form(run.header) if form.num_bytes
    )
    assert sent(run, at_most=number).measured == ("bytes sent", number)
    finding = sent(run, at_most=number - 1)
    assert (finding.ok, finding.measured) == (False, ("bytes sent", number))
    assert finding.sentence.startswith("rank 0 sends ")
    assert sent(Trace.empty(), at_most=1).sentence.startswith("the run has no recorded step")


@pytest.mark.parametrize(("step", "number"), [(-1, 2), (-3, 0), (1, 1)])
def test_a_step_is_counted_from_either_end(step, number, run):
    assert counts(run, CALLS, step=step).sentence.endswith(f"in step {number}")


@pytest.mark.parametrize(
    ("step", "why"), [(3, "no step 3 that ended on all ranks; it has 3 recorded"), (-4, "no 4 steps that ended")]
)
def test_a_step_that_is_missing_is_a_finding(step, why, run):
    assert why in counts(run, CALLS, step=step).sentence


def test_the_newest_step_counts_also_if_it_has_not_ended_on_every_rank(run):
    def is_last_end(rows):
        return (rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.END) & (rows["step"] == 2)

    trace = without(run, 3, is_last_end)
    every = counts(trace, CALLS), order(trace), payload(trace, CALLS), counts(trace, CALLS, step=-2)
    for finding in every:
        assert finding.sentence.startswith("step 2 began and did not end on rank 3, and an older step does not count: ")
    assert counts(trace, CALLS, look="%fsdp comms").ok, "a student may look at a step that is stopped"
    assert counts(trace, CALLS, step=1).ok, "a step that is chosen by its number has ended"


def test_of_a_run_without_a_sharded_model_it_says_so_whether_or_not_its_newest_step_has_ended(run):
    plain = without(run, 3, lambda rows: rows["unit"] >= 0).rank(3)
    for rows, words in (
        (
            plain.rows,
            "rank 3 issued 0 all-gathers (not 7) and 0 reduce-scatters (not 4) in step 2: no sharded unit ran",
        ),
        (plain.rows[:-1], "step 1 ran no sharded unit: "),
    ):
        finding = counts(Trace(run.header, (RankTrace(3, rows),)), CALLS)
        assert finding.sentence.startswith(words)
        assert "the model was not sharded, or another one was trained; look for an error" in finding.sentence


def test_without_steps_the_finding_says_what_to_do(run):
    assert "train at least one, such as with %fsdp step 1" in counts(Trace(run.header), CALLS).sentence
    assert "no recorded step" in counts(Trace.empty(), CALLS).sentence


def test_units_that_are_kept_after_forward_are_the_reason():
    finding = counts(simulate(Setup(reshard_after_forward=False)), CALLS)
    assert finding.sentence.startswith(
        "ranks 0-3 issued 4 all-gathers in step 2, not 7: FSDP gathers each unit again for backward; these keep "
        "their full parameters after forward: blocks.0-2"
    )


def test_a_root_that_is_freed_after_forward_is_the_reason_of_one_more():
    finding = counts(simulate(Setup(reshard_root=True)), CALLS)
    assert (
        "8 all-gathers in step 2, not 7: (root) is gathered twice: reshard_after_forward true frees" in finding.sentence
    )
    own = simulate(Setup(reshard_root=True))
    units = tuple(replace(unit, engine="my engine") for unit in own.header.units)
    finding = counts(Trace(replace(own.header, units=units), own.ranks), CALLS)
    assert finding.sentence.endswith("8 all-gathers in step 2, not 7: (root) is gathered twice")


def test_micro_batches_are_the_reason_of_more_calls():
    finding = counts(simulate(Setup(passes=2)), CALLS)
    assert "the step has 2 forward and backward passes, and units are gathered in each" in finding.sentence
    assert "your engine reduces after each of 2 micro-batches" in finding.sentence


def test_all_reduces_of_copies_have_no_reason_and_others_do(run):
    copies = counts(simulate(Setup(copies=2)), CALLS)
    assert copies.sentence == "ranks 0-3 issued 4 all-reduces in step 2, not 0"
    rank = run.rank(0)
    rows = rank.rows.copy()
    rows["kind"][rows["kind"] == Kind.REDUCE_SCATTER] = Kind.ALL_REDUCE
    other = Trace(run.header, (RankTrace(0, rows, rank.start),))
    finding = counts(other, CALLS)
    assert finding.sentence.startswith(
        "rank 0 issued 0 reduce-scatters (not 4) and 4 all-reduces (not 0) in step 2: an all-reduce gives every rank "
        "the whole gradient"
    )
    assert "never" not in finding.sentence


def test_a_unit_that_is_never_reduced_is_named(run):
    other = without(run, 1, lambda rows: (rows["kind"] == Kind.REDUCE_SCATTER) & (rows["unit"] == 2))
    assert counts(other, {"reduce_scatter": 4}).sentence == (
        "rank 1 issued 3 reduce-scatters in step 2, not 4: blocks.2 never issued a reduce-scatter"
    )


def test_several_groups_of_ranks_are_said_one_by_one(run):
    one = without(run, 1, lambda rows: (rows["kind"] == Kind.REDUCE_SCATTER) & (rows["unit"] == 2))
    two = without(one, 2, lambda rows: (rows["kind"] == Kind.REDUCE_SCATTER) & (rows["unit"] >= 2))
    assert counts(two, {"reduce_scatter": 4}).sentence.startswith(
        "rank 1 issued 3 reduce-scatters (not 4); rank 2 issued 2 reduce-scatters (not 4); all in step 2: blocks.2 "
    )


def test_ranks_that_differ_are_told_apart(run):
    gathers = np.array([Kind.ALL_GATHER, Kind.UNSHARD])
    other = without(run, 2, lambda rows: np.isin(rows["kind"], gathers) & (rows["unit"] == 1))
    finding = counts(other, {"all_gather": 7})
    assert finding.sentence == "rank 2 issued 5 all-gathers in step 2, not 7: blocks.1 was never gathered"


@pytest.mark.parametrize("kind", ["gather!", "unshard", ""])
def test_a_kind_that_does_not_exist_is_an_error_that_lists_them(kind, run):
    with pytest.raises(UsageError, match=r"there is no kind of collective .*; the kinds: all_gather, reduce_scatter"):
        counts(run, {kind: 1})


def test_every_kind_of_collective_can_be_counted(run):
    assert counts(run, {kind.key: 0 for kind in COLLECTIVES if kind.key not in CALLS}).ok


def test_the_order_of_all_ranks_is_the_same_or_the_finding_says_where_not(run):
    assert order(run).sentence == "all ranks issued the same collectives in the same order in step 2"
    first = without(run, 1, lambda rows: (rows["comm_seq"] == 0) & np.isin(rows["kind"], COLLECTIVES))
    assert order(first, step=0).ok, "a rank is compared from the first row that it has"
    rows = run.rank(1).rows.copy()
    rows["unit"][np.isin(rows["kind"], COLLECTIVES) & (rows["comm_seq"] == 5)] = 3
    other = Trace(run.header, (run.rank(0), RankTrace(1, rows)))
    finding = order(other, step=0)
    assert finding.sentence.startswith(
        "ranks 0-1 part: rank 0 issued all-gather of blocks.1, rank 1 all-gather of (root)"
    )
    assert "each rank must issue the same collectives in the same order" in finding.sentence
    assert order(other, step=1).ok, "an engine that was wrong before may be right now"
    assert "no recorded step" in order(Trace.empty()).sentence


def test_a_unit_that_the_run_does_not_have_is_the_reason(run):
    assert counts(run, {"all_gather:blocks.9": 2}).sentence == (
        "ranks 0-3 issued 0 all-gathers of blocks.9 in step 2, not 2: the run has no unit blocks.9; its units: "
        "blocks.0-2 and (root)"
    )


@pytest.mark.parametrize("answer", ["9", 9.5, True, [9]])
def test_an_answer_of_a_wrong_type_gets_a_sentence(answer, run):
    assert counts(run, {"all_gather": answer}).sentence == (
        f"the number of all-gathers: {answer!r} is a {type(answer).__name__}: write a whole number, such as 12"
    )


@pytest.mark.parametrize("answer", [None, ..., ""])
def test_no_answer_is_no_right_answer(answer, run):
    assert counts(run, {"all_gather": answer}).sentence.startswith("the number of all-gathers: there is no answer yet")
    assert "there is no answer yet" in counts(run, {}).sentence


def test_whole_numbers_of_any_library_are_answers(run):
    assert counts(run, {"all_gather": np.int64(7), "reduce_scatter": 4.0}).sentence.startswith(
        "each rank issued 7 all-"
    )


def test_a_wrong_answer_is_told_where_to_look_and_not_the_number(run, monkeypatch):
    finding = counts(run, {"all_gather": 5, "reduce_scatter": 4}, look="%fsdp comms")
    assert finding.sentence == (
        "you answered 5 all-gathers, which is not what a rank issued in step 2; your answer for the reduce-scatters is "
        "right: look at %fsdp comms"
    )
    assert finding.answer == "7 all-gathers"
    assert payload(run, {"all_gather": 12}, look="%fsdp comms").sentence.startswith("you answered 12 B in all-gathers")
