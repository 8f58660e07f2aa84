"""What counts as a checkpoint in memory, and which models take one."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as of_models

from tests.helpers.forked_ranks import on_one_rank
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
    "copied": (lambda file: {k: v.clone() for k, v in torch.load(file).items()}, ELEMENTS),
    "cast": (lambda file: {k: v.half() for k, v in torch.load(file, mmap=True).items()}, ELEMENTS),
    "safetensors": (lambda file: load_file(as_safetensors(file)), None),
    "safetensors, cast": (lambda file: {k: v.half() for k, v in load_file(as_safetensors(file)).items()}, ELEMENTS),
    "safetensors, one by one": (lambda file: dict(opened(as_safetensors(file))), ELEMENTS),
    "not read": (lambda _: nn.Linear(6, 4).state_dict(), None),
}


def as_safetensors(file):
    path = str(file.with_suffix(".safetensors"))
    save_file(nn.Linear(6, 4).state_dict(), path)
    return path


def opened(path):
    with safe_open(path, framework="pt") as file:
        yield from ((name, file.get_tensor(name).to(torch.bfloat16)) for name in file.keys())  # noqa: SIM118 - it is no dict


@pytest.mark.parametrize("name", MAKES)
def test_a_model_takes_what_torch_load_has_allocated(name, reads, file):
    make, expected = MAKES[name]
    state, model = make(file), nn.Linear(6, 4)
    model.load_state_dict(state)
    taken = reads.taken.get(model)
    assert (taken.num_elements if taken else None) == expected
    assert reads.unclaimed() == []


class Pretrained(nn.Sequential):
    """A model that reads a file as those of transformers do, without a call of ``load_state_dict``."""

    @classmethod
    def from_pretrained(cls, path, dtype=None, *, is_mapped=True):
        with torch.device("meta"):
            model = cls(nn.Linear(6, 4))
        for name, value in load_file(path).items():
            cast = value.to(dtype or value.dtype)
            setattr(model[0], name, nn.Parameter(cast if is_mapped else cast.clone()))
        return model.eval()

    def eval(self):
        return self.train(False)


def loaded(path, **kwargs):
    return Pretrained.from_pretrained(path, **kwargs)


PRETRAINED = {
    "mapped": (loaded, None),
    "cast": (lambda path: loaded(path, dtype=torch.bfloat16), ELEMENTS),
    "copied": (lambda path: loaded(path, is_mapped=False), ELEMENTS),
    "cast later": (lambda path: loaded(path).half(), ELEMENTS),
    "cast later, inside another": (lambda path: nn.Sequential(loaded(path)).to(torch.float64)[0], ELEMENTS),
    "its own dtype again": (lambda path: loaded(path).float(), None),
    "a head is new": (lambda path: headed(loaded(path)).half(), ELEMENTS + 4 * 2 + 2),
    "not read": (lambda _: Pretrained(nn.Linear(6, 4)).eval(), None),
}


def headed(model):
    return model.append(nn.Linear(4, 2))


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_model_of_from_pretrained_takes_what_is_not_mapped(name, reads, file):
    make, expected = PRETRAINED[name]
    model = make(as_safetensors(file))
    taken = reads.taken.get(model)
    assert (taken and taken.num_elements) == expected
    assert taken is None or (taken.is_pretrained and taken.words.endswith(" B of model.safetensors"))
    assert not any(part in reads.taken for part in model)
    other = nn.Linear(6, 4)
    other.load_state_dict({name: value.detach() for name, value in model[0].state_dict().items()})
    assert (other in reads.taken) == (expected is not None)  # what another model takes of it is of the file too
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


def test_a_copy_counts_for_the_first_model_that_takes_its_file(reads, file):
    state = {k: v.half() for k, v in torch.load(file, mmap=True).items()}
    first, second = nn.Linear(6, 4), nn.Linear(6, 4)
    first.load_state_dict(state)
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    assert [model in reads.taken for model in (first, second)] == [True, False]


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
    loaded(as_safetensors(file))
    assert found == ["building", "reading model.pt", "loading Linear", "loading Pretrained"]


@on_one_rank
def test_a_broadcast_is_announced_also_where_no_checkpoint_was_read():
    reads, model, found = CheckpointReads().install(), nn.Linear(6, 4), []
    reads.on_read = found.append
    options = of_models.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    of_models.set_model_state_dict(model, model.state_dict(), options=options)
    assert found == ["broadcasting Linear"]


def test_a_program_goes_on_where_noting_fails(reads, file, capfd):
    reads.on_read = [].index  # raises
    assert torch.load(file).keys() == {"weight", "bias"}
    assert "checkpoints that are read are not seen from here on; the program continues" in capfd.readouterr().err
    nn.Linear(6, 4).load_state_dict(torch.load(file))
    assert len(reads.taken) == 0


def test_nothing_is_noted_after_removal(file):
    reads, before = CheckpointReads(), (torch.load, nn.Module.load_state_dict, nn.Module.train, nn.Module.to)
    reads.install().remove()
    assert (torch.load, nn.Module.load_state_dict, nn.Module.train, nn.Module.to) == before
    state = torch.load(file)
    assert state
    assert reads.unclaimed() == []
