import pytest

from workbench.magics.command_lines import WORDS
from workbench.magics.completion import candidates

POLICY_FLAGS = ["--help", "--wrap", "--mesh", "--reshard-after-forward", "--api", "--strategy", "--mp", "--prefetch"]
SWITCHES = ["--json", "--no-offload", "--no-orig-params", "--offload", "--orig-params"]
SHARD_FLAGS = [*POLICY_FLAGS[:6], "--engine", *POLICY_FLAGS[6:], "--ignore", *SWITCHES]
RESHARD_FLAGS = [*POLICY_FLAGS, *SWITCHES]
NAMES = {
    "modules": ["model", "encoder"],
    "parts": ["model", "encoder", "model.blocks.0"],
    "variables": ["train_step", "model"],
    "units": ["blocks.0", "(root)"],
    "explained": ["peak", "step", "blocks.0"],
}


def names(kind):
    return NAMES[kind]


def refuse(kind):
    raise AssertionError(f"asked the ranks for {kind}")


@pytest.mark.parametrize(
    ("before", "symbol", "expected"),
    [
        ("%fsdp ", "", list(WORDS)),
        ("%fsdp unshard e", "e", ["encoder"]),
        ("%fsdp verify ", "", ["model", "encoder", "--help", "--fn", "--resume", "--json", "--no-repeat", "--repeat"]),
        ("%fsdp shard --wrap Block ", "", ["model", "encoder", *SHARD_FLAGS]),
        ("%fsdp shard model ", "", SHARD_FLAGS),
        ("%fsdp shard model --o", "--o", ["--offload", "--orig-params"]),
        ("%fsdp reshard --no-offload ", "", ["model", "encoder", "model.blocks.0", *RESHARD_FLAGS]),
        ("%fsdp reshard model.", "model.", ["model.blocks.0"]),
        ("%fsdp shard model --api ", "", ["fully_shard", "classic"]),
        ("%fsdp shard model --reshard-after-forward ", "", ["auto", "true", "false"]),
        ("%fsdp reshard model --mp=f", "f", ["fp16", "fp32", "fp64"]),
        ("%fsdp step --fn=t", "t", ["train_step"]),
        ("%fsdp layout --unit b", "b", ["blocks.0"]),
        ("%fsdp explain b", "b", ["blocks.0"]),
    ],
)
def test_candidates(before, symbol, expected):
    assert candidates(before, symbol, names) == expected


@pytest.mark.parametrize(
    "line", ["%fsdp ", "%fsdp sh", "%fsdp shard --", "%fsdp shard m --mesh 2", "%fsdp start -n 4", ""]
)
def test_completion_queries_ranks_only_for_names(line):
    symbol = line.rpartition(" ")[2]
    assert isinstance(candidates(line, symbol, refuse), list)
