"""Marks that several files of tests need."""

import pytest


def unless(why_not: str) -> pytest.MarkDecorator:
    """Leave a test out for a reason that ``why_not`` says; empty: there is none, and it runs."""
    return pytest.mark.skipif(bool(why_not), reason=why_not or "it runs")
