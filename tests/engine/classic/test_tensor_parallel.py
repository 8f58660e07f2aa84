"""Tensor parallelism in a wrapper, compared with torch's wrapper and with a plain model that sees all ranks' data."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.engine.test_tensor_parallel import (
    DIM,
    FSDP_TP,
    HSDP_TP,
    Block,
    Decoder,
    PartlySplit,
    loss_of,
    make,
    meshes,
    split,
)
from tests.helpers.forked_ranks import run_cases, run_ranks
from tests.helpers.known_warnings import FROZEN_BESIDE_TRAINED, NO_SHARD, OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.pairwise import covering
from tests.helpers.parity import average_grads
from tests.helpers.small_models import adamw
from tests.helpers.wrapped_models import CPU, OURS, SAME, THEIRS, adam
from workbench.engine import RanksDisagreeError, fully_shard, unshard_module
from workbench.engine.classic import rewrap_optimizers, unwrap
from workbench.engine.classic.unwrapping import plain_copy
from workbench.engine.fsdp_state import states_below, units_of
from workbench.engine.unsharding import remap_optimizer

Mesh = tuple[tuple[str, ...], tuple[int, ...]]
EITHER = (False, True)
HSDP = (HSDP_TP, (2, 1, 2)), (HSDP_TP, (1, 2, 2))
BF16 = torch.bfloat16


def make_uneven() -> Decoder:
    """Return a model whose first and last weight have 11 rows, which tensor parallelism splits into 6 and 5."""
    model = make()
    torch.manual_seed(1)
    model.embed, model.head = nn.Embedding(11, DIM), nn.Linear(DIM, 11)
    return model


def wrap(api: SimpleNamespace, model: nn.Module, dp: DeviceMesh, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    with ignoring_warnings(*NO_SHARD, *FROZEN_BESIDE_TRAINED):
        return api.FullyShardedDataParallel(
            model,
            device_mesh=dp,
            sharding_strategy=api.ShardingStrategy[strategy],
            **{"auto_wrap_policy": api.ModuleWrapPolicy({Block}), "device_id": CPU, **options},
        )


def made(use_orig_params: bool = False, mesh: Mesh = FSDP_TP, model: Decoder | None = None, **options: Any) -> Any:
    """Return our wrapper, its optimizer, and the mesh of the ranks with different data."""
    dp, tp = meshes(*mesh)
    strategy = "HYBRID_SHARD" if len(mesh[0]) > 2 else "FULL_SHARD"
    wrapped = wrap(OURS, split(model or make(), tp), dp, strategy, use_orig_params=use_orig_params, **options)
    return wrapped, adam(wrapped.parameters()), dp


def whole_of(value: Any) -> Any:
    """Return a copy that is whole along every mesh axis; collective for DTensors."""
    if isinstance(value, dict):
        return {key: whole_of(each) for key, each in value.items()}
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone() if isinstance(whole, torch.Tensor) else whole


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter of a wrapped or plain model, whole along every mesh axis."""
    summon = getattr(type(model), "summon_full_params", None)
    with nullcontext() if summon is None else summon(model, writeback=False):
        return whole_of(dict(model.named_parameters()))


def train(model: Any, optimizer: torch.optim.Optimizer, dp: DeviceMesh, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, dp)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def layout(value: Any) -> Any:
    """Return a value's mesh, placements and shapes."""
    if isinstance(value, dict):
        return {key: layout(each) for key, each in value.items()}
    if not isinstance(value, DTensor):
        return tuple(value.shape) if isinstance(value, torch.Tensor) else value
    return value.device_mesh.mesh_dim_names, value.placements, tuple(value.shape), tuple(value.to_local().shape)


# ---- training


def trains_as_torchs(mesh: Mesh, strategy: str, make_model: Callable[[], Decoder], **options: Any) -> None:
    """Train with both wrappers; accumulate gradients, except where torch fails (pieces) or rounds (low precision)."""
    dp, tp = meshes(*mesh)
    runs = []
    for api in (OURS, THEIRS):
        given = {k: api.MixedPrecision(**v) if k == "mixed_precision" else v for k, v in options.items()}
        model = wrap(api, split(make_model(), tp), dp, strategy, **given)
        optimizer = adam(model.parameters())
        if not options.get("use_orig_params") and "mixed_precision" not in options:
            with model.no_sync():
                loss_of(model, 9, dp).backward()
        runs.append((train(model, optimizer, dp, range(3)), whole(model)))
    torch.testing.assert_close(*runs)


def every_way() -> Iterator[tuple[Any, Callable[[], None]]]:
    # of NO_SHARD with pieces, torch's wrapper loses the optimizer's parameters
    for strategy, pieces in (("FULL_SHARD", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", True), ("NO_SHARD", False)):
        options = {"use_orig_params": pieces}
        yield (strategy, pieces), partial(trains_as_torchs, FSDP_TP, strategy, make, **options)
    for mesh in HSDP[1:]:
        for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            yield (mesh, strategy), partial(trains_as_torchs, mesh, strategy, make)
    low = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    yield "bf16", partial(trains_as_torchs, FSDP_TP, "FULL_SHARD", make, mixed_precision=low)
    yield "one unit", partial(trains_as_torchs, FSDP_TP, "FULL_SHARD", make, auto_wrap_policy=None)


@pytest.mark.thorough
def test_it_trains_as_torchs_wrapper():
    run_cases(4, dict(every_way()))


def trains_as_plain(mesh: Mesh, use_orig_params: bool, make_model: Callable[[], Decoder], strategy: str = "") -> None:
    """Train next to a plain model, with clipping by the norm of the whole model's gradient, equal on every rank."""
    dp, tp = meshes(*mesh)
    plain = make_model()
    strategy = strategy or ("HYBRID_SHARD" if len(mesh[0]) > 2 else "FULL_SHARD")
    model = wrap(OURS, split(copy.deepcopy(plain), tp), dp, strategy, use_orig_params=use_orig_params)
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    for step, norm_type in enumerate((2.0, 1.0, float("inf"))):
        with model.no_sync():
            for m in (plain, model):
                loss_of(m, 10 + step, dp).backward()
        losses = [loss_of(m, step, dp) for m in (plain, model)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        average_grads(plain)  # over all ranks: each rank of tensor parallelism has every batch once
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        norm = model.clip_grad_norm_(0.1, norm_type)
        torch.testing.assert_close(norm, expected)
        norms = torch.stack([norm, -norm])
        dist.all_reduce(norms, dist.ReduceOp.MAX)
        assert norms[0] == -norms[1]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(whole(model), whole_of(dict(plain.named_parameters())))
    states = OURS.FullyShardedDataParallel.optim_state_dict(model, optimizers[1])["state"]
    expected = {name: optimizers[0].state[param] for name, param in plain.named_parameters()}
    torch.testing.assert_close({name: whole_of(states[name]) for name in expected}, expected)


@pytest.mark.thorough
def test_it_trains_and_clips_as_a_plain_model():
    cases = {
        "pieces": partial(trains_as_plain, FSDP_TP, True, make_uneven),
        "uneven": partial(trains_as_plain, FSDP_TP, False, make_uneven),
        "copies of shards": partial(trains_as_plain, HSDP[0], True, make),
        "NO_SHARD": partial(trains_as_plain, FSDP_TP, True, make, "NO_SHARD"),
    }
    run_cases(4, cases)


def recomputes(model: nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


def evaluates(model: nn.Module) -> None:
    dp, _ = meshes(*FSDP_TP)
    with torch.no_grad():
        loss_of(model, 5, dp)
    model.eval()
    loss_of(model, 5, dp)
    model.train()


def registers(model: nn.Module) -> None:
    dp, _ = meshes(*FSDP_TP)
    model.register_comm_hook(OURS.DefaultState(dp.get_group()), OURS.reduce_scatter_hook)


def trains_alike(use_orig_params: bool) -> None:
    """Train with everything at once that changes no loss."""
    ahead = {"forward_prefetch": True, "backward_prefetch": OURS.BackwardPrefetch.BACKWARD_POST}
    expected = train(*made(use_orig_params), range(3))
    model, optimizer, dp = made(use_orig_params)
    for change in (recomputes, evaluates, registers):
        change(model)
    torch.testing.assert_close(train(model, optimizer, dp, range(3)), expected)
    options = {**ahead, "cpu_offload": OURS.CPUOffload(offload_params=True)}
    assert train(*made(use_orig_params, **options), range(3)) == expected


def some_are_frozen() -> None:
    dp, tp = meshes(*FSDP_TP)
    plain = make()
    plain.blocks[0].up.weight.requires_grad_(False)
    model = wrap(OURS, split(copy.deepcopy(plain), tp), dp, use_orig_params=True)
    optimizers = [adamw(p for p in m.parameters() if p.requires_grad) for m in (plain, model)]
    for step in range(2):
        for m in (plain, model):
            loss_of(m, step, dp).backward()
        average_grads(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(whole(model), whole(plain))
    back, _ = unwrap(model, [optimizers[1]])
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in plain.parameters()]


@pytest.mark.exhaustive
def test_it_recomputes_prefetches_evaluates_offloads_and_freezes():
    cases: dict[Any, Callable[[], None]] = {pieces: partial(trains_alike, pieces) for pieces in EITHER}
    run_cases(4, {**cases, "frozen": some_are_frozen})


def partly_split(use_orig_params: bool, left_out: bool) -> None:
    """One of a unit's parameters is split by tensor parallelism, or ignored by the wrapper; the other is plain."""
    dp, tp = meshes(*FSDP_TP)
    torch.manual_seed(0)
    plain = PartlySplit()
    model = parallelize_module(copy.deepcopy(plain), tp, {"up": ColwiseParallel(output_layouts=Replicate())})
    ignored = [model.up] if left_out else []
    model = wrap(
        OURS, model, dp, use_orig_params=use_orig_params, auto_wrap_policy=None, ignored_states=ignored or None
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False) for m in (plain, model)]
    for step in range(2):
        place = 0 if left_out else dp.get_local_rank()  # no rank averages an ignored parameter's gradient
        x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + place))
        for m in (plain, model):
            m(x).square().mean().backward()
        average_grads(plain)
        norms = [nn.utils.clip_grad_norm_(plain.parameters(), 0.1), model.clip_grad_norm_(0.1)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(whole(model), dict(plain.named_parameters()))
    state = OURS.FullyShardedDataParallel.optim_state_dict(model, optimizers[1])["state"]
    momentum = {name: whole_of(each)["momentum_buffer"] for name, each in state.items()}
    expected = [optimizers[0].state[param]["momentum_buffer"] for param in plain.parameters()]
    torch.testing.assert_close([momentum[name] for name, _ in plain.named_parameters()], expected)
    loaded = OURS.FullyShardedDataParallel.optim_state_dict_to_load(model, optimizers[1], {"state": state})["state"]
    kept = optimizers[1].state_dict()["state"]
    torch.testing.assert_close(loaded, {key: each for key, each in kept.items() if each["momentum_buffer"].numel()})


def test_a_unit_with_split_and_whole_parameters_and_one_that_is_left_out():
    run_cases(4, {case: partial(partly_split, *case) for case in itertools.product(EITHER, EITHER)})


def partly_empty(use_orig_params: bool, strategy: str) -> None:
    """The second rank of tensor parallelism has nothing of a one-row parameter, and with pieces no optimizer state."""
    dp, tp = meshes(*FSDP_TP)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3))
    model = parallelize_module(copy.deepcopy(plain), tp, {"0": ColwiseParallel(output_layouts=Replicate())})
    model = wrap(OURS, model, dp, strategy, use_orig_params=use_orig_params, auto_wrap_policy=None)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for step in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dp.get_local_rank()))
        for m in (plain, model):
            m(x).square().mean().backward()
        average_grads(plain)
        inf = float("inf")
        torch.testing.assert_close(
            model.clip_grad_norm_(0.1, inf), nn.utils.clip_grad_norm_(plain.parameters(), 0.1, inf)
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: optimizers[0].state[param] for name, param in plain.named_parameters()}
    for kind in ("Full", "Sharded"):
        set_type(OURS, model, kind)
        values, state = state_dicts(OURS, model, optimizers[1])
        torch.testing.assert_close(whole_of(values), whole(plain))
        torch.testing.assert_close({name: whole_of(state["state"][name]) for name in expected}, expected)
        model.load_state_dict(values)
        OURS.FullyShardedDataParallel.optim_state_dict_to_load(model, optimizers[1], state, load_directly=True)
    back, _ = unwrap(model, [optimizers[1]])
    torch.testing.assert_close(whole(back), whole(plain))
    torch.testing.assert_close(
        {name: whole_of(optimizers[1].state[param]) for name, param in back.named_parameters()}, expected
    )


@pytest.mark.thorough
def test_a_tensor_parallel_rank_may_hold_no_elements_of_a_parameter():
    run_cases(4, {case: partial(partly_empty, *case) for case in itertools.product(EITHER, ("FULL_SHARD", "NO_SHARD"))})


# ---- state dicts


def set_type(api: SimpleNamespace, model: nn.Module, kind: str, **options: Any) -> None:
    config, optim_config = (getattr(api, f"{kind}{of}Config") for of in ("StateDict", "OptimStateDict"))
    configs = config(**options), optim_config(**options)
    wrapper = api.FullyShardedDataParallel
    wrapper.set_state_dict_type(
        model, api.StateDictType[f"{kind.replace('Full', 'FULL').upper()}_STATE_DICT"], *configs
    )


def state_dicts(api: SimpleNamespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return dict(model.state_dict()), api.FullyShardedDataParallel.optim_state_dict(model, optimizer)


@ignoring_warnings(*OLD_CALLS, *SHARDED_TENSOR)
def as_torchs(mesh: Mesh, use_orig_params: bool) -> None:
    """Compare values and layouts; not values of pieces' states, where torch's wrapper assigns some elements wrongly."""
    dp, tp = meshes(*mesh)
    strategy = "HYBRID_SHARD" if len(mesh[0]) > 2 else "FULL_SHARD"
    found: dict[str, list[Any]] = {}
    for api in (OURS, THEIRS):
        model = wrap(api, split(make(), tp), dp, strategy, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        train(model, optimizer, dp, range(2))
        for kind in ("Full", "Sharded"):
            set_type(api, model, kind)
            found.setdefault(kind, []).append(state_dicts(api, model, optimizer))
    for (ours, our_optimizer), (theirs, their_optimizer) in found.values():
        assert list(ours) == list(theirs)
        assert layout(ours) == layout(theirs)
        torch.testing.assert_close(whole_of(ours), whole_of(theirs))
        states, others = our_optimizer["state"], their_optimizer["state"]
        assert list(states) == list(others)
        assert our_optimizer["param_groups"] == their_optimizer["param_groups"]
        assert layout(states) == layout(others)
        if not use_orig_params:
            torch.testing.assert_close(whole_of(states), whole_of(others))


@pytest.mark.thorough
def test_state_dicts_are_torchs():
    cases = (FSDP_TP, False), (FSDP_TP, True), (HSDP[1], False)
    run_cases(4, {case: partial(as_torchs, *case) for case in cases})


def goes_on(kind: str, uneven: bool, is_from_pieces: bool, options: dict[str, Any]) -> None:
    """Load saved state into a wrapper with the other kind of parameters; it must train on exactly."""
    api = OURS.FullyShardedDataParallel
    each = make_uneven if uneven else make
    model, optimizer, dp = made(is_from_pieces, model=each())
    train(model, optimizer, dp, range(2))
    set_type(OURS, model, kind, **options)
    values, state = copy.deepcopy(state_dicts(OURS, model, optimizer))
    expected = train(model, optimizer, dp, range(2, 4))
    other, others, dp = made(not is_from_pieces, model=each())
    train(other, others, dp, range(5, 6))
    set_type(OURS, other, kind, **options)
    if "rank0_only" in options:
        assert bool(values) == bool(state) == (dp.get_local_rank() == 0)
    else:
        assert other.load_state_dict(values).missing_keys == []
    others.load_state_dict(api.optim_state_dict_to_load(other, others, state))
    if "rank0_only" not in options:
        assert train(other, others, dp, range(2, 4)) == expected
    set_type(OURS, other, "Full")
    set_type(OURS, model, "Full")
    if "rank0_only" in options:
        again = api.optim_state_dict(other, others)["state"]
        if state:
            torch.testing.assert_close(whole_of(again), whole_of(state["state"]), **SAME)
        else:
            whole_of(again)


@pytest.mark.exhaustive
def test_training_continues_bit_by_bit_from_every_state_dict():
    cases = {
        ("Full", False, False): {},
        ("Full", True, True): {},
        ("Sharded", False, True): {"offload_to_cpu": True},
        ("Sharded", True, False): {},
        ("Full", False, True, "first"): {"rank0_only": True, "offload_to_cpu": True},
    }
    run_cases(4, {case: partial(goes_on, *case[:3], options) for case, options in cases.items()})


def takes_whole_values() -> None:
    """Load a plain model's values, also with assign; refuse another shape."""
    plain = make()
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1)
    for mesh, use_orig_params, assign in covering(2, (FSDP_TP, HSDP[0]), EITHER, EITHER):
        model, *_ = made(use_orig_params, mesh)
        model.load_state_dict(plain.state_dict(), assign=assign)
        torch.testing.assert_close(whole(model), whole(plain), **SAME)
        wrong = {**plain.state_dict(), "embed.weight": torch.zeros(5, DIM)}
        with pytest.raises(RuntimeError, match=r"'embed.weight' has shape \[5, 6\] and its parameter \[10, 6\]"):
            model.load_state_dict(wrong)
        torch.testing.assert_close(whole(model), whole(plain), **SAME)


@pytest.mark.thorough
def test_it_loads_what_a_plain_model_has():
    run_ranks(4, takes_whole_values)


def refuses_local() -> None:
    for use_orig_params in EITHER:
        model, optimizer, dp = made(use_orig_params)
        train(model, optimizer, dp, range(1))
        before, api = whole(model), OURS.FullyShardedDataParallel
        saved, state = state_dicts(OURS, model, optimizer)
        kept = copy.deepcopy(optimizer.state_dict())
        set_type(OURS, model, "Local")
        uses = (
            model.state_dict,
            partial(model.load_state_dict, saved),
            partial(api.optim_state_dict, model, optimizer),
            partial(api.optim_state_dict_to_load, model, optimizer, state, load_directly=True),
        )
        for use in uses:
            with pytest.raises(RuntimeError, match=r"'embed\.weight' is a DTensor of tensor parallelism.*use SHARDED"):
                use()
        torch.testing.assert_close(whole(model), before, **SAME)
        torch.testing.assert_close(optimizer.state_dict(), kept, **SAME)
        set_type(OURS, model, "Full")
        train(model, optimizer, dp, range(1, 2))


def test_local_state_dicts_are_refused():
    run_ranks(4, refuses_local)


# ---- torch.distributed.checkpoint


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    values, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": values, "optimizer": state}


def second() -> Any:
    dp, tp = meshes(*FSDP_TP)
    model = split(make(), tp)
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    return model, adam(model.parameters()), dp


KINDS: dict[str, Callable[[], Any]] = {
    "flat": made,
    "pieces": partial(made, True),
    "copies": partial(made, False, HSDP[1]),
    "fully_shard": second,
}


LOADED_AS = {"flat": ("pieces", "fully_shard"), "copies": ("flat",), "fully_shard": ("copies",)}
"""In which ways what is saved in one way is loaded: each is saved in once and loaded into once."""


def saves(folder: Path, kind: str) -> tuple[dict[str, Any], list[float]]:
    model, optimizer, dp = KINDS[kind]()
    train(model, optimizer, dp, range(2))
    dcp.save(states_of(model, optimizer), checkpoint_id=folder)
    full = copy.deepcopy(states_of(model, optimizer, full_state_dict=True))
    assert not any(isinstance(value, DTensor) for value in full["model"].values())
    return full, train(model, optimizer, dp, range(2, 3))


def loads(folder: Path, saved: dict[str, Any], losses: list[float] | None) -> None:
    """Load the checkpoint or the full state in other ways, then train; ``losses`` are the expected ones."""
    for kind in LOADED_AS[folder.name]:
        for way in ("sharded", "full") if kind == "pieces" else ("sharded",):
            model, optimizer, dp = KINDS[kind]()
            train(model, optimizer, dp, range(7, 8))
            states, options = states_of(model, optimizer), StateDictOptions(full_state_dict=way == "full")
            if way == "full":
                states = copy.deepcopy(saved)
            else:
                dcp.load(states, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
                options=options,
            )
            found = states_of(model, optimizer, full_state_dict=True)
            torch.testing.assert_close(dict(found["model"]), dict(saved["model"]), **SAME)
            torch.testing.assert_close(found["optimizer"]["state"], saved["optimizer"]["state"], **SAME)
            after = train(model, optimizer, dp, range(2, 3))
            if losses is not None and kind != "copies":
                torch.testing.assert_close(after, losses)


def saves_and_loads(folder: Path) -> None:
    for kind in LOADED_AS:
        saved, losses = saves(folder / kind, kind)
        loads(folder / kind, saved, None if kind == "copies" else losses)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Detected:UserWarning")
def test_checkpoints_go_from_one_way_of_sharding_to_another(tmp_path):
    run_ranks(4, saves_and_loads, tmp_path)


OPTIONS = {
    "flat keys": {"flatten_optimizer_state_dict": True},
    "on the CPU": {"cpu_offload": True},
    "from the first rank": {"full_state_dict": True, "broadcast_from_rank0": True},
}


def every_option(mesh: Mesh, use_orig_params: bool) -> None:
    model, optimizer, dp = made(use_orig_params, mesh)
    train(model, optimizer, dp, range(2))
    first = states_of(model, optimizer, full_state_dict=True, cpu_offload=True)
    assert bool(first["model"]) == bool(first["optimizer"]) == (dist.get_rank() == 0)
    states = {
        name: first if "full_state_dict" in options else copy.deepcopy(states_of(model, optimizer, **options))
        for name, options in OPTIONS.items()
    }
    expected = train(model, optimizer, dp, range(2, 3))
    for name, options in OPTIONS.items():
        other, others, dp = made(not use_orig_params, mesh)
        set_model_state_dict(other, states[name]["model"], options=StateDictOptions(**options))
        set_optimizer_state_dict(other, others, states[name]["optimizer"], options=StateDictOptions(**options))
        assert train(other, others, dp, range(2, 3)) == expected, name


def goes_on_from_the_first(mesh: Mesh, use_orig_params: bool) -> None:
    """Load state that only the first data-parallel rank of each tensor-parallel part has."""
    api = OURS.FullyShardedDataParallel
    model, optimizer, dp = made(use_orig_params, mesh)
    train(model, optimizer, dp, range(2))
    full = api.full_optim_state_dict(model, optimizer)
    is_first = not any(dp.get_coordinate())
    assert bool(full) == is_first
    other, others, dp = made(not use_orig_params, mesh)
    others.load_state_dict(api.scatter_full_optim_state_dict(full if is_first else None, other, optim=others))
    found, expected = (
        api.full_optim_state_dict(m, o, rank0_only=False)["state"] for m, o in ((other, others), (model, optimizer))
    )
    torch.testing.assert_close(whole_of(found), whole_of(expected), **SAME)


@pytest.mark.exhaustive
def test_state_of_one_rank_is_scattered_and_options_are_kept():
    cases = covering(2, (every_option, goes_on_from_the_first), (FSDP_TP, HSDP[1]), EITHER)
    run_cases(4, {(each.__name__, mesh, pieces): partial(each, mesh, pieces) for each, mesh, pieces in cases})


# ---- whole parameters, and undoing


def summons() -> None:
    for use_orig_params in EITHER:
        model, optimizer, dp = made(use_orig_params)
        plain = make()
        for m in (plain, model):
            loss_of(m, 0, dp).backward()
        average_grads(plain)
        held = list(model.parameters())
        with model.summon_full_params(model, with_grads=use_orig_params):
            for (name, param), (expected_name, expected) in zip(
                model.named_parameters(), plain.named_parameters(), strict=True
            ):
                assert name == expected_name
                assert isinstance(param, DTensor)
                assert param.device_mesh.mesh_dim_names == ("tp",)
                torch.testing.assert_close(param.full_tensor(), expected)
                if use_orig_params:
                    torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
                    param.grad.mul_(2)
                with torch.no_grad():
                    param.mul_(3)
        assert all(mine is before for mine, before in zip(model.parameters(), held, strict=True))
        if use_orig_params:
            torch.testing.assert_close(
                model.clip_grad_norm_(1e9), 2 * nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            )
        expected = {name: 3 * param.detach() for name, param in plain.named_parameters()}
        torch.testing.assert_close(whole(model), expected)
        optimizer.step()
        optimizer.zero_grad()
        before = whole(model)
        with model.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            assert isinstance(model.module.embed.weight, DTensor) == (dp.get_local_rank() == 0)
            if dp.get_local_rank() == 0:
                model.module.embed.weight.data.zero_()
        torch.testing.assert_close(whole(model), before, **SAME)
        train(model, optimizer, dp, range(1, 3))


@pytest.mark.thorough
def test_whole_parameters_are_those_of_tensor_parallelism():
    run_ranks(4, summons)


def is_undone() -> None:
    for mesh, use_orig_params in ((FSDP_TP, True), (HSDP[1], False)):
        dp, tp = meshes(*mesh)
        strategy = "HYBRID_SHARD" if len(mesh[0]) > 2 else "FULL_SHARD"
        reference = split(make(), tp)
        model = copy.deepcopy(reference)
        originals = dict(model.named_parameters())
        values = whole_of(originals)
        wrapped = wrap(OURS, model, dp, strategy, use_orig_params=use_orig_params)
        numel = sum(p.to_local().numel() for p in originals.values())
        assert numel == 0  # the originals hold no memory
        loss_of(wrapped, 0, dp).backward()
        back, _ = unwrap(wrapped)
        assert back is model
        assert not any("_workbench" in name for param in originals.values() for name in vars(param))
        for name, param in back.named_parameters():
            assert param is originals[name]
            assert param.placements == param.grad.placements == reference.get_parameter(name).placements
        torch.testing.assert_close(whole(back), values, **SAME)
        plain = make()
        loss_of(plain, 0, dp).backward()
        average_grads(plain)
        torch.testing.assert_close(
            {name: param.grad.full_tensor() for name, param in back.named_parameters()},
            {name: param.grad for name, param in plain.named_parameters()},
        )


def goes_there_and_back() -> None:
    """Carry an optimizer from pieces to flat parameters, to fully_shard, and to pieces again."""
    reference, kept, dp = made(use_orig_params=True)
    expected = train(reference, kept, dp, range(8))
    model, optimizer, _ = made(use_orig_params=True)
    losses = train(model, optimizer, dp, range(2))
    model, _ = unwrap(model, [optimizer])
    assert all(isinstance(v, DTensor) for s in optimizer.state.values() for k, v in s.items() if k != "step")
    model = wrap(OURS, model, dp, use_orig_params=False)
    rewrap_optimizers(model, [optimizer])
    losses += train(model, optimizer, dp, range(2, 4))
    memo: dict[int, Any] = {}
    copied, (copied_optimizer,) = plain_copy(model, memo, [optimizer])
    torch.testing.assert_close(whole(copied), whole(model), **SAME)
    assert {id(p) for group in copied_optimizer.param_groups for p in group["params"]} == set(
        map(id, copied.parameters())
    )
    model, _ = unwrap(model, [optimizer])
    before = dict(model.named_parameters())
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    remap_optimizer(optimizer, {before[name]: param for name, param in model.named_parameters()})
    losses += train(model, optimizer, dp, range(4, 6))
    unshard_module(model, [optimizer])
    model = wrap(OURS, model, dp, use_orig_params=True)
    rewrap_optimizers(model, [optimizer])
    losses += train(model, optimizer, dp, range(6, 8))
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(whole(model), whole(reference))


@pytest.mark.exhaustive
def test_unwrapping_restores_the_tensor_parallel_parameters():
    run_cases(4, {case.__name__: case for case in (is_undone, goes_there_and_back)})


# ---- new values, from the user, the first rank, or an initialiser


def is_changed() -> None:
    def fills(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.25)

    for use_orig_params in EITHER:
        model, _, dp = made(use_orig_params)
        before = whole(model)
        model.double()
        torch.testing.assert_close(whole(model), {name: value.double() for name, value in before.items()}, **SAME)
        train(model, adam(model.parameters()), dp, range(1))
        model.float().apply(fills)
        filled = {name for name, value in whole(model).items() if (value == 0.25).all()}
        assert filled == {name for name, value in before.items() if value.ndim == 2 and name != "embed.weight"}
        train(model, adam(model.parameters()), dp, range(1))


def is_replaced() -> None:
    """Replace one parameter by a whole DTensor and one by a plain tensor; the optimizer's pieces take the values."""
    model, optimizer, dp = made(use_orig_params=True)
    embed, head = model.module.embed, model.module.head
    held = embed.weight, head.weight
    with model.summon_full_params(model, writeback=False):
        doubled = (2 * embed.weight).detach().clone()
    embed.weight, head.weight = nn.Parameter(doubled), nn.Parameter(torch.ones(head.out_features, DIM))
    values = whole(model)
    torch.testing.assert_close(values["embed.weight"], doubled.full_tensor(), **SAME)
    assert (values["head.weight"] == 1).all()
    assert (embed.weight, head.weight) == held
    train(model, optimizer, dp, range(1))
    head.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"'head\.weight' was replaced by one of shape \[3, 3\].*full shape \[10, 6\]"):
        loss_of(model, 1, dp)


@pytest.mark.thorough
def test_it_is_converted_and_its_parameters_are_replaced():
    run_cases(4, {case.__name__: case for case in (is_changed, is_replaced)})


def begins_anywhere() -> None:
    dp, tp = meshes(*FSDP_TP)
    expected = whole(split(make(), tp))
    for use_orig_params in EITHER:
        torch.manual_seed(dist.get_rank())  # different on every rank
        other = split(Decoder(), tp)
        if dp.get_local_rank() == 0:
            other = split(make(), tp)
        model = wrap(OURS, other, dp, sync_module_states=True, use_orig_params=use_orig_params)
        torch.testing.assert_close(whole(model), expected, **SAME)
        with torch.device("meta"):
            empty = Decoder()
        model = wrap(OURS, split(empty, tp), dp, param_init_fn=halves, use_orig_params=use_orig_params)
        assert all((value == 0.5).all() for value in whole(model).values())
        model.load_state_dict(make().state_dict())
        torch.testing.assert_close(whole(model), expected, **SAME)
        train(model, adam(model.parameters()), dp, range(2))


def halves(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.fill_(0.5)


def test_it_begins_with_the_first_ranks_values_or_from_the_meta_device():
    run_ranks(4, begins_anywhere)


# ---- descriptions


def is_described() -> dict[str, Any]:
    model, _, dp = made(model=make_uneven())
    loss_of(model, 0, dp).backward()
    flat = units_of(states_below(model))[0].fsdp_params[0]
    away = model.module.head.weight
    assert repr(away) == "<head.weight is sharded: [11, 6], torch.float32>"
    with pytest.raises(RuntimeError, match=r"'head\.weight' is sharded"):
        away + 1
    known, tensors = flat.describe(), flat.tensors()
    assert {name: tensors[name].shard.numel() for name in tensors if name != flat.fqn}.keys() == {
        part.fqn for part in known.parts
    }
    return {
        "flat": (known.shape, known.global_shape),
        **{part.fqn: (part.shape, part.global_shape) for part in known.parts},
    }


def test_it_is_described_by_its_local_and_global_shape():
    for rank, found in enumerate(run_ranks(4, is_described)):
        own = 5 if rank % 2 else 6  # of 11 rows
        assert found == {
            "flat": ((6 * own + 6 + 6 + 6 * own + own,), (66 + 6 + 6 + 66 + 11,)),
            "embed.weight": ((own, 6), (11, 6)),
            "norm.weight": ((6,), (6,)),
            "norm.bias": ((6,), (6,)),
            "head.weight": ((own, 6), (11, 6)),
            "head.bias": ((own,), (11,)),
        }


# ---- refused


def lacks_gradients() -> None:
    """Only rank 3 lacks a gradient; the ranks with the other part of the model must fail too."""
    model, _, dp = made(use_orig_params=True)
    loss_of(model, 0, dp).backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    lost = model.module.norm.bias  # it crosses the border between two ranks
    if dist.get_rank() == 3:
        lost.grad, before[[p is lost for p in model.parameters()].index(True)] = None, None
    with pytest.raises(RanksDisagreeError, match=r"the gradient of 'norm\.bias': .* rank 3 has none"):
        model.clip_grad_norm_(0.1)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert (param.grad is None) if grad is None else torch.equal(param.grad, grad)


def test_gradients_that_only_some_ranks_have_are_not_clipped():
    run_ranks(4, lacks_gradients)


def disagrees() -> None:
    """Ranks with the other part of the model fail too."""
    for use_orig_params in EITHER:
        model, optimizer, dp = made(use_orig_params)
        train(model, optimizer, dp, range(1))
        loss_of(model, 1, dp).backward()
        if dist.get_rank() == 3:
            model.zero_grad()
        for use in (partial(unwrap, model, [optimizer]), partial(plain_copy, model, {}, [optimizer])):
            with pytest.raises(RanksDisagreeError, match=r"ranks differ in the gradient of .* rank 3 has none"):
                use()
        model.zero_grad()
        if dist.get_rank() == 1:
            optimizer.state.clear()
        saves = partial(OURS.FullyShardedDataParallel.optim_state_dict, model, optimizer)
        for use in (partial(unwrap, model, [optimizer]), saves):
            with pytest.raises(RanksDisagreeError, match=r"ranks differ in the optimizer state of .* rank 1 has none"):
                use()
        assert isinstance(model, OURS.FullyShardedDataParallel)
        optimizer.state.clear()
        train(model, optimizer, dp, range(1))


@pytest.mark.thorough
def test_state_that_only_some_ranks_have_is_not_gathered():
    run_ranks(4, disagrees)


def cannot_be_flat() -> None:
    dp, tp = meshes(*FSDP_TP)
    pair = dist.new_group([0, 2]), dist.new_group([1, 3])

    def as_partial(model: nn.Module) -> None:
        pending = DTensor.from_local(model[1].weight.to_local(), tp, [Partial()], run_check=False)
        model[1].weight = nn.Parameter(pending)

    refusals: dict[str, tuple[str, Callable[[nn.Module], None], dict[str, Any]]] = {
        "placement": ("'1.weight' is a DTensor with the placement Partial", as_partial, {"device_mesh": dp}),
        "own axis": ("'1.weight' is a DTensor on mesh .* cannot be combined", _as_it_is, {"device_mesh": tp}),
        "all ranks": ("'1.weight' is a DTensor on mesh .* cannot be combined", _as_it_is, {}),
        "groups": ("cannot be combined .* one DeviceMesh", _as_it_is, {"process_group": pair[dist.get_rank() % 2]}),
    }
    for case, policy in itertools.product(refusals, (None, OURS.ModuleWrapPolicy({nn.Linear}))):
        match, change, options = refusals[case]
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_module(model, tp, {"1": ColwiseParallel()})
        change(model)
        before = list(model.named_parameters())
        with pytest.raises(ValueError, match=match):
            OURS.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, **options)
        after = list(model.named_parameters())
        assert all(n == m and p is q for (n, p), (m, q) in zip(after, before, strict=True)), case


def _as_it_is(_: nn.Module) -> None:
    """Change nothing."""


def test_invalid_parameters_are_refused_before_anything_is_wrapped():
    run_ranks(4, cannot_be_flat)
