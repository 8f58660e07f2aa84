# %% overlap-by-hand: right
# %%fsdp
def run(x):
    handles = [gather(0)]
    for i in range(4):
        handles += [gather(i + 1)] if i < 3 else []
        x = use(i, handles[i], x)
    return x


# %% overlap-by-hand: right
# %%fsdp
def run(x):
    first, second = gather(0), gather(1)
    x = use(0, first, x)
    third = gather(2)
    x = use(1, second, x)
    fourth = gather(3)
    return use(3, fourth, use(2, third, x))


# %% overlap-by-hand: right
# %%fsdp
def run(x, i=0, handle=None):
    handle = handle or gather(i)
    if i == 3:
        return use(i, handle, x)
    return run(use(i, handle, x), i + 1, ahead) if (ahead := gather(i + 1)) else None


# %% overlap-by-hand: ranks 0-1 issue 0 of 4 all-gathers ahead
# %%fsdp
def run(x):
    for i in range(4):
        x = use(i, gather(i), x)
    return x


# %% overlap-by-hand: more than 1.00 MiB
# %%fsdp
def run(x):
    handles = [gather(i) for i in range(4)]
    for i in range(4):
        x = use(i, handles[i], x)
    return x


# %% overlap-by-hand: compute with layers.0 in step
# %%fsdp
def run(x):
    handle = gather(0)
    for i in range(4):
        ahead = gather(i + 1) if i < 3 else handle
        x = use(i, ahead, x)
        handle = ahead
    return x


# %% overlap-by-hand: an older step does not count: rank
# %%fsdp
def run(x):
    handle = gather(0)
    for i in range(4):
        ahead = gather(i + 1)
        x = use(i, handle, x)
        handle = ahead
    return x


# %% overlap-by-hand: an older step does not count: rank
# %%fsdp
def run(x):
    raise ValueError("not yet")


# %% overlap-by-hand: issued 0 all-gathers of layers.0 (not 1)
# %%fsdp
def run(x):
    weight = torch.cat([torch.full_like(shards[0], 0.01 * (each + 1)) for each in range(world_size)])
    for _ in range(4):
        x = torch.tanh(x @ weight)
    return x


# %% overlap-by-hand: the results are not those of the reference
# %%fsdp
def run(x):
    handle = gather(0)
    for i in range(4):
        ahead = gather(i + 1) if i < 3 else None
        y = use(i, handle, x)
        handle = ahead
    return y


# %% overlap-by-hand: issued 0 all-gathers of layers.3 in step
# %%fsdp
def run(x):
    handle = gather(0)
    for i in range(3):
        ahead = gather(i + 1) if i < 2 else None
        x = use(i, handle, x)
        handle = ahead
    return x


# %% overlap-by-hand: ranks 0-1 issue 2 of 4 all-gathers ahead
# %%fsdp
def run(x):
    for i in (0, 2):
        first, second = gather(i), gather(i + 1)
        x = use(i + 1, second, use(i, first, x))
    return x


# %% overlap-fewer: not 9: (root) is gathered twice: reshard_after_forward true frees it after forward too
# %fsdp unshard model
# %fsdp shard model --wrap Block --reshard-after-forward true

# %% overlap-fewer: these keep their full parameters after forward
# %fsdp unshard model
# %fsdp shard model --wrap Block --reshard-after-forward false

# %% overlap-fewer: issued 199,936 B in all-gathers of blocks.0 (not 399,872)
# %fsdp unshard model
# %fsdp shard model --wrap Block --mp bf16

# %% overlap-fewer: issued 0 all-gathers (not 9)
# %fsdp unshard model
# %fsdp shard model --wrap GPT

# %% overlap-fewer: issued 0 all-gathers (not 9) and 0 reduce-scatters (not 5)
# %fsdp unshard model

# %% overlap-fewer: issued 17 all-gathers (not 9)
# %fsdp shard model --wrap Block,Attention

# %% overlap-fewer: issued
# %fsdp unshard model
# %fsdp shard model --wrap Attention

# %% overlap-fewer: issued
# %fsdp unshard model
# %fsdp shard model --wrap Block,Linear

# %% overlap-fewer: right
# %fsdp unshard model
# %fsdp shard model

# %% overlap-fewer: right
# %fsdp unshard model
# %fsdp shard model --wrap Block --prefetch 2

# %% overlap-fewer: right
# %fsdp unshard model
# %fsdp shard model --wrap Block --reshard-after-forward auto
