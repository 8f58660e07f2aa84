import dataclasses
import json

from tests.helpers.trace_strategies import example_trace
from tests.views.test_contract import EVIL, same_with_names
from workbench.export import export
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
