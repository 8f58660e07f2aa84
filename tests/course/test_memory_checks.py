"""Findings about peaks, about what a step leaves behind, and about the states of units."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.simulated_job import Setup, simulate
from workbench.course import exposed, most_bytes, nothing_left, peak, states
from workbench.errors import UsageError
from workbench.events import Category, Kind
from workbench.replay import memory
from workbench.trace.columns import RankTrace, Trace


@pytest.fixture(scope="module")
def run():
    return simulate(Setup())


@pytest.fixture(scope="module")
def keeps():
    return simulate(Setup(reshard_after_forward=False, num_units=8))


def changed(trace, change):
    """Return a trace with the rows of each rank changed."""
    ranks = []
    for rank in trace.ranks:
        rows = change(rank.rows.copy())
        rows["seq"] = range(len(rows))
        ranks.append(RankTrace(rank.rank, rows, rank.start))
    return Trace(trace.header, tuple(ranks))


def test_the_limit_itself_passes_and_one_byte_less_fails(run):
    size = max(memory.peak(rank).num_bytes for rank in run.slice(step=2).ranks)
    assert peak(run, at_most=size).ok
    finding = peak(run, at_most=size - 1)
    assert not finding.ok
    assert finding.sentence.startswith(
        "the peak of step 2 is 1.40 MiB on rank 0, more than 1.40 MiB (backward of blocks.1"
    )


def test_a_reference_gives_the_limit(run, keeps):
    assert (
        peak(run, reference=run, ratio=1).sentence
        == "the peak of step 2 is 1.40 MiB, 1.00 times the reference's 1.40 MiB"
    )
    other = simulate(Setup(num_units=8))
    finding = peak(keeps, reference=other, ratio=1.1)
    assert not finding.ok
    assert "times the reference's" in finding.sentence
    assert finding.sentence.endswith("the full parameters of blocks.0-6 stay after forward: free them until backward")
    alike = peak(keeps, reference=keeps, ratio=0.5)
    assert not alike.ok
    assert "free them" not in alike.sentence  # the reference keeps them too


def test_one_class_of_bytes_has_its_own_peak(run, keeps):
    most = most_bytes(run, "unsharded_params")
    assert most == max(
        memory.series(rank).num_bytes[:, Category.UNSHARDED_PARAMS].max() for rank in run.slice(step=2).ranks
    )
    assert peak(run, of="unsharded params", at_most=most).measured == ("peak of unsharded params", most)
    wrong = peak(run, of="unsharded_params", at_most=most - 1)
    assert not wrong.ok
    assert wrong.sentence.startswith("the peak of the unsharded params in step 2 is ")
    assert not peak(keeps, of="unsharded_params", reference=run).ok
    with pytest.raises(UsageError, match="there is no class of bytes 'weights'; the classes: sharded_params, "):
        peak(run, of="weights", at_most=1)
    with pytest.raises(UsageError, match="the run has no recorded step"):
        most_bytes(Trace.empty(), "activations")


def test_a_peak_needs_exactly_one_limit(run):
    for limits in ({}, {"at_most": 1, "reference": run}):
        with pytest.raises(UsageError, match="peak needs a limit"):
            peak(run, **limits)


def test_a_reference_without_steps_is_a_finding(run):
    assert peak(run, reference=Trace.empty()).sentence.startswith("the reference run has no recorded step")
    assert peak(Trace.empty(), at_most=1).sentence.startswith("the run has no recorded step")
    assert nothing_left(Trace.empty()).sentence.startswith("the run has no recorded step")
    assert states(Trace.empty(), "forward", {"(root)": "sharded"}).sentence.startswith("the run has no recorded step")


def test_an_unsharded_model_has_no_peak_and_leaves_nothing_by_luck(run):
    plain = changed(run, lambda rows: rows[rows["unit"] < 0])
    for finding in (peak(plain, at_most=2**40), nothing_left(plain), exposed(plain, 1e18)):
        assert finding.sentence.startswith("step 2 ran no sharded unit: the model was not sharded")


def test_a_step_leaves_nothing_or_the_finding_says_what(run):
    assert nothing_left(run).sentence == "step 2 leaves nothing gathered"
    kept = changed(run, lambda rows: rows[~((rows["unit"] == 1) & (rows["kind"] == Kind.RESHARD))])
    assert nothing_left(kept).sentence.startswith(
        "after step 2, ranks 0-3 keep blocks.1 unsharded: after backward the engine"
    )

    def leaks(rows):
        freed = (rows["kind"] == Kind.FREE) & (rows["category"] == Category.UNSHARDED_PARAMS) & (rows["unit"] == 0)
        return rows[~freed]

    assert "parameters stay in memory: blocks.0: reshard() only" in nothing_left(changed(run, leaks)).sentence


def test_buffers_that_a_transport_frees_a_moment_later_are_not_left(run):
    """They are freed in the next step: only what the step before has left too counts."""

    def once(rows):
        gone = (rows["kind"] == Kind.FREE) & (rows["category"] == Category.REDUCE_SCATTER_BUFFERS)
        last = np.flatnonzero(gone)[-1]
        return np.delete(rows, last)

    def always(rows):
        gone = (rows["kind"] == Kind.FREE) & (rows["category"] == Category.REDUCE_SCATTER_BUFFERS)
        return rows[~gone]

    assert nothing_left(changed(run, once)).ok
    assert "of reduce-scatter buffers" in nothing_left(changed(run, always)).sentence


def test_states_are_those_before_the_event(run):
    finding = states(run, "backward:blocks.1", {"blocks.2": "sharded", "(root)": "UNSHARDED"})
    assert finding.ok
    assert finding.sentence == "at backward:blocks.1 of step 2: blocks.2 is sharded and (root) is unsharded"
    before, after = (
        states(run, f"all_gather{edge}:blocks.0", {"blocks.0": "all-gather in flight"}) for edge in ("", ".end")
    )
    assert not before.ok
    assert after.ok


def test_a_wrong_state_is_said_once_for_all_ranks(keeps):
    finding = states(keeps, "backward:blocks.3", {"blocks.0": "sharded", "blocks.9": "sharded"})
    assert finding.sentence == (
        "at backward:blocks.3 of step 2 on ranks 0-3, blocks.0 is unsharded, not sharded and there is no unit blocks.9"
    )
    assert "there is no such event" in states(keeps, "forward:blocks.9", {"(root)": "sharded"}).sentence


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({}, "there is no answer yet: write a state for each unit"),
        (None, "there is no answer yet"),
        ("sharded", "'sharded' is a str: write a state for each unit"),
        ({"blocks.2": "sharded"}, "there is no answer for (root)"),
        ({"(root)": "unsharded", "blocks.2": "gone"}, "there is no state 'gone'; the states: sharded, all-gather in"),
        ({"(root)": "unsharded", "blocks.2": None}, "there is no state None"),
        (
            {"(root)": "sharded", "blocks.2": "sharded"},
            "not every state is right: (root) is in another one: look at it",
        ),
    ],
)
def test_a_wrong_answer_on_states_has_no_state(answer, why, run):
    finding = states(run, "backward:blocks.1", answer, units=("(root)", "blocks.2"), look="it")
    assert why in finding.sentence
    assert not finding.ok


def test_states_are_read_as_people_write_them(run):
    answer = {" (root) ": "Unsharded ", "blocks.0": "all_gather in flight"}
    assert states(run, "all_gather.end:blocks.0", {**answer, "(root)": "unsharded"}, look="it").ok


def test_words_that_do_not_exist_are_errors(run):
    with pytest.raises(UsageError, match=r"there is no state 'split'; the states: sharded, all-gather in flight"):
        states(run, "forward", {"blocks.0": "split"})
    with pytest.raises(UsageError, match="there is no event 'foward'"):
        states(run, "foward", {"blocks.0": "sharded"})


def test_of_several_units_with_one_name_the_one_that_runs_counts(run):
    old = replace(run.header.units[0], index=4, gone=True)
    trace = Trace(replace(run.header, units=(*run.header.units, old)), run.ranks)
    assert states(trace, "optimizer", {"blocks.0": "sharded"}).ok
