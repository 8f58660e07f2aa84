"""WHAT HAPPENED: the record of a training job, in memory and on disk. numpy only."""

from workbench.trace.begin_end import partners
from workbench.trace.builder import TraceBuilder
from workbench.trace.columns import RankTrace, Trace, merge, steps
from workbench.trace.file import load, save
from workbench.trace.header import header_from_dict, header_to_dict, key_frame_from_dict, key_frame_to_dict
from workbench.trace.invariants import check
from workbench.trace.keyframe import advance
from workbench.trace.perfetto import to_perfetto

__all__ = [
    "RankTrace",
    "Trace",
    "TraceBuilder",
    "advance",
    "check",
    "header_from_dict",
    "header_to_dict",
    "key_frame_from_dict",
    "key_frame_to_dict",
    "load",
    "merge",
    "partners",
    "save",
    "steps",
    "to_perfetto",
]
