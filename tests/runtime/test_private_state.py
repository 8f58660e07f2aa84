"""What no replica of a rank has: it is in a file after each step, whenever the rank is killed."""

import pickle

import torch
from torch import nn

from workbench.protocol.rank_messages import SnapshotMark
from workbench.runtime.private_state import PrivateStates
from workbench.runtime.training_state import TrainingObjects, capture


def trained(model, opt):
    model(torch.randn(4, 3)).sum().backward()
    opt.step()
    opt.zero_grad()


def test_two_states_are_in_the_file_and_the_newest_counts_only_while_the_rest_is_as_it_was(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.ones(3))
    variables = {"model": model, "opt": torch.optim.AdamW(model.parameters(), lr=0.1)}
    states = PrivateStates(tmp_path / "state")
    assert states.read() == []
    for step in range(4):
        trained(*variables.values())
        objects = TrainingObjects.among(variables)
        states.write(SnapshotMark(entry=2, count=step), objects, step, pickle.dumps({"step": step}))
        newest = states.newest(objects)
        assert newest is not None
        assert newest.mark.count == step
    found = PrivateStates(tmp_path / "state").read()
    assert [each.state.step for each in found] == [2, 3]
    assert pickle.loads(found[-1].plain) == {"step": 3}
    changed = {f"model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert found[-1].state.tensors.keys() == changed, "replicas have what steps do not change"
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state"]

    mine, replica = found[-1], capture(objects, 3)
    seen = replica.tensors["model.1.num_batches_tracked"].fill_(100)
    restored = mine.over(replica)
    assert restored.tensors.keys() == replica.tensors.keys()
    assert restored.tensors["model.1.num_batches_tracked"] == 4 != seen
    torch.rand(())
    assert mine.state.random["torch"] != TrainingObjects.among(variables).random.plain()["torch"]

    assert states.newest(objects, optimizer_steps=1) is None
    trained(*variables.values())
    assert states.newest(TrainingObjects.among(variables)) is None, "parameters are those of a later step"
    states.remove()
    assert states.read() == []


def test_a_file_that_cannot_be_written_leaves_none(tmp_path):
    states = PrivateStates(tmp_path / "none" / "state")
    states.write(SnapshotMark(entry=0, count=0), TrainingObjects.among({}), 0, b"")
    assert states.read() == []
