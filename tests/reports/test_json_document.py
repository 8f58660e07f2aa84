"""Reports as JSON, and the documents around them."""

import json

import numpy as np
import pytest
import torch

from tests.helpers import json_schema
from tests.replay.test_run_positions import gather
from tests.reports.test_report import REPORTS
from tests.reports.test_run_where import DONE, RUNS, alive, quiet, report
from workbench.errors import RankDied, RankError, UsageError
from workbench.events import Kind
from workbench.reports import as_json
from workbench.reports.json_document import document, to_line


@pytest.mark.parametrize("example", REPORTS, ids=lambda example: type(example).__name__)
def test_every_report_is_a_valid_document(example):
    found = json_schema.check(document("x", example, notices=["a"]))
    assert (found["type"], found["report"]["headline"]) == (type(example).__name__, example.headline)
    assert found["notices"] == ["a"]


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (Kind.ALL_GATHER, "all_gather"),
        (True, True),
        (3, 3),
        (float("nan"), "nan"),
        (np.float64("-inf"), "-inf"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.arange(3), [0, 1, 2]),
        ({1: (Kind.STEP, None)}, {"1": ["step", None]}),
    ],
)
def test_values(value, data):
    assert as_json(value) == data
    assert type(as_json(value)) is type(data)


def test_a_tensor_is_refused():
    with pytest.raises(TypeError, match="a Tensor has no place in a JSON document"):
        as_json({"loss": torch.ones(2)})


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (UsageError("no"), {"type": "UsageError", "message": "no", "ranks": []}),
        (RankDied("gone", ranks=(1, 3)), {"type": "RankDied", "ranks": [1, 3]}),
        (
            RankError("x", rank=2, also=(3,), ename="KeyError", evalue="'a'", traceback="\x1b[1;31mT\x1b[0m", line=4),
            {"ranks": [2, 3], "ename": "KeyError", "evalue": "'a'", "traceback": "T", "line": 4},
        ),
    ],
)
def test_errors(error, facts):
    found = json_schema.check(document("step", error=error))
    assert (found["type"], found["report"]) == (None, None)
    assert facts.items() <= found["error"].items()


def test_a_document_is_one_line_of_ascii():
    line = to_line(document("x", notices=["é\n\x1b[2J\u2028"]))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["notices"] == ["é\n\x1b[2J\u2028"]


def test_where_a_recorded_run_is():
    silent = alive(1, gather(2, kind=Kind.ALL_REDUCE, unit=-1), **quiet("train.py:3 in step"))
    found = report(alive(0, gather(1, step=7)), silent, alive(2, RUNS, **DONE), groups=((0, 1, 2),), notes=("cut",))
    told = json_schema.check(document("where", found))["report"]
    assert (told["is_stalled"], told["notes"]) == (True, ["cut"])
    assert [(each["state"], each["step"], each["unit"]) for each in told["ranks"]] == [
        *[("waits", 7, "blocks.2"), ("waits", 0, None), ("ended", 7, "blocks.2")]
    ]
    assert told["ranks"][0]["pending"] == {
        "kind": "all_gather",
        "unit": "blocks.2",
        "group": "group 0",
        "number": 4,
        "absent": [2],
        "others": {"1": "all_reduce"},
        "unknown": [],
    }
    assert told["ranks"][1]["stack"] == ["train.py:3 in step"]
    assert told["ranks"][2]["pending"] is None
    assert isinstance(told["ranks"][0]["for_ns"], int)
