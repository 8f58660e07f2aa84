"""A reference to full parameters reads as NaN after their unit is resharded, and never crashes the process."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import Block
from tests.helpers.unsharded_copy import DIM, data
from workbench.engine import fully_shard
from workbench.engine.backends.page_pool import SparePages
from workbench.engine.unshard_memory import UnshardMemory

ALIASES: dict[str, Callable[[nn.Parameter], object]] = {
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data,
    "row": lambda p: p.detach()[1],
    "transposed": lambda p: p.detach().t(),
    "view": lambda p: p.detach().view(-1),
    "in the graph": lambda p: p.t(),
    "array": lambda p: p.detach().numpy(),
    "storage": lambda p: torch.empty(0, dtype=p.dtype).set_(p.untyped_storage()),
    "parameter": lambda p: p,
    "another's data": lambda p: nn.Parameter(p.data),
}


class KeepsWeight(nn.Module):
    """Keeps references to its weight while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.kept: dict[str, object] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = {name: alias(self.inner.weight) for name, alias in ALIASES.items()}
        return self.inner(x)


def read(kept: dict[str, object]) -> dict[str, bool]:
    """Read every value; return which are all NaN."""
    values = {name: torch.as_tensor(value).detach() for name, value in kept.items()}
    assert all(repr(value) and value.clone() is not None for value in values.values())
    return {name: bool(value.isnan().all()) for name, value in values.items()}


def kept_by_a_forward(recorded: bool) -> None:
    model = KeepsWeight()
    plain = copy.deepcopy(model)
    fully_shard(model, reshard_after_forward=True)
    with torch.set_grad_enabled(recorded):
        loss = model(data(0)).square().mean()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert read(model.kept) == dict.fromkeys(ALIASES, True)
    if recorded:
        del model.kept["in the graph"]
        loss.backward()  # autograd's saved tensors are filled again
        plain(data(0)).square().mean().backward()
        average_grads(plain)
        assert_same_shards(model, plain)
        assert set(read(model.kept).values()) == {True}
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("recorded", [False, True])
def test_retained_views_of_a_full_parameter_read_nan_after_reshard(world_size, recorded):
    run_ranks(world_size, kept_by_a_forward, recorded)


def kept_over_iterations() -> None:
    model = nn.Sequential(KeepsWeight(), KeepsWeight(), KeepsWeight())
    for module in (*model, model):
        fully_shard(module)
    for step in range(3):
        model(data(step)).square().mean().backward()
        for module in model:
            assert set(read(module.kept).values()) == {True}
    model.release_buffers()
    for module in model:
        assert set(read(module.kept).values()) == {True}


def test_retained_views_of_reused_pages_read_nan():
    run_ranks(2, kept_over_iterations)


def inner_state_dict(reshard: bool) -> None:
    """Get an inner module's state dict while its unit is unsharded, train, then read the state dict."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(DIM), Block(DIM))
    model = copy.deepcopy(plain)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=reshard)
    with torch.no_grad():
        model(data(0))
    states = [model[1].mlp[0].state_dict(), model[1].norm.state_dict(), model[0].state_dict()]
    expected = [plain[1].mlp[0].state_dict(), plain[1].norm.state_dict(), plain[0].state_dict()]
    model(data(0)).square().mean().backward()
    for state, values in zip(states, expected, strict=True):
        assert list(state) == list(values)
        for name, value in state.items():
            assert isinstance(value, DTensor)
            torch.testing.assert_close(value.full_tensor(), values[name])


@pytest.mark.parametrize("reshard", [False, True])
def test_the_state_dict_of_an_inner_module_holds_shards_too(reshard):
    run_ranks(2, inner_state_dict, reshard)


def inner_load(assign: bool, unsharded: bool) -> None:
    torch.manual_seed(0)
    plain, source = nn.Sequential(Block(DIM), Block(DIM)), nn.Linear(DIM, 3 * DIM + 1)
    model = copy.deepcopy(plain)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=False)
    state = {name: value.clone() for name, value in model[1].mlp[0].state_dict().items()}
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(distribute_tensor(source.state_dict()[name], value.device_mesh, value.placements))
        if unsharded:
            model(data(0))
    plain[1].mlp[0].load_state_dict(source.state_dict())
    model[1].mlp[0].load_state_dict(state, assign=assign)
    assert_same_shards(model[1], plain[1])
    torch.testing.assert_close(model(data(0)), plain(data(0)))
    for each in (model, plain):
        each(data(0)).square().mean().backward()
    average_grads(plain)
    assert_same_shards(model, plain)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("unsharded", [False, True])
def test_an_inner_module_can_load_a_state_dict(assign, unsharded):
    run_ranks(2, inner_load, assign, unsharded)


class FailsOnce:
    """Memory whose first call of one method raises, as code that is out of stack does anywhere."""

    def __init__(self, fails: str) -> None:
        self.tensor = torch.zeros(6)
        self._fails = fails

    def fill(self, _spare: SparePages) -> None:
        self._raise_in("fill")

    def empty(self, _spare: SparePages) -> None:
        self._raise_in("empty")

    def _raise_in(self, method: str) -> None:
        if self._fails == method:
            self._fails = ""
            raise RecursionError


def use(memory: UnshardMemory, spare: SparePages) -> None:
    memory.take(spare)
    memory.give_back(spare)


@pytest.mark.parametrize(("fails", "expected"), [("fill", []), ("empty", [24, -24])])
def test_memory_that_a_failed_step_left_is_counted_and_freed_once(fails, expected):
    memory, spare = UnshardMemory(0, FailsOnce(fails)), SparePages()
    with recording() as recorded:
        with pytest.raises(RecursionError):
            use(memory, spare)
        memory.give_back(spare)  # as the reset after the step does
    assert [delta for _, _, delta in recorded.deltas] == expected
