import pytest

from tests.helpers.trace_strategies import example_trace
from workbench.protocol.breakpoints import EVENTS, parse_event
from workbench.reports.until_text import MAX_CAME, came
from workbench.trace.columns import Trace

TRACE = example_trace(num_ranks=2, num_units=3, steps=2)
UNITS = [unit.name for unit in TRACE.header.units]


@pytest.mark.parametrize("asked", ["all_gather:blocks.9", "all_gather.end:blocks.9", "offload", "optimizer.end"])
def test_occurred_events_are_listed_nearest_first(asked):
    found = came(TRACE, {}, asked)
    assert 0 < len(found) <= MAX_CAME
    for event in found:
        parse_event(event, UNITS)
    assert all(
        event.partition(":")[0].endswith(".end") == (".end" in asked) for event in found if "reshard" not in event
    )
    assert found[0].startswith(asked.partition(":")[0]) or asked == "offload"
    assert {event.partition(".")[0].partition(":")[0] for event in found} <= set(EVENTS)


def test_only_events_of_the_request_count():
    ends = {rank.rank: rank.end_seq for rank in TRACE.ranks}
    assert came(TRACE, ends, "forward") == []
    assert came(Trace.empty(), {}, "forward") == []
    late = {rank.rank: rank.rows["seq"][-1] for rank in TRACE.ranks}
    assert len(came(TRACE, late, "forward")) <= 1
