# %% overlap-by-hand
# %%fsdp
def run(x):
    handle = gather(0)
    for i in range(4):
        ahead = gather(i + 1) if i < 3 else None
        x = use(i, handle, x)
        handle = ahead
    return x


# %% overlap-fewer
# %fsdp unshard model
# %fsdp shard model --wrap Block
