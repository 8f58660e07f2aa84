"""The names that a script imports, and how cells keep theirs."""

from workbench.script.cell_code import cell_code
from workbench.script.script_names import ScriptNames


def names(*cells, engine="workbench"):
    return ScriptNames([cell_code(cell) for cell in cells], engine)


def test_imports_are_grouped_and_sorted():
    found = names()
    for name in ("torch", "unwrap", "fully_shard", "os", "dist", "fmean", "MixedPrecisionPolicy"):
        assert found.imported(name) == name
    assert found.import_lines() == [
        "import os",
        "from statistics import fmean",
        "",
        "import torch",
        "import torch.distributed as dist",
        "from workbench.engine import MixedPrecisionPolicy, fully_shard",
        "from workbench.engine.classic import unwrap",
    ]


def test_each_engine_has_names_of_its_own():
    found = names(engine="torch")
    found.imported("fully_shard")
    assert found.import_lines() == ["from torch.distributed.fsdp import fully_shard"]


def test_a_name_that_a_cell_binds_otherwise_gets_another():
    found = names("from torch.distributed.fsdp import fully_shard\ndist = 3", "import torch")
    assert found.imported("fully_shard") == "fully_shard_"
    assert found.imported("dist") == "dist_"
    assert found.imported("torch") == "torch"
    assert found.import_lines() == [
        "import torch",
        "import torch.distributed as dist_",
        "from workbench.engine import fully_shard as fully_shard_",
    ]
    assert found.repeated() == {"torch"}


def test_the_same_import_in_a_cell_is_the_same_name():
    found = names("from workbench.engine import fully_shard")
    assert found.imported("fully_shard") == "fully_shard"
    assert names("from workbench.engine import fully_shard\nfully_shard = 1").imported("fully_shard") == "fully_shard_"


def test_own_names_are_free():
    found = names("module = module_ = 1")
    assert (found.own("module"), found.own("model"), found.own("filter")) == ("module__", "model", "filter_")


def test_long_imports_are_broken():
    found = names()
    for name in ("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"):
        found.imported(name)
    assert found.import_lines()[0].splitlines()[:2] == ["from workbench.engine import (", "    CPUOffloadPolicy,"]
