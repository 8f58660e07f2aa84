"""The machines that plans know."""

import pytest

from workbench.base.machines import DEFAULT, MACHINES, TF32, machine
from workbench.errors import UsageError


def test_each_machine_has_its_own_name_and_figures_that_go_together():
    for name, known in MACHINES.items():
        assert machine(name) is known
        assert str(known.memory_bytes // 2**30) in name
        assert known.flops["bfloat16"] > known.peak(TF32) > known.peak("float32") == known.peak("float64")
        assert known.memory_rate > known.link_rate > known.network_rate
    assert DEFAULT in MACHINES


def test_another_name_is_refused_with_the_nearest_one():
    with pytest.raises(UsageError, match="no figures of a device 'a100-80g', did you mean 'a100-80gb'"):
        machine("a100-80g")
