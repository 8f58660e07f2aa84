"""``--json`` on two real ranks: the documents of a whole session."""

import pytest

from tests.helpers import json_schema
from tests.helpers.ipython_shell import ipython_shell
from tests.helpers.notebook_model import CELL
from tests.magics.conftest import Notebook
from workbench.magics import register, unregister

pytestmark = pytest.mark.cluster


def test_the_documents_of_a_session(tmp_path):
    with ipython_shell() as shell:
        notebook = Notebook(shell)
        register(shell)

        def report(line, kind):
            found = json_schema.read(notebook.ok(line).out)
            assert (found["type"], found["error"]) == (kind, None)
            return found["report"]

        try:
            assert report("%fsdp start -n 2 --device cpu --json", "StartReport")["devices"] == ["cpu", "cpu"]
            assert report(f"%%fsdp --json\n{CELL}\nprint('made')", "CellReport")["texts"] == {
                "0": "made\n",
                "1": "made\n",
            }
            sharded = report("%fsdp shard model --wrap Block --json", "ShardReport")
            assert sum(sharded["bytes_at_rest"]) >= sharded["bytes_unsharded"]
            step = report("%fsdp step 2 --json", "StepReport")
            assert step["steps_done"] == len(step["losses"]) == 2
            assert report("%fsdp comms --json", "CommsReport")["as_expected"]
            assert report("%fsdp verify --json", "VerifyReport")["ok"]
            stop = report("%fsdp step --until backward:blocks.1 --json", "StopReport")
            assert {(row["state"], row["unit"], row["kind"]) for row in stop["ranks"]} == {
                ("held", "blocks.1", "backward")
            }
            where = report("%fsdp where --stacks --json", "WhereReport")
            assert all(row["stacks"][0]["is_main"] for row in where["ranks"])
            fqn = sharded_param(report("%fsdp layout --unit blocks.1 --json", "LayoutReport"))
            found = report(f"%fsdp inspect {fqn} --json", "InspectReport")["by_rank"]
            assert {own["unit"] for own in found.values()} == {"blocks.1"}
            assert {own["full"]["state"] for own in found.values()} == {"unsharded"}
            assert all(isinstance(own["shard"]["values"]["norm"], float) for own in found.values())
            assert report("%fsdp eval rank --json", "EvalReport")["texts"] == {"0": "0", "1": "1"}
            assert report("%fsdp continue --json", "StepReport")["steps_done"] == 1
            for view in ("memory", "timeline", "states", "training"):
                report(f"%fsdp {view} --json", f"{view.title()}Report")
            assert report(f"%fsdp export {tmp_path}/run.trace --json", "ExportReport")["num_bytes"] > 0
            assert len(report("%fsdp status --json", "StatusReport")["models"]) == 1
        finally:
            unregister(shell)


def sharded_param(layout):
    (unit,) = layout["units"]
    return unit["params"][0]["fqn"]
