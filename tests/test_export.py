import dataclasses
import json

import pytest

from tests.helpers.trace_strategies import example_trace
from tests.views.test_contract import EVIL, same_with_names
from workbench.errors import UsageError
from workbench.export import export
from workbench.session.program import CompletedCell, Program
from workbench.trace.columns import Trace
from workbench.trace.schema import ClockReading, HostClock


def test_names_in_perfettos_file_are_strings_of_it(tmp_path):
    export(same_with_names(example_trace(num_ranks=1, steps=1), EVIL), tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def test_the_perfetto_file_has_the_clock_errors(tmp_path):
    found = example_trace(num_ranks=3, steps=1)
    begin_ns = min(int(rank_trace.rows["t_ns"][0]) for rank_trace in found.ranks)
    end_ns = max(int(rank_trace.rows["t_ns"][-1]) for rank_trace in found.ranks)
    readings = tuple(ClockReading(t_ns=t_ns, offset_ns=7, error_ns=400_000) for t_ns in (begin_ns, end_ns + 1))
    clock = HostClock(ranks=(1, 2), readings=readings)
    export(Trace(dataclasses.replace(found.header, clocks=(clock,)), found.ranks), tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.endswith(", times within 400 µs of rank 0's)") for name in names] == [False, True, True]


def of_one_cell(code="x = 1"):
    return Program(ranks_per_host=(2,), entries=(CompletedCell(code=code),))


def test_a_script_replaces_only_scripts(tmp_path):
    path = tmp_path / "train.py"
    trace = example_trace(num_ranks=1, steps=1)
    report = export(trace, path, program=of_one_cell())
    assert "torchrun --nproc-per-node 2 train.py" in str(report)
    export(trace, path, program=of_one_cell("y = 2"))
    assert "\ny = 2\n" in path.read_text()
    path.write_text("import torch\n")
    with pytest.raises(UsageError, match=r"train.py was not written by %fsdp export and is not replaced"):
        export(trace, path, program=of_one_cell())
    assert path.read_text() == "import torch\n"


@pytest.mark.parametrize("suffix", [".trace", ".json", ".html"])
def test_a_file_replaces_only_one_of_an_export(tmp_path, suffix):
    path, trace = tmp_path / f"data{suffix}", example_trace(num_ranks=1, steps=1)
    path.write_text("")
    for _ in range(2):
        export(trace, path)
    whole = path.read_bytes()
    for other in (b"PK\x03\x04 of another program", b'{"traceEvents": []}', b"<!DOCTYPE html>\n<p>My notes"):
        path.write_bytes(other)
        with pytest.raises(UsageError, match=f"data{suffix} was not written by %fsdp export and is not replaced"):
            export(trace, path)
        assert path.read_bytes() == other
    path.write_bytes(whole)
    export(trace, path)


def test_notes_of_a_script_are_reported(tmp_path):
    report = export(Trace.empty(), tmp_path / "a.py", program=of_one_cell("!ls"))
    assert "note  Not Python, and so comments in the script: !ls." in str(report)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("a.py", {"steps": "3"}, "a script has everything that the ranks have done: leave out --steps"),
        ("a.trace", {"engine": "torch"}, r"--engine is for a script, such as train.py; a.trace is about the engine"),
        ("a.py", {"engine": "deepspeed"}, "engine is workbench or torch, not 'deepspeed'"),
        ("a.xyz", {}, r"\.py \(a script for torchrun\)"),
        ("a.py", {"program": Program()}, "nothing to write"),
        ("a.py", {"program": None}, r"has no known format; .* without a network\)$"),
        ("no/a.py", {}, "there is no folder"),
    ],
)
def test_what_is_no_script_is_refused(tmp_path, name, options, reason):
    with pytest.raises(UsageError, match=reason):
        export(example_trace(num_ranks=1, steps=1), tmp_path / name, **{"program": of_one_cell(), **options})
    assert list(tmp_path.iterdir()) == []
