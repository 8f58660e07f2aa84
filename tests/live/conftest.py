"""Widgets without a browser, as in tests/widgets."""

from tests.widgets.conftest import kept

__all__ = ["kept"]
