"""Real ranks, from cell to figure: training and its record agree."""

import numpy as np
import psutil
import pytest

from tests.helpers.figure_checks import subtitle
from tests.helpers.notebook_model import CELL
from tests.live import test_fold
from tests.live.test_feed import prefix
from tests.live.test_fold import folded
from tests.live.test_live_spans import check_the_pictures_agree
from workbench import Workbench
from workbench.errors import RankError, UsageError
from workbench.events import Category, Edge, Kind
from workbench.replay import collectives
from workbench.reports.json_document import error_facts
from workbench.trace import check, load, steps
from workbench.views import VIEWS

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def trained():
    """Two ranks with a model, sharded and trained for three steps."""
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(CELL)
        wb.shard("model", wrap=["Block"])
        wb.step(3)
        yield wb


def test_every_rank_has_its_names(trained):
    report = trained.run_cell("print(rank, world_size, device, mesh.size(), callable(log_metric))")
    assert [text.strip() for text in report.texts.values()] == ["0 2 cpu 2 True", "1 2 cpu 2 True"]


def test_all_sockets_listen_on_loopback_only(trained):
    """The store and gloo do not authenticate connections: see docs/security.md."""
    processes = trained._session.cluster._provider._zygote.process, *psutil.Process().children(recursive=True)
    addresses = {
        (process.pid, connection.laddr.ip)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {ip for _, ip in addresses} == {"127.0.0.1"}
    ranks = {status.pid for status in trained.status().ranks}
    assert ranks <= {pid for pid, _ in addresses}  # gloo listens on each


def test_the_recorded_trace_satisfies_all_invariants(trained):
    trace = trained.trace
    assert check(trace) == []
    assert {0, 1, 2} <= set(steps(trace))


def test_live_views_of_a_recorded_trace_match_replay(trained):
    trace = trained.trace
    parts = [prefix(trace, [len(r.rows) * share // 4 for r in trace.ranks]) for share in (1, 2, 3)]
    fold = folded([*parts, trace])
    test_fold.check(fold, trace)
    test_fold.check_steps(fold, trace)
    check_the_pictures_agree(trace)


def test_collectives_are_those_of_the_closed_form(trained):
    for step in (0, 1, 2):
        found = collectives.compare(trained.trace, step)
        assert found
        assert not [c for c in found if c.differs]
        gathers = sum(c.calls for c in found if c.kind == Kind.ALL_GATHER and 0 in c.ranks)
        scatters = sum(c.calls for c in found if c.kind == Kind.REDUCE_SCATTER and 0 in c.ranks)
        assert (gathers, scatters) == (2 * 4 - 1, 4)


def test_after_a_step_only_shards_and_optimizer_state_are_alive(trained):
    for rank in trained.trace.ranks:
        rows = rank.rows[rank.rows["step"] <= 2]
        live = np.zeros(len(Category), np.int64)
        moves = rows[np.isin(rows["kind"], (Kind.ALLOC, Kind.FREE))]
        np.add.at(live, moves["category"], moves["num_bytes"])
        kept = {Category(c) for c in np.flatnonzero(live)} - {Category.RESERVED}  # buffers kept for reuse
        assert kept == {Category.SHARDED_PARAMS, Category.OPTIMIZER_STATE}


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_every_view_draws_what_was_recorded(trained, name):
    figure = trained.view(name)
    assert len(figure.data) > 0
    assert figure.layout.title.text


def test_verify_finds_no_difference_and_changes_nothing(trained):
    before = trained.run_cell(
        "print(sum(p.full_tensor().detach().double().sum().item() for p in model.parameters()))"
    ).texts[0]
    assert trained.verify().ok
    after = trained.run_cell(
        "print(sum(p.full_tensor().detach().double().sum().item() for p in model.parameters()))"
    ).texts[0]
    assert before == after


def test_a_loop_of_the_user_s_own_is_recorded_as_steps(trained):
    known = set(steps(trained.trace))
    trained.run_cell("for _ in range(2): loss = train_step()")
    assert len(set(steps(trained.trace)) - known) == 2
    assert check(trained.trace) == []


def test_logged_metrics_are_drawn(trained):
    trained.run_cell(
        """
old_step = train_step
def train_step():
    log_metric("gradient norm", 2.0)
    return old_step()
"""
    )
    trained.step(1)
    trained.run_cell("train_step = old_step")
    rows = trained.trace.rank(0).rows
    metrics = rows[rows["kind"] == Kind.METRIC]
    names = {trained.trace.header.strings[m] for m in metrics["module"]}
    assert {"loss", "gradient norm"} <= names


UNMANAGED = """
model.register_buffer("drawn", torch.full((2,), float(rank)))
hook = model.head.weight.register_hook(lambda grad: grad)
"""
MENDED = """
torch.distributed.broadcast(model.drawn, 0)
hook.remove()
"""


def test_unmanaged_parameters_are_reported_in_status_and_comms(trained):
    assert trained.status().notes == ()
    trained.run_cell(UNMANAGED)
    hooks, buffers = trained.status().notes
    assert hooks.startswith("register_hook is never called on a sharded parameter: head.weight. ")
    assert buffers.startswith("buffers differ between ranks: drawn. ")
    trained.step(1)
    text = subtitle(trained.comms())
    assert "head.weight. Use register_post_accumulate_grad_hook" in text
    assert "differ between ranks: drawn. " in text
    trained.run_cell(MENDED)
    assert trained.status().notes == ()
    trained.run_cell("del model.drawn")


def test_the_policy_changes_collectives_and_memory(trained):
    trained.unshard("model")
    trained.shard("model", wrap=["Block"], reshard_after_forward="false")
    trained.step(1)
    found = collectives.compare(trained.trace, steps(trained.trace)[-1])
    assert not [c for c in found if c.differs]
    assert sum(c.calls for c in found if c.kind == Kind.ALL_GATHER and 0 in c.ranks) == 4
    trained.unshard("model")
    trained.shard("model", wrap=["Block"])


def test_a_saved_trace_is_the_one_recorded(trained, tmp_path):
    trained.export(tmp_path / "run.trace")
    # at that time: garbage collection may record freed memory at any moment
    assert load(tmp_path / "run.trace") == trained._session.trace


def test_a_wrong_class_names_those_there_are(trained):
    trained.unshard("model")
    try:
        with pytest.raises(UsageError, match=r"has no module of class Blok; its classes are: .*Block \(3\)"):
            trained.shard("model", wrap=["Blok"])
    finally:
        trained.shard("model", wrap=["Block"])


def test_a_rank_that_raises_is_named_and_the_next_step_works(trained):
    trained.run_cell(
        """
old_step = train_step
def train_step():
    if rank == 1:
        raise KeyError("missing")
    return old_step()
"""
    )
    with pytest.raises(RankError, match=r"rank 1 raised KeyError: 'missing' \(line 4, in train_step") as caught:
        trained.step(2)
    assert caught.value.rank == 1
    trained.run_cell("train_step = old_step")
    assert trained.step(2).steps_done == 2
    assert check(trained.trace) == []


def test_a_note_on_a_sharded_parameter_reaches_the_notebook_and_the_document(trained):
    with pytest.raises(RankError, match=r"mixed torch\.Tensor and DTensor|is sharded") as caught:
        trained.run_cell("weight = next(model.parameters())\nweight @ torch.ones(2, 2)")
    for traceback in (caught.value.traceback, error_facts(caught.value).traceback):
        before, note = traceback.split("\n[workbench] parameter ")
        assert "torch.Tensor and DTensor" in before
        assert "is sharded; unit " in note
        assert "\nfix: call model" in note
    assert trained.step(1).steps_done == 1


def test_a_barrier_that_one_rank_skips_is_left_by_the_others(trained):
    with pytest.raises(RankError, match="rank 0 raised ZeroDivisionError"):
        trained.run_cell("import torch.distributed as dist\n1 / 0 if rank == 0 else dist.barrier()")
    trained.run_cell("dist.barrier()")
    assert trained.step(1).steps_done == 1


def test_different_models_are_refused_before_anything_changes(trained):
    trained.run_cell("other = Net(width=16 + rank)")
    with pytest.raises(RankError, match="ranks built different models") as caught:
        trained.shard("other")
    assert "rank 0 has" in str(caught.value)
    report = trained.run_cell("print(type(other).__name__)")
    assert {text.strip() for text in report.texts.values()} == {"Net"}


def test_forwards_begin_and_end(trained):
    rows = trained.trace.rank(0).rows
    forwards = rows[(rows["kind"] == Kind.FORWARD) & (rows["step"] == 0)]
    assert (forwards["edge"] == Edge.BEGIN).sum() == (forwards["edge"] == Edge.END).sum() == 4
