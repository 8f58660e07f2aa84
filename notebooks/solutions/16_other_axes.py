# %% axes-schedule
# %%fsdp
def schedule(rank, world_size, parts):
    ahead = min(world_size - rank, parts)
    order = [("forward", part) for part in range(ahead)]
    for part in range(parts):
        order.append(("backward", part))
        if part + ahead < parts:
            order.append(("forward", part + ahead))
    return order
