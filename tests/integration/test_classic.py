"""A classic wrapped model on real ranks, through ``%fsdp`` commands: stopped, inspected, aborted, resharded."""

import os
import signal

import pytest

from tests.helpers.ctrl_c import CtrlCCallback
from tests.helpers.figure_checks import subtitle
from tests.helpers.notebook_model import CELL, fresh_cell
from tests.helpers.pairwise import quick
from tests.helpers.waiting import wait_until
from workbench import Workbench
from workbench.errors import RankDied, RankError
from workbench.magics.command_lines import parse_line
from workbench.replay import collectives
from workbench.reports.pause_reports import StopReport
from workbench.reports.stop_positions import live_units
from workbench.trace import check
from workbench.trace.columns import steps
from workbench.views.compare import draw

pytestmark = pytest.mark.cluster

STEPS = 4
FRESH = fresh_cell(
    optimizer="lr=1e-2",
    synced="model.no_sync() if micro == 0 else contextlib.nullcontext()",
    clip="model.clip_grad_norm_(1.0)",
)
WEIGHTS = """
with model.summon_full_params(model, writeback=False):
    print([p.double().sum().item() for p in model.parameters()])
"""
WHOLE = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from workbench.engine.classic import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

only_first = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
in_full = model.state_dict_type(model, StateDictType.FULL_STATE_DICT, *only_first)
"""
CHECKPOINTS = {
    "the wrapper's": (
        """
with in_full:
    saved = model.state_dict(), model.optim_state_dict(model, opt)
torch.distributed.broadcast_object_list(saved := list(saved), 0)
""",
        """
model.load_state_dict(saved[0])
opt.load_state_dict(model.optim_state_dict_to_load(model, opt, saved[1]))
""",
    ),
    "torch's": (
        "saved = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))",
        """
options = StateDictOptions(full_state_dict=True)
set_state_dict(model, opt, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
""",
    ),
}
"""Cells that save a model and its optimizer on every rank, and that load both."""
GATHERS, COPIES = "all_gather:blocks.1", "all_reduce:blocks.1"
STRATEGIES = {
    "full": ("--strategy full", GATHERS),
    "full, pieces": ("--strategy full --orig-params", GATHERS),
    "grad": ("--strategy grad", "reduce_scatter:blocks.1"),
    "none": ("--strategy none", COPIES),
}
"""Flags of each strategy, and a collective that it has."""


@pytest.fixture(scope="module")
def wb():
    """Two ranks with the model's classes."""
    with Workbench(2, device="cpu") as bench:
        bench.run_cell(CELL)
        yield bench


def output_of(wb, line):
    return wb.do(parse_line(line))


def fresh(wb, strategy):
    """Make the same model, optimizer and data again, whatever the previous test left."""
    if wb._session.request is not None:
        wb.abort()
    wb.break_clear()
    wb.run_cell(FRESH)
    output_of(wb, f"shard model --api classic --wrap Block {STRATEGIES[strategy][0]}")


@pytest.fixture(scope="module")
def undisturbed(wb):
    """Losses of the steps and final parameters, by strategy."""
    found = {}
    for strategy in STRATEGIES:
        fresh(wb, strategy)
        found[strategy] = wb.step(STEPS).losses, wb.run_cell(WEIGHTS).texts
    return found


def newest(wb):
    """Return the four units of the last sharded model; an error's traceback may keep an earlier one alive."""
    return live_units(wb.trace.header)[-4:]


def assert_all_at_one_event(report):
    assert isinstance(report, StopReport), report
    assert report.stop.held == (0, 1)
    assert len({p.held.place for p in report.stop.positions.values()}) == 1


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full"]))
def test_steps_stopped_repeatedly_compute_the_same(wb, undisturbed, strategy):
    fresh(wb, strategy)
    first = wb.step(1)
    output_of(wb, f"break add {STRATEGIES[strategy][1]}")
    output_of(wb, "break add forward:blocks.1 --when 'step < 3'")
    report, outputs = output_of(wb, f"step {STEPS - 1}"), []
    for what in ("event", "collective", "unit", "phase"):
        assert_all_at_one_event(report)
        outputs += [
            report,
            output_of(wb, "where --stacks"),
            output_of(wb, "inspect blocks.1.mlp.0.weight"),
            wb.evaluate("count"),
        ]
        report = output_of(wb, f"next {what}")
    output_of(wb, "break clear")
    report = output_of(wb, "continue")
    assert (first.losses + report.losses, wb.run_cell(WEIGHTS).texts) == undisturbed[strategy]
    assert check(wb.trace) == []
    assert "blocks.1" in "".join(map(str, outputs))
    assert "_fsdp_wrapped_module" not in "".join(map(str, outputs))


@pytest.mark.parametrize("event", ["forward.end:blocks.1", "backward:blocks.1", "optimizer", "a collective"])
@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full"]))
def test_an_aborted_step_can_be_repeated(wb, undisturbed, strategy, event):
    fresh(wb, strategy)
    first = wb.step(2)
    assert_all_at_one_event(wb.step(1, until=STRATEGIES[strategy][1] if event == "a collective" else event))
    assert "idle again" in wb.abort().headline
    wait_until(lambda: {row.state for row in wb.where().ranks} == {"idle"})
    wb.run_cell("opt.zero_grad()")
    again = wb.step(STEPS - 2)
    assert (first.losses + again.losses, wb.run_cell(WEIGHTS).texts) == undisturbed[strategy]
    assert check(wb.trace) == []


@pytest.mark.parametrize("strategy", ["full", "none"])
def test_a_rank_that_raises_in_forward_is_named_with_the_unit_and_training_continues(wb, undisturbed, strategy):
    fresh(wb, strategy)
    first = wb.step(1)
    wb.run_cell(
        """
def refuse(module, args):
    if rank == 1: raise ValueError("no such input")
handle = model.blocks[1].mlp.register_forward_pre_hook(refuse)
"""
    )
    with pytest.raises(RankError, match=r"^rank 1 raised ValueError: no such input") as caught:
        wb.step(1)
    assert "forward, unit blocks.1" in str(caught.value).partition("\n")[0]
    assert "_fsdp_wrapped_module" not in str(caught.value)
    wb.run_cell("handle.remove()\nopt.zero_grad()")
    again = wb.step(STEPS - 1)
    assert (first.losses + again.losses, wb.run_cell(WEIGHTS).texts) == undisturbed[strategy]


@pytest.mark.parametrize("strategy", ["full", "none"])
def test_disagreeing_ranks_are_reported_with_unit_names(wb, strategy):
    fresh(wb, strategy)
    wb.step(1)
    with pytest.raises(RankError, match="RanksDisagreeError: ranks disagree on collective") as caught:
        wb.run_cell("model.blocks[rank](torch.ones(1, 16)).sum().backward()")
    message = str(caught.value)
    assert "of unit blocks.0 (" in message
    assert "of unit blocks.1 (" in message
    assert "_fsdp_wrapped_module" not in message
    wb.run_cell("opt.zero_grad()")
    assert wb.step(1).steps_done == 1


def test_ctrl_c_pauses_and_a_pause_in_the_background_as_well(wb, every_rank_comes):
    fresh(wb, "full")
    assert_all_at_one_event(wb.step(1_000_000, on_progress=CtrlCCallback()))
    assert "idle again" in wb.abort().headline
    wb.step(1_000_000, background=True)
    assert_all_at_one_event(wb.pause())
    assert set(wb.evaluate("type(model).__name__").texts.values()) == {"'FullyShardedDataParallel'"}
    assert "idle again" in wb.abort().headline
    wb.run_cell("opt.zero_grad()")
    assert wb.step(1).steps_done == 1


def test_a_classic_model_is_sharded_stopped_inspected_and_converted(wb):
    if wb._session.request is not None:
        wb.abort()
    wb.break_clear()
    wb.run_cell(CELL)
    assert "classic: one flat parameter per unit" in str(output_of(wb, "shard model --api classic --wrap Block"))
    policies = {model.name: model.policy for model in wb.status().models}
    assert "classic: one flat parameter per unit" in policies["model"]
    output_of(wb, "step 2")
    last = steps(wb.trace)[-1]
    assert not [c for c in collectives.compare(wb.trace, last) if c.differs]
    output_of(wb, "step 1 --until backward:blocks.1")
    assert "elements" in str(output_of(wb, "inspect blocks.1.mlp.0.weight"))
    assert output_of(wb, "layout").data
    output_of(wb, "continue")
    assert output_of(wb, "verify").ok
    before, of_classic = wb.trace.slice(step=last), newest(wb)
    assert all(param.parts for unit in of_classic for param in unit.params)
    output_of(wb, "reshard model --api fully_shard")
    assert not {unit.index for unit in of_classic} & {unit.index for unit in live_units(wb.trace.header)}
    assert not [param for unit in newest(wb) for param in unit.params if param.parts]
    output_of(wb, "step 2")
    assert output_of(wb, "verify").ok
    after = wb.trace.slice(step=last + 3)
    assert "in 4 flat parameters -&gt; stored separately" in subtitle(draw(before, after))
    output_of(wb, "unshard model")


@pytest.mark.parametrize("orig_params", quick(["", "--orig-params"], ["--orig-params"]))
def test_an_offloaded_model_is_saved_loaded_and_resharded_with_its_optimizer(wb, undisturbed, orig_params):
    expected = undisturbed["full, pieces" if orig_params else "full"]
    shards = f"shard model --api classic --wrap Block {orig_params}"

    def begins(offloads):
        wb.run_cell(FRESH)
        output_of(wb, f"{shards} {offloads}")

    for saves, loads in CHECKPOINTS.values():
        begins("--offload")
        first = wb.step(2).losses
        wb.run_cell(WHOLE + saves)
        assert (first + wb.step(2).losses, wb.run_cell(WEIGHTS).texts) == expected
        for offloads in ("--offload", "--no-offload"):
            begins(offloads)
            wb.run_cell(f"{loads}\ncount = 2")
            assert (first + wb.step(2).losses, wb.run_cell(WEIGHTS).texts) == expected
    begins("--no-offload")
    losses = wb.step(1).losses
    for line in ("--offload", "--no-offload", "--offload"):
        assert ("host memory" in str(output_of(wb, f"reshard model {line}"))) == (line == "--offload")
        losses += wb.step(1).losses
    assert (losses, wb.run_cell(WEIGHTS).texts) == expected
    assert check(wb.trace) == []


@pytest.mark.thorough
def test_a_killed_rank_in_a_step_is_named_and_the_others_are_free():
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(CELL)
        fresh(wb, "full")
        victims = [wb.status().ranks[1].pid]

        def kill(progress):
            if progress.done and victims:
                os.kill(victims.pop(), signal.SIGKILL)

        with pytest.raises(RankDied, match=r"^rank 1 died: the process was killed by SIGKILL"):
            wb.step(100_000, on_progress=kill)
        assert wb.run_cell("print(type(model).__name__)", ranks=[0]).texts == {0: "FullyShardedDataParallel\n"}
