"""torch.distributed.checkpoint's functions with a wrapped model and its optimizer, across numbers of ranks."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.engine.classic.test_optim_state import whole_of
from tests.engine.classic.test_unwrapping import train
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.pairwise import quick, quick_rows
from tests.helpers.parity import shard_net
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, SAME, THEIRS, adam, copies_of_shards, whole, wrap_net

ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
EVERYWHERE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT_KEYS = StateDictOptions(flatten_optimizer_state_dict=True)
Pair = tuple[nn.Module, torch.optim.Optimizer]


def begun(seed: int = 0, *, use_orig_params: bool = False, strategy: str = "FULL_SHARD") -> Pair:
    options = {"device_mesh": copies_of_shards()} if strategy == "HYBRID_SHARD" else {}
    model = wrap_net(OURS, make_net(seed, num_blocks=2), strategy, use_orig_params=use_orig_params, **options)
    return model, adam(model.parameters())


def second() -> Pair:
    model = shard_net(make_net(num_blocks=2))
    return model, adam(model.parameters())


def states_of(pair: Pair, **options: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(*pair, options=StateDictOptions(**options))
    return {"model": model, "optimizer": optimizer}


def load_states(pair: Pair, states: dict[str, Any], **options: Any) -> Any:
    state_options = StateDictOptions(**options)
    if state_options.broadcast_from_rank0:  # torch's set_state_dict skips an empty model state, on that rank alone
        set_model_state_dict(pair[0], states["model"], options=state_options)
        return set_optimizer_state_dict(*pair, states["optimizer"], options=state_options)
    return set_state_dict(
        *pair, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=state_options
    )


def load_from(pair: Pair, folder: Path) -> None:
    states = states_of(pair)
    dcp.load(states, checkpoint_id=folder)
    load_states(pair, states)


def saves(folder: Path, kind: str) -> tuple[dict[str, Any], list[float]]:
    """Train and save, for flat parameters asynchronously; return the full saved state and the losses after it."""
    pair = second() if kind == "fully_shard" else begun(use_orig_params=kind == "pieces")
    train(*pair, range(2))
    states = states_of(pair)
    if kind == "flat":
        dcp.async_save(states, checkpoint_id=folder).result()
    else:
        dcp.save(states, checkpoint_id=folder)
    full = copy.deepcopy(states_of(pair, full_state_dict=True))  # fully_shard returns the optimizer's own memory
    return full, train(*pair, range(2, 3))


def loads(folder: Path, is_same: bool) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Load into new and into trained models; return their state and the losses after it."""
    found, losses = [], []
    for use_orig_params in (False, True):
        for trained in (False, True):
            pair = begun(3, use_orig_params=use_orig_params)
            if trained:
                train(*pair, range(1))
            load_from(pair, folder)
            found.append(states_of(pair, full_state_dict=True))
            losses.append(train(*pair, range(2, 3)))
    pair = second()
    load_from(pair, folder)
    return [*found, states_of(pair, full_state_dict=True)], losses if is_same else []


FROM_TWO = [*product([(2, 1)], ["flat", "pieces", "fully_shard"])]


@pytest.mark.filterwarnings("ignore:Detected:UserWarning")
@pytest.mark.parametrize(
    ("ranks", "kind"),
    quick_rows([*FROM_TWO, ((2, 4), "fully_shard"), ((4, 2), "flat"), ((2, 2), "flat"), ((2, 2), "pieces")], FROM_TWO),
    ids=str,
)
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks, kind, tmp_path):
    (saved, losses), *_ = run_ranks(ranks[0], saves, tmp_path, kind)
    (found, after), *_ = run_ranks(ranks[1], loads, tmp_path, ranks[0] == ranks[1] and kind != "fully_shard")
    for each in found:
        assert_same(each, saved)
    assert all(each == losses for each in after)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part in (found["model"], found["optimizer"]["state"]):
        assert not any(isinstance(v, DTensor) for v in part.values())
    torch.testing.assert_close(dict(found["model"]), dict(wanted["model"]), **SAME)
    torch.testing.assert_close(found["optimizer"]["state"], wanted["optimizer"]["state"], **SAME)
    assert [{**g, "params": set(g["params"])} for g in found["optimizer"]["param_groups"]] == [
        {**g, "params": set(g["params"])} for g in wanted["optimizer"]["param_groups"]
    ]


# ---- the options


def every_option() -> None:
    for strategy, use_orig_params in (
        *product(["FULL_SHARD"], (False, True)),
        ("NO_SHARD", True),
        ("HYBRID_SHARD", False),
    ):
        pair = begun(use_orig_params=use_orig_params, strategy=strategy)
        train(*pair, range(2))
        before, full = whole(pair[0]), states_of(pair, full_state_dict=True)
        first = get_state_dict(*pair, options=ON_RANK_0)
        assert bool(first[1]) == (dist.get_rank() == 0) or strategy == "NO_SHARD"
        expected = train(*pair, range(2, 3))
        ways = {
            "sharded": ({}, None),
            "full": ({"full_state_dict": True}, full),
            "flat keys": ({"flatten_optimizer_state_dict": True}, None),
            "first": ({"full_state_dict": True, "broadcast_from_rank0": True}, full),
        }
        for way, (options, given) in ways.items():
            source = begun(use_orig_params=use_orig_params, strategy=strategy)
            train(*source, range(2))
            states = states_of(source, **options) if given is None else given
            if way == "first" and dist.get_rank():
                states = {"model": {}, "optimizer": {}}
            other = begun(5, use_orig_params=use_orig_params, strategy=strategy)
            load_states(other, {k: dict(v) for k, v in states.items()}, **options)
            torch.testing.assert_close(whole(other[0]), before, **SAME)
            assert train(*other, range(2, 3)) == expected, way


@pytest.mark.parametrize("world_size", quick([1, 2], [1]))
def test_training_continues_bit_by_bit_with_every_option(world_size):
    run_ranks(world_size, every_option)


@ignoring_warnings(*SHARDED_TENSOR, *OLD_CALLS)
def as_torchs() -> None:
    """The same calls, with both."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for use_orig_params in (False, True):
        for options in (None, EVERYWHERE, ON_RANK_0, FLAT_KEYS):
            saved, pairs = [], []
            for api in (OURS, THEIRS):
                model = wrap_net(api, make_net(num_blocks=2), use_orig_params=use_orig_params, device_mesh=mesh)
                pairs.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)))
                loss_of(model, batch(dist.get_rank(), 0)).backward()
                pairs[-1][1].step()
                saved.append(get_optimizer_state_dict(*pairs[-1], options=options))
            ours, theirs = saved
            assert ours.keys() == theirs.keys()
            if options is FLAT_KEYS:
                torch.testing.assert_close(*({k: whole_of(v) for k, v in s.items()} for s in (ours, theirs)))
            elif ours:
                assert ours["param_groups"] == theirs["param_groups"]
                for name, state in ours["state"].items():
                    assert {k: type(v) for k, v in state.items()} == {
                        k: type(v) for k, v in theirs["state"][name].items()
                    }


def test_it_is_what_torchs_wrapper_gives():
    run_ranks(2, as_torchs)


# ---- partial loads


def loads_a_part() -> None:
    for use_orig_params in (True, False):
        pair = begun(use_orig_params=use_orig_params)
        train(*pair, range(2))
        states = states_of(pair, full_state_dict=True)
        part = {k: v for k, v in states["optimizer"]["state"].items() if not k.startswith("blocks.1.")}
        names = [n for n in states["optimizer"]["param_groups"][0]["params"] if n in part]
        given = {"state": part, "param_groups": [{**states["optimizer"]["param_groups"][0], "params": names}]}
        other = begun(5, use_orig_params=use_orig_params)
        set_optimizer_state_dict(*other, given, options=StateDictOptions(full_state_dict=True, strict=False))
        found = get_optimizer_state_dict(*other, options=EVERYWHERE)
        torch.testing.assert_close(found["state"], part, **SAME)
        assert len(found["param_groups"][0]["params"]) == len(states["optimizer"]["param_groups"][0]["params"])


def test_a_part_of_an_optimizers_state_is_loaded():
    run_ranks(2, loads_a_part)


# ---- through overrides and torch.compile


class ForwardingSubclass(OURS.FullyShardedDataParallel):
    """A user's subclass whose overrides only call those of the wrapper."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield from super().named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        yield from super().named_modules(*args, **kwargs)


def saved_through_others() -> None:
    """Compare what checkpoints save of a wrapper with what they save of a subclass and of a compiled one."""
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    for use_orig_params in (False, True):
        saved = []
        for kind in (OURS.FullyShardedDataParallel, ForwardingSubclass):
            module = make_net(num_blocks=2)
            module.blocks[0] = kind(module.blocks[0].requires_grad_(False), use_orig_params=use_orig_params)
            wrapped = kind(module, use_orig_params=use_orig_params)
            for model in (wrapped, torch.compile(wrapped, backend="eager")):
                optimizer = adam(wrapped.parameters())
                saved.append(get_state_dict(model, optimizer, options=options))
        first, *others = saved
        assert {name.partition(".1.")[0] for name in first[0] if name.startswith("blocks")} == {"blocks"}
        for model_state, optimizer_state in others:
            torch.testing.assert_close(dict(model_state), dict(first[0]), **SAME)
            assert optimizer_state["param_groups"] == first[1]["param_groups"]


@pytest.mark.parametrize("world_size", quick([1, 2], [1]))
def test_a_subclass_or_a_compiled_wrapper_is_saved_as_the_wrapper_is(world_size):
    run_ranks(world_size, saved_through_others)
