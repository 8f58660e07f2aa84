"""Hybrid sharding: sharded over one mesh axis, replicated over the other; 2 x 2 ranks by default."""

import copy
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.both_engines import (
    APIS,
    CLOSE,
    call_setter,
    double_net,
    in_order,
    one_batch,
    shard_net_with,
    train_all,
    units_below,
)
from tests.helpers.expected_sizes import BLOCK_SHAPES, BLOCKS, FP32, NET, ROOT_SHAPES, UNITS, slots
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.recording_probe import ROOT, Recording, recording
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from workbench import engine
from workbench.engine import collective_order
from workbench.events import Edge, Kind

F = R = 2
KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


def grid(replicas: int = R, shards: int = F) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard_on(mesh: DeviceMesh, **options: object):
    return lambda api, model: shard_net_with(api, model, mesh=mesh, **options)


# ---- numbers


def ten_steps(reshard: bool | None) -> None:
    train_all(double_net, shard_on(grid(), reshard_after_forward=reshard), steps=10)


@pytest.mark.parametrize("reshard", quick([None, True, False], [None]))
def test_ten_steps_equal_an_unsharded_model_and_torchs(reshard):
    run_ranks(4, ten_steps, reshard)


def replicas_after_training() -> None:
    mesh = grid()
    model = shard_net_with(engine, make_net(**NET), mesh=mesh)
    optimizer = adamw(model.parameters())
    for step in range(3):
        one_batch(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for p in model.parameters():
        replicas = [torch.empty_like(p.to_local()) for _ in range(R)]
        dist.all_gather(replicas, p.to_local().contiguous(), group=mesh.get_group("replicate"))
        assert torch.equal(*replicas)


def test_replicas_stay_bit_identical():
    run_ranks(4, replicas_after_training)


def clipped() -> None:
    plain = double_net()
    models = [shard_net_with(api, copy.deepcopy(plain), mesh=grid()) for api in APIS]
    for model in (plain, *models):
        one_batch(model, 0)
    average_grads(plain)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    for model in models:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        torch.testing.assert_close(norm.full_tensor(), expected, **CLOSE)
        assert_same_shards(model, plain, **CLOSE)


def test_clip_grad_norm_counts_every_shard_once():
    run_ranks(4, clipped)


# ---- events and bytes


def last_of_two_steps(replicas: int, shards: int, reduce: torch.dtype | None) -> Recording:
    policy = engine.MixedPrecisionPolicy(reduce_dtype=reduce)
    with recording() as record:
        model = shard_net_with(engine, make_net(**NET), mesh=grid(replicas, shards), mp_policy=policy)
        for step in range(2):
            record.clear()
            one_batch(model, step)
    return record


def by_unit(record: Recording, kind: Kind) -> dict[str, int]:
    """Return the bytes that each unit's ``kind`` began with."""
    return {record.name(unit): n for k, edge, unit, n, *_ in record.rows if (k, edge) == (kind, Edge.BEGIN)}


@pytest.mark.parametrize("reduce", [None, torch.bfloat16])
def test_one_reduction_of_each_kind_per_unit_with_the_closed_forms_bytes(reduce):
    units = dict(zip(UNITS, (slots(F, s) for s in (ROOT_SHAPES, BLOCK_SHAPES, BLOCK_SHAPES)), strict=True))
    b_r = (reduce or torch.float32).itemsize
    for record in run_ranks(4, last_of_two_steps, R, F, reduce):
        assert record.count(Kind.ALL_GATHER) == dict.fromkeys(UNITS, 2) | {ROOT: 1}
        assert record.payload(Kind.ALL_GATHER) == F * (units[ROOT] + 2 * BLOCKS * slots(F, BLOCK_SHAPES)) * FP32
        for kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
            assert record.count(kind) == record.count(kind, Edge.END) == dict.fromkeys(UNITS, 1)
        assert by_unit(record, Kind.REDUCE_SCATTER) == {unit: F * s * b_r for unit, s in units.items()}
        assert by_unit(record, Kind.ALL_REDUCE) == {unit: s * b_r for unit, s in units.items()}
        assert all((u.shard_size, u.replicate_size) == (F, R) for u in record.units.values())


def test_the_all_reduce_follows_the_reduce_scatter_in_the_replicas_group():
    for rank, record in enumerate(run_ranks(4, last_of_two_steps, R, F, None)):
        for unit in UNITS:
            assert in_order(
                record.events,
                f"REDUCE_SCATTER BEGIN {unit}",
                f"REDUCE_SCATTER END {unit}",
                f"ALL_REDUCE BEGIN {unit}",
                f"ALL_REDUCE END {unit}",
            )
        ranks = {
            kind: {record.groups[comm.group] for k, _, _, _, comm, _ in record.rows if k is kind} for kind in KINDS
        }
        row, column = divmod(rank, F)
        assert ranks[Kind.ALL_GATHER] == ranks[Kind.REDUCE_SCATTER] == {(F * row, F * row + 1)}
        assert ranks[Kind.ALL_REDUCE] == {(column, column + F)}


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (1, 2), (1, 1)])
def test_an_axis_of_one_rank_needs_no_collective(replicas, shards):
    for record in run_ranks(replicas * shards, last_of_two_steps, replicas, shards, None):
        sharded, replicated = shards > 1, replicas > 1
        assert record.count(Kind.ALL_GATHER).total() == (5 if sharded else 0)
        assert record.count(Kind.REDUCE_SCATTER) == (dict.fromkeys(UNITS, 1) if sharded else {})
        assert record.count(Kind.ALL_REDUCE) == (dict.fromkeys(UNITS, 1) if replicated else {})


def trained_on(replicas: int, shards: int) -> None:
    train_all(double_net, shard_on(grid(replicas, shards)))


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (1, 2)])
def test_an_axis_of_one_rank_gives_the_same_numbers(replicas, shards):
    run_ranks(2, trained_on, replicas, shards)


# ---- accumulation


def reduce_now_replicate_later(model: nn.Module, step: int) -> None:
    """Run three micro-batches; reduce only the last one over the replicas."""
    for micro in range(3):
        call_setter(model, "set_requires_all_reduce", micro == 2)
        one_batch(model, 3 * step + micro)
        if micro < 2 and isinstance(model.scale, DTensor):
            assert all(p.grad is None for p in model.parameters())  # a partial gradient is not visible


def without_any_sync(model: nn.Module, step: int) -> None:
    for micro in range(3):
        call_setter(model, "set_requires_gradient_sync", micro == 2)
        one_batch(model, 3 * step + micro)


def only_the_blocks_wait(model: nn.Module, step: int) -> None:
    for micro in range(2):
        for unit in units_below(model):
            unit.set_requires_all_reduce(unit is model or micro == 1, recurse=False)
        one_batch(model, 2 * step + micro)


def accumulated(run) -> dict[str, dict[str, int]]:
    record = train_all(double_net, shard_on(grid()), run, 2)
    return {kind.name: dict(record.count(kind)) for kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)}


@pytest.mark.parametrize(
    ("run", "reduced", "replicated"),
    [
        (reduce_now_replicate_later, dict.fromkeys(UNITS, 3), dict.fromkeys(UNITS, 1)),
        (without_any_sync, dict.fromkeys(UNITS, 1), dict.fromkeys(UNITS, 1)),
        (only_the_blocks_wait, dict.fromkeys(UNITS, 2), dict.fromkeys(UNITS, 1) | {ROOT: 2}),
    ],
)
def test_accumulation_over_micro_batches(run, reduced, replicated):
    for counts in run_ranks(4, accumulated, run):
        assert counts == {"REDUCE_SCATTER": reduced, "ALL_REDUCE": replicated}


class Experts(nn.Module):
    """Experts of which each micro-batch uses one, and an inner unit that a micro-batch may skip."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, h), nn.Linear(h, 5)) for h in hidden)
        self.inner = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, expert: int, *, with_inner: bool) -> torch.Tensor:
        x = self.experts[expert](x)
        return self.inner(x) if with_inner else x


# per replica: the expert of each micro-batch; and whether each micro-batch uses the inner unit
USES = {
    "one after the other": (((0, 1), (0, 1)), (True, True)),
    "again": (((0, 1, 1, 0), (0, 1, 1, 0)), (True, True, True, True)),
    "the last in none before": (((0, 0, 1), (0, 0, 1)), (True, False, True)),
    "inner only at first": (((0, 1), (0, 1)), (True, False)),
    "inner only at last": (((1, 0), (1, 0)), (False, True)),
    "replicas in another order": (((0, 1), (1, 0)), (True, True)),
}


def replicate_at_last(hidden: tuple[int, ...], uses: str) -> None:
    """Run two steps whose micro-batches use different parameters of a unit; all-reduce only in the last micro-batch."""
    experts, inner = USES[uses]
    torch.manual_seed(0)
    plain = Experts(*hidden).double()
    model = copy.deepcopy(plain)
    mesh = grid()
    for module in (model.inner, model):
        engine.fully_shard(module, mesh=mesh)
    mine = experts[dist.get_rank() // F]
    for step in range(2):
        for micro, (expert, with_inner) in enumerate(zip(mine, inner, strict=True)):
            model.set_requires_all_reduce(micro == len(mine) - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            x = torch.randn(3, 5, generator=generator, dtype=torch.float64)
            for m in (plain, model):
                m(x, expert, with_inner=with_inner).square().sum().backward()
        average_grads(plain)
        assert all(p.grad is not None for p in plain.parameters())
        assert_same_shards(model, plain, **CLOSE)
        for m in (plain, model):
            m.zero_grad()


@pytest.mark.parametrize("hidden", [(5, 5), (3, 7)], ids=["equal", "unequal"])
@pytest.mark.parametrize("uses", USES)
def test_half_reduced_gradients_belong_to_their_parameters(uses, hidden):
    run_ranks(4, replicate_at_last, hidden, uses)


def replicas_disagree() -> str:
    """Each replica uses another expert: as many bytes, but other parameters."""
    torch.manual_seed(0)
    model = engine.fully_shard(Experts(5, 5), mesh=grid())
    with pytest.raises(engine.RanksDisagreeError) as refused:
        model(torch.ones(3, 5), dist.get_rank() // F, with_inner=True).sum().backward()
    return str(refused.value)


def test_replicas_with_different_used_parameters_are_reported(monkeypatch):
    monkeypatch.setattr(collective_order, "ANSWERS_S", 600.0)  # wait for a slow rank's part of the message
    for what in run_ranks(4, replicas_disagree):
        assert "all-reduce without experts.1.0.weight, experts.1.0.bias, experts.1.1.weight, experts.1.1.bias (" in what
        assert "all-reduce without experts.0.0.weight" in what


def dropped_by_a_reset() -> None:
    """A reset drops gradients that are reduced but not yet replicated."""
    plain = double_net()
    model = shard_net_with(engine, copy.deepcopy(plain), mesh=grid())
    model.set_requires_all_reduce(False)
    one_batch(model, 7)
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    for m in (plain, model):
        one_batch(m, 0)
    average_grads(plain)
    assert_same_shards(model, plain, **CLOSE)


def test_a_reset_drops_half_reduced_gradients():
    run_ranks(4, dropped_by_a_reset)


# ---- the user's all-reduce


def hooked(api: ModuleType) -> list[int]:
    """A hook after the all-reduce sees each unit's shard once and may change it; return the sizes in elements."""
    plain = double_net()
    model = shard_net_with(api, copy.deepcopy(plain), mesh=grid())
    seen = []

    def double(shard: torch.Tensor) -> None:
        seen.append(shard.numel())
        shard.mul_(2)

    for unit in units_below(model):
        unit.set_all_reduce_hook(double)
    for m in (plain, model):
        one_batch(m, 0)
    average_grads(plain)
    for p in plain.parameters():
        p.grad.mul_(2)
    assert_same_shards(model, plain, **CLOSE)
    return seen


@pytest.mark.parametrize("api", APIS)
def test_an_all_reduce_hook_gets_each_units_shard(api):
    block, root = slots(F, BLOCK_SHAPES), slots(F, ROOT_SHAPES)
    assert run_ranks(4, hooked, api) == [[block] * BLOCKS + [root]] * 4


def replicated_by_hand(api: ModuleType) -> None:
    """Sharding over a row plus a manual all-reduce over the column equals hybrid sharding."""
    mesh = grid()
    plain = double_net()
    model = shard_net_with(api, copy.deepcopy(plain), mesh=mesh["shard"])

    def replicate(shard: torch.Tensor) -> None:
        dist.all_reduce(shard, group=mesh.get_group("replicate"))
        shard.div_(R)

    for unit in units_below(model):
        unit.set_all_reduce_hook(replicate)
    for m in (plain, model):
        one_batch(m, 0)
    average_grads(plain)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name, **CLOSE)


@pytest.mark.parametrize("api", APIS)
def test_a_hook_that_replicates_by_itself(api):
    run_ranks(4, replicated_by_hand, api)


def stream_for_the_hook() -> str:
    model = engine.fully_shard(nn.Linear(4, 4), mesh=grid(2, 1))
    with pytest.raises(ValueError, match="in the stream of their all-reduce") as caught:
        model.set_all_reduce_hook(lambda shard: None, stream=torch.cpu.Stream())
    return str(caught.value)


def test_a_stream_for_the_hook_is_refused_on_a_mesh_that_has_its_own():
    assert all("set_all_reduce_hook: with replicas" in message for message in run_ranks(2, stream_for_the_hook))


# ---- state dicts


def placements(api: ModuleType) -> set[tuple[object, ...]]:
    mesh = grid()
    plain = make_net(**NET)
    model = shard_net_with(api, copy.deepcopy(plain), mesh=mesh)
    optimizer = adamw(model.parameters())
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    values = model.state_dict()
    for value, param in zip(values.values(), model.parameters(), strict=True):
        assert torch.equal(value.full_tensor(), param.full_tensor())
    model.load_state_dict(values)
    return {(t.placements, t.device_mesh == mesh, t.device_mesh.mesh_dim_names) for t in (*values.values(), *moments)}


@pytest.mark.parametrize("api", APIS)
def test_state_is_replicated_over_one_axis_and_sharded_over_the_other(api):
    expected = {((Replicate(), Shard(0)), True, ("replicate", "shard"))}
    assert run_ranks(4, placements, api) == [expected] * 4


# ---- meshes that are refused

MESHES = {
    "unnamed": ((2, 2), None, "mesh_dim_names"),
    "three axes": ((1, 2, 2), ("a", "b", "c"), "3-D|3 axes|three"),
    "three unnamed axes": ((1, 2, 2), None, "3-D|3 axes|three"),
}


def refused(shape: tuple[int, ...], names: tuple[str, ...] | None, message: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Linear(4, 4)
    params = list(model.parameters())
    with pytest.raises(ValueError, match=message):
        engine.fully_shard(model, mesh=mesh)
    assert type(model) is nn.Linear
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("kind", MESHES)
def test_other_meshes_are_refused_and_the_module_is_unchanged(kind):
    run_ranks(4, refused, *MESHES[kind])
