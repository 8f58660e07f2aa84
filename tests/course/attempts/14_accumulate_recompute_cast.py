# %% levers-accumulate: right
# %%fsdp
def accumulate(tokens):
    model.set_requires_gradient_sync(False)
    *most, last = tokens.split(2)
    parts = [one(each) for each in most]
    model.set_requires_gradient_sync(True)
    return sum(parts) + one(last)


def one(part):
    loss = loss_of(part) / 4
    loss.backward()
    return loss.item()


# %% levers-accumulate: right
# %%fsdp
def accumulate(tokens):
    losses_of_parts = []
    for place in range(0, 8, 2):
        model.set_requires_gradient_sync(place == 6)
        loss = loss_of(tokens[place : place + 2])
        loss.backward(torch.tensor(0.25))
        losses_of_parts.append(loss.item())
    return sum(losses_of_parts) / len(losses_of_parts)


# %% levers-accumulate: right
# %%fsdp
from contextlib import contextmanager


@contextmanager
def no_sync(net):
    net.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        net.set_requires_gradient_sync(True)


def accumulate(tokens):
    first, second, third, last = tokens.chunk(4)
    with no_sync(model):
        found = sum(backward_of(each) for each in (first, second, third))
    return found + backward_of(last)


def backward_of(part):
    loss = loss_of(part).div(4)
    loss.backward()
    return float(loss)


# %% levers-accumulate: reduces after each of 4 micro-batches
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for number, part in enumerate(tokens.chunk(4), 1):
        loss = loss_of(part) / 4
        loss.backward()
        model.set_requires_gradient_sync(True)
        total += loss.item()
    return total


# %% levers-accumulate: (all are 4 times as large)
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for number, part in enumerate(tokens.chunk(4), 1):
        model.set_requires_gradient_sync(number == 4)
        loss = loss_of(part)
        loss.backward()
        total += loss.item() / 4
    return total


# %% levers-accumulate: the losses are not those of the reference
# %%fsdp
def accumulate(tokens):
    for number, part in enumerate(tokens.chunk(4), 1):
        model.set_requires_gradient_sync(number == 4)
        loss = loss_of(part) / 4
        loss.backward()
    return loss.item()


# %% levers-accumulate: issued 9 all-gathers
# %%fsdp
def accumulate(tokens):
    loss = loss_of(tokens)
    loss.backward()
    return loss.item()


# %% levers-accumulate: issued 0 reduce-scatters
# %%fsdp
def accumulate(tokens):
    total = 0.0
    model.set_requires_gradient_sync(False)
    for part in tokens.chunk(4):
        loss = loss_of(part) / 4
        loss.backward()
        total += loss.item()
    return total


# %% levers-accumulate: the peak of the activations in
# %%fsdp
def accumulate(tokens):
    loss = sum(loss_of(part) for part in tokens.chunk(4)) / 4
    loss.backward()
    return loss.item()


# %% levers-accumulate: issued 10 reduce-scatters
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for number, part in enumerate(tokens.chunk(4), 1):
        model.set_requires_gradient_sync(number in (1, 4))
        loss = loss_of(part) / 4
        loss.backward()
        total += loss.item()
    return total


# %% levers-accumulate: the sums and norms of each parameter's gradient are not those of the reference
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for number, part in enumerate(tokens.chunk(4), 1):
        model.set_requires_gradient_sync(number == 4)
        loss = loss_of(part) / 4
        optimizer.zero_grad()
        model.reset_iter_state()
        loss.backward()
        total += loss.item()
    for each in model.parameters():
        each.grad *= 4
    return total


# %% levers-accumulate: an older step does not count: rank
# %%fsdp
def accumulate(tokens):
    with model.no_sync():
        return at_once(tokens)


# %% levers-accumulate: an older step does not count: rank
# %%fsdp
def acumulate(tokens):
    return at_once(tokens)


# %% levers-accumulate: issued 21 all-gathers
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for number, part in enumerate(tokens.chunk(4), 1):
        model.set_requires_gradient_sync(number == 4)
        model.set_reshard_after_backward(number == 4)
        loss = loss_of(part) / 4
        loss.backward()
        total += loss.item()
    return total


# %% levers-accumulate: issued 17 reduce-scatters
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for place, part in enumerate(tokens.chunk(4)):
        model.set_requires_gradient_sync(place == 3, recurse=False)
        loss = loss_of(part) / 4
        loss.backward()
        total += loss.item()
    return total


# %% levers-accumulate: ranks 0-1 keep 822 KiB of unsharded grads
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for place, part in enumerate(tokens.chunk(4)):
        model.set_requires_gradient_sync(place == 0)
        loss = loss_of(part) / 4
        loss.backward()
        total += loss.item()
    return total


# %% levers-recompute: RecursionError
# %%fsdp
def recompute(net):
    for block in net.blocks:
        block.forward = lambda x, block=block: checkpoint(block, x, use_reentrant=False)
    return net


# %% levers-recompute: right
# %%fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from workbench.zoo import Block


def recompute(net):
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    return net


# %% levers-recompute: right
# %%fsdp
from torch import nn
from torch.utils.checkpoint import checkpoint


class Again(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def recompute(net):
    net.blocks = nn.ModuleList(Again(block) for block in net.blocks)
    return net


# %% levers-recompute: right
# %%fsdp
from types import MethodType

from torch.utils.checkpoint import checkpoint


def again(self, x):
    return checkpoint(self.plain, x, use_reentrant=False)


def recompute(net):
    for block in net.blocks:
        block.plain = block.forward
        block.forward = MethodType(again, block)
    return net


# %% levers-recompute: expected 8 (all are too small by a factor of 2)
# %%fsdp
from torch.utils.checkpoint import checkpoint


def recompute(net):
    checkpoint(net, torch.zeros(1, 32, dtype=torch.long), use_reentrant=False)
    return net


# %% levers-recompute: the peak of the activations in
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    net.forward = partial(checkpoint, net.forward, use_reentrant=False)
    return net


# %% levers-recompute: 6 of rank 0 at [0], expected 8
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    for block in net.blocks[::2]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return net


# %% levers-recompute: the peak of the activations in
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    for block in net.blocks:
        block.attention.forward = partial(checkpoint, block.attention.forward, use_reentrant=False)
    return net


# %% levers-recompute: the forwards of the 4 blocks in each step are not those of the reference
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    for block in net.blocks:
        block.mlp.forward = partial(checkpoint, block.mlp.forward, use_reentrant=False)
    return net


# %% levers-recompute: the forwards of the 4 blocks in each step are not those of the reference
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    net.forward = partial(checkpoint, net.forward, use_reentrant=False)
    return net


# %% levers-recompute: an older step does not count
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


# %% levers-recompute: the sums and norms of each parameter's gradient are not those of the reference
# %%fsdp
def recompute(net):
    for block in net.blocks:
        block.requires_grad_(False)
    return net


# %% levers-recompute: the losses are not those of the reference
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    net.blocks = net.blocks[:2]
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return net


# %% levers-recompute: the sums and norms of each parameter's gradient are not those of the reference
# %%fsdp
def recompute(net):
    for block in net.blocks:
        block.forward = torch.no_grad()(block.forward)
    return net


# %% levers-cast: right
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    root = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return fully_shard(net, mp_policy=root)


# %% levers-cast: right
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    net.register_forward_hook(lambda _module, _args, scores: scores.float())
    return fully_shard(net, mp_policy=policy)


# %% levers-cast: an older step does not count: rank
# %%fsdp
def cast(net):
    short = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=short)
    return fully_shard(net, mp_policy=short)


# %% levers-cast: right
# %%fsdp
from dataclasses import replace


def cast(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*net.blocks, net]:
        fully_shard(module, mp_policy=replace(policy, output_dtype=torch.float32 if module is net else None))
    return net


# %% levers-cast: B in reduce-scatters
# %%fsdp
def cast(net):
    for block in net.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    return fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32))


# %% levers-cast: the dtypes of the loss are not those of the reference
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


# %% levers-cast: the dtypes of shards and optimizer state are not those of the reference
# %%fsdp
def cast(net):
    return shard(net.to(torch.bfloat16))


# %% levers-cast: an older step does not count: rank
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net, mp_policy=policy)


# %% levers-cast: an older step does not count: rank
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net)


# %% levers-cast: issued 1 all-gather
# %%fsdp
def cast(net):
    return fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))


# %% levers-cast: B in all-gathers
# %%fsdp
def cast(net):
    net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)
    return shard(net)


# %% levers-cast: B in all-gathers
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


# %% levers-cast: the dtypes of shards and optimizer state are not those of the reference
# %%fsdp
def cast(net):
    net = shard(net)
    net.half()
    return net


# %% levers-cast: an older step does not count
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy("bfloat16", "float32")
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


# %% levers-cast: issued 7 all-gathers
# %%fsdp
def cast(net):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in net.blocks[:2]:
        fully_shard(block, mp_policy=policy)
    for block in net.blocks[2:]:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
