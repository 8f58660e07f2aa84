"""The loss of all ranks: killed one by one, or with a process that all need."""

import os
import signal

import pytest

from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench import Workbench
from workbench.errors import RankDied, UsageError
from workbench.reports.failures import RESTART
from workbench.views import VIEWS

pytestmark = pytest.mark.cluster

KILLED = "was killed by SIGKILL (as when memory runs out)"


def victims_of(bench, who):
    """Return process ids, and the text for the loss of each rank."""
    launch = bench._session.cluster._provider
    ranks = [status.pid for status in bench.status().ranks]
    return {
        "every rank": (ranks, f"died: the process {KILLED}"),
        "the controller": (
            [launch._watched[None].process.pid],
            f"cannot be reached: the cluster's controller {KILLED}",
        ),
        "the zygote": ([launch._zygote.process.pid], f"died: the process that ranks are forked from {KILLED}"),
    }[who]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_ranks", "who"),
    [(1, "every rank"), (2, "every rank"), (2, "the controller"), (2, "the zygote")],
)
def test_with_all_ranks_dead_views_work_and_a_start_replaces_them(num_ranks, who, tmp_path):
    with Workbench(num_ranks, device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap=["Block"])
        pids, how = victims_of(bench, who)

        def kill(progress):
            if progress.done:
                while pids:
                    os.kill(pids.pop(), signal.SIGKILL)

        with pytest.raises(RankDied) as caught:
            bench.step(100_000, on_progress=kill)
        wait_until(lambda: set(bench.losses) == set(range(num_ranks)), PATIENCE_S)
        assert bench.losses == dict.fromkeys(range(num_ranks), how)
        assert how in str(caught.value)
        assert RESTART in str(caught.value)

        assert how in str(bench.status())
        assert "died: %fsdp stop, then %fsdp start" in bench.status().headline
        assert bench.status().num_rows > 0
        for view in VIEWS:
            bench.view(view)
        assert bench.memory().data
        assert bench.export(tmp_path / "run.trace").num_bytes > 0
        assert {row.state for row in bench.where().ranks} == {"gone"}
        assert set(bench.pulse().losses.values()) == {how}
        assert bench.names() == {}
        for ask in (bench.step, lambda: bench.run_cell("1")):
            with pytest.raises(RankDied, match=r"^ranks? [01-]+ (died|cannot be reached): ") as later:
                ask()
            assert how in str(later.value)
        with pytest.raises(UsageError, match="nothing to pause"):
            bench.pause()

        recorded = bench.trace.num_rows
        if num_ranks == 1:
            bench.stop()
            assert bench.trace.num_rows == recorded
        else:
            bench.start()  # replaces the dead ranks
            assert bench.run_cell("print('well')").texts == dict.fromkeys(range(num_ranks), "well\n")
            assert bench.trace.num_rows == 0


@pytest.mark.thorough
def test_while_a_rank_lives_a_start_names_the_dead_and_the_remedy():
    with Workbench(2, device="cpu") as bench:
        os.kill(bench.status().ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: bench.losses and bench.output().lines)
        assert [line.text for line in bench.output().lines] == [f"rank 1 died: the process {KILLED}"]
        with pytest.raises(UsageError, match=r"rank 1 died: the process was killed by SIGKILL .*: %fsdp stop first"):
            bench.start()
        bench.stop()
        bench.start(num_ranks=1)
        assert bench.run_cell("print(world_size)").texts == {0: "1\n"}


THREE_MODELS = """
import os, signal
from workbench.engine.classic import FullyShardedDataParallel as Wrapper, StateDictType
torchs, classic = Net(), Net()

def train_step():
    outputs = [each(torch.randn(8, 16)).sum() for each in (model, torchs, classic)]
    outputs[0].backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sum(outputs[1:]).backward()
"""
RESCUE = """
for each in (model, torchs):
    print({name: tuple(value.to_local().shape) for name, value in each.state_dict().items()}["head.weight"])
with Wrapper.state_dict_type(classic, StateDictType.LOCAL_STATE_DICT):
    print(sum(value.to_local().numel() for value in classic.state_dict().values()))
print(len(opt.state_dict()["state"]))
"""


def test_after_a_death_inside_a_step_the_others_still_have_their_shards():
    with Workbench(2, device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap=["Block"])
        bench.step(1)
        bench.run_cell(THREE_MODELS)
        bench.shard("torchs", wrap=["Block"], engine="torch")
        bench.shard("classic", wrap=["Block"], api="classic")
        with pytest.raises(RankDied, match="rank 0 can still run cells with %%fsdp -t 0"):
            bench.step(1)
        local = 26 + 3 * 552  # half of each flat parameter
        assert bench.run_cell(RESCUE, ranks=[0]).texts == {0: f"(2, 16)\n(2, 16)\n{local}\n20\n"}
