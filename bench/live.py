"""The measurements of "Live", "Lab" and "Hosts", each in a new process: see the modules that make them."""

import statistics
from collections.abc import Callable
from typing import Any

from bench.apart import ApartFailure, call_apart
from bench.cases import RECORDED, Case
from bench.compare import Effort

Tree = dict[str, Any]
Call = Callable[..., Any]
"""As :func:`bench.apart.call_apart`."""

MAX_BROWSER_S = MAX_MANY_S = 600.0


def measured(name: str, work: Callable[[], Tree]) -> Tree:
    """Return the result of ``work``, or its failure: one failed measurement does not lose the others."""
    try:
        return {**work(), "failed": {}}
    except ApartFailure as error:
        return {"failed": {name: str(error)}}


def live(effort: Effort, call: Call = call_apart) -> dict[str, Callable[[], Tree]]:
    """Return the measurements on real clusters, by name, each to be called."""

    def watched(case: Case, num_ranks: int, viewer: str) -> Callable[[], Tree]:
        return lambda: call(
            "bench.watched:measure_watched",
            case=case.name,
            num_ranks=num_ranks,
            rounds=effort.blocks,
            block_s=effort.block_s,
            viewer=viewer,
        )

    return {
        **{f"watched {name}": watched(case, case.num_ranks, "dashboard") for name, case in RECORDED.items()},
        "panel 3.7M": watched(RECORDED["3.7M"], 8, "panel"),
        "to browser": lambda: call("bench.watched:measure_to_browser", num_ranks=8, seconds=5 * effort.block_s),
        "side door": lambda: call("bench.doors:measure_side_door", num_ranks=2, num_times=2 * effort.repeats),
        "side door of hosts": lambda: call(
            "bench.doors:measure_side_door_of_hosts", num_hosts=3, num_local=2, num_times=2 * effort.repeats
        ),
        "cells": lambda: call("bench.cells:measure_cells", num_ranks=4, num_times=effort.repeats),
        "start": lambda: _starts(effort.starts, call),
        "attach": lambda: call("bench.doors:measure_attach", num_engines=8, num_times=effort.starts),
    }


def many(effort: Effort, call: Call = call_apart) -> dict[str, Callable[[], Tree]]:
    """Return the measurements with many ranks and many units, by name, each to be called."""
    return {
        "next collective": lambda: call(
            "bench.many:measure_next",
            num_ranks=effort.many_ranks,
            num_times=3 * effort.starts,
            timeout_s=MAX_MANY_S,
        ),
        "shard": lambda: call("bench.many:measure_shard", num_units=effort.many_units, timeout_s=MAX_MANY_S),
    }


def _starts(num_times: int, call: Call) -> Tree:
    starts = [call("bench.doors:measure_start", num_ranks=4) for _ in range(num_times)]
    return {
        "median_s": statistics.median(start["seconds"] for start in starts),
        "cpu_s": statistics.median(start["cpu_s"] for start in starts),
        "all_s": [start["seconds"] for start in starts],
    }


def trace(effort: Effort, call: Call = call_apart) -> Tree:
    """Return the times of a trace of 1 M rows."""
    return call("bench.traces:measure_trace", repeats=max(3, effort.repeats // 10), num_states=effort.repeats)


def scale(effort: Effort, call: Call = call_apart) -> dict[str, Callable[[], Tree]]:
    """Return the measurements on traces of many ranks, by name, each to be called."""
    arguments = {"repeats": max(3, effort.repeats // 20), "num_states": effort.repeats}
    return {
        name: lambda name=name: call("bench.traces:measure_scale", name=name, **arguments) for name in ("wide", "long")
    }


def browser(call: Call = call_apart) -> dict[str, Callable[[], Tree]]:
    """Return the measurements in a real browser, by name, each to be called."""
    modules = {"timeline": "pixels", "pixels": "pixels", "scrub": "pixels", "panel": "panel", "soak": "soak"}
    return {
        name: lambda name=name, module=module: call(f"bench.{module}:measure_{name}", timeout_s=MAX_BROWSER_S)
        for name, module in modules.items()
    }
