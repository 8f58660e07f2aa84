# %% holds-states
answer = {
    "(root)": "unsharded",
    "blocks.0": "sharded",
    "blocks.1": "sharded",
    "blocks.2": "unsharded",
}

# %% holds-smaller-units
# %fsdp unshard model
# %fsdp shard model --wrap Linear
