# %% replay-counts: right
all_gathers, reduce_scatters = 9, 5

# %% replay-counts: right
units = 5
all_gathers = sum(1 if unit == "root" else 2 for unit in ["root", *range(units - 1)])
reduce_scatters = float(units)

# %% replay-counts: right
import numpy as np

all_gathers, reduce_scatters = np.array([9, 5])

# %% replay-counts: you answered 10 all-gathers, which is not what a rank issued in step 5; your answer for the reduce-scatters is right: look at %fsdp states
all_gathers, reduce_scatters = 10, 5

# %% replay-counts: you answered 5 all-gathers, which
all_gathers, reduce_scatters = 5, 5

# %% replay-counts: you answered 8 all-gathers, which
all_gathers, reduce_scatters = 8, 5

# %% replay-counts: you answered 9 reduce-scatters, which is not what a rank issued in step 5; your answer for the all-gathers is right
all_gathers, reduce_scatters = 9, 9

# %% replay-counts: you answered 36 all-gathers and 20 reduce-scatters, which
all_gathers, reduce_scatters = 4 * 9, 4 * 5

# %% replay-counts: the number of all-gathers: '9' is a str: write a whole number, such as 12
all_gathers, reduce_scatters = "9", 5

# %% replay-counts: the number of all-gathers: there is no answer yet: write a whole number
all_gathers, reduce_scatters = None, 5

# %% replay-counts: the number of reduce-scatters: 4.5 is a float
all_gathers, reduce_scatters = 9, 4.5

# %% replay-states: right
answer = {"blocks.0": "sharded", "blocks.1": "all-gather in flight", "blocks.2": "unsharded", "(root)": "unsharded"}

# %% replay-states: right
answer = dict.fromkeys(["(root)", "blocks.2"], "Unsharded ") | {
    "blocks.1": "all_gather_in_flight",
    "blocks.0": "SHARDED",
}

# %% replay-states: right
answer = {
    "blocks.3": "sharded",  # more than was asked
    "(root)": "unsharded",
    "blocks.2": "unsharded",
    "blocks.1": "all gather in flight",
    "blocks.0": "sharded",
}

# %% replay-states: not every state is right: blocks.1 is in another one: look at %fsdp states
answer = {"(root)": "unsharded", "blocks.2": "unsharded", "blocks.1": "sharded", "blocks.0": "sharded"}

# %% replay-states: not every state is right: blocks.2 is in another one
answer = {"(root)": "unsharded", "blocks.2": "sharded", "blocks.1": "all-gather in flight", "blocks.0": "sharded"}

# %% replay-states: not every state is right: (root) is in another one
answer = {"(root)": "sharded", "blocks.2": "unsharded", "blocks.1": "all-gather in flight", "blocks.0": "sharded"}

# %% replay-states: not every state is right: blocks.1 and blocks.0 are in another one
answer = dict.fromkeys(["(root)", "blocks.2", "blocks.1", "blocks.0"], "unsharded")

# %% replay-states: there is no answer yet
answer = {}

# %% replay-states: there is no answer for blocks.0
answer = {"(root)": "unsharded", "blocks.2": "unsharded", "blocks.1": "all-gather in flight"}

# %% replay-states: there is no state 'gathered'; the states: sharded, all-gather in flight, unsharded, reducing
answer = {"(root)": "gathered", "blocks.2": "unsharded", "blocks.1": "all-gather in flight", "blocks.0": "sharded"}

# %% replay-states: is a list: write a state for each unit
answer = ["unsharded", "unsharded", "all-gather in flight", "sharded"]
