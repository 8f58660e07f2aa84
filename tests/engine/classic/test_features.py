"""A wrapper's features besides training: initial values, whole parameters, names, clipping, fp16."""

import itertools
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TheirScaler

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.helpers.pairwise import pairs_and_triples, quick, rows_of
from tests.helpers.parity import shard_net
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from tests.helpers.wrapped_models import (
    CPU,
    OURS,
    SAME,
    THEIRS,
    adam,
    assert_same_values,
    check_parity,
    steps_of,
    whole,
    wrap_net,
)
from workbench.engine import MixedPrecisionPolicy, collective_order


def both(*args, **options):
    """The same net wrapped by ours and by torch's."""
    with ignoring_warnings(*NO_SHARD):
        return [wrap_net(api, make_net(dim=8), *args, **options) for api in (OURS, THEIRS)]


def hybrid_trains():
    size = dist.get_world_size()
    for shape in ((size, 1), (1, size)):  # test_table.py has the other shapes
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("repeat", "shard"))
        for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            check_parity(make_net, lambda net: wrap_net(OURS, net, strategy, device_mesh=mesh), steps=3)  # noqa: B023


@pytest.mark.parametrize("world_size", [2, 4])
def test_copies_of_any_number_train_as_an_unsharded_copy_does(world_size):
    run_ranks(world_size, hybrid_trains)


AS_IN_BOTH = [
    ({}, {}),
    ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, {"ways": [(2, True)]}),
]
"""Precision, and how to train. Both our APIs accumulate in fp32 under no_sync(); torch's wrapper does so in bf16."""


def reduce_last(unit_tree):
    """Add ``no_sync`` to modules of ``fully_shard``."""

    @contextmanager
    def no_sync():
        unit_tree.set_requires_gradient_sync(False)
        yield
        unit_tree.set_requires_gradient_sync(True)

    unit_tree.no_sync = no_sync
    return unit_tree


def trains_as_fully_shard():
    for (strategy, reshard), (precision, how) in itertools.product(
        (("FULL_SHARD", True), ("SHARD_GRAD_OP", False)), AS_IN_BOTH
    ):
        wrapped = wrap_net(OURS, make_net(), strategy, mixed_precision=OURS.MixedPrecision(**precision))
        policy = MixedPrecisionPolicy(**precision, cast_forward_inputs=False)
        units = reduce_last(shard_net(make_net(), reshard_after_forward=reshard, mp_policy=policy))
        losses = [list(itertools.islice(steps_of(m, make_optimizer=adam, **how), 10)) for m in (wrapped, units)]
        torch.testing.assert_close(*losses, **SAME)
        values = {name: p.full_tensor().detach() for name, p in units.named_parameters()}
        torch.testing.assert_close(whole(wrapped), values, **SAME)


@pytest.mark.parametrize("world_size", quick([1, 2, 4], [1, 2]))
def test_it_trains_as_fully_shard_does_bit_by_bit(world_size):
    run_ranks(world_size, trains_as_fully_shard)


# ---- initial values


def begins_with_those_of_rank_0():
    plain = make_net()
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        net = make_net(seed=dist.get_rank())
        wrapped = wrap_net(OURS, net, strategy, sync_module_states=True)
        assert_same_values(wrapped, plain, rtol=0, atol=0)


def begins_with_nothing():
    def fill(module):
        module.to_empty(device=CPU, recurse=False)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(0.5)

    for use_orig_params in (False, True):
        with torch.device("meta"):
            nets = [make_net(dim=8) for _ in range(2)]
        models = [
            wrap_net(api, net, param_init_fn=fill, use_orig_params=use_orig_params)
            for api, net in zip((OURS, THEIRS), nets, strict=True)
        ]
        torch.testing.assert_close(*map(whole, models), rtol=0, atol=0)
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        torch.manual_seed(0)
        wrapped = OURS.FullyShardedDataParallel(net, device_id=CPU, use_orig_params=use_orig_params)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        assert_same_values(wrapped, plain, rtol=0, atol=0)


@pytest.mark.parametrize("begins", [begins_with_those_of_rank_0, begins_with_nothing])
def test_values_are_those_of_rank_0_or_of_what_initialises_them(begins):
    run_ranks(2, begins)


def deferred_with_shared():
    """Return a meta model whose first and last layer share a parameter, and its optimizer."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False))
        net[2].weight = net[0].weight
    return net, torch.optim.Adam(net.parameters(), foreach=False)


def stay_the_same_objects():
    for use_orig_params in (False, True):
        for options in ({}, {"param_init_fn": lambda module: module.to_empty(device=CPU, recurse=False)}):
            net, optimizer = deferred_with_shared()
            before = dict(net.named_parameters())
            wrapped = OURS.FullyShardedDataParallel(net, device_id=CPU, use_orig_params=use_orig_params, **options)
            assert len(wrapped._state.flat.parts) == 3
            OURS.rewrap_optimizers(wrapped, [optimizer])
            assert set(optimizer.param_groups[0]["params"]) == set(wrapped.parameters())
            plain, _ = OURS.unwrap(wrapped, [optimizer])
            assert dict(plain.named_parameters()) == before
            assert all(now is before[name] and not now.is_meta for name, now in plain.named_parameters())
            assert net[2].weight is net[0].weight
            net, _ = deferred_with_shared()
            kept = net[0].weight
            wrapped = OURS.FullyShardedDataParallel(net, device_id=CPU, ignored_states=[kept], **options)
            assert [part.fqn for part in wrapped._state.flat.parts] == ["1.weight", "1.bias"]
            assert net[0].weight is kept


def test_parameters_without_values_stay_the_objects_that_modules_share_and_optimizers_hold():
    run_ranks(2, stay_the_same_objects)


# ---- whole parameters


SUMMONED = [
    {},
    {"recurse": False},
    {"offload_to_cpu": True},
    {"writeback": False},
    {"writeback": False, "rank0_only": True},
    {"writeback": False, "rank0_only": True, "offload_to_cpu": True},
    {"with_grads": True},
]


def seen_and_left(model, options):
    """Return the values in a summoned model, and the whole parameters after adding to them there."""
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    with type(model).summon_full_params(model, **options):
        with_grads = options.get("with_grads", False)
        seen = {name: (p.grad if with_grads else p).detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            # where parameters are not whole a rank would change its pieces, and torch's pieces have other borders
            for param in () if options.get("rank0_only") and dist.get_rank() else model.parameters():
                param.add_(1)
    return seen, whole(model)


def summons():
    rank = dist.get_rank()
    for use_orig, options in itertools.product((False, True), SUMMONED):
        if options.get("with_grads") and not use_orig:
            continue
        if options.get("writeback") is False and dist.get_world_size() == 1:
            continue  # torch's wrapper writes back anyway
        mine, other = both(use_orig_params=use_orig)
        ours = seen_and_left(mine, options)
        # torch's offload_to_cpu fails, and changes nothing, if parameters are on the CPU already
        theirs = seen_and_left(other, {key: value for key, value in options.items() if key != "offload_to_cpu"})
        torch.testing.assert_close(ours[1], theirs[1])
        is_whole = options.get("recurse", True) and (rank == 0 or not options.get("rank0_only"))
        if is_whole:  # elsewhere the pieces have other borders
            torch.testing.assert_close(ours[0], theirs[0])
            assert list(ours[0]) == list(theirs[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_whole_parameters_are_summoned_as_torchs_are(world_size):
    run_ranks(world_size, summons)


def is_evaluated_whole():
    tokens = batch(dist.get_rank(), 0)
    for strategy, use_orig in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True)):
        model = wrap_net(OURS, make_net(dim=8), strategy, use_orig_params=use_orig)
        with torch.no_grad():
            wanted = [model(tokens), wrap_net(OURS, plus_one(make_net(dim=8)))(tokens)]
            for recurse in (True, False):
                with model.summon_full_params(model, recurse=recurse):
                    assert torch.equal(model(tokens), wanted[0])
                    assert torch.equal(model.module(tokens), wanted[0])
            with model.summon_full_params(model):
                model(tokens)
                assert torch.equal(plus_one(model)(tokens), wanted[1])  # in-place changes after it are kept
            assert torch.equal(model(tokens), wanted[1])


@torch.no_grad()
def plus_one(model):
    for param in model.parameters():
        param.add_(1)
    return model


def test_a_model_is_evaluated_with_whole_parameters():
    """This needs no gathering; text generation uses it."""
    run_ranks(2, is_evaluated_whole)


def applies():
    def halve(module):
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.mul_(0.5)

    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for use_orig in (False, True):
            models = both(strategy, use_orig_params=use_orig)
            for model in models:
                assert model.apply(halve) is model
            torch.testing.assert_close(*map(whole, models))


def test_apply_reaches_whole_parameters_as_torchs_does():
    run_ranks(2, applies)


def clips():
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for norm_type in (1.0, 2.0, 3, float("inf")):
            for use_orig in (False, True):
                models = both(strategy, use_orig_params=use_orig)
                for model in models:
                    loss_of(model, batch(dist.get_rank(), 0)).backward()
                norms = [model.clip_grad_norm_(0.05, norm_type) for model in models]
                torch.testing.assert_close(*norms)
                optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
                for optimizer in optimizers:
                    optimizer.step()
                torch.testing.assert_close(*map(whole, models))


def test_gradients_are_clipped_as_torchs_are():
    run_ranks(2, clips)


def asks_while_clipping(use_orig: bool) -> list[int]:
    """Return the store accesses of each clipping, until the first iteration, which had no clipping, is forgotten."""
    model = wrap_net(OURS, make_net(num_blocks=1), use_orig_params=use_orig)
    found = []
    for step in range(collective_order.REMEMBERED + 4):
        loss_of(model, batch(dist.get_rank(), step)).backward()
        with mock.patch.object(
            collective_order.MessageBoard, "_add", autospec=True, side_effect=collective_order.MessageBoard._add
        ) as add:
            model.clip_grad_norm_(0.05)
        found.append(add.call_count)
        model.zero_grad()
    return found


@pytest.mark.parametrize("use_orig", [False, True])
def test_clipping_in_every_step_needs_no_store_access(use_orig):
    for found in run_ranks(2, asks_while_clipping, use_orig):
        assert found[-2:] == [0, 0]


def skips_a_batch(model, to_none, between):
    """Drop the first batch's gradients, before or after the second forward; step with the second batch's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss_of(model, batch(dist.get_rank(), 1)).backward()
    if not between:
        optimizer.zero_grad(set_to_none=to_none)
    loss = loss_of(model, batch(dist.get_rank(), 2))
    if between:
        optimizer.zero_grad(set_to_none=to_none)
    loss.backward()
    optimizer.step()
    return whole(model)


def forgets_what_was_added_up(part):
    strategies, either = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True)
    for strategy, use_orig, to_none, between in rows_of(part, strategies, either, either, either):
        (mine, other), (later, _) = (both(strategy, use_orig_params=use_orig) for _ in range(2))
        ours = skips_a_batch(mine, to_none, between)
        torch.testing.assert_close(ours, skips_a_batch(other, to_none, between))
        loss_of(later, batch(dist.get_rank(), 0)).backward()  # torch's wrapper keeps earlier reduced gradients
        torch.testing.assert_close(ours, skips_a_batch(later, to_none, between), **SAME)


@pairs_and_triples
def test_gradients_that_no_sync_has_added_up_are_made_zero_as_torchs_are(part):
    run_ranks(2, forgets_what_was_added_up, part)


def waits_for_reduction():
    for use_orig in (False, True):
        model = wrap_net(OURS, make_net(dim=8), use_orig_params=use_orig)
        optimizer = adamw(model.parameters())
        loss_of(model, batch(0, 0)).backward()
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with model.no_sync():
            loss_of(model, batch(0, 1)).backward()
        shown = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(repr(grad).startswith("<gradient of ") for grad in shown)
        for uses in (optimizer.step, lambda m=model: m.clip_grad_norm_(1.0), lambda g=shown[0]: g + 1):
            with pytest.raises(
                RuntimeError, match=r"was accumulated within no_sync\(\) and is not reduced yet; run a back"
            ):
                uses()
        model.reset_iter_state()
        after = [p.grad for p in model.parameters()]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_unreduced_gradients_cannot_be_used():
    run_ranks(2, waits_for_reduction)


# ---- a wrapper acts like its module


class Indexed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.kind, self.state = "odd", "solid"

    def twice(self):
        return 2 * len(self)


def is_like_the_module_in_it():
    found = []
    for api in (OURS, THEIRS):
        torch.manual_seed(0)
        model = api.FullyShardedDataParallel(Indexed(), device_id=CPU, use_orig_params=True)
        assert (model.kind, model.state, model.twice(), model[1] is model.module[1]) == ("odd", "solid", 6, True)
        assert model.check_is_root()
        with pytest.raises(AttributeError):
            _ = model.nothing
        model(torch.ones(3, 4) * dist.get_rank()).sum().backward()
        found.append(
            [
                [name for name, _ in model.named_parameters()],
                {name: b.clone() for name, b in model.named_buffers()},
                [type(m).__name__ for m in model.modules()],
                len(api.FullyShardedDataParallel.fsdp_modules(model)),
            ]
        )
    assert found[0][0] == found[1][0]
    assert found[0][2:] == found[1][2:]
    torch.testing.assert_close(found[0][1], found[1][1])


def says_where_it_is():
    mesh = dist.init_device_mesh("cpu", (1, 2))
    for strategy, groups in (("FULL_SHARD", {}), ("NO_SHARD", {}), ("HYBRID_SHARD", {"device_mesh": mesh})):
        for model in both(strategy, **groups):
            assert (model.rank, model.world_size, model.compute_device) == (dist.get_rank(), 2, CPU)
            assert dist.get_process_group_ranks(model.process_group) == [0, 1]
            assert model.blocks[0].sharding_strategy.name == strategy
            assert model.mixed_precision.param_dtype is None


def changes_dtype():
    for use_orig in (False, True):
        models = [model.to(torch.float64) for model in both(use_orig_params=use_orig)]
        for model in models:
            loss_of(model, batch(dist.get_rank(), 0)).backward()
            assert {p.dtype for p in model.parameters()} == {torch.float64}
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(*map(whole, models))


def buffers_are_cast():
    found = []
    for api in (OURS, THEIRS):
        torch.manual_seed(0)
        precision = api.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float16)
        model = api.FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)), device_id=CPU, mixed_precision=precision)
        model.module.register_buffer("table", torch.ones(4))
        model(torch.ones(2, 4))
        found.append({name: b.dtype for name, b in model.named_buffers()})
    assert found[0] == found[1] == {"_fsdp_wrapped_module.table": torch.float16}


def scales_in_fp16():
    found = []
    for api in (OURS, THEIRS):
        model = wrap_net(api, make_net(dim=8), mixed_precision=api.MixedPrecision(param_dtype=torch.float16))
        scaler = (OURS.ShardedGradScaler if api is OURS else TheirScaler)(device="cpu", init_scale=2.0**10)
        optimizer = adamw(model.parameters())
        for step in range(4):
            loss = loss_of(model, batch(dist.get_rank(), step))
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((whole(model), scaler.get_scale()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-3)
    assert found[0][1] == 2.0**9


@pytest.mark.parametrize(
    "what", [is_like_the_module_in_it, says_where_it_is, changes_dtype, buffers_are_cast, scales_in_fp16]
)
def test_as_with_torchs(what):
    run_ranks(2, what)
