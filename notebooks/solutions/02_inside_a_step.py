# %% inside-reshard
# %fsdp reshard model --reshard-after-forward auto

# %% inside-states
answer = {"(root)": "unsharded", "blocks.1": "sharded", "blocks.2": "unsharded", "blocks.3": "all-gather in flight"}
