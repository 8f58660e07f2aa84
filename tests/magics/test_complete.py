import pytest

from workbench.magics.complete import candidates
from workbench.magics.words import WORDS

NAMES = {"modules": ["model", "encoder"], "variables": ["train_step", "model"]}


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
        (
            "%fsdp shard --wrap Block ",
            "",
            ["model", "encoder", "--help", "--wrap", "--reshard-after-forward", "--ignore"],
        ),
        ("%fsdp shard model ", "", ["--help", "--wrap", "--reshard-after-forward", "--ignore"]),
        ("%fsdp step --fn=t", "t", ["train_step"]),
    ],
)
def test_candidates(before, symbol, expected):
    assert candidates(before, symbol, names) == expected


@pytest.mark.parametrize(
    "line", ["%fsdp ", "%fsdp sh", "%fsdp shard --", "%fsdp shard m --wrap B", "%fsdp start -n 4", ""]
)
def test_ranks_are_asked_only_for_names(line):
    symbol = line.rpartition(" ")[2]
    assert isinstance(candidates(line, symbol, refuse), list)
