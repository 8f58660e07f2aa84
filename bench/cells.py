"""An empty cell on all ranks, as ``%%fsdp`` and as ``%%px``: in one IPython shell, on the same engines, alternating.

A pause separates the cells, as users do not run two within a few milliseconds: neither pays for work that the other
leaves behind.
"""

import time
from pathlib import Path
from typing import Any

import ipyparallel
from IPython.core.interactiveshell import InteractiveShell

from bench.stats import spread
from tests.helpers.ipython_shell import ipython_shell
from workbench.cluster import Cluster
from workbench.magics import register, unregister
from workbench.workbench import Workbench

Tree = dict[str, Any]
FSDP, PX = "%%fsdp\npass", "%%px\npass"
WARM_UP, PAUSE_S = 5, 0.05


class ReachedCluster(Cluster):
    """A cluster with the path of its controller's connection file."""

    @property
    def connection_file(self) -> Path:
        """Path of the controller's connection file for clients."""
        return self._provider._root / "profile" / "security" / "ipcontroller-client.json"


def measure_cells(num_ranks: int, num_times: int) -> Tree:
    """Return the milliseconds of both, and the ratio of their medians."""
    made: list[ReachedCluster] = []

    def factory(*args: Any, **settings: Any) -> ReachedCluster:
        made.append(ReachedCluster(*args, **settings))
        return made[-1]

    with ipython_shell() as shell:
        register(shell, lambda *args, **settings: Workbench(*args, cluster_factory=factory, **settings))
        try:
            _run(shell, f"%fsdp start -n {num_ranks} --device cpu")
            with ipyparallel.Client(str(made[0].connection_file)) as client:
                view = client[:]
                view.block = True
                view.activate()
                times_ms = _in_turns(shell, num_times)
        finally:
            unregister(shell)
    fsdp, px = (spread(times_ms[code]) for code in (FSDP, PX))
    return {"fsdp_ms": fsdp.as_dict(), "px_ms": px.as_dict(), "to_px": fsdp.median / px.median}


def _in_turns(shell: InteractiveShell, num_times: int) -> dict[str, list[float]]:
    times_ms: dict[str, list[float]] = {FSDP: [], PX: []}
    for number in range(WARM_UP + num_times):
        for code in (FSDP, PX) if number % 2 else (PX, FSDP):
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            _run(shell, code)
            times_ms[code].append((time.perf_counter() - begin) * 1e3)
    return {code: found[WARM_UP:] for code, found in times_ms.items()}


def _run(shell: InteractiveShell, code: str) -> None:
    shell.run_cell(code, store_history=True).raise_error()
