"""The sentences with which a parameter of either API refuses to compute while it is sharded."""

from __future__ import annotations


def used_after_reshard(fqn: str, unit: str) -> str:
    """Say that the full parameter ``fqn``, kept from before ``unit`` was resharded, holds no values."""
    return (
        f"the full parameter {fqn!r} was kept from before unit {unit!r} was resharded, and holds no values since: read "
        "it from its module each time, and compute with it in the forward, or between unshard() and reshard()"
    )


def is_sharded(fqn: str, call: str, within: str) -> str:
    """Say that ``fqn`` is sharded, what to ``call`` instead, or ``within`` what to compute."""
    return f"parameter {fqn!r} is sharded; call {call}, or compute {within}"
