"""Mixed precision: the dtypes of compute, communication, sums and outputs, next to torch's engine."""

import copy
from collections import namedtuple
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from tests.helpers.both_engines import APIS, SAME, shard_net_with
from tests.helpers.expected_sizes import BLOCK_SHAPES, BLOCKS, FP32, NET, ROOT_SHAPES, slots
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import Block, batch, loss_of, make_net
from tests.helpers.unsharded_copy import DIM, data
from workbench import engine
from workbench.engine._torch import REDUCES_IN_GRAD_DTYPE
from workbench.events import Category, Kind

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def reduced_in(param: torch.dtype | None, reduce: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the installed torch reduces gradients of float32 parameters."""
    return reduce or (F32 if REDUCES_IN_GRAD_DTYPE else param) or F32


def itemsize(*dtypes: torch.dtype | None) -> int:
    """Return the bytes per element of the first dtype that is set."""
    return next(dtype for dtype in (*dtypes, F32) if dtype is not None).itemsize


# ---- the numbers of a step


def low_precision_grads(plain: nn.Module, param: torch.dtype | None, reduce: torch.dtype | None, step: int) -> None:
    """Give ``plain`` the mean gradient of copies that compute in ``param``, summed in ``reduce``."""
    low = copy.deepcopy(plain).to(param or F32)
    loss_of(low, batch(dist.get_rank(), step)).backward()
    for master, p in zip(plain.parameters(), low.parameters(), strict=True):
        grad = p.grad.to(reduced_in(param, reduce))
        dist.all_reduce(grad)
        master.grad = grad.div_(dist.get_world_size()).to(master.dtype)


def three_steps(param: torch.dtype | None, reduce: torch.dtype | None) -> tuple[int, int]:
    """Train next to the reference and torch's engine; return the bytes that our last step gathered and reduced."""
    plain = make_net(**NET)
    with recording() as record:
        models = [copy.deepcopy(plain) for _ in APIS]
        for api, model in zip(APIS, models, strict=True):
            shard_net_with(api, model, mp_policy=api.MixedPrecisionPolicy(param, reduce))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, *models)]
        for step in range(3):
            record.clear()
            low_precision_grads(plain, param, reduce, step)
            for model in models:
                loss_of(model, batch(dist.get_rank(), step)).backward()
                assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {F32}
                # fp16 is divided before the sum, so that tiny values lose bits
                is_half = reduced_in(param, reduce).itemsize == 2
                close = {"rtol": 2e-3, "atol": 1e-6} if is_half else {"rtol": 1e-6, "atol": 1e-8}
                assert_same_shards(model, plain, **(close if FP16 in {reduce, param} else SAME))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return record.payload(Kind.ALL_GATHER), record.payload(Kind.REDUCE_SCATTER)


@pytest.mark.parametrize(
    ("param", "reduce"),
    [(BF16, F32), (BF16, None), (BF16, BF16), (FP16, F32), (FP16, None), (None, BF16), (None, F64), (F32, F32)],
)
def test_a_step_in_low_precision_equals_the_reference_and_counts_its_bytes(param, reduce):
    root, block = slots(2, ROOT_SHAPES), slots(2, BLOCK_SHAPES)
    for gathered, reduced in run_ranks(2, three_steps, param, reduce):
        assert gathered == 2 * (root + 2 * BLOCKS * block) * itemsize(param)
        assert reduced == 2 * (root + BLOCKS * block) * reduced_in(param, reduce).itemsize


class GradientIsInput(nn.Module):
    """A parameter whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


def reduced_gradient(api: ModuleType, per_rank: list[float], reduce: torch.dtype | None) -> float:
    model = api.fully_shard(GradientIsInput(), mp_policy=api.MixedPrecisionPolicy(reduce_dtype=reduce))
    model(torch.full((), per_rank[dist.get_rank()])).backward()
    (value,) = set(model.weight.grad.full_tensor().flatten().tolist())
    return value


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("per_rank", "reduce", "expected"),
    [
        ([1 + 2**-10] * 2, None, 1 + 2**-10),
        ([1 + 2**-10] * 2, BF16, 1.0),  # eight bits are left
        ([2.0**30, 1.0, -(2.0**30), 1.0], F64, 0.5),  # fp32 loses this sum
        ([3.0] * 4, FP16, 3.0),
        ([60000.0] * 2, FP16, 60000.0),  # the bare sum would overflow
    ],
)
def test_gradients_are_added_up_in_the_reduce_dtype(api, per_rank, reduce, expected):
    assert run_ranks(len(per_rank), reduced_gradient, api, per_rank, reduce) == [expected] * len(per_rank)


def accumulated(api: ModuleType, reduce: torch.dtype | None) -> tuple[float, float, int]:
    """Run four micro-batches, the last with sync; return the gradient, its exact value, and the bytes before sync."""
    factors = [1.0, 2.0**-9, 2.0**-9, 2.0**-9]  # each is a bf16 number, but no sum of them is
    with recording() as record:
        model = api.fully_shard(GradientIsInput(), mp_policy=api.MixedPrecisionPolicy(BF16, reduce))
        for factor in factors[:-1]:
            model.set_requires_gradient_sync(False)
            model(torch.tensor(factor)).backward()
            assert model.weight.grad is None
        held = record.alive.get(Category.UNSHARDED_GRADS, 0)
        model.set_requires_gradient_sync(True)
        model(torch.tensor(factors[-1])).backward()
    assert model.weight.grad.dtype is F32
    (value,) = set(model.weight.grad.full_tensor().flatten().tolist())
    return value, sum(factors), held


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("reduce", [F32, None])
def test_accumulation_without_sync_adds_up_in_the_reduce_dtype(api, reduce):
    for value, exact, held in run_ranks(2, accumulated, api, reduce):
        assert (value == exact) == (reduced_in(BF16, reduce) is F32)
        if api is engine:
            assert held == 4 * 3 * reduced_in(BF16, reduce).itemsize


# ---- inputs and outputs of modules

Point = namedtuple("Point", "x y")


class RecordsDtypes(nn.Module):
    """Records the dtypes of its inputs."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("scale", torch.full((dim,), 1 + 2**-10))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[object] = []

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        self.seen = dtypes_of((x, args, kwargs))
        return self.linear(x.to(self.linear.weight.dtype))


def dtypes_of(value: object) -> object:
    """Return the structure with each tensor replaced by its dtype."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return {key: dtypes_of(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [dtypes_of(v) for v in value]
    return value


def inputs() -> tuple[tuple, dict]:
    """Return nested positional and keyword inputs of several dtypes; some need gradients."""
    x = torch.ones(2, DIM, requires_grad=True)
    args = ([torch.ones(1), (torch.ones(1, dtype=F64), torch.ones(1, dtype=torch.int32))], Point(torch.ones(1), "text"))
    return (x, *args), {"mask": torch.ones(1, dtype=torch.bool), "deep": {"a": [torch.ones(1, dtype=FP16), None]}}


def seen_inputs(api: ModuleType, cast: bool) -> tuple[object, torch.dtype]:
    policy = api.MixedPrecisionPolicy(BF16, cast_forward_inputs=cast)
    model = api.fully_shard(RecordsDtypes(), mp_policy=policy)
    args, kwargs = inputs()
    model(*args, **kwargs).sum().backward()
    return model.seen, args[0].grad.dtype


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("cast", [True, False])
def test_inputs_are_cast_in_any_container(api, cast):
    def like(dtype: torch.dtype) -> torch.dtype:
        return BF16 if cast else dtype

    args = [[like(F32), [like(F64), torch.int32]], [like(F32), "text"]]
    expected = [like(F32), args, {"mask": torch.bool, "deep": {"a": [like(FP16), None]}}]
    assert run_ranks(1, seen_inputs, api, cast) == [(expected, F32)]


class Answers(nn.Module):
    """Returns tensors in containers of every kind, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = self.linear(x)
        return {"y": y, "list": [y * 2, (y.argmax(), None)], "point": Point(y.sum(), "text")}


def answered(api: ModuleType, output: torch.dtype | None) -> tuple[object, list[float]]:
    torch.manual_seed(0)
    plain = Answers()
    model = api.fully_shard(copy.deepcopy(plain), mp_policy=api.MixedPrecisionPolicy(BF16, F32, output_dtype=output))
    losses = []
    for m, x in ((plain.to(BF16), data(0).to(BF16)), (model, data(0))):
        out = m(x)
        losses.append(out["y"].square().sum() + out["list"][0].sum() + out["point"].x)
        losses[-1].backward()
    grads = [p.grad.float() for p in plain.parameters()]
    for p, grad in zip(model.parameters(), grads, strict=True):
        dist.all_reduce(grad)
        torch.testing.assert_close(p.grad.full_tensor(), grad / dist.get_world_size(), rtol=2e-2, atol=2e-2)
    return dtypes_of(out), losses[1].dtype


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("output", [None, F32, F64])
def test_outputs_are_cast_in_any_container(api, output):
    dtype = output or BF16
    expected = {"y": dtype, "list": [dtype, [torch.int64, None]], "point": [dtype, "text"]}
    assert run_ranks(2, answered, api, output) == [(expected, dtype)] * 2


def buffers_after_a_step(api: ModuleType) -> list[str]:
    model = RecordsDtypes()
    buffers = dict(model.named_buffers())
    before = {name: (b.dtype, b.data_ptr(), b.clone()) for name, b in buffers.items()}
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(BF16, F32))
    model(data(0)).sum().backward()
    for name, buffer in model.named_buffers():
        dtype, pointer, value = before[name]
        assert buffer is buffers[name]
        assert (buffer.dtype, buffer.data_ptr()) == (dtype, pointer)
        assert torch.equal(buffer, value)
    return list(buffers)


@pytest.mark.parametrize("api", APIS)
def test_buffers_stay_as_the_user_left_them(api):
    assert run_ranks(2, buffers_after_a_step, api) == [["scale", "count"]] * 2


# ---- a policy per module


def shard_with_norms_in_fp32(api: ModuleType, model: nn.Module) -> None:
    low = api.MixedPrecisionPolicy(BF16, F32)
    for block in model:
        api.fully_shard(block.norm, mp_policy=api.MixedPrecisionPolicy(F32, F32, output_dtype=BF16))
        api.fully_shard(block, mp_policy=low)
    api.fully_shard(model, mp_policy=low)


def norms_in_fp32() -> dict[str, int]:
    """Train next to a plain model with manual casts; return the bytes each unit gathers in its forward."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(DIM), Block(DIM))
    models = [copy.deepcopy(plain) for _ in APIS]
    x = data(0)
    with recording() as record:
        for api, model in zip(APIS, models, strict=True):
            shard_with_norms_in_fp32(api, model)
        outputs = [model(x) for model in models]
        gathered = {record.name(unit): n for kind, edge, unit, n, *_ in record.rows if kind is Kind.ALL_GATHER}
    expected = _blocks_by_hand(plain, x.to(BF16))
    expected.sum().backward()
    for model, output in zip(models, outputs, strict=True):
        assert output.dtype is BF16
        assert torch.equal(output, expected)
        output.sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            grad = q.grad.clone()
            dist.all_reduce(grad)
            assert torch.equal(p.grad.full_tensor(), grad / 2)
    return gathered


def _blocks_by_hand(plain: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for block in plain:
        low = {name: p.to(BF16) for name, p in block.mlp.named_parameters()}
        x = x + torch.func.functional_call(block.mlp, low, (block.norm(x.float()).to(BF16),))
    return x


def test_norms_in_fp32_within_a_model_in_bf16():
    mlp = slots(2, BLOCK_SHAPES[2:]) * BF16.itemsize
    norm = slots(2, BLOCK_SHAPES[:2]) * FP32
    for gathered in run_ranks(2, norms_in_fp32):
        assert gathered == {"0": 2 * mlp, "0.norm": 2 * norm, "1": 2 * mlp, "1.norm": 2 * norm}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = RecordsDtypes(), RecordsDtypes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        return self.b(hidden.float(), extra=[x])


def grouped(api: ModuleType, output: torch.dtype | None) -> list[object]:
    model = Pair()
    api.fully_shard([model.a, model.b], mp_policy=api.MixedPrecisionPolicy(BF16, F32, output_dtype=output))
    api.fully_shard(model)
    out = model(data(0))
    out.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {F32}
    return [model.a.seen, model.b.seen, out.dtype]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("output", [None, F32])
def test_modules_of_a_list_are_cast_one_by_one(api, output):
    expected = [[BF16, [], {}], [BF16, [], {"extra": [BF16]}], output or BF16]
    assert run_ranks(2, grouped, api, output) == [expected] * 2


# ---- around the step


def unsharded_by_hand(api: ModuleType) -> tuple[set[torch.dtype], set[torch.dtype]]:
    model = shard_net_with(api, make_net(**NET), mp_policy=api.MixedPrecisionPolicy(BF16))
    full = {name: p.full_tensor() for name, p in model.named_parameters()}
    model(batch(0, 0))
    model.blocks[0].unshard()
    for name, p in model.blocks[0].named_parameters():
        assert torch.equal(p, full[f"blocks.0.{name}"].to(BF16))
    dtypes = {p.dtype for p in model.blocks[0].parameters()}
    return dtypes, {v.dtype for v in model.state_dict().values() if isinstance(v, DTensor)}


@pytest.mark.parametrize("api", APIS)
def test_full_parameters_are_in_the_compute_dtype_and_state_dicts_in_their_own(api):
    assert run_ranks(2, unsharded_by_hand, api) == [({BF16}, {F32})] * 2


def alive_after_another_forward(reduce: torch.dtype) -> dict[Category, int]:
    with recording() as record:
        model = shard_net_with(engine, make_net(**NET), mp_policy=engine.MixedPrecisionPolicy(BF16, reduce))
        loss_of(model, batch(0, 0)).backward()
        loss_of(model, batch(0, 0))
        return {category: n for category, n in record.alive.items() if category is not Category.RESERVED}


@pytest.mark.parametrize("reduce", [F32, BF16])
def test_bytes_follow_the_dtypes(reduce):
    root, block = slots(2, ROOT_SHAPES), slots(2, BLOCK_SHAPES)
    assert run_ranks(2, alive_after_another_forward, reduce)[0] == {
        Category.SHARDED_PARAMS: (root + BLOCKS * block) * FP32,
        Category.SHARDED_GRADS: (root + BLOCKS * block) * FP32,
        Category.UNSHARDED_PARAMS: 2 * root * BF16.itemsize,  # after forward: only the root
    }


def announced(param: torch.dtype | None, reduce: torch.dtype | None) -> set[tuple[object, ...]]:
    with recording() as record:
        shard_net_with(engine, make_net(**NET), mp_policy=engine.MixedPrecisionPolicy(param, reduce))(batch(0, 0))
    return {(u.compute_dtype, u.compute_itemsize, u.reduce_dtype, u.reduce_itemsize) for u in record.units.values()}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ((None, None), ("float32", 4, "float32", 4)),
        ((BF16, None), ("bfloat16", 2, *(("float32", 4) if REDUCES_IN_GRAD_DTYPE else ("bfloat16", 2)))),
        ((FP16, F32), ("float16", 2, "float32", 4)),
    ],
)
def test_units_announce_their_dtypes(policy, expected):
    assert run_ranks(1, announced, *policy) == [{expected}]


def test_the_policy_is_a_frozen_record_with_torchs_fields():
    policy = engine.MixedPrecisionPolicy(BF16, F32, F64)
    assert policy == engine.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F64)
    assert vars(engine.MixedPrecisionPolicy()) == {"param_dtype_override_fn": None, **vars(fsdp.MixedPrecisionPolicy())}
    with pytest.raises(AttributeError):
        policy.param_dtype = F32


def frozen_and_trained(api: ModuleType) -> tuple[torch.Tensor | None, torch.dtype]:
    model = make_net(**NET)
    model.embed.requires_grad_(False)
    shard_net_with(api, model, mp_policy=api.MixedPrecisionPolicy(BF16, F32))
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    return model.embed.weight.grad, model.head.weight.grad.dtype


@pytest.mark.parametrize("api", APIS)
def test_frozen_parameters_in_low_precision(api):
    assert run_ranks(2, frozen_and_trained, api) == [(None, F32)] * 2
