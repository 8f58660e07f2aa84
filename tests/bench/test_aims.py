"""The issue's figures, and when they are met."""

import pytest

from tests.bench.aims import AIMS, RESERVED, SHARDING, STEP, Aim, Verdict, verdicts
from tests.bench.cases import CASES, OF_OURS, OURS, OURS_GLOO, num_params


def result(cases=(), **sharding):
    return {"cases": dict(cases), "sharding": sharding}


def measured(found, what, implementation=OURS):
    (verdict,) = (v for v in verdicts(found) if (v.aim.what, v.aim.implementation) == (what, implementation))
    return verdict.measured


def test_the_table_is_the_issues():
    asked = {
        case: tuple(a.at_most for i in OF_OURS for a in AIMS if (a.what, a.case, a.implementation) == (STEP, case, i))
        for case in CASES
    }
    assert asked == {
        "19.2M": (0.87, 0.78),
        "3.3M": (0.84, 0.74),
        "19.2M-4ranks": (0.88, 0.82),
        "19.2M-bf16": (0.92, 0.85),
    }
    assert {a.implementation for a in AIMS if not a.is_must} == {OURS}
    assert all(a.is_must for a in AIMS if a.implementation == OURS_GLOO or a.what != STEP)


def test_the_models_are_the_issues():
    sizes = {name: (round(num_params(case.config) / 1e6, 1), case.num_ranks) for name, case in CASES.items()}
    assert sizes == {"19.2M": (19.2, 2), "3.3M": (3.3, 2), "19.2M-4ranks": (19.2, 4), "19.2M-bf16": (19.2, 2)}
    assert [name for name, case in CASES.items() if case.is_bf16] == ["19.2M-bf16"]


@pytest.mark.parametrize(("ratio", "word"), [(None, "not measured"), (0.9, "met"), (0.8999, "met"), (0.9001, "MISSED")])
def test_an_aim_is_met_up_to_its_figure(ratio, word):
    verdict = Verdict(Aim(STEP, "3.3M", OURS, 0.9), ratio)
    assert (verdict.word, verdict.is_met) == (word, word == "met")
    assert verdict.as_dict()["verdict"] == word


def test_a_step_is_judged_against_the_run_in_which_torch_was_faster():
    steps = {OURS: {"to_torch": 0.7, "to_torch_only": 0.8}, OURS_GLOO: {"to_torch": 0.7}}
    found = result({"3.3M": {"steps": steps}})
    assert measured(found, STEP) == 0.8
    assert measured(found, STEP, OURS_GLOO) == 0.7


def test_what_failed_is_not_measured():
    found = result({"3.3M": {"steps": {}, "bytes": {}, "failed": {}}}, failed={})
    assert {v.word for v in verdicts(found)} == {"not measured"}


def test_reserved_bytes_and_sharding_are_judged():
    found = result({"3.3M": {"bytes": {OURS: {"reserved_to_torch": 0.9}}}}, to_torch=0.5)
    assert (measured(found, RESERVED), measured(found, SHARDING)) == (0.9, 0.5)


def test_only_chosen_cases_are_judged():
    assert [v.aim.what for v in verdicts(result())] == [SHARDING]
    assert {v.aim.case for v in verdicts(result({"3.3M": {}}))} == {"3.3M", ""}
