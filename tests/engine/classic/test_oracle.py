"""Torch's wrapper as oracle: the same script gives the same numbers with our names and with torch's."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from tests.helpers import huggingface_models as hf
from tests.helpers.forked_ranks import in_turn, run_ranks
from tests.helpers.known_warnings import FROZEN_BESIDE_TRAINED, NO_SHARD, ignoring_warnings
from tests.helpers.pairwise import quick
from tests.helpers.small_models import Block, adamw, batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, THEIRS, compare_with_torchs, whole, wrap_net

BF16 = torch.bfloat16
SMALL = functools.partial(make_net, dim=8, num_blocks=2)


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def run_all(cases):
    with ignoring_warnings(*NO_SHARD, *FROZEN_BESIDE_TRAINED):
        in_turn(dict(cases))


def pairs_of_groups():
    """A pair of process groups is equivalent to a mesh; :mod:`.test_table` tests the mesh."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (max(1, size // 2), min(size, 2)), mesh_dim_names=("repeat", "shard"))
    pair = mesh.get_group("shard"), mesh.get_group("repeat")
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        wrapped = functools.partial(_wrapped, wrap=wrap_net, options={"strategy": strategy, "process_group": pair})
        yield strategy, functools.partial(compare_with_torchs, SMALL, wrapped, steps=2, ways=[(2, True)])


def every_pair():
    run_all(pairs_of_groups())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_pair_of_process_groups_is_the_shard_and_the_replicate_group(world_size):
    run_ranks(world_size, every_pair)


def gradients_stay_low():
    """Test gradients without an optimizer: fused Adam needs gradients of the parameters' dtype."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        found = []
        for api in (OURS, THEIRS):
            precision = api.MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
            with ignoring_warnings(*NO_SHARD):
                model = wrap_net(api, SMALL(), strategy, mixed_precision=precision, use_orig_params=True)
            loss_of(model, batch(dist.get_rank(), 0)).backward()
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.numel()})
        ours, theirs = found
        assert {grad.dtype for grad in ours.values()} == {BF16}
        shared = ours.keys() & theirs.keys()  # pieces have other borders where torch's flat parameter has gaps
        for name in shared:
            assert theirs[name].dtype == BF16


def test_gradients_stay_in_low_precision_if_requested():
    run_ranks(2, gradients_stay_low)


# ---- models of all kinds


class Shared(nn.Module):
    """Has a tied weight, a module that is called twice, and an unused layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.unused = nn.Linear(8, 3)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return self.head(x * self.scale)


def make_shared():
    torch.manual_seed(0)
    return Shared()


def frozen():
    net = SMALL()
    net.embed.weight.requires_grad_(False)
    net.blocks[0].mlp[0].weight.requires_grad_(False)
    return net


def frozen_block():
    net = SMALL()
    net.blocks[0].requires_grad_(False)
    return net


def one(api, module, strategy, **options):
    """Wrap one module."""
    return api.FullyShardedDataParallel(
        module, sharding_strategy=api.ShardingStrategy[strategy], device_id=CPU, **options
    )


def nested(api, net, **options):
    wrap = functools.partial(one, api, **options)
    for block in net.blocks:
        block.mlp = wrap(block.mlp)
    net.blocks[0] = wrap(net.blocks[0])
    return wrap(net)


def ignoring(api, net, **options):
    return wrap_net(api, net, ignored_modules=[net.blocks[0].norm, net.head], **options)


def ignoring_params(api, net, **options):
    return wrap_net(api, net, ignored_states=[net.blocks[1].norm.weight, net.head.weight], **options)


def checkpointed_inside(api, net, **options):
    for i, block in enumerate(net.blocks):
        net.blocks[i] = one(api, checkpoint_wrapper(block), **options)
    return one(api, net, **options)


def checkpointed_outside(api, net, **options):
    for i, block in enumerate(net.blocks):
        net.blocks[i] = checkpoint_wrapper(one(api, block, **options))
    return one(api, net, **options)


def checkpointed_after(api, net, **options):
    wrapped = wrap_net(api, net, **options)
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, Block))
    return wrapped


def looking_between(model, tokens):
    """Run forwards without a backward before the one that trains."""
    with torch.no_grad():
        model(tokens[:, :-1])
    model.eval()
    model(tokens[:, :-1])
    model.train()
    return loss_of(model, tokens)


WRAPPINGS = [wrap_net, nested, ignoring, ignoring_params]
CHECKPOINTED = [checkpointed_inside, checkpointed_outside, checkpointed_after]


def kinds():
    """Yield names, model factories, wrapping functions and training options."""
    for wrap in (*WRAPPINGS, *CHECKPOINTED):
        yield wrap.__name__, SMALL, wrap, {}
    yield "frozen block", frozen_block, wrap_net, {}
    yield "shared, unused, called twice", make_shared, wrap_net, {}
    yield "looked at between", SMALL, wrap_net, {"loss": looking_between}


def models():
    """Yield each kind with each strategy, with and without ``use_orig_params``."""
    for strategy, use_orig_params in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True)):
        options = {"strategy": strategy, "use_orig_params": use_orig_params}
        partly_frozen = [("frozen", frozen, wrap_net, {})] if use_orig_params else []
        for name, make, wrap, how in (*kinds(), *partly_frozen):
            wrapped = functools.partial(_wrapped, wrap=wrap, options=options)
            yield (
                f"{name}, {options}",
                functools.partial(compare_with_torchs, make, wrapped, steps=3, tolerance=CLOSE, **how),
            )


def _wrapped(api, net, *, wrap, options):
    return wrap(api, net, **options)


def every_model():
    run_all(models())


@pytest.mark.thorough
def test_models_of_all_kinds_train_as_with_torchs_wrapper():
    run_ranks(2, every_model)


# ---- third-party models and scripts


def trains_huggingface(name):
    def wrap(api, model):
        blocks = {type(block) for block in hf.blocks(model)}
        policy = functools.partial(api.transformer_auto_wrap_policy, transformer_layer_cls=blocks)
        return api.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, use_orig_params=True)

    models = [wrap(api, hf.make(name)) for api in (OURS, THEIRS)]
    optimizers = [adamw(model.parameters(), lr=1e-3, eps=1e-4) for model in models]
    for step in range(3):
        losses = [hf.loss_of(model, hf.batch(dist.get_rank(), step)) for model in models]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(*map(whole, models), **CLOSE)


@pytest.fixture
def imported_once():
    hf.transformers()  # ranks are forked, so they inherit the import


@pytest.mark.parametrize("name", quick(["Llama", "GPT-2", "T5"], ["GPT-2"]))
@pytest.mark.usefixtures("imported_once")
def test_models_of_huggingface_train_as_with_torchs_wrapper(name):
    run_ranks(2, trains_huggingface, name)


class Digits(nn.Module):
    """The network of PyTorch's FSDP tutorial, for 8 x 8 images."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(x))))
        x = torch.flatten(nn.functional.max_pool2d(x, 2), 1)
        return nn.functional.log_softmax(self.fc2(nn.functional.relu(self.fc1(x))), dim=1)


def tutorial(api):
    """Train, test and save on rank 0 as the tutorial does; return this rank's saved state and the global losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = functools.partial(api.size_based_auto_wrap_policy, min_num_params=500)
    model = api.FullyShardedDataParallel(Digits(), auto_wrap_policy=policy, device_id=CPU)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    losses = []
    for _epoch in range(2):
        model.train()
        ddp_loss = torch.zeros(2)
        for data, target in zip(images[rank::size].split(4), labels[rank::size].split(4), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(data), target, reduction="sum")
            loss.backward()
            optimizer.step()
            ddp_loss += torch.tensor([loss.item(), len(data)])
        dist.all_reduce(ddp_loss)
        model.eval()
        with torch.no_grad():
            correct = (model(images).argmax(dim=1) == labels).sum()
        losses.append((ddp_loss[0] / ddp_loss[1], correct))
        scheduler.step()
    with api.FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
        saved = {name: p.detach().clone() for name, p in model.named_parameters()} if rank == 0 else {}
    return saved, losses


def tutorial_of_both():
    (ours, our_losses), (theirs, their_losses) = map(tutorial, (OURS, THEIRS))
    assert list(ours) == list(theirs)
    assert bool(ours) == (dist.get_rank() == 0)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(our_losses, their_losses, **CLOSE)


def test_the_script_of_the_tutorial_runs_after_its_import_was_changed():
    run_ranks(2, tutorial_of_both)
