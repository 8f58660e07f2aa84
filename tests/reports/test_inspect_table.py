from dataclasses import replace

from workbench.events import UnitState
from workbench.protocol.inspect_reply import FullFacts, InspectReply, OptimizerFacts, ShardFacts, TensorFacts
from workbench.reports.inspect_table import cells_of, table_of, unit_of
from workbench.reports.pause_reports import EvalReport, InspectReport

HERE = {"dtype": "float32", "device": "cpu"}
TENSOR = TensorFacts(shape=(8, 16), num_bytes=512, norm=1.8251, mean=-0.000125, max_abs=0.5, **HERE)
SHARD = ShardFacts(dim=0, first_row=8, num_rows=8, of_rows=32, values=TENSOR)
FULL = FullFacts(state=UnitState.SHARDED, why="not needed now", values=None)
GATHERED = TensorFacts(shape=(32, 16), num_bytes=2048, norm=3.5, mean=0.0, max_abs=1.0, **HERE)
STATE = {
    "step": TensorFacts(shape=(), num_bytes=4, norm=3.0, mean=3.0, max_abs=3.0, **HERE),
    "exp_avg": replace(TENSOR, dtype="bfloat16", num_bytes=256),
}
FOUND = InspectReply(
    fqn="blocks.1.weight",
    model="model",
    unit="blocks.1",
    global_shape=(32, 16),
    trainable=True,
    shard=SHARD,
    full=FULL,
    full_grad=None,
    sharded_grad=replace(TENSOR, norm="nan"),
    optimizers=(OptimizerFacts(name="opt", type="AdamW", state=STATE),),
)
FIRST = replace(FOUND, shard=replace(SHARD, first_row=0, values=replace(TENSOR, norm=2.0)))


def rows_of(*found):
    return table_of(dict(enumerate(found))).rows


def test_a_column_a_rank_and_each_fact_a_row():
    assert rows_of(FIRST, FOUND) == [
        ("this shard", "rows", "0-7 of 32", "8-15 of 32"),
        ("", "shape", "8x16", "8x16"),
        ("", "dtype", "float32", "float32"),
        ("", "device", "cpu", "cpu"),
        ("", "bytes", "512 B", "512 B"),
        ("", "norm", "2", "1.825"),
        ("", "mean", "-0.000125", "-0.000125"),
        ("", "max abs", "0.5", "0.5"),
        ("full parameter", "state", "sharded", "sharded"),
        ("", "bytes", "0 B", "0 B"),
        ("full gradient", "state", "none", "none"),
        ("sharded gradient", "norm", "nan", "nan"),
        ("", "mean", "-0.000125", "-0.000125"),
        ("", "max abs", "0.5", "0.5"),
        ("opt (AdamW)", "step", "3", "3"),
        ("opt (AdamW) exp_avg", "dtype", "bfloat16", "bfloat16"),
        ("", "bytes", "256 B", "256 B"),
        ("", "norm", "1.825", "1.825"),
        ("", "mean", "-0.000125", "-0.000125"),
        ("", "max abs", "0.5", "0.5"),
    ]


def test_ranks_alike_share_a_column():
    table = table_of({0: FIRST, 1: FOUND, 2: FIRST, 3: FOUND})
    assert table.head == ("", "", "ranks 0, 2", "ranks 1, 3")
    assert len(table.rows[0]) == 4


def test_a_rank_that_has_more_than_the_others():
    full = FullFacts(state=UnitState.UNSHARDED, why="its forward runs", values=GATHERED)
    rows = rows_of(FIRST, replace(FOUND, full=full, full_grad=TENSOR))
    assert ("full parameter", "state", "sharded", "unsharded") in rows
    assert ("", "shape", "", "32x16") in rows
    assert rows[rows.index(("", "shape", "", "32x16")) + 1] == ("", "bytes", "0 B", "2.00 KiB")
    assert ("full gradient", "state", "none", "") in rows
    assert ("", "norm", "", "1.825") in rows
    assert ("", "mean", "", "-0.000125") in rows


def test_other_states():
    nothing = replace(TENSOR, shape=(0, 16), num_bytes=0, norm=0.0, mean=None, max_abs=None)
    empty = replace(SHARD, num_rows=0, values=nothing)
    other = cells_of(replace(FOUND, shard=empty, optimizers=(OptimizerFacts(name="opt", type="SGD", state={}),)))
    assert other["this shard", "rows"] == "none of 32"
    assert other["this shard", "mean"] == ""
    assert other["opt (SGD)", "state"] == "none yet"
    assert cells_of(replace(FOUND, shard=replace(SHARD, dim=1)))["this shard", "rows"] == "8-15 of 32 along dim 1"
    flat = cells_of(replace(FOUND, shard=replace(SHARD, dim=None)))
    assert flat["this shard", "elements"] == "8-15 of 32"
    assert ("this shard", "rows") not in flat
    assert unit_of(FOUND) == "blocks.1 of model; 32x16 in all"
    assert unit_of(replace(FOUND, trainable=False, global_shape=(), model="", unit="(root)")) == (
        "(root) of a model; a scalar in all, not trained"
    )


def test_a_device_is_shown_if_it_differs_from_the_shards():
    full = FullFacts(state=UnitState.UNSHARDED, why="its forward runs", values=replace(GATHERED, device="cuda:0"))
    rows = rows_of(replace(FOUND, full=full))
    assert [row for row in rows if row[1] == "device"] == [("", "device", "cpu"), ("", "device", "cuda:0")]


def test_the_report_is_a_table_with_the_reasons_above_it():
    evil = "<img src=x>"
    full = FullFacts(state=UnitState.UNSHARDED, why="its forward runs", values=replace(GATHERED, dtype=evil))
    report = InspectReport(fqn=evil, by_rank={0: FIRST, 1: replace(FOUND, full=full)}, not_queried=(2, 3))
    lines = str(report).splitlines()
    assert lines[0] == f"{evil} on ranks 0-1"
    assert lines[1] == "  unit            blocks.1 of model; 32x16 in all"
    assert lines[2] == "  full parameter  not needed now on rank 0; its forward runs on rank 1"
    assert lines[3] == "  not queried     ranks 2-3: not held in the gate, see %fsdp where"
    assert lines[4].split() == ["rank", "0", "rank", "1"]
    assert lines[5].split() == ["this", "shard", "rows", "0-7", "of", "32", "8-15", "of", "32"]
    page = report._repr_html_()
    assert page.count("&lt;img src=x&gt;") == 2
    assert "<img" not in page
    assert page.count("<th ") == 4
    assert report._repr_mimebundle_() == {"text/plain": str(report), "text/html": page}


def test_an_evaluation_names_ranks_that_were_not_queried():
    report = EvalReport(expr="x", texts={1: "3"}, not_queried=(0,))
    assert str(report) == "x = 3   (rank 1)\n  not queried  rank 0: not held in the gate, see %fsdp where"
