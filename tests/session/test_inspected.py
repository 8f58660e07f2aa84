from workbench.session.inspected import facts_of

TENSOR = {"present": True, "bytes": 512, "norm": 1.8251, "shape": [8, 16], "dtype": "float32"}
NONE = {"present": False, "bytes": 0, "norm": None, "shape": None, "dtype": None}
ROWS = {"dim": 0, "first_row": 8, "last_row": 16, "num_rows": 8, "of_rows": 32, "device": "cpu"}
FULL = {"exists": False, "why": "not needed now", "bytes": 0, "norm": None, "shape": [32, 16], "dtype": "float32"}
FOUND = {
    "unit": "blocks.1",
    "model": "model",
    "global_shape": [32, 16],
    "trainable": True,
    "shard": TENSOR | ROWS,
    "full": FULL,
    "full_grad": NONE,
    "sharded_grad": TENSOR | {"norm": "nan"},
    "optimizers": [{"name": "opt", "type": "AdamW", "state": [{"name": "exp_avg", **TENSOR}]}],
}


def test_a_parameter_in_words():
    assert facts_of(FOUND) == {
        "unit": "blocks.1 of model; 32x16 in all",
        "this shard": "rows 8-15 of 32: 8x16 float32, 512 B, norm 1.825, on cpu",
        "full parameter": "not in memory; not needed now",
        "full gradient": "none",
        "sharded gradient": "8x16 float32, 512 B, norm nan",
        "optimizer opt": "AdamW: exp_avg 8x16 float32, 512 B, norm 1.825",
    }


def test_other_states():
    other = facts_of(
        FOUND
        | {
            "trainable": False,
            "shard": {**TENSOR, **ROWS, "num_rows": 0},
            "full": {**FULL, "exists": True, "bytes": 2048},
            "optimizers": [{"name": "opt", "type": "SGD", "state": []}],
        }
    )
    assert other["unit"].endswith("not trained")
    assert other["this shard"] == "none of 32 rows"
    assert other["full parameter"] == "in memory, 32x16 float32, 2.00 KiB; not needed now"
    assert other["optimizer opt"] == "SGD: no state yet"
    assert facts_of({**FOUND, "shard": {**TENSOR, **ROWS, "dim": 1}})["this shard"].startswith(
        "rows 8-15 of 32 along dim 1"
    )
    assert facts_of({}) == {}
