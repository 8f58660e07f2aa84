"""Widgets without a browser."""

import pytest


@pytest.fixture
def kept():
    """Records a widget's messages in its ``sent``, and closes it after the test."""
    found = []

    def keep(widget):
        widget.sent = []
        widget.send = lambda content, buffers=None: widget.sent.append((content, buffers))
        found.append(widget)
        return widget

    yield keep
    for widget in found:
        widget.close()
