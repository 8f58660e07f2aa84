"""One example of each answer to a panel, for the tests of the front end: ``extension/tests/answers.ts``.

``python -m tests.helpers.example_answers`` rewrites the file after a message has changed.
"""

from __future__ import annotations

import json

from tests.helpers.package_source import REPO
from workbench.base.codec import encode
from workbench.events import Category
from workbench.live.messages import (
    VERSION,
    BreakpointState,
    ClockState,
    ClusterState,
    CommandHistory,
    CommandLine,
    CommandOutput,
    InitialState,
    Model,
    Models,
    OutputTail,
    PanelAnswer,
    ParamInfo,
    Params,
    Preview,
    RankState,
    Refused,
    RequestState,
    RestPreview,
    SentPreview,
    State,
    TrainingSummary,
    UnitInfo,
    UnitStates,
    Welcome,
)
from workbench.protocol.policy import ModelPolicy
from workbench.protocol.rank_messages import WrapClass
from workbench.reports.history_report import PastCommand
from workbench.reports.output_report import OutputLine
from workbench.session.snapshot import LastResult

FILE = REPO / "extension" / "tests" / "answers.ts"

_HEADING = """\
// Made of workbench/live/messages.py by: python -m tests.helpers.example_answers
// One example of each answer to a panel, as the kernel sends it.
import type { AnswerOf } from "../src/client";
import type { PanelAnswer } from "../src/protocol";
"""

_BYTES = tuple(1024 * (1 + place) for place in range(len(Category)))


def _rank(number: int) -> RankState:
    return RankState(
        rank=number,
        health="running",
        where="forward of blocks.0, step 11",
        host="here",
        device="cpu",
        pid=100 + number,
        num_bytes=_BYTES,
        in_use=sum(_BYTES),
        peak_bytes=2 * sum(_BYTES),
        peak_bytes_by_class=tuple(2 * each for each in _BYTES),
        peak="backward of blocks.0, step 10",
    )


def _unit(index: int, name: str) -> UnitInfo:
    return UnitInfo(
        index=index,
        name=name,
        root=0,
        num_params=2,
        is_flat=index == 0,
        bytes_unsharded=4096,
        bytes_at_rest=2048,
        bytes_padding=0,
        shard_size=2,
        replicate_size=1,
        reshard_after_forward="true",
        compute_dtype="float32",
        reduce_dtype="float32",
        offload=False,
    )


EXAMPLES: tuple[PanelAnswer, ...] = (
    Welcome(
        number=1,
        version=VERSION,
        workbench="0.2.0",
        dashboard=InitialState(buttons=("step",), panels=("ranks",), sizes=("unit",), faults=("random",)),
    ),
    State(
        number=2,
        cluster=ClusterState(
            is_running=True,
            exchange="",
            waits_for="",
            num_ranks=2,
            device="cpu",
            profile="",
            host="here",
            kernel_pid=1,
            outlives=False,
            held_by="",
            is_free=False,
            one_job="",
            cores=2,
        ),
        ranks=(_rank(0), _rank(1)),
        clocks=(ClockState(ranks=(1,), error_ns=40_000, text="its clock is 5.00 ms behind rank 0's, ± 40.0 µs"),),
        units=(_unit(0, "(root)"), _unit(1, "blocks.0")),
        unit_states=(UnitStates(ranks=(0, 1), states="02"),),
        breakpoints=(BreakpointState(id=1, text="all_gather:blocks.0 --rank 1", is_on=True),),
        request=RequestState(
            line="%fsdp step 40",
            is_stopped=False,
            stop="",
            reasons=(),
            in_background=True,
            steps_done=11,
            steps_total=40,
        ),
        training=TrainingSummary(step=11, loss=2.30259, loss_step=11, steps_per_s=3.14159, tokens_per_s=None),
        ended=LastResult(count=1, line="a cell", text="", is_error=False),
        output=3,
        is_recorded=True,
        record="",
        said="",
    ),
    Models(
        number=3,
        models=(
            Model(
                name="model",
                class_name="GPT",
                is_sharded=True,
                num_params=10,
                num_elements=100,
                num_bytes=400,
                classes=(WrapClass(name="Block", count=4, num_elements=80),),
                suggested=("Block",),
                policy=ModelPolicy(
                    api="fully_shard",
                    strategy="hybrid",
                    orig_params=False,
                    wrap=("Block",),
                    mesh="2x2",
                    reshard_after_forward=2,
                    mp="bf16,reduce=fp32",
                    offload=True,
                    prefetch=2,
                ),
                units=(0, 1),
                ranks=(0, 1),
            ),
        ),
    ),
    Preview(
        number=4,
        line="%fsdp shard model",
        units=("(root)", "blocks.0"),
        bytes_unsharded=8192,
        at_rest=(RestPreview(ranks=(0, 1), params=4096, grads=4096, adam=8192),),
        sent=(SentPreview(kind="all-gather", num_ranks=2, calls=3, num_bytes=8192, sent_bytes=4096),),
        sent_bytes=4096,
    ),
    Params(
        number=5,
        unit=1,
        params=(
            ParamInfo(
                fqn="blocks.0.weight",
                shape=(32, 16),
                dtype="float32",
                bytes_unsharded=2048,
                bytes_at_rest=1024,
                rows_per_rank=(16, 16),
                is_trainable=True,
            ),
        ),
    ),
    CommandLine(number=6, line="%fsdp step 3"),
    CommandOutput(number=7, line="%fsdp step 3", text="3 steps, loss 2.1", is_error=False, data={}),
    CommandHistory(number=8, commands=(PastCommand(line="%fsdp start", source="panel", t_s=1.5),)),
    OutputTail(
        number=9,
        lines=(OutputLine(ranks=(0, 1), kind="stdout", text="loss 2.5", step=11, t_s=1.5),),
        is_cut=False,
    ),
    Refused(number=9, text="No such question."),
)
"""One of each class of answer; every list in them has an item."""


def program() -> str:
    """Return the contents of the file."""
    answers = json.dumps({answer.word: encode(answer) for answer in EXAMPLES}, indent=2)
    kinds = '{ readonly [W in PanelAnswer["word"]]: AnswerOf<W> }'
    return f"{_HEADING}\nexport const ANSWERS = {answers} as const satisfies {kinds};\n"


if __name__ == "__main__":
    FILE.write_text(program(), encoding="utf-8")
