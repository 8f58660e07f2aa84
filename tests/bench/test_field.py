"""How the exam on field scripts judges, by answers made by hand; and three scripts, run for real."""

import sys
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest

from bench.field.__main__ import Result, examine, interpreter, page, passes, summary, torch_of, worst
from bench.field.cases import CASES, Kind, Moment
from bench.field.judge import RULES, Outcome, judge
from bench.field.run import Settings

NEW = (9, 0)
BY_NAME = {case.name: case for case in CASES}
LEFT_OUT = BY_NAME["subgroup_left_out"]  # rank 3 of 4 goes past an all_reduce
UNEVEN = BY_NAME["round_robin_files"]  # rank 0 makes more steps: either side may be named
LATE = BY_NAME["sound_slow_rank"]  # rank 2 is slower than the others
RECIPE = BY_NAME["sound_recipe_dropout"]  # for verify
DEAD = BY_NAME["bad_label"]  # rank 2 raises


RESULT = Result(
    case="one", kind="hang", moment="standing", cause="RAISED", outcome="right", said="", why="", text="", seconds=1.0
)


def said(rule, verdict, *evidence, **more):
    return {"report": {"cause": {"rule": rule, "verdict": verdict, "evidence": evidence, "fix": ""}, **more}}


HERE = f"rank 3 is in /x/{LEFT_OUT.script.name}:{LEFT_OUT.lines[0]} in sync"


@pytest.mark.parametrize(
    ("case", "document", "outcome"),
    [
        (LEFT_OUT, said("other-collective", "rank 3 left out all_reduce, which rank 2 issued", HERE), Outcome.RIGHT),
        (LEFT_OUT, said("other-collective", "rank 3 left out all_reduce, which rank 2 issued"), Outcome.PARTLY),
        (LEFT_OUT, said("other-collective", "rank 2 issued all_reduce, which rank 3 left out", HERE), Outcome.PARTLY),
        (LEFT_OUT, said("other-collective", "ranks 0-1 left out all_reduce", HERE), Outcome.WRONG_CULPRIT),
        (LEFT_OUT, said("late-rank", "rank 3 does not come", HERE), Outcome.WRONG),
        (LEFT_OUT, said("wrong-order", "rank 3 is the other way round", HERE), Outcome.PARTLY),
        (LEFT_OUT, said("a-rule-of-tomorrow", "rank 3 is odd", HERE), Outcome.WRONG),
        (LEFT_OUT, {"report": {"headline": "3 ranks wait"}}, Outcome.ABSTAINED),
        (LEFT_OUT, None, Outcome.ABSTAINED),
        (replace(LEFT_OUT, abstain="a reason"), None, Outcome.ALLOWED),
        (replace(LEFT_OUT, min_torch=(9, 1)), None, Outcome.ALLOWED),
        (UNEVEN, said("uneven-batches", f"rank 0 goes on, {UNEVEN.script.name}:{UNEVEN.lines[0]}"), Outcome.RIGHT),
        (UNEVEN, said("uneven-batches", f"ranks 1-2 ended, {UNEVEN.script.name}:{UNEVEN.lines[0]}"), Outcome.RIGHT),
        (UNEVEN, said("uneven-batches", "rank 1 has ended"), Outcome.WRONG_CULPRIT),
        (DEAD, said("dead-rank", "ranks 0-2 are gone"), Outcome.PARTLY),
        (DEAD, said("dead-rank", "rank 0 is gone"), Outcome.WRONG_CULPRIT),
        (LATE, said("late-rank", "rank 2 does not come"), Outcome.RIGHT),
        (LATE, said("late-rank", "rank 1 does not come"), Outcome.FALSE_ALARM),
        (LATE, said("dead-rank", "rank 2 is gone"), Outcome.FALSE_ALARM),
        (LATE, {"report": {"is_stalled": False}}, Outcome.RIGHT),
        (LATE, {"report": {"faults": [{"rule": "tiny-units", "verdict": "units are tiny"}]}}, Outcome.RIGHT),
        (RECIPE, {"report": {"ok": False}}, Outcome.FALSE_ALARM),
        (RECIPE, said("different-data", "the two steps got different data", ok=False), Outcome.ABSTAINED),
    ],
)
def test_an_answer_is_judged_by_cause_rank_words_and_line(case, document, outcome):
    assert judge(case, Moment.RUNNING if case.kind is Kind.SOUND else Moment.STANDING, document, NEW).outcome == outcome


def test_the_right_fault_behind_another_is_partly_right():
    rules = ("never-written", "optimizer-before-shard")
    document = {"report": {"faults": [{"rule": rule, "verdict": "the optimizer"} for rule in rules]}}
    assert judge(BY_NAME["optimizer_too_early"], Moment.CHECKED, document, NEW).outcome == Outcome.PARTLY


def test_every_verdict_can_be_got_and_has_its_script_and_line():
    sayable = {cause for causes in RULES.values() for cause in causes}
    assert {case.script.stem for case in CASES} == {path.stem for path in CASES[0].script.parent.glob("*.py")} - {
        "common"
    }
    for case in CASES:
        assert (case.kind is Kind.SOUND) == (not case.causes), case.name
        assert not case.line or case.lines, case.name
        assert all(ranks <= frozenset(range(case.ranks)) for ranks in case.culprits), case.name
    assert {cause for case in CASES for cause in case.causes} <= sayable


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "moment", "outcomes"),
    [
        ("halo_recv_first", Moment.STANDING, (Outcome.RIGHT, Outcome.PARTLY, Outcome.ABSTAINED)),
        ("optimizer_too_early", Moment.CHECKED, (Outcome.RIGHT,)),
        ("sound_no_sync", Moment.ENDED, (Outcome.RIGHT,)),
    ],
)
def test_a_script_is_run_and_judged(name, moment, outcomes):
    found = examine(BY_NAME[name], [moment], Settings(), torch_of(sys.executable))
    assert [each.moment for each in found] == [moment]
    assert found[0].outcome in outcomes, found[0].text
    assert name in page(found)
    assert worst(found) == found


def test_one_wrong_culprit_fails_the_exam():
    good = [replace(RESULT, case=f"case {number}") for number in range(40)]
    assert passes(good)
    assert passes([*good, replace(RESULT, outcome=Outcome.PARTLY)])
    assert not passes([*good, replace(RESULT, outcome=Outcome.WRONG_CULPRIT)])
    assert not passes([replace(RESULT, outcome=Outcome.ABSTAINED), *good[:4]])
    assert summary([RESULT, replace(RESULT, outcome=Outcome.WRONG)]) == "1 of 2 answers are right (1 right, 1 wrong)"


def test_an_interpreter_is_found_from_other_folders_and_a_wrong_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert interpreter("./python") == f"{tmp_path}/python"
    with pytest.raises(ArgumentTypeError, match="no such interpreter: nothing/python"):
        interpreter("nothing/python")
