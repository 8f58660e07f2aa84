"""THE COURSE: predictions, and checks that read what a run did off its trace. Never imports torch."""

from workbench.course.call_checks import counts, order, payload, sent
from workbench.course.checks import CheckFailed, check
from workbench.course.drawn_faults import named_fault, student_seed
from workbench.course.engine_checks import engine_findings
from workbench.course.finding import CheckFinding
from workbench.course.memory_checks import most_bytes, nothing_left, peak, states
from workbench.course.notebook_output import from_ranks, held, only_source, recorded
from workbench.course.overlap_checks import exposed, overlaps, waited
from workbench.course.predictions import Prediction, predict
from workbench.course.value_checks import agree, same

__all__ = [
    "predict",
    "Prediction",
    "check",
    "CheckFailed",
    "CheckFinding",
    "counts",
    "payload",
    "sent",
    "order",
    "peak",
    "most_bytes",
    "nothing_left",
    "states",
    "overlaps",
    "exposed",
    "waited",
    "held",
    "named_fault",
    "student_seed",
    "agree",
    "same",
    "engine_findings",
    "recorded",
    "only_source",
    "from_ranks",
]
