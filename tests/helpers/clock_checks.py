"""A check of the times of ranks in the same collective, whatever their clocks showed."""

from collections import defaultdict
from collections.abc import Sequence

from workbench.events import Kind
from workbench.replay.clock_error import error_ns
from workbench.replay.collectives import table
from workbench.trace.columns import Trace


def late_ends(trace: Trace, kinds: Sequence[Kind]) -> list[tuple[int, int]]:
    """Return the collectives, as (group, number), that ended on one rank before another rank issued them.

    This is impossible, as each rank needs data of every other; differences below the clocks' error are ignored.
    """
    issued, ended = defaultdict(list), defaultdict(list)
    for rank in trace.ranks:
        found = table(rank)
        for kind, group, seq, issue_ns, end_ns in zip(
            found.kind, found.comm_group, found.comm_seq, found.issue_ns, found.end_ns, strict=True
        ):
            if kind in kinds and end_ns >= 0:
                issued[int(group), int(seq)].append(int(issue_ns))
                ended[int(group), int(seq)].append(int(end_ns))
    assert issued, "no such collective was recorded"
    return [key for key in issued if max(issued[key]) - min(ended[key]) > error_ns(trace)]
