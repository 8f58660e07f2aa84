"""A model of the classic wrapper, by the words of ``%fsdp`` on real ranks: sharded, stopped, looked at, taken over."""

import pytest

from tests.integration.model import CELL
from workbench import Workbench
from workbench.magics.words import parse_line
from workbench.replay import collectives
from workbench.views.compare import draw

pytestmark = pytest.mark.cluster


def test_a_classic_model_is_sharded_stopped_looked_at_and_taken_to_fully_shard():
    with Workbench(2, device="cpu") as wb:

        def say(line):
            return wb.do(parse_line(line))

        wb.run_cell(CELL)
        assert "classic: one flat parameter for each unit" in str(say("shard model --api classic --wrap Block"))
        assert ("classic", "all") in wb.status().facts()
        say("step 2")
        assert not [c for c in collectives.compare(wb.trace, 1) if c.differs]
        say("step 1 --until backward:blocks.1")
        said = str(say("inspect blocks.1.mlp.0.weight"))
        assert "elements" in said
        assert say("layout").data
        say("continue")
        assert say("verify").ok
        before = wb.trace.slice(step=1)
        say("reshard model --api fully_shard")
        assert wb.status().classic == ()
        say("step 2")
        assert say("verify").ok
        after = wb.trace.slice(step=4)
        assert "in 4 flat ones -&gt; by themselves" in (draw(before, after).layout.title.subtitle.text or "")
        say("unshard model")
