"""The split of a rank's rows into the tracks of a timeline (:class:`~workbench.events.Track`), for every picture.

Spans that nest, those of compute, are cut into pieces: each stretch of time belongs to the innermost span. A step and a
wait for communication also own stretches of time, but nothing is drawn there on the compute track. All other spans are
drawn whole. Times are nanoseconds. Arrays: ``N`` spans, ``P`` pieces.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.events import Kind, Track, on_track
from workbench.replay.spans import Ints, Spans, exclusive

NUMBER = {track: number for number, track in enumerate(Track)}
"""Number of each track of a rank, from the top."""

NOT_COMPUTE = (Kind.STEP, Kind.WAIT)
"""Kinds whose stretches of time are not compute, for the spans around them either."""

NESTED = tuple(dict.fromkeys((*on_track(Track.COMPUTE), *NOT_COMPUTE)))
"""Kinds of the spans that a rank's thread nests: the input of :func:`compute_pieces`."""

COMPUTE = tuple(kind for kind in NESTED if kind not in NOT_COMPUTE)
"""Kinds drawn on the compute track."""

DRAWN = tuple(kind for kind in Kind if kind.info.track is not None and kind is not Kind.STEP)
"""Kinds drawn on any track."""

_IS_COMPUTE = np.isin(np.arange(256), COMPUTE)


def compute_pieces(found: Spans) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Return the pieces of nested spans, in order of time.

    Args:
        found: spans of the kinds NESTED, ``[N]``, that all have an end.

    Returns:
        Position of the span, begin and end of each piece, and whether it is drawn as compute. ``[P]`` each.
    """
    owner, begin_ns, end_ns = exclusive(found)
    return owner, begin_ns, end_ns, is_compute(found)[owner]


def is_compute(found: Spans) -> NDArray[np.bool_]:
    """Return which spans are drawn on the compute track. ``[N]``."""
    shown: NDArray[np.bool_] = _IS_COMPUTE[found.kind]
    return shown
