"""The wrapper trains as an unsharded copy does, and as torch's wrapper."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, THEIRS, adam, check_parity, steps_of, whole, wrap_net
from workbench.engine.fsdp_state import units_of
from workbench.events import Kind

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_trains_as_an_unsharded_copy_does(world_size):
    """Clips gradients; test_table.py covers more options, ten steps, and torch's wrapper."""
    run_ranks(world_size, every_form_trains_alike)


def every_form_trains_alike():
    for strategy, use_orig_params in itertools.product(STRATEGIES, (False, True)):
        options = {"strategy": strategy, "use_orig_params": use_orig_params}
        check_parity(make_net, lambda net: wrap_net(OURS, net, **options), 3, clip=0.1)  # noqa: B023 - called at once


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
def test_prefetching_changes_no_number(prefetch):
    run_ranks(2, prefetches, prefetch)


def prefetches(prefetch):
    backward_prefetch = OURS.BackwardPrefetch[prefetch] if prefetch else None
    for forward_prefetch in (False, True):
        options = {"backward_prefetch": backward_prefetch, "forward_prefetch": forward_prefetch}
        check_parity(make_net, lambda net: wrap_net(OURS, net, **options), steps=3)  # noqa: B023 - called at once


def test_an_optimizer_is_given_flat_parameters_or_pieces():
    run_ranks(2, names_and_shapes)


def names_and_shapes():
    flat = wrap_net(OURS, make_net())
    assert [name for name, _ in flat.named_parameters()] == [
        "_fsdp_wrapped_module._flat_param",
        *(f"_fsdp_wrapped_module.blocks.{i}._fsdp_wrapped_module._flat_param" for i in range(3)),
    ]
    pieces = wrap_net(OURS, make_net(), use_orig_params=True)
    theirs = wrap_net(THEIRS, make_net(), use_orig_params=True)
    assert [name for name, _ in pieces.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    total = torch.tensor(sum(p.numel() for p in pieces.parameters()))
    torch.distributed.all_reduce(total)
    assert total == sum(p.numel() for p in make_net().parameters())
    assert all(p.device == CPU for p in (*flat.parameters(), *pieces.parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_sharding_modules_use_the_optimizers_parameters(world_size):
    run_ranks(world_size, computes_in_place)


def computes_in_place():
    for use_orig_params in (False, True):
        wrapped = wrap_net(OURS, make_net(), "NO_SHARD", use_orig_params=use_orig_params)
        flat = wrapped.blocks[0]._state.flat
        seen = []
        wrapped.blocks[0].norm.register_forward_hook(lambda norm, *_: seen.append(norm.weight.data_ptr()))  # noqa: B023
        loss_of(wrapped, batch(0, 0)).backward()
        assert seen == [flat.slot.data_ptr()]
        assert flat.slot.data_ptr() == next(iter(flat.owned)).data_ptr()


def keeps_its_pieces():
    def shapes(model):
        return [tuple(p.shape) for p in model.parameters()]

    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        wrapped = wrap_net(OURS, make_net(), strategy, use_orig_params=True)
        originals, pieces = list(wrapped.parameters()), shapes(wrapped)
        with torch.no_grad():
            loss_of(wrapped, batch(0, 0))
        assert all(now is before for now, before in zip(wrapped.parameters(), originals, strict=True))
        loss = loss_of(wrapped, batch(0, 0))
        assert shapes(wrapped) == pieces
        with wrapped.no_sync():
            loss.backward()
            assert shapes(wrapped) == pieces
            loss_of(wrapped, batch(0, 1)).backward()
        assert shapes(wrapped) == pieces


def test_retained_full_parameters_are_not_the_models():
    """An optimizer made after a forward without a backward, as in an evaluation, holds pieces."""
    run_ranks(2, keeps_its_pieces)


def trains_after_an_evaluation(model):
    with torch.no_grad():
        loss_of(model, batch(dist.get_rank(), 0))
    return list(itertools.islice(steps_of(model, make_optimizer=adam), 3)), whole(model)


def is_evaluated_first():
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        models = [wrap_net(api, make_net(), strategy, use_orig_params=True) for api in (OURS, THEIRS)]
        torch.testing.assert_close(*map(trains_after_an_evaluation, models))


def test_an_optimizer_may_be_made_after_an_evaluation():
    run_ranks(2, is_evaluated_first)


def nests_no_sync(model):
    """Return the gradients of two micro-batches; the first runs in a ``no_sync`` after nested ones have ended."""
    with model.no_sync():
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        with model.no_sync():
            pass
        loss_of(model, batch(dist.get_rank(), 0)).backward()
    loss_of(model, batch(dist.get_rank(), 1)).backward()
    return whole(model, with_grads=True)


def is_restored():
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        ours, theirs = (wrap_net(api, make_net(), strategy, use_orig_params=True) for api in (OURS, THEIRS))
        with recording() as record:
            grads = nests_no_sync(ours)
        assert set(record.count(Kind.REDUCE_SCATTER).values()) == {1}
        torch.testing.assert_close(grads, nests_no_sync(theirs))
        with pytest.raises(ZeroDivisionError), ours.no_sync():
            raise ZeroDivisionError
        assert all(unit.sync.reduce_grads and unit.reshard_after_backward for unit in units_of(ours._state.tree))


def test_nested_no_sync_restores_the_outer_setting():
    run_ranks(2, is_restored)


def summons_twice():
    model = wrap_net(OURS, make_net(), use_orig_params=True)
    summon = OURS.FullyShardedDataParallel.summon_full_params
    before, shapes = whole(model), [p.shape for p in model.parameters()]
    for options in ({}, {"rank0_only": True, "writeback": False}):
        with summon(model, **options):
            outer = [p.shape for p in model.parameters()]
            with summon(model.blocks[0]):
                assert [p.shape for p in model.parameters()] == outer
            assert [p.shape for p in model.parameters()] == outer
            if outer != shapes:
                with torch.no_grad():
                    model.blocks[0].norm.weight += 1
        assert [p.shape for p in model.parameters()] == shapes
    name = "blocks.0.norm.weight"
    torch.testing.assert_close(whole(model), before | {name: before[name] + 1})


def test_parameters_stay_whole_when_an_inner_summons_ends():
    run_ranks(2, summons_twice)
