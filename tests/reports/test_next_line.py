"""Each stage of a session has one line that comes next."""

import re
from dataclasses import replace

import pytest

from workbench.magics.command_lines import parse_line
from workbench.reports.next_line import NEXT, SessionStage, next_line

RANKS = SessionStage()
MODEL = replace(RANKS, model="net")
SHARDED = replace(MODEL, is_sharded=True)
OPTIMIZER = replace(SHARDED, has_optimizer=True)
READY = replace(OPTIMIZER, has_function=True)
STEPPED = replace(READY, has_stepped=True)
LOOKED = replace(STEPPED, has_looked=True)
FIX = "correct the code and run its cell again, then %fsdp step 5"

STAGES = {
    "no ranks": (SessionStage(is_running=False), "%fsdp start -n 2"),
    "no ranks after training": (replace(LOOKED, is_running=False), "%fsdp start -n 2"),
    "the ranks of another notebook": (replace(READY, is_viewed=True), ""),
    "ranks": (RANKS, "a model in a %%fsdp cell, such as that of %fsdp example"),
    "a model": (MODEL, "%fsdp shard net"),
    "a model with all else": (replace(READY, is_sharded=False), "%fsdp shard net"),
    "sharded": (SHARDED, "an optimizer of net and train_step() in a %%fsdp cell, then %fsdp step 5"),
    "sharded, with an optimizer": (OPTIMIZER, "train_step() in a %%fsdp cell, then %fsdp step 5"),
    "sharded, with a function": (
        replace(SHARDED, has_function=True),
        "an optimizer of net in a %%fsdp cell, unless train_step() makes it; then %fsdp step 5",
    ),
    "ready": (READY, "%fsdp step 5"),
    "a step runs": (replace(READY, is_busy=True), ""),
    "stopped": (replace(STEPPED, is_busy=True, is_stopped=True), "%fsdp continue, %fsdp next or %fsdp abort"),
    "after steps": (STEPPED, "%fsdp explain, for what matters most, or %fsdp dashboard"),
    "after steps whose function makes the optimizer": (replace(LOOKED, has_optimizer=False), ""),
    "after steps and a look": (LOOKED, ""),
    "after the steps of a loop in a cell": (replace(LOOKED, has_function=False), ""),
    "after a first step that raised": (replace(READY, has_failed=True), FIX),
    "after a step that raised": (replace(LOOKED, has_failed=True), FIX),
    "a rank is lost": (replace(LOOKED, has_lost=True, has_failed=True), "%fsdp heal"),
    "all ranks are lost": (replace(LOOKED, is_stuck=True), "%fsdp stop, then %fsdp start"),
    "healed, with steps to do": (replace(LOOKED, is_healed=True, left="%fsdp step 8"), "%fsdp step 8"),
    "healed, and later": (replace(LOOKED, left="%fsdp step 8"), "%fsdp step 8"),
    "healed": (replace(LOOKED, is_healed=True, has_failed=True), "%fsdp step 5"),
    "healed before training": (replace(SHARDED, is_healed=True), next_line(SHARDED)),
}


@pytest.mark.parametrize(("stage", "line"), STAGES.values(), ids=STAGES)
def test_the_line_of_each_stage(stage, line):
    assert next_line(stage) == line
    for text in re.findall(r"(?<!%)%fsdp ((?:(?!,| or ).)+)", line):
        parse_line(text)


def test_each_row_of_the_table_is_that_of_a_stage():
    first = [next(number for number, (holds, _) in enumerate(NEXT) if holds(stage)) for stage, _ in STAGES.values()]
    assert {*first} == {*range(len(NEXT))}
