"""What a rank measures: operations by name and size, and the line of a collective's times."""

import pytest
import torch

from tests.helpers.forked_ranks import on_one_rank
from workbench.base.codec import decode, encode
from workbench.base.machines import OpTime
from workbench.events import Kind
from workbench.plan.calibration_rank import TimedOps, _line


@on_one_rank
def test_operations_are_timed_by_name_dtype_and_size():
    x = torch.ones(4, 4)
    with TimedOps(x.device) as timed:
        x.t() @ x
        torch.relu(x).add_(x)
        x.to(torch.bfloat16)
    assert set(timed.times) == {
        ("aten.mm", "float32", 2 * 4**3),
        ("aten.relu", "float32", 2 * 64),
        ("aten.add_", "float32", 3 * 64 - 64),
        ("aten._to_copy", "float32", 64 + 32),
    }
    assert timed.num_ops == 4
    received = decode(tuple[OpTime, ...], encode(timed.op_times()), "ops")
    assert len(received) == 4
    assert all(each.time_ns > 0 for each in received)


@pytest.mark.parametrize(
    ("points", "latency_ns", "bytes_per_s"),
    [([(0, 50.0), (100, 99.0), (1000, 1050.0)], 50, 1e9), ([(10, 5.0), (110, 205.0)], 0, 5e8)],
)
def test_a_line_goes_through_the_smallest_and_the_largest(points, latency_ns, bytes_per_s):
    found = _line(Kind.ALL_GATHER, 2, points)
    assert (found.kind, found.num_ranks) == ("all_gather", 2)
    assert (found.latency_ns, found.bytes_per_s) == pytest.approx((latency_ns, bytes_per_s))
