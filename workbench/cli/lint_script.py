"""``workbench lint``: run a training script on CPU ranks, and check the sharded models that it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.errors import UsageError
from workbench.reports.lint_report import LintReport
from workbench.session.outputs import OnOutput
from workbench.session.script_ranks import ScriptRanks, run_of


def run(script: str, args: Sequence[str], *, module: bool, num_ranks: int, on_output: OnOutput) -> LintReport:
    """Run ``script`` to its end as ``%fsdp run`` does, then check its models; the ranks are ended in any case.

    Args:
        script: the file, or the name of a module.
        args: its arguments.
        module: whether it is the name of a module.
        num_ranks: number of ranks.
        on_output: called with the script's output as it arrives.

    Raises:
        UsageError: there is no such script, or no variable of it holds a sharded model at its end.
        RankError, RankDied, Interrupted: the script failed, or was interrupted.
    """
    run_of(script, args, module=module)
    with ScriptRanks(num_ranks, on_output) as ranks:
        ranks.run_script(script, args, module=module)
        held = [model for models in ranks.models().values() for model in models if model.units]
        if not held:
            raise UsageError(
                f"nothing was checked: no variable of {script}, nor of a function of it that steps an optimizer, "
                "holds a sharded model"
            )
        return ranks.lint()
