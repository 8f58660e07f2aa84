# %% inside-reshard: issued 5 all-gathers in step
# %fsdp reshard model --reshard-after-forward false

# %% inside-reshard: not 9: (root) is gathered twice: reshard_after_forward true frees it after forward too
# %fsdp reshard model --reshard-after-forward true

# %% inside-reshard: right
# %fsdp reshard model --reshard-after-forward auto

# %% inside-reshard: right
# %fsdp reshard model --reshard-after-forward auto --prefetch 1

# %% inside-reshard: right
# %fsdp unshard model
# %fsdp shard model --wrap Block

# %% inside-reshard: issued 17 all-gathers
# %fsdp unshard model
# %fsdp shard model --wrap Attention,Block

# %% inside-reshard: issued 5 all-gathers
# %fsdp unshard model
# %fsdp shard model --wrap Block --reshard-after-forward false

# %% inside-reshard: issued 6 all-gathers
# %fsdp reshard model.blocks.0 --reshard-after-forward true

# %% inside-reshard: issued 8 all-gathers
# %fsdp reshard model.blocks.1 --reshard-after-forward true
# %fsdp reshard model.blocks.2 --reshard-after-forward true

# %% inside-reshard: issued 8 all-gathers
# %fsdp reshard model --prefetch 1

# %% inside-states: right
answer = {"blocks.3": "all-gather in flight", "blocks.2": "unsharded", "blocks.1": "sharded", "(root)": "unsharded"}

# %% inside-states: right
answer = {"(root)": "UNSHARDED", "blocks.1": " sharded", "blocks.2": "unsharded", "blocks.3": "all_gather_in_flight"}

# %% inside-states: right
answer = dict(
    zip(("(root)", "blocks.1", "blocks.2", "blocks.3"), ("unsharded", "sharded", "unsharded", "all-gather in flight"))
)

# %% inside-states: (root) is in another one: look at
answer = {"(root)": "sharded", "blocks.1": "sharded", "blocks.2": "unsharded", "blocks.3": "all-gather in flight"}

# %% inside-states: blocks.3 is in another one
answer = {"(root)": "unsharded", "blocks.1": "sharded", "blocks.2": "unsharded", "blocks.3": "sharded"}

# %% inside-states: blocks.2 is in another one
answer = {
    "(root)": "unsharded",
    "blocks.1": "sharded",
    "blocks.2": "all-gather in flight",
    "blocks.3": "all-gather in flight",
}

# %% inside-states: blocks.1 is in another one
answer = {"(root)": "unsharded", "blocks.1": "unsharded", "blocks.2": "unsharded", "blocks.3": "all-gather in flight"}

# %% inside-states: there is no answer yet
answer = {}

# %% inside-states: there is no answer for (root)
answer = {"blocks.1": "sharded", "blocks.2": "unsharded", "blocks.3": "all-gather in flight"}

# %% inside-states: there is no state 'in flight'
answer = {"(root)": "unsharded", "blocks.1": "sharded", "blocks.2": "unsharded", "blocks.3": "in flight"}

# %% inside-states: is a set
answer = {"unsharded", "sharded"}
