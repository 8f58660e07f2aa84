# %% replay-counts
all_gathers = 2 * 5 - 1
reduce_scatters = 5

# %% replay-states
answer = {
    "(root)": "unsharded",
    "blocks.2": "unsharded",
    "blocks.1": "all-gather in flight",
    "blocks.0": "sharded",
}
