# %% memory-lower-peak: more than 0.9
# %fsdp reshard model --reshard-after-forward auto

# %% memory-lower-peak: these keep their full parameters after forward: blocks.0-3
# %fsdp reshard model --reshard-after-forward false

# %% memory-lower-peak: not 9: (root) is gathered twice
# %fsdp reshard model --reshard-after-forward true

# %% memory-lower-peak: more than 0.9
# %fsdp reshard model --reshard-after-forward auto --prefetch 3

# %% memory-lower-peak: more than 0.9
# %fsdp reshard model --prefetch 1

# %% memory-lower-peak: more than 0.9
# %fsdp reshard model --bf16

# %% memory-lower-peak: more than 0.9
nothing = "was changed"

# %% memory-lower-peak: the bytes of a rank between steps are not those of the reference
# %fsdp reshard model --mesh {n}x1 --prefetch auto

# %% memory-lower-peak: right
# %fsdp reshard model --mesh {n} --mp bf16

# %% memory-lower-peak: right
# %fsdp reshard model --mp bf16,reduce=fp32

# %% memory-lower-peak: right
# %fsdp reshard model --mp fp16


# %% memory-formula: right
def bytes_between_steps(p, ranks):
    shard = 4 * p / ranks
    return shard + 2 * shard


# %% memory-formula: right
bytes_between_steps = lambda p, ranks: 12 * p // ranks

# %% memory-formula: right
from fractions import Fraction


def bytes_between_steps(p, ranks):
    return sum(Fraction(each * p, ranks) for each in (4, 4, 4))


# %% memory-formula: is not right: look at what %fsdp memory shows between two steps
def bytes_between_steps(p, ranks):
    return 16 * p / ranks


# %% memory-formula: is not right
def bytes_between_steps(p, ranks):
    return 8 * p / ranks


# %% memory-formula: is not right
def bytes_between_steps(p, ranks):
    return 12 * p


# %% memory-formula: is not right
def bytes_between_steps(p, ranks):
    return 3 * p / ranks


# %% memory-formula: the formula has to hold for every size
def bytes_between_steps(p, ranks):
    return 12 * p / 2


# %% memory-formula: is not right
def bytes_between_steps(p, ranks):
    return 4 * p + 8 * p / ranks


# %% memory-formula: there is no answer yet
def bytes_between_steps(p, ranks):
    12 * p / ranks


# %% memory-formula: is not right
def bytes_between_steps(p, ranks):
    return str(12 * p / ranks)


# %% memory-formula: the formula has to hold for every size
def bytes_between_steps(p, ranks):
    return between if p == num_params else 10.5e9
