# %% axes-schedule: right
# %%fsdp
def schedule(rank, world_size, parts):
    warm = min(world_size - rank - 1, parts)
    order = [("forward", part) for part in range(warm)]
    for part in range(parts - warm):
        order += [("forward", warm + part), ("backward", part)]
    return order + [("backward", part) for part in range(parts - warm, parts)]


# %% axes-schedule: right
# %%fsdp
def schedule(rank, world_size, parts):
    forwards, backwards, order = 0, 0, []
    while backwards < parts:
        if forwards < parts and forwards - backwards < world_size - rank:
            order.append(("forward", forwards))
            forwards += 1
        else:
            order.append(("backward", backwards))
            backwards += 1
    return order


# %% axes-schedule: right
# %%fsdp
def schedule(rank, world_size, parts):
    at = {("forward", part): 2 * part for part in range(parts)}
    at |= {("backward", part): 2 * (part + min(world_size - rank, parts)) - 1 for part in range(parts)}
    return sorted(at, key=at.get)


# %% axes-schedule: the most parts that each rank keeps at once are not those of the reference
# %%fsdp
def schedule(rank, world_size, parts):
    return all_forwards_first(rank, world_size, parts)


# %% axes-schedule: the most parts that each rank keeps at once are not those of the reference
# %%fsdp
def schedule(rank, world_size, parts):
    return [(what, part) for part in range(parts) for what in ("forward", "backward")]


# %% axes-schedule: the most parts that each rank keeps at once are not those of the reference
# %%fsdp
def schedule(rank, world_size, parts):
    first = [("forward", 0), ("forward", 1)]
    rest = [each for part in range(2, parts) for each in (("backward", part - 2), ("forward", part))]
    return [*first, *rest, ("backward", parts - 2), ("backward", parts - 1)]


# %% axes-schedule: an older step does not count
# %%fsdp
def schedule(rank, world_size, parts):
    return [("forward", part) for part in range(parts)]


# %% axes-schedule: an older step does not count
# %%fsdp
def schedule(rank, world_size, parts):
    return [(what, part) for part in range(parts - 1) for what in ("forward", "backward")]


# %% axes-schedule: an older step does not count
# %%fsdp
def schedule(rank, world_size, parts):
    [(what, part) for part in range(parts) for what in ("forward", "backward")]


# %% axes-schedule: an older step does not count
# %%fsdp
def schedule(rank, world_size, parts):
    order = [("backward", part) for part in range(parts)]
    return order + [("forward", part) for part in range(parts)]


# %% axes-schedule: an older step does not count
# %%fsdp
def schedule(rank, world_size):
    return all_forwards_first(rank, world_size, 4)


# %% axes-schedule: the most parts that each rank keeps at once are not those of the reference
# %%fsdp
def schedule(rank, world_size, parts):
    order = []
    for first in range(0, parts, 2):
        order += [("forward", first), ("forward", first + 1), ("backward", first), ("backward", first + 1)]
    return order


# %% axes-schedule: are not those of the reference: 12 at [0], expected 10
# %%fsdp
def schedule(rank, world_size, parts):
    size, order = world_size - rank, []
    for first in range(0, parts, size):
        group = range(first, min(first + size, parts))
        order += [("forward", part) for part in group] + [("backward", part) for part in group]
    return order


# %% axes-schedule: the turns of a step, here and for 8 parts on 4 ranks
# %%fsdp
def schedule(rank, world_size, parts):
    order = [("forward", part) for part in range(min(2, parts) if rank == 0 else 1)]
    late = len(order)
    for part in range(parts):
        order.append(("backward", part))
        if late - 1 <= part and part + 1 < parts and late < parts:
            order.append(("forward", late))
            late += 1
    return order


# %% axes-schedule: at [1], expected 22
# %%fsdp
def schedule(rank, world_size, parts):
    warm = 1 if rank == 0 else 0
    order = [("forward", part) for part in range(warm)]
    for part in range(parts - warm):
        order += [("forward", warm + part), ("backward", part)]
    return order + [("backward", part) for part in range(parts - warm, parts)]


# %% axes-schedule: an older step does not count
# %%fsdp
def schedule(rank, world_size, parts):
    warm = min(rank, parts)
    order = [("forward", part) for part in range(warm)]
    for part in range(parts - warm):
        order += [("forward", warm + part), ("backward", part)]
    return order + [("backward", part) for part in range(parts - warm, parts)]
