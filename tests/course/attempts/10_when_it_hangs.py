# %% hang-mean: right
# %%fsdp
def mean_loss(loss):
    loss = loss / world_size
    dist.all_reduce(loss)
    return loss


# %% hang-mean: right
# %%fsdp
def mean_loss(loss):
    every = [torch.empty_like(loss) for _ in range(world_size)]
    dist.all_gather(every, loss)
    return torch.stack(every).mean()


# %% hang-mean: right
# %%fsdp
def mean_loss(loss):
    dist.reduce(loss, 0)
    dist.broadcast(loss, 0)
    return loss / world_size


# %% hang-mean: 2 times as large
# %%fsdp
def mean_loss(loss):
    dist.all_reduce(loss)
    return loss


# %% hang-mean: the losses that ranks log are not those of the reference
# %%fsdp
def mean_loss(loss):
    dist.all_reduce(loss, op=dist.ReduceOp.MAX)
    return loss


# %% hang-mean: the losses that ranks log differ
# %%fsdp
def mean_loss(loss):
    dist.reduce(loss, 0)
    return loss / world_size


# %% hang-mean: the losses that ranks log are not those of the reference
# %%fsdp
def mean_loss(loss):
    loss = loss * 0
    dist.all_reduce(loss)
    return loss


# %% hang-mean: the losses that ranks log are not those of the reference
# %%fsdp
def mean_loss(loss):
    dist.all_reduce(loss)
    return loss * float("nan")


# %% hang-mean: the losses that ranks log are not those of the reference
# %%fsdp
def mean_loss(loss):
    dist.broadcast(loss, 0)
    return loss


# %% hang-mean: too small by a factor of 2
# %%fsdp
def mean_loss(loss):
    loss = loss / world_size
    dist.all_reduce(loss)
    return loss / world_size


# %% hang-mean: the losses that ranks log differ
# %%fsdp
def mean_loss(loss):
    total = loss.clone()
    dist.all_reduce(total)
    return loss


# %% hang-mean: an older step does not count: rank
# %%fsdp
def mean_loss(loss):
    dist.all_reduce(loss)


# %% hang-name: it is not straggler: it is still on
answer = "straggler"

# %% hang-name: it is not same-data
answer = "same-data"

# %% hang-name: there is no fault 'uneven-batch', did you mean
answer = "uneven-batch"

# %% hang-name: there is no answer yet
answer = None

# %% hang-name: there is no answer yet
answer = ""

# %% hang-name: 3 is a int
answer = 3

# %% hang-name: is a list
answer = ["uneven-batches", "straggler"]

# %% hang-name: it is not skip-collective
answer = "skip-collective"

# %% hang-name: right
answer = " Uneven-Batches "
