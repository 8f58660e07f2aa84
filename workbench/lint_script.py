"""``workbench lint``: run a training script on CPU ranks, and check the sharded models that it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.errors import UsageError
from workbench.reports.lint_report import LintReport
from workbench.session.outputs import OnOutput
from workbench.workbench import Workbench


def run(script: str, args: Sequence[str], *, module: bool, num_ranks: int, on_output: OnOutput) -> LintReport:
    """Run ``script`` to its end as ``%fsdp run`` does, then check its models; the ranks are stopped in any case.

    Args:
        script: the file, or the name of a module.
        args: its arguments.
        module: whether it is the name of a module.
        num_ranks: number of ranks.
        on_output: called with the script's output as it arrives.

    Raises:
        UsageError: there is no such script, or no variable of it holds a sharded model at its end.
        RankError, RankDied, ClusterError, Interrupted: the script failed, or the ranks did not start.
    """
    with Workbench(num_ranks, device="cpu") as wb:
        wb.run_script(script, args, module=module, on_output=on_output)
        held = [model for models in wb.models().values() for model in models if model.units]
        if not held:
            raise UsageError(
                f"nothing was checked: no variable of {script}, nor of a function of it that steps an optimizer, "
                "holds a sharded model"
            )
        return wb.lint()
