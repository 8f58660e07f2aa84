"""Rows survive the wire format unchanged, and are smaller in it."""

import pytest
from hypothesis import given

from tests.helpers.trace_strategies import any_packed_rows, example_trace
from workbench.errors import TraceError
from workbench.trace.row_compression import from_wire, to_wire


@given(any_packed_rows())
def test_any_rows_come_out_as_they_went_in(packed):
    rows = b"".join(packed)
    assert from_wire(to_wire(rows)) == rows
    assert from_wire(memoryview(to_wire(rows))) == rows


def test_a_step_is_a_fifth_of_its_size():
    rows = example_trace(num_units=5).slice(step=1).rank(0).rows.tobytes()
    assert len(rows) > 5_000
    assert len(to_wire(rows)) < len(rows) / 5


@pytest.mark.parametrize("sent", [b"not deflated", to_wire(bytes(52))[:-1]])
def test_invalid_rows_are_refused(sent):
    with pytest.raises(TraceError, match="received bytes cannot be unpacked into rows"):
        from_wire(sent)
