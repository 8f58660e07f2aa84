"""Save and load an optimizer's state: training continues exactly, and other shardings can load it."""

import itertools
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.engine.classic.test_optim_state import FSDP, set_state_dict_type
from tests.engine.classic.test_unwrapping import STRATEGIES, train, wrapped
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import pairs_and_triples, rows_of
from tests.helpers.parity import shard_net
from tests.helpers.small_models import make_net
from tests.helpers.wrapped_models import OURS, SAME, adam, whole

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
LOW = OURS.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = OURS.CPUOffload(offload_params=True)


def partly_frozen() -> nn.Module:
    """Return a model in which the parameters of one unit have no optimizer state."""
    model = make_net(num_blocks=2)
    model.blocks[1].requires_grad_(False)
    return model


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, of flat parameters, pieces or DTensors."""
    named = list(model.named_parameters())
    blocks, others = ([p for name, p in named if ("blocks" in name) is wanted] for wanted in (True, False))
    return adam([{"params": blocks, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}])


def begun(strategy: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped(partly_frozen(), strategy, **options)
    return model, grouped(model)


Saved = tuple[dict[str, Any], dict[str, Any]]
"""State dicts of a model and its optimizer."""


def saved_after_two_steps(strategy: str, **options: Any) -> dict[str, Saved]:
    """Return the saved state of each type; model and optimizer are freed."""
    model, optimizer = begun(strategy, **options)
    train(model, optimizer, range(2))
    saved = {}
    for kind in (FULL, SHARDED, LOCAL):
        set_state_dict_type(model, kind)
        saved[kind] = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    return saved


def goes_on(kind: str, saved: Saved, strategy: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Load saved state into a new model and continue training."""
    values, state = saved
    model, optimizer = begun(strategy, **options)
    set_state_dict_type(model, kind)
    model.load_state_dict(values)
    FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    again = FSDP.optim_state_dict(model, optimizer)
    torch.testing.assert_close(again["state"], state["state"], **SAME)
    assert again["param_groups"] == state["param_groups"]
    assert [(group["weight_decay"], group["lr"]) for group in again["param_groups"]] == [(0.1, 1e-2), (1e-2, 3e-3)]
    assert not any("blocks.1" in str(name) for name in again["state"])
    return train(model, optimizer, range(2, 4)), whole(model)


def every_type_goes_on(strategy: str, rows: list[tuple[Any, Any, bool]]) -> None:
    for precision, options_of_it in itertools.groupby(rows, key=operator.itemgetter(0)):
        model, optimizer = begun(strategy, mixed_precision=precision)
        losses = train(model, optimizer, range(4))[2:]
        values = whole(model)
        for _, offload, use_orig_params in options_of_it:
            options = {"mixed_precision": precision, "cpu_offload": offload, "use_orig_params": use_orig_params}
            for kind, saved in saved_after_two_steps(strategy, **options).items():
                found, left = goes_on(kind, saved, strategy, **options)
                assert found == losses, (kind, options)
                torch.testing.assert_close(left, values, **SAME)


CASES = [
    (1, "NO_SHARD"),
    *((2, strategy) for strategy in STRATEGIES),
    *((4, strategy) for strategy in ("FULL_SHARD", "HYBRID_SHARD")),  # the others save what these or two ranks save
]


@pairs_and_triples
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_training_resumes_bit_identically_from_every_type(case, part):
    """Covers mixed precision, offload and ``use_orig_params``."""
    world_size, strategy = case
    rows = [options for at, *options in rows_of(part, CASES, (None, LOW), (None, OFFLOAD), (False, True)) if at == case]
    run_ranks(world_size, every_type_goes_on, strategy, rows)


# ---- into other shardings


def classic_relay(source: Path | None, target: Path, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load ``source``, or train if it is None; save to ``target``; return the whole state."""
    model, optimizer = begun(strategy, **options)
    set_state_dict_type(model, SHARDED)
    train(model, optimizer, range(2))  # loading overwrites this
    state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if source is not None:
        dcp.load(state, checkpoint_id=source)
        model.load_state_dict(state["model"])
        FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"], load_directly=True)
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=target)
    set_state_dict_type(model, FULL)
    return {"model": dict(model.state_dict()), "optimizer": FSDP.optim_state_dict(model, optimizer)}


def second_relay(source: Path, target: Path) -> None:
    """Load and save with ``fully_shard`` and torch's checkpoint functions."""
    model = shard_net(partly_frozen())
    optimizer = grouped(model)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=source)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=target)


@pytest.mark.thorough
def test_from_four_ranks_to_two_to_one_to_fully_shard_and_back(tmp_path):
    """Each stage differs in strategy, precision, offload, and flat parameters or pieces."""
    first, *_ = run_ranks(
        4,
        classic_relay,
        None,
        tmp_path / "4",
        "HYBRID_SHARD",
        {"use_orig_params": True, "mixed_precision": LOW, "cpu_offload": OFFLOAD},
    )
    run_ranks(2, classic_relay, tmp_path / "4", tmp_path / "2", "FULL_SHARD", {"mixed_precision": LOW})
    one = {"use_orig_params": True, "cpu_offload": OFFLOAD}
    run_ranks(1, classic_relay, tmp_path / "2", tmp_path / "1", "NO_SHARD", one)
    run_ranks(2, second_relay, tmp_path / "1", tmp_path / "second")
    last, *_ = run_ranks(4, classic_relay, tmp_path / "second", tmp_path / "last", "SHARD_GRAD_OP", {})
    torch.testing.assert_close(last["model"], first["model"], **SAME)
    torch.testing.assert_close(last["optimizer"]["state"], first["optimizer"]["state"], **SAME)
    assert last["optimizer"]["param_groups"] == first["optimizer"]["param_groups"]
    assert len(first["optimizer"]["state"]) == sum(p.requires_grad for p in partly_frozen().parameters())
