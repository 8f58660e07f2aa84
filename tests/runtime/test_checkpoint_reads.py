"""What counts as a checkpoint in memory, and which models take one."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

from workbench.runtime.checkpoint_reads import CheckpointReads

ELEMENTS = 6 * 4 + 4


@pytest.fixture
def reads():
    reads = CheckpointReads().install()
    yield reads
    reads.remove()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(6, 4).state_dict(), path)
    return path


MAKES = {
    "allocated": (lambda file: torch.load(file), ELEMENTS),  # noqa: PLW0108 - that of the time of the test
    "renamed": (lambda file: OrderedDict(reversed(torch.load(file).items())), ELEMENTS),
    "from bytes": (lambda file: torch.load(io.BytesIO(file.read_bytes())), ELEMENTS),
    "mapped": (lambda file: torch.load(file, mmap=True), None),
    "copied": (lambda file: {k: v.clone() for k, v in torch.load(file).items()}, None),
    "not read": (lambda _: nn.Linear(6, 4).state_dict(), None),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_model_takes_what_torch_load_has_allocated(name, reads, file):
    make, expected = MAKES[name]
    state, model = make(file), nn.Linear(6, 4)
    model.load_state_dict(state)
    taken = reads.taken.get(model)
    assert (taken.num_elements if taken else None) == expected
    assert reads.unclaimed() == []


def test_what_no_model_took_is_unclaimed_while_it_is_in_memory(reads, file):
    state = torch.load(file)
    (left,) = reads.unclaimed()
    assert (left.path, left.num_elements) == (str(file), ELEMENTS)
    del state
    assert reads.unclaimed() == []


def test_the_last_state_counts(reads, file):
    model = nn.Linear(6, 4)
    model.load_state_dict(torch.load(file))
    assert reads.taken[model].words == f"{4 * ELEMENTS:,} B of model.pt"
    model.load_state_dict(nn.Linear(6, 4).state_dict())
    assert model not in reads.taken


def test_a_pickled_model_has_its_own(reads, tmp_path):
    torch.save(nn.Linear(6, 4), tmp_path / "module.pt")
    model = torch.load(tmp_path / "module.pt", weights_only=False)
    assert reads.taken[model].num_elements == ELEMENTS


def test_tensors_stay_as_they_are(reads, file, tmp_path):
    state = torch.load(file)
    torch.save(state, tmp_path / "again.pt")
    assert (tmp_path / "again.pt").stat().st_size <= file.stat().st_size + 200
    assert vars(state["weight"]) == vars(copy.deepcopy(state)["weight"]) == {}


def test_parts_of_loading_are_announced(reads, file):
    found = []
    reads.on_read = found.append
    nn.Linear(6, 4).load_state_dict(torch.load(file))
    torch.save(torch.ones(2), file)
    torch.load(file)
    assert found == ["reading model.pt", "loading Linear"]


def test_a_program_goes_on_where_noting_fails(reads, file, capfd):
    reads.on_read = [].index  # raises
    assert torch.load(file).keys() == {"weight", "bias"}
    assert "checkpoints that are read are not seen from here on; the program continues" in capfd.readouterr().err
    nn.Linear(6, 4).load_state_dict(torch.load(file))
    assert len(reads.taken) == 0


def test_nothing_is_noted_after_removal(file):
    reads, before = CheckpointReads(), (torch.load, nn.Module.load_state_dict)
    reads.install().remove()
    assert (torch.load, nn.Module.load_state_dict) == before
    state = torch.load(file)
    assert state
    assert reads.unclaimed() == []
