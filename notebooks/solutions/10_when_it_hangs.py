# %% hang-mean
# %%fsdp
def mean_loss(loss):
    dist.all_reduce(loss)
    return loss / world_size


# %% hang-name
answer = "uneven-batches"
