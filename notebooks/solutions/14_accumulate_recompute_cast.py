# %% levers-accumulate
# %%fsdp
def accumulate(tokens):
    total = 0.0
    for number, part in enumerate(tokens.chunk(4), 1):
        model.set_requires_gradient_sync(number == 4)
        loss = loss_of(part) / 4
        loss.backward()
        total += loss.item()
    return total


# %% levers-recompute
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(net):
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return net


# %% levers-cast
# %%fsdp
def cast(net):
    for block in net.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
