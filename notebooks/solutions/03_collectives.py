# %% collectives-mean
# %%fsdp
def mean_of(x):
    part = torch.empty(len(x) // world_size)
    dist.reduce_scatter(part, list(x.chunk(world_size)))
    mean = torch.empty_like(x)
    dist.all_gather(list(mean.chunk(world_size)), part / world_size)
    return mean


# %% collectives-padding
# %%fsdp
def rows_of(length):
    return -(-length // world_size)
