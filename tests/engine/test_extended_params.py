"""Tensors with an all-gather of their own, beside torch's engine: ranks exchange bytes and scales."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from tests.helpers.both_engines import APIS, SAME
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.pairwise import quick_rows
from tests.helpers.recording_probe import Recording, recording
from workbench import engine
from workbench.engine import fully_shard
from workbench.events import Category, Edge, Kind

LEVELS = 127


class Wrapper(torch.Tensor):
    """A tensor subclass around one tensor; most operations act on that and keep the class."""

    KEEP: ClassVar = {"detach", "new_zeros", "chunk", "split", "slice", "copy_", "view", "_to_copy", "clone", "add_"}

    @staticmethod
    def __new__(cls, inner: torch.Tensor, *_: object) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    def value(self) -> torch.Tensor:
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda x: x.value() if isinstance(x, Wrapper) else x  # noqa: E731
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if func.overloadpacket.__name__ not in cls.KEEP:
            return out
        if func.overloadpacket.__name__ in {"copy_", "add_"}:
            return args[0]
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)


class Bytes(Wrapper):
    """A full parameter that stays as bytes with a scale for each rank, in the memory that was gathered."""

    KEEP: ClassVar = {"detach"}

    @staticmethod
    def __new__(cls, codes: torch.Tensor, *_: object) -> "Bytes":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def value(self) -> torch.Tensor:
        return decoded(self.codes, self.scales)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in {"detach", "as_strided"} and isinstance(args[0], cls):
            rows = args[1][0] if len(args) > 1 else len(args[0].codes)
            return cls(args[0].codes[:rows], args[0].scales)
        return super().__torch_dispatch__(func, types, args, kwargs)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return values: each of the equal runs of rows has a scale."""
    each = scales.repeat_interleave(-(-len(codes) // len(scales)))[: len(codes)] / LEVELS
    return codes.float().sub_(LEVELS) * each[:, None]


class SendsBytes(Wrapper):
    """A shard that is sent as bytes, with its scale as a second tensor; the full parameter is plain."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        assert (mesh.ndim, outer_stride, module.weight.shape) == (1, (outer_size[1], 1), outer_size)
        return self.encoded(len(self), self.inner.abs().amax().view(1)), mp_policy.reduce_dtype

    def encoded(self, rows: int, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.zeros(rows, *self.shape[1:], dtype=torch.uint8)
        codes[: len(self)] = (self.inner / scale * LEVELS).round() + LEVELS
        return codes, scale

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        assert (metadata, param_dtype) == (torch.float32, torch.float32)
        value = decoded(*gathered)
        if out is None:
            return value, (value,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(value)
        return None


class StaysBytes(SendsBytes):
    """The full parameter is the gathered tensors themselves; the signature is the oldest."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return self.encoded(len(self), self.inner.abs().amax().view(1)), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return Bytes(*gathered), gathered
        assert [t.data_ptr() for t in gathered] == [out.codes.data_ptr(), out.scales.data_ptr()]
        return None


class OneScale(SendsBytes):
    """A shard, perhaps padded, with a scale that it reduces over ranks itself instead of sending it."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        scale = self.inner.abs().amax().view(1) if len(self) else torch.zeros(1)
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        return self.encoded(-(-outer_size[0] // mesh.size()), scale)[:1], scale

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return Bytes(*gathered, metadata), gathered
        out.scales = metadata
        return None


def make_model(kind: type[Wrapper], rows: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, rows), nn.Tanh(), nn.Linear(rows, 8), nn.LayerNorm(8))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.data))
    return model


def train(api: Any, model: nn.Sequential, **options: Any) -> list[Any]:
    policy = api.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (model[0], model[2], model):
        api.fully_shard(part, mp_policy=policy, **options)
    facts: list[Any] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(5, 6, generator=generator)).square().mean()
        loss.backward()
        facts += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().add_(param.grad.to_local(), alpha=-0.5)
                param.grad = None
    return facts


def beside_torch(kind: type[Wrapper], rows: int, copies: int, reshard: bool) -> Recording:
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("copy", "shard"))
    plain = make_model(kind, rows)
    facts = []
    for api in APIS:
        with recording() as record:
            model = make_model(kind, rows)
            options = {"mesh": mesh if copies > 1 else mesh["shard"], "reshard_after_forward": reshard}
            facts.append(train(api, model, **options))
        if api is engine:
            ours = record
    assert len(plain) == 4
    torch.testing.assert_close(*facts, **SAME)
    return ours


def with_default_comm(function: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", "default")  # the collectives that torch's engine uses
        return function(*args)


CASES = [(n, copies, reshard) for n, copies in ((1, 1), (2, 1), (4, 1), (4, 2)) for reshard in (True, False)]


@pytest.mark.parametrize("kind", [SendsBytes, StaysBytes, OneScale])
@pytest.mark.parametrize(("num_ranks", "copies", "reshard"), quick_rows(CASES, [(2, 1, True)]))
def test_all_bits_are_those_of_torch(kind, num_ranks, copies, reshard):
    if num_ranks == 1 and kind is not OneScale:
        pytest.skip("on one rank, torch takes one tensor only")
    rows, shards = 7 if kind is OneScale else 8, num_ranks // copies
    scales = 0 if kind is OneScale else 4 * shards
    sent = {6 * shards * -(-rows // shards) + scales, 8 * rows + scales}
    for record in run_ranks(num_ranks, with_default_comm, beside_torch, kind, rows, copies, reshard):
        extended = {index for index, unit in record.units.items() if unit.gather_nbytes}
        gathers = {row[2]: row[3] for row in record.rows if row[:2] == (Kind.ALL_GATHER, Edge.BEGIN)}
        assert {record.units[index].gather_nbytes for index in extended} == sent
        gathered = {num_bytes for index, num_bytes in gathers.items() if index in extended}
        assert gathered == (sent if shards > 1 else set())
        assert set(record.alive) == {Category.SHARDED_PARAMS}


# ---- memory, and shards that are replaced


class Releases(SendsBytes):
    """Needs nothing of what was gathered once the full parameter is made."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


def held(kind: type[Wrapper], keep: bool) -> dict[str, int]:
    """Return the bytes of full parameters during forward, and after backward."""
    model = nn.Linear(6, 64, bias=False)
    model.weight = nn.Parameter(kind(model.weight.data))
    fully_shard(model, mp_policy=engine.MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model.set_keep_unsharded_storage(keep)
    with recording() as record:
        output = model(torch.ones(2, 6))
        found = {"in forward": record.alive[Category.UNSHARDED_PARAMS]}
        output.sum().backward()
        found["after backward"] = record.alive.get(Category.UNSHARDED_PARAMS, 0)
    return found


def test_memory_counts_what_was_gathered_and_what_was_made_of_it():
    gathered, made = 64 * 6 + 64, 64 * 6 * 4  # two scales are in 64 bytes
    cases = {StaysBytes: gathered, SendsBytes: gathered + made, Releases: made}
    for kind, num_bytes in cases.items():
        assert run_ranks(2, held, kind, False) == [{"in forward": num_bytes, "after backward": 0}] * 2
    kept = gathered + made
    assert run_ranks(2, held, SendsBytes, True) == [{"in forward": kept, "after backward": kept}] * 2


def replaced() -> tuple[list[float], str]:
    """Load other shards, of the same kind and then plain ones; return outputs, and the error for the last."""
    model = fully_shard(nn.Sequential(make_model(OneScale, 8)[0]))
    model[0].bias.detach().zero_()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    outputs = []
    for value in (2.0, 3.0):
        state["0.weight"].to_local().inner.fill_(value)
        model.load_state_dict(state, assign=True)
        output = model(torch.ones(1, 6))
        output.sum().backward()
        outputs.append(output[0, 0].item())
    like = state["0.bias"]
    plain = DTensor.from_local(state["0.weight"].to_local().inner, like.device_mesh, like.placements)
    model.load_state_dict(state | {"0.weight": plain}, assign=True)
    with pytest.raises(TypeError) as caught:
        model(torch.ones(1, 6))
    return outputs, str(caught.value)


def test_a_loader_may_replace_shards_by_others_of_their_kind():
    for outputs, error in run_ranks(2, replaced):
        assert outputs == [12.0, 18.0]
        assert error.startswith("parameter '0.weight' was replaced by a plain tensor after fully_shard")


# ---- refusals


class OnlyBefore(Wrapper):
    """Half of an all-gather of its own."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> None: ...


class TwoArguments(SendsBytes):
    """A signature that torch does not have either."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh, policy: Any) -> None: ...  # type: ignore[override]


class Answers(SendsBytes):
    """Says neither yes nor no."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (OnlyBefore, {}, TypeError, r"'0.weight' is a OnlyBefore, .* needs both fsdp_pre_all_gather and fsdp_post"),
        (SendsBytes, {"shard_placement_fn": lambda _: Shard(-1)}, NotImplementedError, "return Shard.0. for it"),
        (SendsBytes, {"reshard_after_forward": 2}, NotImplementedError, "use reshard_after_forward=True or False"),
        (Answers, {}, TypeError, "must return a bool, got None"),
    ],
)
def test_what_it_cannot_be_combined_with(kind, options, error, message):
    assert run_ranks(4, refused, kind, options, error, message) == [True] * 4


def refused(kind: type[Wrapper], options: dict[str, Any], error: type[Exception], message: str) -> bool:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight = param = nn.Parameter(kind(model[0].weight.data))
    with pytest.raises(error, match=message):
        fully_shard(model, **options)
    return model[0].weight is param and type(model) is nn.Sequential


@on_one_rank
def test_what_is_refused_later():
    model = fully_shard(nn.Sequential(make_model(TwoArguments, 8)[0]))
    with pytest.raises(TypeError, match=r"fsdp_pre_all_gather of parameter '0.weight' takes 2 arguments; it may take"):
        model(torch.ones(1, 6))
    with pytest.raises(NotImplementedError, match=r"unshard_module cannot gather parameter '0.weight', which defines"):
        engine.unshard_module(model)


@on_one_rank
def test_a_gradient_that_is_no_plain_tensor():
    model = fully_shard(nn.Sequential(make_model(OneScale, 8)[0]))
    model.unshard()
    model[0].weight.grad = Wrapper(torch.ones(8, 6))
    with pytest.raises(NotImplementedError, match=r"gradient of parameter '0.weight', .* is a Wrapper: only plain"):
        model(torch.ones(1, 6)).sum().backward()
    model.reset_iter_state()
