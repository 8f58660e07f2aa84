"""Every instrument on a model of every engine: it works, or says in one sentence why it cannot."""

import pytest

from tests.helpers.booted_ranks import run
from tests.helpers.engine_contract import ENGINES, INSTRUMENTS, LIMITS, MODELS, answers


@pytest.mark.parametrize("engine", ENGINES)
def test_every_instrument_works_or_says_why_not(engine):
    for found in run(2, answers, engine, list(MODELS), timeout_s=300):
        assert len(found) == len(MODELS) * len(INSTRUMENTS)
        limits = {asked: LIMITS.get((asked[1], engine), "") for asked in found}
        assert {a: said for a, said in found.items() if limits[a] not in said or bool(said) != bool(limits[a])} == {}
