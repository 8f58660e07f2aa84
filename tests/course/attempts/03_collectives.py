# %% collectives-mean: right
# %%fsdp
def mean_of(x):
    part = torch.zeros(8)
    dist.reduce_scatter_tensor(part, x / world_size)
    whole = torch.zeros_like(x)
    dist.all_gather_into_tensor(whole, part)
    return whole


# %% collectives-mean: right
# %%fsdp
def mean_of(x):
    part, parts = torch.empty(8), [torch.empty(8) for _ in range(world_size)]
    dist.reduce_scatter(part, list(x.chunk(world_size)), async_op=True).wait()
    dist.all_gather(parts, part.div_(world_size))
    return torch.cat(parts)


# %% collectives-mean: right
# %%fsdp
def mean_of(x):
    parts = [each.contiguous() for each in x.view(world_size, -1)]
    own = torch.empty_like(parts[rank])
    dist.reduce_scatter(own, parts, op=dist.ReduceOp.SUM)
    dist.all_gather(parts, own)
    return torch.stack(parts).flatten().mul(1 / world_size)


# %% collectives-mean: the means are not those of the reference
# %%fsdp
def mean_of(x):
    part, parts = torch.empty(8), [torch.empty(8) for _ in range(world_size)]
    dist.reduce_scatter(part, list(x.chunk(world_size)))
    dist.all_gather(parts, part)
    return torch.cat(parts)


# %% collectives-mean: (all are too small by a factor of 2)
# %%fsdp
def mean_of(x):
    part, parts = torch.empty(8), [torch.empty(8) for _ in range(world_size)]
    dist.reduce_scatter(part, list((x / world_size).chunk(world_size)))
    dist.all_gather(parts, part / world_size)
    return torch.cat(parts)


# %% collectives-mean: expected
# %%fsdp
def mean_of(x):
    part, parts = torch.empty(8), [torch.empty(8) for _ in range(world_size)]
    dist.reduce_scatter(part, list(x.chunk(world_size)), op=dist.ReduceOp.MAX)
    dist.all_gather(parts, part)
    return torch.cat(parts)


# %% collectives-mean: issued 1 all-reduce (not 0), 0 reduce-scatters (not 1) and 0 all-gathers (not 1)
# %%fsdp
def mean_of(x):
    dist.all_reduce(x)
    return x / world_size


# %% collectives-mean: an older step does not count: rank
# %%fsdp
def mean_of(x):
    return whatever(x)


# %% collectives-mean: 8 B in reduce-scatters
# %%fsdp
def mean_of(x):
    every = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(every, x)
    dist.reduce_scatter(torch.empty(1), list(torch.zeros(world_size).chunk(world_size)))
    return torch.stack(every).mean(0)


# %% collectives-mean: shape (8,) of rank 0, expected (16,)
# %%fsdp
def mean_of(x):
    part, parts = torch.empty(8), [torch.empty(8) for _ in range(world_size)]
    dist.reduce_scatter(part, list(x.chunk(world_size)))
    dist.all_gather(parts, part / world_size)
    return parts[rank]


# %% collectives-mean: the means are not those of the reference
# %%fsdp
def mean_of(x):
    part, parts = torch.empty(8), [torch.empty(8) for _ in range(world_size)]
    dist.reduce_scatter(part, list(x.chunk(world_size)))
    dist.all_gather(parts, part / world_size)
    return torch.cat(parts[::-1])


# %% collectives-mean: expected
# %%fsdp
def mean_of(x):
    part, parts = torch.empty(8), [torch.empty(8) for _ in range(world_size)]
    dist.reduce_scatter(part, list(x.chunk(world_size)))
    dist.all_gather(parts, part / world_size)


# %% collectives-padding: right
# %%fsdp
def rows_of(length):
    return (length + world_size - 1) // world_size


# %% collectives-padding: right
# %%fsdp
import math


def rows_of(length):
    return math.ceil(length / world_size)


# %% collectives-padding: right
# %%fsdp
rows_of = lambda length: len(torch.arange(length).chunk(world_size)[0])


# %% collectives-padding: shape (8,) of rank 0, expected (9,)
# %%fsdp
def rows_of(length):
    return length // world_size


# %% collectives-padding: all-gathers
# %%fsdp
def rows_of(length):
    return length


# %% collectives-padding: all-gathers
# %%fsdp
def rows_of(length):
    return length // world_size + 1


# %% collectives-padding: all-gathers
# %%fsdp
def rows_of(length):
    return 6


# %% collectives-padding: an older step does not count: rank
# %%fsdp
def rows_of(length):
    return length / world_size


# %% collectives-padding: all-gathers
# %%fsdp
def rows_of(length):
    return 2 ** math.ceil(math.log2(length / world_size))


# %% collectives-padding: shape (8,) of rank 0, expected (9,)
# %%fsdp
def rows_of(length):
    return round(length / world_size)


# %% collectives-padding: an older step does not count: rank
# %%fsdp
def rows_of(length):
    pass
