# %% lie-weight: right
# %%fsdp
weight = lambda my_rows, all_rows: world_size * my_rows / all_rows


# %% lie-weight: right
# %%fsdp
def weight(my_rows, all_rows):
    return my_rows / (all_rows / world_size)


# %% lie-weight: right
# %%fsdp
def weight(my_rows, all_rows):
    share = torch.tensor(my_rows) / all_rows
    return share * torch.distributed.get_world_size()


# %% lie-weight: the norms of the gradients are not those of the reference
# %%fsdp
def weight(my_rows, all_rows):
    return 1.0


# %% lie-weight: too small by a factor of
# %%fsdp
def weight(my_rows, all_rows):
    return my_rows / all_rows


# %% lie-weight: the norms of the gradients are not those of the reference
# %%fsdp
def weight(my_rows, all_rows):
    return all_rows / (my_rows * world_size)


# %% lie-weight: the norms of the gradients are not those of the reference
# %%fsdp
def weight(my_rows, all_rows):
    return world_size


# %% lie-weight: the norms of the gradients are not those of the reference
# %%fsdp
def weight(my_rows, all_rows):
    return my_rows


# %% lie-weight: the norms of the gradients are not those of the reference
# %%fsdp
def weight(my_rows, all_rows):
    return my_rows * world_size // all_rows


# %% lie-weight: (all have the other sign)
# %%fsdp
def weight(my_rows, all_rows):
    return -world_size * my_rows / all_rows


# %% lie-weight: an older step does not count: rank
# %%fsdp
def weight(my_rows, all_rows):
    world_size * my_rows / all_rows


# %% lie-weight: an older step does not count: rank
# %%fsdp
def weight(my_rows):
    return my_rows


# %% lie-name: it is not same-data: it is still on
answer = "same-data"

# %% lie-name: it is not straggler
answer = "straggler"

# %% lie-name: it is not nan
answer = "nan"

# %% lie-name: there is no fault 'no-sync'
answer = "no-sync"

# %% lie-name: there is no answer yet
answer = None

# %% lie-name: is a dict
answer = {"fault": "no-sync-left-on"}

# %% lie-name: there is no fault 'no sync left on'
answer = "no sync left on"

# %% lie-name: right
answer = "No-Sync-Left-On"
