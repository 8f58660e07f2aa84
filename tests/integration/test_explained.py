"""Real ranks: what an explanation promises is what the ranks then measure, and a slow rank is named."""

import pytest

from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import wait_until
from workbench import Workbench
from workbench.magics.command_lines import parse_line
from workbench.replay.peak_savings import Knob
from workbench.replay.step_parts import Group, Part
from workbench.reports.explain_report import ExplainReport

pytestmark = pytest.mark.cluster

SLOW = """
import time

def slowly():
    if rank == 1 and where == "before":
        time.sleep(0.2)
    return train_step()

def sleep_in_forward(module, args):
    if rank == 1 and where == "forward":
        time.sleep(0.2)

model.blocks[1].mlp.register_forward_pre_hook(sleep_in_forward)
where = ""
"""


ROOTLESS = """
rootless = nn.Sequential(*(Block(64) for _ in range(4)))

def sleep_in_the_third(module, args):
    if rank == 1:
        time.sleep(0.2)

def train_rootless():
    rootless(torch.randn(8, 64)).square().mean().backward()
"""
"""Rank 1 is behind only at the end of the forward, where the other one waits until it has read the last block."""


@pytest.fixture(scope="module")
def ranks():
    """Two ranks whose model keeps its units unsharded after forward; six blocks, so that this sets the peak."""
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(CELL.replace("range(3)", "range(6)").replace("width=16", "width=64").replace("(8, 16,", "(8, 64,"))
        wb.shard("model", wrap=["Block"], reshard_after_forward="false")
        wb.run_cell(SLOW)
        yield wb


def test_the_line_that_lowers_the_peak_lowers_it_as_promised(ranks):
    ranks.step(2)
    before = ranks.explain("peak")
    assert before.answer.fix.startswith("%fsdp reshard model ")
    promised = next(saving for saving in before.savings if saving.line == before.answer.fix)
    assert promised.knob is Knob.RESHARD
    ranks.do(parse_line(before.answer.fix.removeprefix("%fsdp ")))
    ranks.step(2)
    after = ranks.explain("peak")
    measured = max(each.peak_bytes for each in ranks.numbers("memory").ranks)
    assert measured == pytest.approx(promised.peak_bytes, rel=0.01)
    assert promised.saved_bytes > 0.1 * (promised.peak_bytes + promised.saved_bytes)
    gathers = [
        sum(row.calls for row in ranks.numbers("comms", step=step).rows if row.kind.key == "all_gather")
        for step in (1, 3)
    ]
    assert gathers[1] - gathers[0] == promised.more_calls
    assert "--reshard-after-forward" not in after.answer.fix


def explained_as(ranks, rule, headline="", step="slowly"):
    """Step until the newest steps are explained as wanted; on a busy machine some are slow for another reason."""

    def explanation():
        ranks.step(8, step)
        found = ranks.explain()
        return found if found.answer.rule == rule and found.headline.startswith(headline) else None

    return wait_until(explanation)


@pytest.mark.parametrize(("where", "part"), [("before", Part.BEFORE), ("forward", Part.FORWARD)])
def test_a_rank_that_sleeps_is_named_with_where(ranks, where, part):
    ranks.run_cell(f"where = {where!r}")
    found = explained_as(ranks, "slow-rank", f"rank 1 is slow {'before' if where == 'before' else 'in'} forward")
    assert isinstance(found, ExplainReport)
    if part is Part.FORWARD:
        assert any(line.startswith("most of it in blocks.1: rank 1 takes ") for line in found.answer.evidence)
    for each in found.ranks:
        assert sum(each.groups_ns.values()) == each.step_ns
    assert ranks.picture(found).layout.title.text
    ranks.run_cell("where = ''")
    assert explained_as(ranks, "nothing").faults == ()


def test_a_rank_that_reads_late_is_named(ranks):
    ranks.run_cell(ROOTLESS)
    ranks.shard("rootless", wrap=["Block"])
    ranks.run_cell("rootless[2].mlp.register_forward_pre_hook(sleep_in_the_third)")
    found = explained_as(ranks, "slow-rank", "rank 1 is slow in forward", "train_rootless")
    assert isinstance(found, ExplainReport)
    assert found.ranks[0].groups_ns[Group.LATE] > found.ranks[0].groups_ns[Group.COMPUTE]
    ranks.run_cell("del rootless")


def test_why_a_unit_is_unsharded_inside_a_stopped_step(ranks):
    ranks.step(1, until="backward:blocks.3")
    found = ranks.explain("blocks.3")
    assert "blocks.3 is unsharded" in found.headline
    assert "(root)" in ranks.explain("(root)").headline
    assert ranks.explain("blocks.0").headline.startswith("blocks.0 is sharded: freed after forward in step")
    ranks.abort()
