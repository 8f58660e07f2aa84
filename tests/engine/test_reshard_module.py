"""reshard_module: change wrap, mesh, schedule, precision or offloading of a live, trained model."""

import copy
import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.engine.test_errors import fingerprint
from tests.engine.test_placements import even_net, second
from tests.engine.test_tensor_parallel import FSDP_TP, meshes, split
from tests.engine.test_tensor_parallel import loss_of as loss_of_split
from tests.engine.test_tensor_parallel import make as make_decoder
from tests.engine.test_tensor_parallel import shard as shard_decoder
from tests.helpers.expected_sizes import BLOCK_SHAPES, BLOCKS, FP32, NET, ROOT_SHAPES, slots
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.parity import assert_same_shards, shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import Block, Net, adamw, batch, loss_of, make_net
from workbench.engine import (
    CPUOffloadPolicy,
    DefaultAllGather,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    fully_shard,
    register_fsdp_forward_method,
    replacement,
    reshard_module,
    reshard_unit,
    share_comm_ctx,
    unshard_module,
)
from workbench.engine.fsdp_state import roots, states_below, units_of
from workbench.engine.mesh import mesh_info
from workbench.engine.unsharding import remap_optimizer
from workbench.events import Category

Losses = list[float]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def nothing(module: nn.Module) -> bool:
    return False


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW with two groups, as is common."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return adamw([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}])


def backward(model: nn.Module, step: int) -> float:
    loss = loss_of(model, batch(dist.get_rank(), step))
    loss.backward()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Losses:
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_equal(model: nn.Module, twin: nn.Module) -> None:
    """Check that names, values and gradients are bitwise equal, for any sharding."""
    for (name, value), (twin_name, wanted) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == twin_name
        assert torch.equal(value.full_tensor(), wanted.full_tensor()), name
        assert (value.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            assert torch.equal(value.grad.full_tensor(), wanted.grad.full_tensor()), name


def unit_names(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]


# ---- changes that keep all numbers

CHANGES = {
    "one unit": {"wrap": nothing},
    "smaller units": {"wrap": is_linear},
    "the same units": {"wrap": is_block},
    "kept after forward": {"reshard_after_forward": False},
    "all freed after forward": {"reshard_after_forward": True},
    "auto": {"reshard_after_forward": None},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "all at once": {"wrap": is_linear, "reshard_after_forward": False, "offload_policy": CPUOffloadPolicy()},
}


def changed_midway(change: dict[str, object]) -> None:
    """Change the model between a backward and its optimizer step, next to an unchanged twin."""
    model, twin = shard_net(make_net(num_blocks=2)), shard_net(make_net(num_blocks=2))
    optimizers = [optimizer_of(m) for m in (model, twin)]
    assert train(model, optimizers[0], range(2)) == train(twin, optimizers[1], range(2))
    assert backward(model, 2) == backward(twin, 2)
    before = list(model.parameters())
    assert reshard_module(model, **change) == {}
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert_equal(model, twin)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert train(model, optimizers[0], range(3, 6)) == train(twin, optimizers[1], range(3, 6))
    assert_equal(model, twin)
    if "wrap" in change:
        wanted = ["", *(name for name, m in model.named_modules() if name and change["wrap"](m))]
        assert unit_names(model) == wanted
    if change.get("offload_policy"):
        assert all(unit.policy.offloads for unit in units_of(states_below(model)))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_continues_bit_identically_with_the_same_parameters(world_size, change):
    run_ranks(world_size, changed_midway, change)


@pytest.mark.thorough
@pytest.mark.parametrize("change", [{"wrap": is_linear}, {"reshard_after_forward": 2}], ids=["wrap", "split in twos"])
def test_training_continues_bit_identically_on_four_ranks_with_empty_shards(change):
    run_ranks(4, changed_midway, change)


def over_shared_memory(change: dict[str, object]) -> None:
    import os

    os.environ.pop("WORKBENCH_COMM", None)  # only in this process, which ends with the test
    changed_midway(change)


@pytest.mark.parametrize("change", [{"wrap": is_linear}, {"reshard_after_forward": False}], ids=["wrap", "schedule"])
def test_training_continues_bit_identically_over_shared_memory(change):
    run_ranks(2, over_shared_memory, change)


# ---- another mesh


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def there_and_back(shape: tuple[int, ...], offload: bool = False) -> None:
    """Reshard 1-D to (replicate, shard) and back; only HSDP's order of sums may make a difference."""
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model, twin = shard_net(make_net(tied=True), **options), shard_net(make_net(tied=True), **options)
    optimizers = [optimizer_of(m) for m in (model, twin)]
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        train(m, optimizer, range(2))
        backward(m, 2)
    for round_, mesh in enumerate((mesh_of(shape), mesh_of((dist.get_world_size(),)))):
        before = dict(model.named_parameters())
        same = all(p.device_mesh == mesh for p in before.values())
        mapping = reshard_module(model, mesh=mesh, optimizers=[optimizers[0]])
        assert mapping == ({} if same else {old: model.get_parameter(name) for name, old in before.items()})
        assert all(p.device_mesh == mesh for p in model.parameters())
        assert all(old.grad is None for old in mapping)
        assert model.head.weight is model.embed.weight
        if round_ == 0:
            assert_equal(model, twin)
            assert any(p.grad is not None for p in model.parameters())
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            train(m, optimizer, range(3, 5))
    for (name, value), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value.full_tensor(), wanted.full_tensor(), msg=name)
        for key, moment in optimizers[0].state[value].items():
            expected = optimizers[1].state[wanted][key]
            whole = (moment.full_tensor(), expected.full_tensor()) if key != "step" else (moment, expected)
            torch.testing.assert_close(*whole)


@pytest.mark.parametrize(
    ("world_size", "shape"), [(1, (1, 1)), (2, (2, 1)), (2, (1, 2)), (4, (2, 2)), (2, (2,))], ids=str
)
def test_another_mesh_and_back(world_size, shape):
    run_ranks(world_size, there_and_back, shape)


def test_another_mesh_of_an_offloaded_model():
    run_ranks(2, there_and_back, (2, 1), True)


def moved_bits() -> None:
    """Move to a renamed mesh of the same ranks: every tensor is gathered and split again, but no number changes."""
    model, twin = shard_net(make_net()), shard_net(make_net())
    optimizers = [optimizer_of(m) for m in (model, twin)]
    assert train(model, optimizers[0], range(2)) == train(twin, optimizers[1], range(2))
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    mapping = reshard_module(model, mesh=mesh, optimizers=[optimizers[0]])
    assert len(mapping) == len(list(model.parameters()))
    assert [g["lr"] for g in optimizers[0].param_groups] == [1e-2, 3e-3]
    assert train(model, optimizers[0], range(2, 5)) == train(twin, optimizers[1], range(2, 5))
    assert_equal(model, twin)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mesh_that_sums_in_the_same_order_changes_no_bit(world_size):
    run_ranks(world_size, moved_bits)


# ---- precision


def precision_changed() -> None:
    """Compare with a twin that is unsharded, sharded again with the other precision, and remapped by hand."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, twin = shard_net(make_net()), shard_net(make_net())
    optimizers = [optimizer_of(m) for m in (model, twin)]
    assert train(model, optimizers[0], range(2)) == train(twin, optimizers[1], range(2))
    for options in ({"mp_policy": policy}, {"mp_policy": MixedPrecisionPolicy()}):
        assert reshard_module(model, **options) == {}
        unshard_module(twin, [optimizers[1]])
        before = dict(twin.named_parameters())
        shard_net(twin, **options)
        remap_optimizer(optimizers[1], {before[name]: p for name, p in twin.named_parameters()})
        losses = train(model, optimizers[0], range(2, 5))
        assert losses == train(twin, optimizers[1], range(2, 5))
        assert_equal(model, twin)
    assert all(p.dtype is torch.float32 for p in model.parameters())


def precision_of_each() -> None:
    """A function chooses each module's precision, also for modules that the call wraps, and receives the old one."""
    model, had = fully_shard(make_net()), {}
    result = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    inner = MixedPrecisionPolicy(torch.bfloat16)

    def choose(module: nn.Module, now: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        had[module] = now
        return result if module is model else inner

    for wrap in ({"wrap": is_block}, {}):
        before = {m: state.mp_policy for state in states_below(model) for m in state.modules}
        reshard_module(model, **wrap, mp_policy=choose)
        assert had == {m: before.get(m, before[model]) for m in (model, *model.blocks)}
        assert [state.mp_policy for state in states_below(model)] == [result, inner, inner, inner]
        assert [unit.policy.mp_policy for unit in units_of(states_below(model))] == [result, inner, inner, inner]
        assert model(batch(0, 0)).dtype == torch.float64
        assert model.blocks[0](torch.ones(1, 5)).dtype == torch.bfloat16


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_precision_for_each_module(world_size):
    run_ranks(world_size, precision_of_each)


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_precision_and_back(world_size):
    run_ranks(world_size, precision_changed)


# ---- what the user has set


class Counting(DefaultAllGather):
    """The user's all-gather."""

    calls = 0

    def __call__(self, *args, **kwargs):
        Counting.calls += 1
        return super().__call__(*args, **kwargs)


def settings(change: dict[str, object]) -> None:
    model = make_net(num_blocks=2)
    model.blocks[0].mlp.requires_grad_(False)
    shard_net(model, ignored_params={model.scale})
    called: list[object] = []
    model.register_forward_hook(lambda *_: called.append("forward"))
    handle = model.embed.weight.register_post_accumulate_grad_hook(called.append)
    block = model.blocks[1]
    backward(model, 0)
    model.set_modules_to_forward_prefetch([block])
    block.set_modules_to_backward_prefetch([model.blocks[0]])
    block.set_gradient_divide_factor(3)
    block.set_custom_all_gather(Counting())
    block.set_all_reduce_hook(lambda grad: grad.mul_(1))
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_reshard_after_backward(False, recurse=False)
    model.set_reshard_after_forward(False)
    model.set_is_last_backward(False)
    before, ignored, calls = settings_of(model), model.scale, Counting.calls
    called.clear()
    reshard_module(model, optimizers=[torch.optim.SGD(model.parameters())], **change)
    assert settings_of(model) == before
    embedding = model.embed.weight
    assert model.scale is ignored
    assert type(ignored) is nn.Parameter
    model.set_is_last_backward(True)
    model.zero_grad()
    backward(model, 1)
    assert called[0] == "forward"
    assert called[1] is embedding
    assert [p.requires_grad for p in model.blocks[0].parameters()] == [True, True, False, False, False, False]
    assert model.blocks[0].mlp[0].weight.grad is None
    if dist.get_world_size() > 1:
        assert Counting.calls > calls
    handle.remove()
    backward(model, 2)
    assert called[2:] == ["forward"]


def settings_of(model: nn.Module) -> list[dict[str, object]]:
    found = []
    for state in states_below(model):
        (unit,) = state._fsdp_param_groups
        found.append(
            {
                "forward": [type(s.modules[0]) for s in state.forward_prefetch or ()],
                "backward": [s.modules for s in state.backward_prefetch or ()],
                "sync": dict(vars(unit.sync)),
                "comm": unit.comm.gather if unit.comm and unit.comm.name == "custom" else None,
                "max": unit.max_reductions,
                "flags": (unit.reshard_after_backward, unit.unshard_in_backward, unit.reshard_after_forward),
                "last": state.root_ctx.is_last_backward,
                "frozen": [p.fqn for p in unit.fsdp_params if not p.trainable],
                "names": [p.fqn for p in unit.fsdp_params],
            }
        )
    return found


@pytest.mark.parametrize("change", ["mesh", "wrap", "precision"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_manual_settings_are_kept(world_size, change):
    run_ranks(world_size, settings_by_name, change)


def settings_by_name(change: str) -> None:
    settings(
        {
            "mesh": lambda: {"mesh": mesh_of((1, dist.get_world_size()))},
            "wrap": lambda: {"wrap": is_block},
            "precision": lambda: {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
        }[change]()
    )


def settings_of_new_units() -> None:
    model = shard_net(make_net(num_blocks=2))
    backward(model, 0)
    model.blocks[0].set_gradient_divide_factor(5)
    model.blocks[0].set_reshard_after_forward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    reshard_module(model, wrap=is_linear)
    units = {u.name: u for u in units_of(states_below(model))}
    assert {n: (u.sync.divide_factor, u.reshard_after_forward) for n, u in units.items()} == {
        "": (None, False),
        "head": (None, True),
        "blocks.0.mlp.0": (5, False),
        "blocks.0.mlp.2": (5, False),
        "blocks.1.mlp.0": (None, True),
        "blocks.1.mlp.2": (None, True),
    }
    assert model._get_fsdp_state().forward_prefetch == ()  # the block is no longer a unit
    backward(model, 1)


def test_a_new_unit_takes_the_settings_of_the_one_its_module_was_in():
    run_ranks(2, settings_of_new_units)


def placements_kept() -> None:
    model = even_net()
    plain = copy.deepcopy(model)
    shard_net(model, shard_placement_fn=second)
    dims = {name: p.placements[-1].dim for name, p in model.named_parameters()}
    assert set(dims.values()) == {0, 1}
    reshard_module(model, wrap=is_linear)
    reshard_module(model, mesh=mesh_of((1, 2)))
    assert {name: p.placements[-1].dim for name, p in model.named_parameters()} == dims
    assert_same_shards(model, plain)


def test_dims_chosen_by_a_placement_function_stay():
    run_ranks(2, placements_kept)


class Greeter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x)

    def greet(self, x):
        return self.inner(x) + 1


def registered_methods() -> None:
    model = fully_shard(Greeter())
    register_fsdp_forward_method(model, "greet")
    x = torch.ones(2, 3)
    expected = model.greet(x)
    reshard_module(model, wrap=is_linear, mesh=mesh_of((2, 1)))
    assert torch.equal(model.greet(x), expected)
    unshard_module(model)
    assert torch.equal(model.greet(x), expected)


def test_registered_forward_methods_work_after_resharding_and_after_undoing():
    run_ranks(2, registered_methods)


def shared_context() -> None:
    stages = [fully_shard(nn.Linear(3, 3)) for _ in range(2)]
    share_comm_ctx(stages)
    model = nn.Sequential(*stages)
    model(torch.ones(1, 3)).sum().backward()
    for stage in stages:
        reshard_module(stage, mesh=mesh_of((2, 1)))
    contexts = {id(stage._get_fsdp_state()._comm_ctx) for stage in stages}
    assert len(contexts) == 1
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()


def test_roots_that_shared_a_context_still_do():
    run_ranks(2, shared_context)


# ---- before the first run, on the meta device, in lists


def not_run_yet() -> None:
    plain = make_net(num_blocks=1)
    model = shard_net(copy.deepcopy(plain))
    model.set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(True)
    reshard_module(model, wrap=is_linear, mesh=mesh_of((2, 1)))
    assert_same_shards(model, plain)
    backward(model, 0)


def test_a_model_that_never_ran():
    run_ranks(2, not_run_yet)


def on_meta() -> None:
    with torch.device("meta"):
        model = shard_net(make_net(num_blocks=1))
    reshard_module(model, wrap=is_linear)
    assert all(p.is_meta for p in model.parameters())
    reshard_module(model, mesh=mesh_of((2, 1)))
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    backward(model, 0)


def test_a_model_on_the_meta_device():
    run_ranks(2, on_meta)


class Stages(nn.Module):
    """Its two layers are one unit; a third module has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def lists() -> None:
    model = Stages()
    fully_shard([model.first, model.second])
    fully_shard(model.act)
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    expected = model(torch.ones(2, 3))
    reshard_module(model, mesh=mesh_of((2, 1)))
    assert unit_names(model) == ["", "first", "act", "second"]
    assert model.first._get_fsdp_state() is model.second._get_fsdp_state()
    torch.testing.assert_close(model(torch.ones(2, 3)), expected)
    before = fingerprint(model)
    roots.discard(model._get_fsdp_state())  # as if the list were a separate root
    with pytest.raises(ValueError, match="bias would be in no unit, because they are not below the"):
        reshard_module(model.first, wrap=nothing)
    roots.add(model._get_fsdp_state())
    assert fingerprint(model) == before


def test_a_list_of_modules_and_a_module_without_parameters():
    run_ranks(2, lists)


# ---- several meshes, tensor parallelism


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.expert(self.shared(x))


def experts() -> None:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    small = mesh_info(world["inner"])
    model = nn.Sequential(Expert(), Expert())
    chosen = {id(p) for m in model for p in m.expert.parameters()}

    def place(param):
        return ShardPlacementResult(Shard(0), small) if id(param) in chosen else None

    torch.manual_seed(0)
    for layer in model:
        fully_shard(layer, shard_placement_fn=place)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    before, meshes_before = fingerprint(model), [p.device_mesh for p in model.parameters()]
    with pytest.raises(NotImplementedError, match=r"is on ranks .* cannot give them one mesh"):
        reshard_module(model, mesh=mesh_of((2, 2)))
    assert fingerprint(model) == before
    with torch.no_grad():
        expected = model(torch.ones(2, 4))
    reshard_module(model, wrap=nothing)
    assert [p.device_mesh for p in model.parameters()] == meshes_before
    assert len(model._get_fsdp_state()._fsdp_param_groups) == 2
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), expected)
    model.reshard()  # a root stays unsharded after a forward
    values = {name: p.full_tensor() for name, p in model.named_parameters()}
    unshard_module(model)
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


def test_experts_keep_their_mesh_and_are_refused_another_before_anything_changes():
    run_ranks(4, experts)


def tensor_parallel() -> None:
    dp, tp = meshes(*FSDP_TP)
    models = [shard_decoder(split(make_decoder(), tp), dp, fully_shard) for _ in range(2)]
    model, twin = models
    optimizers = [adamw(m.parameters()) for m in models]

    def step(number: int) -> None:
        losses = []
        for m, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of_split(m, number, dp)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]

    step(0)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"is on ranks .* the mesh has ranks \[0, 1, 2, 3\]; both need the same"):
        reshard_module(model, mesh=mesh_of((4,)))
    assert fingerprint(model) == before
    reshard_module(model, wrap=nothing)
    assert unit_names(model) == [""]
    step(1)
    reshard_module(model, reshard_after_forward=False)
    step(2)
    plain = unshard_module(model, [optimizers[0]])
    assert list(map(id, plain.values())) == list(map(id, model.parameters()))
    for name, value in model.named_parameters():
        wanted = twin.get_parameter(name)
        assert value.device_mesh == tp, name
        assert torch.equal(value.full_tensor(), wanted.full_tensor()), name
        moment = optimizers[0].state[value]["exp_avg"]
        assert (moment.device_mesh, moment.placements) == (value.device_mesh, value.placements)
        assert torch.equal(moment.full_tensor(), optimizers[1].state[wanted]["exp_avg"].full_tensor()), name
    loss_of_split(model, 3, dp).backward()


@pytest.mark.thorough
def test_tensor_parallel_models_keep_their_placements_and_get_them_back():
    run_ranks(4, tensor_parallel)


def int_with_tensor_parallelism() -> None:
    world = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model = shard_decoder(split(make_decoder(), world["tp"]), world["dp"], fully_shard)
    before = fingerprint(model)
    with pytest.raises(NotImplementedError, match="tensor parallelism; reshard_after_forward as a number of ranks"):
        reshard_module(model, reshard_after_forward=2)
    assert fingerprint(model) == before
    loss_of_split(model, 0, world["dp"]).backward()


def test_a_number_of_ranks_is_refused_for_tensor_parallel_parameters():
    run_ranks(4, int_with_tensor_parallelism)


# ---- refused, or failed midway: nothing changes


def still_as_it_was(model: nn.Module, twin: nn.Module, before: dict[str, object], step: int) -> None:
    assert fingerprint(model) == before
    assert backward(model, step) == backward(twin, step)
    assert_equal(model, twin)
    for m in (model, twin):
        m.zero_grad()


def raises(module: nn.Module) -> bool:
    raise LookupError("by the user")


def refusals() -> None:
    model, twin = shard_net(make_net(tied=True)), shard_net(make_net(tied=True))
    for m in (model, twin):
        backward(m, 0)
        m.zero_grad()
    size = dist.get_world_size()
    part = DeviceMesh("cpu", [dist.get_rank()])
    cases = [
        ({"wrap": lambda m: isinstance(m, nn.ModuleList)}, ValueError, "it has no forward"),
        ({"wrap": lambda m: isinstance(m, (nn.Embedding, Block))}, ValueError, "tied"),
        ({"wrap": raises}, LookupError, "by the user"),
        ({"wrap": "blocks"}, TypeError, "wrap must be a function"),
        ({"mesh": 3}, TypeError, "mesh must be a .*DeviceMesh, got int"),
        ({"mesh": part}, ValueError, r"is on ranks \[0, 1\], but the mesh has ranks \[.\]; both need the same ranks"),
        ({"mesh": DeviceMesh("cpu", [[0, 1]])}, ValueError, "without names"),
        ({"reshard_after_forward": 3}, ValueError, "does not divide the 2 ranks"),
        ({"reshard_after_forward": 0}, ValueError, "does not divide the 2 ranks"),
        ({"reshard_after_forward": 3, "wrap": is_block}, ValueError, "does not divide the 2 ranks"),
        ({"reshard_after_forward": "yes"}, TypeError, "got 'yes'"),
        ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy must be"),
        (
            {"mp_policy": lambda *_: None},
            TypeError,
            "mp_policy must return a MixedPrecisionPolicy for FSDPNet, got None",
        ),
        ({"offload_policy": True}, TypeError, "offload_policy must be"),
        ({"optimizers": torch.optim.SGD(model.parameters())}, TypeError, "as a list of torch.optim.Optimizer, got SGD"),
        ({"optimizers": [model]}, TypeError, "got FSDPNet"),
    ]
    assert size == 2
    for step, (change, error, words) in enumerate(cases):
        before = fingerprint(model)
        with pytest.raises(error, match=words):
            reshard_module(model, **change)
        still_as_it_was(model, twin, before, step)


def test_a_refused_change_leaves_the_model_as_it_was():
    run_ranks(2, refusals)


def placement_does_not_fit() -> None:
    narrow = fully_shard(nn.Linear(6, 4), shard_placement_fn=second, mesh=mesh_of((4, 1)))
    before = fingerprint(narrow)
    with pytest.raises(ValueError, match=r"'weight' of shape .4, 6. cannot be split along dim 1: 6 rows"):
        reshard_module(narrow, mesh=mesh_of((4,)))
    assert fingerprint(narrow) == before
    narrow(torch.ones(1, 6)).sum().backward()


def test_a_dim_that_the_new_mesh_cannot_split_is_refused():
    run_ranks(4, placement_does_not_fit)


@on_one_rank
def test_not_in_the_middle_of_an_iteration():
    model = shard_net(make_net(num_blocks=1))
    seen = []

    def change(*_):
        with pytest.raises(RuntimeError, match="forward or backward of FSDPNet is running or has raised"):
            reshard_module(model, wrap=nothing)
        with pytest.raises(RuntimeError, match="unshard_module: the forward or backward of FSDPNet"):
            unshard_module(model)
        seen.append(1)

    handle = model.blocks[0].mlp.register_forward_hook(change)
    backward(model, 0)
    handle.remove()
    assert seen == [1]
    reshard_module(model, wrap=nothing)


@on_one_rank
def test_only_a_whole_root():
    model = shard_net(make_net(num_blocks=1))
    backward(model, 0)
    with pytest.raises(ValueError, match="only a part of the FSDP root FSDPNet; call reshard_module on the root"):
        reshard_module(model.blocks[0], reshard_after_forward=False)


# ---- one unit


def one_unit() -> None:
    """Change units within others, next to an unchanged twin."""
    model, twin = make_net(num_blocks=2), make_net(num_blocks=2)
    for net in (model, twin):
        for block in net.blocks:
            fully_shard(block.mlp)
            fully_shard(block)
        fully_shard(net)
    optimizers = [optimizer_of(net) for net in (model, twin)]
    assert train(model, optimizers[0], range(2)) == train(twin, optimizers[1], range(2))
    by_name = {unit.name: unit for unit in units_of(states_below(model))}

    def policies() -> dict[str, object]:
        return {name: (unit.reshard_after_forward, unit.policy.offloads) for name, unit in by_name.items()}

    plain, before = policies(), list(model.parameters())
    reshard_unit(model.blocks[1], reshard_after_forward=False)
    assert policies() == plain | {"blocks.1": (False, False)}
    reshard_unit(model.blocks[1], offload_policy=CPUOffloadPolicy())
    assert policies() == plain | {"blocks.1": (False, True)}
    reshard_unit(model, reshard_after_forward=True)
    assert policies() == plain | {"blocks.1": (False, True), "": (True, False)}
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert train(model, optimizers[0], range(2, 4)) == train(twin, optimizers[1], range(2, 4))
    assert_equal(model, twin)
    reshard_unit(model, reshard_after_forward=None)
    reshard_unit(model.blocks[1], reshard_after_forward=None, offload_policy=OffloadPolicy())
    assert policies() == plain
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    reshard_unit(model.blocks[1].mlp, mp_policy=low)
    assert {name for name, unit in by_name.items() if unit.param_dtype == torch.bfloat16} == {"blocks.1.mlp"}
    assert all(map(math.isfinite, train(model, optimizers[0], range(4, 6))))


def test_the_policy_of_one_unit_alone():
    run_ranks(2, one_unit)


@on_one_rank
def test_modules_that_cannot_be_changed_now():
    model = shard_net(make_net(num_blocks=1))
    with pytest.raises(ValueError, match="fully_shard was not called on this Linear"):
        reshard_unit(model.head, reshard_after_forward=False)
    with pytest.raises(TypeError, match=r"mp_policy must be a workbench\.engine\.MixedPrecisionPolicy"):
        reshard_unit(model.blocks[0], mp_policy=torch.bfloat16)

    def change(*_: object) -> None:
        reshard_unit(model.blocks[0], reshard_after_forward=False)

    handle = model.head.register_forward_hook(change)
    with pytest.raises(RuntimeError, match=r"reshard_unit: the forward or backward of FSDPNet is running"):
        backward(model, 0)
    handle.remove()
    model.reset_iter_state()
    before = fingerprint(model)
    with pytest.raises(ValueError, match="3"):
        reshard_unit(model.blocks[0], reshard_after_forward=3)
    assert fingerprint(model) == before


def kept_shards() -> None:
    """Gradients reduced over the shard axis only: no other rank holds them."""
    model = shard_net(make_net(num_blocks=1), mesh=mesh_of((2, 1)))
    model.set_requires_all_reduce(False)
    backward(model, 0)
    for undo in (unshard_module, lambda m: reshard_module(m, wrap=nothing)):
        with pytest.raises(RuntimeError, match=r"not reduced yet: .* set_requires_all_reduce\(True\)"):
            undo(model)
    model.set_requires_all_reduce(True)
    backward(model, 1)
    reshard_module(model, wrap=nothing)


def test_gradients_that_wait_for_their_all_reduce_are_not_lost():
    run_ranks(2, kept_shards)


def fails_midway(at: int) -> None:
    """Fail at the ``at``-th tensor."""
    model, twin = shard_net(make_net()), shard_net(make_net())
    optimizers = [optimizer_of(m) for m in (model, twin)]
    assert train(model, optimizers[0], range(2)) == train(twin, optimizers[1], range(2))
    assert backward(model, 2) == backward(twin, 2)
    before, states = fingerprint(model), {p: dict(s) for p, s in optimizers[0].state.items()}
    calls, real = [], replacement.laid_out

    def laid_out(*args):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*args)

    replacement.laid_out = laid_out
    with pytest.raises(KeyboardInterrupt):
        reshard_module(model, wrap=is_linear, mesh=mesh_of((2, 1)), optimizers=[optimizers[0]])
    replacement.laid_out = real
    assert fingerprint(model) == before
    assert {p: dict(s) for p, s in optimizers[0].state.items()} == states
    assert_equal(model, twin)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert train(model, optimizers[0], range(3, 5)) == train(twin, optimizers[1], range(3, 5))
    assert_equal(model, twin)


@pytest.mark.parametrize("at", [1, 8, 30])
def test_a_failure_in_the_middle_is_rolled_back(at):
    run_ranks(2, fails_midway, at)


def fails_at_the_optimizer() -> None:
    """Fail at the last step that can fail, after every unit is initialised."""
    model, twin = shard_net(make_net(num_blocks=1)), shard_net(make_net(num_blocks=1))
    optimizers = [optimizer_of(m) for m in (model, twin)]
    assert train(model, optimizers[0], range(2)) == train(twin, optimizers[1], range(2))
    before, real = fingerprint(model), replacement.staged

    def staged(*args):
        raise MemoryError

    replacement.staged = staged
    for change in ({"wrap": is_linear}, {"wrap": is_linear, "mesh": mesh_of((2, 1))}):
        with pytest.raises(MemoryError):
            reshard_module(model, **change, optimizers=[optimizers[0]])
        assert fingerprint(model) == before
        assert len(roots) == 2
    replacement.staged = real
    assert train(model, optimizers[0], range(2, 5)) == train(twin, optimizers[1], range(2, 5))
    assert_equal(model, twin)


def test_a_failure_at_the_end_is_rolled_back():
    run_ranks(2, fails_at_the_optimizer)


def old_graphs() -> list[str]:
    messages = []
    for change in ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, {"wrap": nothing}):
        model = shard_net(make_net(num_blocks=1))
        loss = loss_of(model, batch(0, 0))
        reshard_module(model, **change)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        messages.append(str(caught.value))
        model.reset_iter_state()
        backward(model, 0)
    return messages


def test_an_old_graph_raises_an_error():
    (messages,) = run_ranks(1, old_graphs)
    assert "modified by an inplace operation" in messages[0]
    assert "run the forward again" in messages[1]


# ---- bytes


def bytes_meanwhile(change: str) -> tuple[int, int, int, int]:
    """Return the bytes of shards before, at the peak and after, and the bytes of gradients after."""
    gc.disable()
    with recording() as record:
        model = shard_net(Net(**NET))
        backward(model, 0)
        before = record.live[Category.SHARDED_PARAMS]
        record.clear()
        options = {"wrap": nothing} if change == "wrap" else {"mesh": mesh_of((2, 1))}
        reshard_module(model, **options)
        peak, after = record.peak[Category.SHARDED_PARAMS], record.live[Category.SHARDED_PARAMS]
        grads = record.live[Category.SHARDED_GRADS]
        retired = len(record.retired)
        assert sorted(record.alive) == [Category.SHARDED_PARAMS, Category.SHARDED_GRADS]
    assert retired == 1 + BLOCKS
    return before, peak, after, grads


@pytest.mark.parametrize("change", ["wrap", "mesh"])
def test_old_and_new_shards_coexist_only_if_they_differ(change):
    old, whole = (FP32 * (slots(size, ROOT_SHAPES) + BLOCKS * slots(size, BLOCK_SHAPES)) for size in (2, 1))
    expected = (old, old, old, old) if change == "wrap" else (old, old + whole, whole, whole)
    assert run_ranks(2, bytes_meanwhile, change) == [expected] * 2


def refused_replicas() -> str:
    model = shard_net(make_net(num_blocks=1))
    unit = model._get_fsdp_state()._fsdp_param_group
    unit.sync.hook_stream = object()  # a stream needs CUDA
    before = fingerprint(model)
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="has an all-reduce hook with a stream") as refused:
        reshard_module(model, mesh=replicas)
    dist.barrier()  # refused before any collective: the rank with the store must not leave first
    assert fingerprint(model) == before
    return str(refused.value)


def test_a_hook_with_a_stream_and_replicas_are_refused():
    reason = (
        "has an all-reduce hook with a stream, which replicas do not allow; call set_all_reduce_hook without a "
        "stream first"
    )
    assert all(reason in message for message in run_ranks(2, refused_replicas))
