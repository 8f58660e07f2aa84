"""Steps of ranks on several hosts, over links of 1 Gbit/s and 2 ms: ours and torch's, and the bytes on the links.

The hosts are network namespaces (:mod:`tests.helpers.ranks_on_hosts`), so all of them compute on this machine's cores.
"""

import statistics
from typing import Any

from bench.cases import OF_OURS, OURS, OURS_GLOO, TORCH, Case
from bench.compare import Effort, Runs, row
from bench.memory import Bytes, measure_bytes
from bench.stats import rotated
from bench.training import WARM_UP, Sample, measure
from tests.helpers import ranks_on_hosts

Tree = dict[str, Any]
IMPLEMENTATIONS = (TORCH, *OF_OURS)


def compare_hosts(case: Case, effort: Effort) -> Tree:
    """Measure one case; without network namespaces, measure nothing and return the reason."""
    why_not = ranks_on_hosts.why_not()
    if why_not:
        return {"left out": why_not, "failed": {}}
    with ranks_on_hosts.network_of(case.num_hosts) as network:
        network.cables.become(ranks_on_hosts.MEASURED_ON)
        runs = Runs(seats=network.seats(*[case.num_ranks // case.num_hosts] * case.num_hosts))
        samples: dict[str, list[list[list[Sample]]]] = {name: [] for name in IMPLEMENTATIONS}
        sent: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
        for number in range(effort.rounds):
            for name in rotated(IMPLEMENTATIONS, number):
                before = network.cables.sent()
                ranks = runs.on_ranks(f"steps of {name}", case.num_ranks, measure, case, name, effort.steps)
                samples[name].append(ranks)
                per_host = [after - b for after, b in zip(network.cables.sent(), before, strict=True)]
                sent[name].append(max(per_host) / (WARM_UP + effort.steps) / 1e6)
        rows = {name: row(starts) for name, starts in samples.items() if all(starts)}
        return {
            "links": str(ranks_on_hosts.MEASURED_ON),
            "steps_ms": {name: each["wall_ms"]["median"] for name, each in rows.items()},
            "cpu_ms": {name: each["cpu_ms"]["median"] for name, each in rows.items()},
            "sent_mb a host and step": {name: statistics.median(found) for name, found in sent.items()},
            "peak_mb": _peaks(case, runs),
            **_ratios(rows),
            "failed": runs.failed,
        }


def _peaks(case: Case, runs: Runs) -> dict[str, float]:
    found = {}
    for name in IMPLEMENTATIONS:
        ranks: list[Bytes] = runs.on_ranks(f"bytes of {name}", case.num_ranks, measure_bytes, case, name)
        if ranks:
            found[name] = max(rank.peak for rank in ranks) / 1e6
    return found


def _ratios(rows: Tree) -> dict[str, float]:
    """Return the ratios of our step to torch's, and to ours with gloo alone; leave out those not measured."""
    medians = {name: each["wall_ms"]["median"] for name, each in rows.items()}
    pairs = {"to_torch": TORCH, "to_gloo": OURS_GLOO}
    return {key: medians[OURS] / medians[other] for key, other in pairs.items() if {OURS, other} <= medians.keys()}
