"""Every instrument on a model of every engine: it works, or says in one sentence why it cannot."""

import pytest

from tests.helpers.booted_ranks import run
from tests.helpers.engine_contract import ENGINES, INSTRUMENTS, LIMITS, MODELS, ON_MESHES, answers


def check(world_size, engines, models):
    for found in run(world_size, answers, engines, list(models), timeout_s=300):
        assert len(found) == len(engines) * len(models) * len(INSTRUMENTS)
        limits = {(e, m, i): LIMITS.get((i, e), LIMITS.get((i, e, m), "")) for e, m, i in found}
        assert {a: said for a, said in found.items() if limits[a] not in said or bool(said) != bool(limits[a])} == {}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_instrument_works_or_says_why_not(engine):
    check(2, [engine], MODELS)


SPLIT = pytest.param("split by tensor parallelism", marks=pytest.mark.thorough)


@pytest.mark.parametrize("model", ["on copies", SPLIT])
def test_every_instrument_works_on_a_mesh_of_two_dimensions(model):
    check(4, ON_MESHES[model], [model])
