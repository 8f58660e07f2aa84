# %% grid-hosts
mesh = f"2x{n // 2}"


# %% grid-plan
# %%fsdp
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
