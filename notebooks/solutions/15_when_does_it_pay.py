# %% pay-tokens
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    sent_bytes = (ranks - 1) / ranks * (2 * gathered + reduced)  # for each parameter
    return sent_bytes / rate * flops / 6


# %% pay-budget
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def policy(net):
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, reshard_after_forward=False)
    return fully_shard(net, reshard_after_forward=False)
