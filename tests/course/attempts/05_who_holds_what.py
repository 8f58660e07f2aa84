# %% holds-states: right
answer = {"blocks.2": "unsharded", "blocks.1": "sharded", "blocks.0": "sharded", "(root)": "unsharded"}

# %% holds-states: right
answer = dict.fromkeys(["blocks.0", "blocks.1"], "SHARDED") | dict.fromkeys(["blocks.2", "(root)"], "unsharded")

# %% holds-states: right
answer = {
    name: "unsharded" if name in ("(root)", "blocks.2") else "sharded"
    for name in ("(root)", *(f"blocks.{i}" for i in range(3)))
}

# %% holds-states: (root) is in another one: look at %fsdp states
answer = {"(root)": "sharded", "blocks.0": "sharded", "blocks.1": "sharded", "blocks.2": "unsharded"}

# %% holds-states: blocks.2 is in another one
answer = {"(root)": "unsharded", "blocks.0": "sharded", "blocks.1": "sharded", "blocks.2": "all-gather in flight"}

# %% holds-states: blocks.1 is in another one
answer = {"(root)": "unsharded", "blocks.0": "sharded", "blocks.1": "unsharded", "blocks.2": "unsharded"}

# %% holds-states: blocks.0 is in another one
answer = {"(root)": "unsharded", "blocks.0": "reducing", "blocks.1": "sharded", "blocks.2": "unsharded"}

# %% holds-states: there is no answer yet
answer = {}

# %% holds-states: there is no answer for blocks.0 and blocks.1
answer = {"(root)": "unsharded", "blocks.2": "unsharded"}

# %% holds-states: there is no state 'whole'
answer = {"(root)": "whole", "blocks.0": "sharded", "blocks.1": "sharded", "blocks.2": "whole"}

# %% holds-states: 'unsharded' is a str
answer = "unsharded"

# %% holds-smaller-units: right
# %fsdp unshard model
# %fsdp shard model --wrap Linear

# %% holds-smaller-units: right
# %fsdp unshard model
# %fsdp shard model --wrap Linear,Block

# %% holds-smaller-units: right
# %fsdp unshard model
# %fsdp shard model --wrap Linear --prefetch 2

# %% holds-smaller-units: issued 0 all-gathers of blocks.0.up (not 2)
# %fsdp unshard model
# %fsdp shard model --wrap Block

# %% holds-smaller-units: issued 1 all-gather of blocks.0.up (not 2)
# %fsdp unshard model
# %fsdp shard model --wrap Linear --reshard-after-forward false

# %% holds-smaller-units: an older step does not count: nothing is sharded yet
# %fsdp unshard model
# %fsdp shard model --wrap Net

# %% holds-smaller-units: an older step does not count: nothing is sharded yet
# %fsdp unshard model

# %% holds-smaller-units: issued 0 all-gathers of blocks.0.up (not 2)
# %fsdp shard model --wrap Block --reshard-after-forward true

# %% holds-smaller-units: issued 0 all-gathers of blocks.0.up (not 2)
# %fsdp reshard model --prefetch 2

# %% holds-smaller-units: issued 0 all-gathers of blocks.0.up (not 2)
# %fsdp shard model --wrap Linear

# %% holds-smaller-units: issued 0 all-gathers of blocks.0.up (not 2)
# %fsdp unshard model
# %fsdp shard model --wrap Block --api classic
