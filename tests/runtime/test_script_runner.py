"""Scripts on real ranks: their namespace, what the next one finds, and how they end."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.booted_ranks import drain, execute, namespace, run
from tests.helpers.scripts import TRAIN, written
from tests.helpers.stopped_step import Meeting, beside
from tests.runtime.test_gate import trace_of
from workbench.engine._torch import named_groups
from workbench.errors import UsageError
from workbench.events import Kind
from workbench.protocol.commands import Continue, Run, Step, Verify
from workbench.runtime.script_runner import ScriptExit
from workbench.trace import check
from workbench.trace.columns import steps


def ran(path, *args, **options):
    return execute(Run(script=path, args=args, **options))


def two_runs(path):
    """Run the script twice, between cells that use some of its names."""
    ns = namespace()
    ns["of_a_cell"] = "kept"
    before = {name: ns[name] for name in ("mesh", "rank", "world_size", "device", "log_metric")}
    groups = set(named_groups())
    replies, losses, seen = [], [], []
    for _ in range(2):
        replies.append(ran(path, "--lr", "1e-3", "--steps", "4"))
        losses.append(ns["losses"])
        seen.append((ns["__file__"], ns["args"].lr, type(ns["model"]).__name__, sys.argv[0] == path))
        ns["of_the_first"] = "a name of a cell"
    dist.barrier()  # the rank's own group still works
    written(Path(path).parent, "mesh = 3", "other.py")
    ran(str(Path(path).parent / "other.py"))
    after = {name: name in ns for name in ("model", "losses", "of_a_cell", "of_the_first")}
    replaced = ns["mesh"]
    written(Path(path).parent, "pass", "last.py")
    ran(str(Path(path).parent / "last.py"))
    restored = all(ns[name] is value for name, value in before.items())
    return replies, losses, seen, after, replaced, restored, set(named_groups()) - groups, check(trace_of(*drain()))


def test_names_stay_until_the_next_run_which_starts_clean(tmp_path):
    path = written(tmp_path)
    for replies, losses, seen, after, replaced, restored, groups, broken in run(2, two_runs, path):
        assert [reply["steps_done"] for reply in replies] == [4, 4]
        assert replies[0]["models"] == ["model"]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 4
        assert seen == [(path, 1e-3, "FSDPNet", False)] * 2
        assert after == {"model": False, "losses": False, "of_a_cell": True, "of_the_first": True}
        assert replaced == 3
        assert restored
        assert groups == set()
        assert broken == []


IN_MAIN = """
import torch
from torch import nn

class Loop:
    def step(self, optimizer):
        inner = nn.Linear(1, 1)
        optimizer.step()

def main():
    model, batch, other = nn.Linear(2, 2), torch.ones(1, 2), "text"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        later = nn.Linear(3, 3) if _ else None
        model(batch).sum().backward()
        Loop().step(optimizer)
    weights.append(model.weight.tolist())

weights, inner = [], "of the module"
main()
"""


def kept_of_main(path):
    ran(path)
    ns = namespace()
    trained = ns["model"].weight.tolist() == ns["weights"][0]
    found = {name: name in ns for name in ("model", "optimizer", "batch", "other", "later")}
    value = ns["inner"]
    written(Path(path).parent, "pass", "next.py")
    ran(str(Path(path).parent / "next.py"))
    return trained, found, value, "model" in ns


def test_models_and_optimizers_of_a_function_that_trains_stay_until_the_next_run(tmp_path):
    path = written(tmp_path, IN_MAIN)
    for trained, found, inner, is_left in run(2, kept_of_main, path):
        assert trained
        assert found == {"model": True, "optimizer": True, "batch": False, "other": False, "later": False}
        assert inner == "of the module"
        assert not is_left


IN_TRAINER = """
import torch
from torch import nn


class Trainer:
    def __init__(self, width):
        self.net = nn.Linear(2, width)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self._hidden = nn.Linear(1, 1)

    def fit(self):
        for _ in range(2):
            self.net(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()


first, second = Trainer(1), Trainer(3)
first.fit()
second.fit()
"""


def kept_of_trainers(path):
    ran(path)
    ns = namespace()
    return ns["net"] is ns["second"].net, ns["optimizer"] is ns["second"].optimizer, "_hidden" in ns


WITH_ARGUMENTS = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
def train_step(model, optimizer, batch, scale=1.0, *, clip):
    batch = batch * scale
    loss = model(batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        train_step(model, optimizer, torch.full((2, 4), 1.0 + step + dist.get_rank()), clip=1.0)
main()
"""
IN_OBJECTS = """
from dataclasses import dataclass
from functools import partial
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
def update(model, optimizer, x, y):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
@dataclass(frozen=True, slots=True)
class Update:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    def __call__(self, *batch):
        return update(self.model, self.optimizer, *batch)
class Trainer:
    def __init__(self, model, optimizer):
        self.own, self.optimizer = model, optimizer
    def fit(self, batches):
        for x, y in batches:
            self.train_step(x, y=y)
    def train_step(self, x, y):
        return update(self.own, self.optimizer, x, y)
def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.full((2, 2, 4), 1.0 + step + dist.get_rank()).unbind() for step in range(3)]
    trainer, of_data = Trainer(model, optimizer), Update(model, optimizer)
    of_partial = partial(update, model, optimizer)
    def nested(x):
        return update(model, optimizer, x, torch.ones(4))
    for call in (of_data, of_partial):
        call(*batches[0])
    nested(batches[1][0])
    trainer.fit(batches)
main()
"""
STEPS = {
    WITH_ARGUMENTS: {"train_step": ["model", "optimizer", "batch", "scale", "clip"]},
    IN_OBJECTS: {
        "train_step": ["x", "y"],
        "trainer.train_step": ["x", "y"],
        "Trainer.train_step": ["self", "x", "y"],
        "of_data": ["*batch"],
        "of_partial": ["x", "y"],
        "nested": ["x"],
        "update": ["model", "optimizer", "x", "y"],
    },
}


def verified_with_arguments(*paths):
    replies = []
    for path, names in zip(paths, STEPS.values(), strict=True):
        ran(path)
        replies += [execute(Verify(fn=name)) for name in names]
        with pytest.raises(UsageError, match=r"train_step\(\) wants \w+, .*, but a step is called"):
            execute(Step(count=1))
    return replies


def test_verify_passes_the_arguments_of_the_last_call_again(tmp_path):
    paths = [written(tmp_path, source, f"of_{number}.py") for number, source in enumerate(STEPS)]
    arguments = [each for names in STEPS.values() for each in names.values()]
    for replies in run(2, verified_with_arguments, *paths):
        for reply, expected in zip(replies, arguments, strict=True):
            assert (reply["ok"], reply["optimizer_steps"], reply["arguments"]) == (True, 1, expected)
            assert reply["max_rel_diff"] <= 1e-5


def test_models_and_optimizers_of_a_trainer_stay_those_of_the_newest_optimizer(tmp_path):
    for found in run(2, kept_of_trainers, written(tmp_path, IN_TRAINER)):
        assert found == (True, True, False)


def groups_of_a_script(path):
    groups = set(named_groups())
    found = []
    for _ in range(2):
        ran(path)
        found.append((len(set(named_groups()) - groups), namespace()["total"].item()))
    written(Path(path).parent, "pass", "next.py")
    ran(str(Path(path).parent / "next.py"))
    return found, len(set(named_groups()) - groups)


def test_groups_of_a_script_live_until_the_next_run(tmp_path):
    source = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group()
pair = dist.new_group([0, 1])
total = torch.ones(1)
dist.all_reduce(total, group=pair)
dist.all_reduce(total, group=init_device_mesh("cpu", (1, 2)).get_group(1))
dist.destroy_process_group()
"""
    for found, left in run(2, groups_of_a_script, written(tmp_path, source)):
        assert [total for _, total in found] == [4.0, 4.0]
        assert found[0][0] == found[1][0] >= 1
        assert left == 0


def imports(path):
    values = []
    for number in (1, 22):
        written(Path(path).parent, f"value = {number}", "beside.py")
        ran(path)
        values.append((namespace()["beside"].value, namespace()["loaded"]))
    return values, "/elsewhere" in sys.path


def test_modules_beside_the_script_are_imported_again_and_others_are_not(tmp_path):
    source = "import sys, beside, torch; loaded = id(torch); sys.path.append('/elsewhere')"
    ((values, has_path),) = run(1, imports, written(tmp_path, source))
    assert [value for value, _ in values] == [1, 22]
    assert values[0][1] == values[1][1]
    assert not has_path


def modules(folder):
    sys.path.insert(0, folder)  # as the working directory of ranks
    ran("package", "1", module=True)
    ns = namespace()
    found = [ns["argv"][1:], ns["__name__"], ns["argv"][0].endswith("__main__.py"), ns["near"].value]
    for name in ("nowhere", "package.nowhere", "package.broken"):
        with pytest.raises(UsageError) as caught:
            ran(name, module=True)
        found.append(str(caught.value).partition(":")[0])
    return found


def test_a_module_runs_as_with_python_m(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    written(folder, "", "__init__.py")
    written(folder, "value = 7", "near.py")
    written(folder, "x = = 1", "broken.py")
    written(folder, "import sys\nfrom package import near\nfrom . import near\nargv = sys.argv", "__main__.py")
    assert run(1, modules, str(tmp_path)) == [
        [
            ["1"],
            "__main__",
            True,
            7,
            "there is no module nowhere to run",
            "there is no module package.nowhere to run",
            "broken.py, line 1",
        ]
    ]


def endings(path):
    found = []
    for code in ("", "0", "None", "3", "'no data'", "True"):
        written(Path(path).parent, f"import sys\n\nsys.exit({code})")
        try:
            ran(path)
        except ScriptExit as error:
            lines = error.__traceback__
            while lines.tb_next is not None:
                lines = lines.tb_next
            found.append((str(error), lines.tb_frame.f_code.co_filename == path and lines.tb_lineno))
        else:
            found.append("success")
    return found


def test_a_status_is_success_or_told_with_its_line(tmp_path):
    assert run(1, endings, written(tmp_path, "")) == [
        [
            *["success"] * 3,
            ("the script called sys.exit(3)", 3),
            ("the script called sys.exit('no data')", 3),
            ("the script called sys.exit(True)", 3),
        ]
    ]


def refusals(path):
    found = []
    for source in ("x = 1\ny = = 2\n", "x = '\0'"):
        written(Path(path).parent, source)
        with pytest.raises(UsageError) as caught:
            ran(path)
        found.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        ran("/nowhere/train.py")
    return [*found, str(caught.value), dist.is_initialized()]


def test_what_is_no_script_is_refused_in_a_sentence(tmp_path):
    ((syntax, null, missing, is_initialized),) = run(1, refusals, written(tmp_path, ""))
    assert syntax == "train.py, line 2: invalid syntax: y = = 2"
    assert "train.py" in null
    assert missing == (
        "rank 0 on here cannot read /nowhere/train.py: No such file or directory; all hosts need the script"
    )
    assert is_initialized


@pytest.mark.fresh_ranks
def test_threads_that_a_process_would_wait_for_are_waited_for(tmp_path):
    source = """
import threading
began = threading.Event()
def work():
    began.wait()
    done.append(1)
done = []
threading.Thread(target=work).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
began.set()
"""
    assert run(1, done_after, written(tmp_path, source)) == [[1]]


def done_after(path):
    ran(path)
    return namespace()["done"]


def test_a_process_that_the_script_forks_is_no_rank(tmp_path):
    source = """
import os, sys
child = os.fork()
if child == 0:
    raise ValueError
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    assert run(1, status_of_child, written(tmp_path, source)) == [1]


def status_of_child(path):
    ran(path)
    return namespace()["status"]


def steps_of(path, *args):
    reply = ran(path, *args)
    trace = trace_of(*drain())
    return reply["steps_done"], list(steps(trace)), check(trace)


PLAIN = """
import torch
from torch import nn

net = nn.Linear(16, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.randn(4, 16)).sum().backward()
    optimizer.step()
"""


def test_a_script_without_a_model_that_ranks_share_has_steps_between_those_of_the_optimizer(tmp_path):
    for done, recorded, broken in run(2, steps_of, written(tmp_path, PLAIN)):
        assert done == 4
        assert recorded[:3] == [1, 2, 3]  # the begin of step 0 is unknown
        assert broken == []


def test_steps_of_replicas_begin_with_their_forward(tmp_path):
    for done, recorded, broken in run(2, steps_of, written(tmp_path), "--ddp", "--steps", "4"):
        assert (done, recorded, broken) == (4, [0, 1, 2, 3], [])


def stopped(path, meeting):
    def at_the_stop(channel):
        held = channel.until_held()
        line = channel.evaluate("[type(model).__name__, len(losses), x.shape[0]]")
        meeting.wait()
        channel(Continue())
        return held.kind, line

    outcome, found = beside(at_the_stop, Run(script=path, until="all_gather:layers.1"))
    return outcome["steps_done"], namespace()["losses"], found


def undisturbed(path):
    ran(path)
    return namespace()["losses"]


def test_a_script_is_stopped_and_goes_on_with_the_same_losses(tmp_path):
    path = written(tmp_path)
    expected = run(2, undisturbed, path)
    for rank, (done, losses, (kind, line)) in enumerate(run(2, stopped, path, Meeting(2))):
        assert done == 3
        assert losses == expected[rank]
        assert kind is Kind.ALL_GATHER
        assert line == "['FSDPNet', 0, 4]"


def workers(path):
    return ran(path, "--workers", "2")["steps_done"]


def test_workers_of_a_data_loader_work(tmp_path):
    assert run(2, workers, written(tmp_path, TRAIN)) == [3, 3]
