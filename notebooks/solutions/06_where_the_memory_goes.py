# %% memory-lower-peak
# %fsdp reshard model --mp bf16


# %% memory-formula
def bytes_between_steps(p, ranks):
    return 12 * p / ranks
