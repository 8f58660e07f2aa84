"""Tests share long-lived ranks."""

from collections.abc import Iterator

import pytest

from tests.helpers.forked_ranks import shared_ranks


@pytest.fixture(autouse=True)
def ranks_that_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    with shared_ranks(request):
        yield
