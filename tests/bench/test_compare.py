"""The schedule of runs, the evaluation of samples, and one whole comparison of a tiny model."""

import json
import subprocess
import sys

import pytest

from bench import __main__ as bench
from bench import processes, report
from bench.aims import Aim, Verdict
from bench.cases import ALONE, IMPLEMENTATIONS, OURS, TORCH
from bench.compare import Effort, Runs, _ratio, against_second_run, compare, joined, row, with_ratios
from bench.processes import RankFailure, on_ranks
from bench.stats import rotated
from bench.training import Sample
from tests.bench.test_parts import TINY

LITTLE = Effort(rounds=1, steps=1, pairs=1)


def test_every_round_begins_with_another_one():
    assert [rotated("abc", n) for n in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_starts_are_joined_per_rank():
    assert joined([[[1], [2]], [[3], [4]]]) == [[1, 3], [2, 4]]


def test_a_step_takes_as_long_as_its_slowest_rank():
    first, second = Sample(3_000_000, 2_000_000, 1_000_000), Sample(5_000_000, 4_000_000, 0)
    found = row([[[first, first], [second, first]]])
    assert found["wall_ms"]["median"] == 4
    assert found["cpu_ms"]["median"] == 2.5
    assert found["optimizer_ms"]["median"] == 0.75
    assert found["wall_ms"]["count"] == 2


def rows(**medians):
    return with_ratios({name: {"wall_ms": {"median": value}} for name, value in medians.items()})


def test_ratios_are_to_compute_alone_to_ddp_and_to_torchs():
    ratios = {"to_alone": 1.5, "to_ddp": 1.2, "to_torch": 0.75}
    assert rows(alone=4, ddp=5, torch=8, ours=6)["ours"] == {"wall_ms": {"median": 6}, **ratios}
    assert rows(torch=8)["torch"] == {"wall_ms": {"median": 8}, "to_torch": 1}


def test_a_machine_twice_as_fast_in_the_second_run_changes_nothing():
    first = rows(alone=4, torch=8, ours=6)
    against_second_run(first, rows(alone=2, torch=4))
    assert first["ours"]["to_torch_only"] == first["ours"]["to_torch"]
    against_second_run(first, {})
    assert first["ours"]["to_torch_only"] == 0.75


def raises_on_the_second_rank():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("no such luck")
    dist.barrier()


def test_a_failing_rank_ends_its_peers_and_is_named():
    with pytest.raises(RankFailure, match=r"(?s)^rank 1: .*ValueError: no such luck$"):
        on_ranks(2, raises_on_the_second_rank)


def test_of_simultaneous_failures_the_first_is_named(monkeypatch):
    monkeypatch.setattr(processes, "wait", lambda pipes, _: [pipe for pipe in pipes if pipe.poll(60)])
    with pytest.raises(RankFailure, match=r"(?s)^rank 1: .*ValueError: no such luck$"):
        on_ranks(2, raises_on_the_second_rank)


def test_failed_work_is_not_restarted():
    runs = Runs()
    assert runs.on_ranks("steps", 1, int, "x") == []
    assert runs.failed["steps"].strip().endswith("ValueError: invalid literal for int() with base 10: 'x'")
    assert runs.on_ranks("steps", 1, int, "3") == []
    assert runs.on_ranks("others", 1, int, "3") == [3]
    assert list(report.failures({"failed": runs.failed})) == [
        "  FAILED steps: ValueError: invalid literal for int() with base 10: 'x'"
    ]


@pytest.mark.thorough
def test_a_comparison_measures_everything_of_everyone(monkeypatch):
    monkeypatch.setattr("bench.training.WARM_UP", 1)
    monkeypatch.setattr("bench.memory.WARM_UP", 1)
    found = compare(TINY, LITTLE, with_parts=True)
    assert found["failed"] == {}
    assert set(found["steps"]) == set(IMPLEMENTATIONS)
    assert set(found["steps_torch_only"]) == {ALONE, TORCH}
    assert set(found["bytes"]) == {TORCH, *found["parts"]}
    assert found["bytes"][OURS]["peak"] > found["bytes"][OURS]["classes_peak"] > 0
    assert json.loads(json.dumps(found)) == found
    lines = [*report.steps(found), *report.parts(found), *report.memory(found)]
    assert all(len(line) <= 120 for line in lines)


def test_a_table_has_columns():
    assert list(report.table(("", "ms"), [("a", "1.0"), ("long", "12.0")])) == [
        "           ms",
        "  a       1.0",
        "  long   12.0",
    ]
    assert [report.number(n, 2) for n in (None, 0.125, 3)] == ["-", "0.12", "3.00"]


@pytest.mark.parametrize(
    ("is_check", "missed", "failed", "status"),
    [
        (True, None, {}, 0),
        (True, "must", {}, 1),
        (True, "aim", {}, 0),
        (False, "must", {}, 0),
        (False, None, {"steps of ours": "Error"}, 1),
        (True, None, {"steps of ours": "Error"}, 1),
    ],
)
def test_the_exit_status(is_check, missed, failed, status):
    result = {"effort": {"steps": 3}, "live": {"cells": {"failed": failed}}, "sharding": {"failed": {}}}
    aim = Aim(what="a ratio", part=(), values=(), limit=1.0, is_must=missed != "aim")
    found = [Verdict(aim, 2.0 if missed else 0.5)]
    assert bench._status(result, found, is_check=is_check) == status


@pytest.mark.thorough
def test_the_forking_process_does_not_load_the_engine():
    program = "import sys, bench.__main__; sys.exit('workbench.engine' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_figure_of_the_wrapper_is_compared_with_another_one():
    measured = {"classic": 3.0, "ours": 4.0}
    assert _ratio("to_fully_shard", measured, "ours") == {"to_fully_shard": 0.75}
    assert _ratio("to_torch", measured, "classic torch") == {}
