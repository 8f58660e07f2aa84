# %% lie-weight
# %%fsdp
def weight(my_rows, all_rows):
    return my_rows * world_size / all_rows


# %% lie-name
answer = "no-sync-left-on"
