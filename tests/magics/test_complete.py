import pytest

from workbench.magics.complete import candidates
from workbench.magics.words import WORDS

POLICY_FLAGS = ["--help", "--wrap", "--mesh", "--reshard-after-forward", "--mp", "--prefetch"]
SHARD_FLAGS = [*POLICY_FLAGS, "--ignore", "--no-offload", "--offload"]
RESHARD_FLAGS = [*POLICY_FLAGS, "--no-offload", "--offload"]
NAMES = {"modules": ["model", "encoder"], "variables": ["train_step", "model"], "units": ["blocks.0", "(root)"]}


def names(kind):
    return NAMES[kind]


def refuse(kind):
    raise AssertionError(f"asked the ranks for {kind}")


@pytest.mark.parametrize(
    ("before", "symbol", "expected"),
    [
        ("%fsdp ", "", list(WORDS)),
        ("%fsdp unshard e", "e", ["encoder"]),
        ("%fsdp verify ", "", ["model", "encoder", "--help", "--fn"]),
        ("%fsdp shard --wrap Block ", "", ["model", "encoder", *SHARD_FLAGS]),
        ("%fsdp shard model ", "", SHARD_FLAGS),
        ("%fsdp shard model --o", "--o", ["--offload"]),
        ("%fsdp reshard --no-offload ", "", ["model", "encoder", *RESHARD_FLAGS]),
        ("%fsdp shard model --reshard-after-forward ", "", ["auto", "true", "false"]),
        ("%fsdp reshard model --mp=f", "f", ["fp16", "fp32", "fp64"]),
        ("%fsdp step --fn=t", "t", ["train_step"]),
        ("%fsdp layout --unit b", "b", ["blocks.0"]),
    ],
)
def test_candidates(before, symbol, expected):
    assert candidates(before, symbol, names) == expected


@pytest.mark.parametrize(
    "line", ["%fsdp ", "%fsdp sh", "%fsdp shard --", "%fsdp shard m --mesh 2", "%fsdp start -n 4", ""]
)
def test_ranks_are_asked_only_for_names(line):
    symbol = line.rpartition(" ")[2]
    assert isinstance(candidates(line, symbol, refuse), list)
