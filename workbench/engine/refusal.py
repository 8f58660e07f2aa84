"""The sentence with which a parameter of either API refuses to compute while it is sharded."""

from __future__ import annotations


def is_sharded(fqn: str, call: str, within: str) -> str:
    """Say that ``fqn`` is sharded, what to ``call`` instead, or ``within`` what to compute."""
    return f"parameter {fqn!r} is sharded; call {call}, or compute {within}"
