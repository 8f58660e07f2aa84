"""A calibration with round figures."""

from workbench.base.machines import VERSION, Calibration, CollectiveTime, HeldOutStep, OpTime

CALIBRATION = Calibration(
    version=VERSION,
    host="here",
    device="cpu",
    processor="test",
    torch="2",
    backend="gloo",
    num_ranks=4,
    cores=2,
    memory_bytes=10**9,
    flops_per_s={"float32": 1e10, "bfloat16": 2e10},
    memory_bytes_per_s=1e9,
    host_copy_bytes_per_s=2e9,
    op_ns=1000.0,
    dtensor_ns=500.0,
    unit_ns=10_000.0,
    spread_percent=3.0,
    ops=(
        OpTime(op="aten.add", dtype="float32", work=100, time_ns=50.0),
        OpTime(op="aten.add", dtype="float32", work=10_000, time_ns=5000.0),
    ),
    collectives=(
        CollectiveTime(kind="all_gather", num_ranks=2, latency_ns=100.0, bytes_per_s=1e9),
        CollectiveTime(kind="all_gather", num_ranks=4, latency_ns=600.0, bytes_per_s=5e8),
    ),
    held_out=(
        HeldOutStep(what="one", planned_ns=104e3, measured_ns=100e3),
        HeldOutStep(what="two", planned_ns=90e3, measured_ns=100e3),
    ),
)
