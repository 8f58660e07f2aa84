"""The session of the notebook that a check is about, and the part of a trace that belongs to one source."""

import json
import re
from dataclasses import replace

import nbformat.v4
import numpy as np
import pytest
import torch

from tests.helpers.own_fsdp import FSDP, source_of
from tests.helpers.simulated_job import Setup, simulate
from tests.helpers.student_fsdp import trained
from tests.helpers.watched import watch
from workbench.cli.grade import grade
from workbench.course import agree, counts, from_ranks, held, nothing_left, only_source, peak, recorded, same
from workbench.course import notebook_output as outputs
from workbench.errors import RankError, UsageError
from workbench.events import Category
from workbench.replay import memory
from workbench.reports.output_report import CellReport
from workbench.trace import check
from workbench.trace.columns import Trace


class Session:
    """Stands for the Workbench of a notebook; cells run here, each rank with its number as ``rank``."""

    def __init__(self, trace=None):
        self.trace = trace or Trace.empty()
        self.train_step = list
        self.num_ranks = 2

    def run_cell(self, code):
        texts = {}
        for rank in (1, 0):
            said = [f"of rank {rank}"]
            exec(code, {"rank": rank, "np": np, "print": said.append, "train_step": self.train_step})
            texts[rank] = "\n".join(said)
        return CellReport(texts=texts)


@pytest.fixture
def session(monkeypatch):
    found = Session()
    monkeypatch.setattr(outputs, "_workbench", lambda: found)
    return found


def test_values_of_ranks_arrive_as_plain_data(session):
    found = from_ranks('{"loss": [rank, float("nan")], "w": np.ones((2, 1)), "some": {1}}')
    assert list(found) == [0, 1]
    assert json.dumps(found[1]) == '{"loss": [1, NaN], "w": [[1.0], [1.0]], "some": [1]}'


def test_values_of_ranks_are_not_those_of_a_newest_step_that_did_not_end(session):
    run = simulate(Setup())
    ranks = tuple(rank.part(0, len(rank.rows) - 1, rank.start) for rank in run.ranks)
    session.trace = run
    assert same(from_ranks("rank"), {0: 0, 1: 1}).ok
    session.trace = Trace(run.header, ranks)
    for finding in (same(from_ranks("rank"), {0: 0, 1: 1}), agree(from_ranks("1"))):
        assert finding.sentence.startswith(
            "step 2 began and did not end on ranks 0-3, and an older step does not count"
        )


def test_a_step_that_could_not_begin_counts_as_the_newest(session):
    session.trace = simulate(Setup())
    session.failed_step = "nothing is sharded yet, so there is nothing to step"
    for finding in (counts(recorded(), {"all_gather": 7}), peak(recorded(""), at_most=2**40), same(from_ranks("1"), 1)):
        assert finding.sentence == (
            "the newest %fsdp step or run failed, and an older step does not count: nothing is sharded yet, so there "
            "is nothing to step"
        )


def test_an_expression_that_raises_after_a_failed_step_is_a_finding(session, monkeypatch):
    def fails(code):
        raise RankError("rank 0 raised", rank=0, ename="NameError", evalue="model")

    monkeypatch.setattr(session, "run_cell", fails)
    with pytest.raises(RankError):
        from_ranks("model")
    session.failed_step = "there is no model"
    assert same(from_ranks("model"), {0: 1, 1: 1}).sentence.endswith("does not count: there is no model")


def test_what_no_engine_announces_is_held_all_the_same(session):
    hidden = []
    session.train_step = lambda: hidden.append(torch.zeros(250_000))
    assert held(at_rest=2**40, in_step=2**20).sentence.startswith(
        "in a step, all tensors of a rank rise by at most 977"
    )
    assert held(at_rest=2**40, in_step=2**19).sentence.startswith(
        "in a step, the tensors of rank 0 rise by 977 KiB, more than 512 KiB: more units are whole at once"
    )
    assert ", more than 1.00 KiB: it holds more than its shards" in held(at_rest=2**10, in_step=2**40).sentence


def test_without_the_extension_the_error_says_what_to_run():
    for call in (recorded, lambda: from_ranks("1")):
        with pytest.raises(UsageError, match="this notebook has no %fsdp: run %load_ext workbench first"):
            call()


def test_the_trace_is_that_of_the_session_or_of_one_source(session):
    session.trace = simulate(Setup())
    assert recorded() is session.trace
    with pytest.raises(UsageError, match="the trace has no units of 'mine'; it has those of: the workbench's engine"):
        recorded("mine")


def two_engines():
    trained("keeps_after_forward")
    return trained("solution") is not None


@pytest.fixture(scope="module")
def both():
    """A trace of two FSDPs, one after the other; the first one's units are renamed."""
    trace = watch(2, two_engines).trace
    first = len(trace.header.units) // 2
    units = tuple(replace(unit, engine="first") if unit.index < first else unit for unit in trace.header.units)
    return type(trace)(replace(trace.header, units=units), trace.ranks)


def test_each_source_has_its_own_steps_calls_and_bytes(both):
    for name, calls, steps in (("first", 10, range(4)), ("my fsdp", 18, range(4, 8))):
        part = only_source(both, name)
        assert check(part) == []
        assert counts(part, {"all_gather": calls, "reduce_scatter": 5}).ok
        assert set(part.ranks[0].steps) == set(steps)
        assert nothing_left(part).ok


def test_bytes_of_another_engine_and_of_no_unit_do_not_count(both):
    alone = watch(2, trained, "solution").trace
    mine, theirs = (
        [memory.peak(rank) for rank in only_source(each, "my fsdp").slice(step=step).ranks]
        for each, step in ((both, 7), (alone, 3))
    )
    assert [found.num_bytes for found in mine] == [found.num_bytes for found in theirs]
    assert mine[0].bytes_by_category[Category.OPTIMIZER_STATE] == 0
    assert peak(only_source(both, "my fsdp"), reference=only_source(alone, "my fsdp"), ratio=1).ok


GRADED = [
    "%load_ext workbench",
    "from workbench.course import *",
    "%fsdp start -n 2",
    *(f"%%fsdp\n{source_of(cell)}" for cell in FSDP),
    "%fsdp step 3",
    "mine = recorded('my fsdp')",
    "check('calls', counts(mine, {'all_gather': 9, 'reduce_scatter': 5}), order(mine), nothing_left(mine))",
    "check('losses', agree(from_ranks('losses')))",
]


@pytest.mark.cluster
def test_a_graded_notebook_checks_its_own_ranks(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in GRADED]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "run.ipynb")
    calls, losses = grade(tmp_path / "run.ipynb").checks
    assert (calls.status, losses.status) == ("passed", "failed"), "each rank has the losses of its own data"
    assert re.match(r"the values differ: rank 0 has \[0\.\d+, ", losses.sentences[0])
