# %% grid-hosts: collectives that cross between the hosts: all_gather, reduce_scatter
mesh = f"{n}"

# %% grid-hosts: the model is on the mesh
mesh = "3x2"

# %% grid-hosts: the model is on the mesh
mesh = "two"

# %% grid-hosts: collectives that cross between the hosts: all_gather, reduce_scatter
mesh = f"1x{n}"

# %% grid-hosts: the model is on the mesh
mesh = ""

# %% grid-hosts: the model is on the mesh
mesh = "2 x 1"

# %% grid-hosts: the model is on the mesh
mesh = None

# %% grid-hosts: the model is on the mesh
mesh = "0x2"

# %% grid-hosts: right
mesh = "2x" + str(n // 2)

# %% grid-hosts: right
replicas = 2
mesh = f"{replicas}x{n // replicas}"

# %% grid-hosts: right
mesh = "x".join(map(str, (2, n // 2)))

# %% grid-plan: right
# %%fsdp
plan = dict(up=ColwiseParallel(), down=RowwiseParallel())

# %% grid-plan: right
# %%fsdp
plan = {"up": ColwiseParallel(input_layouts=Replicate()), "down": RowwiseParallel(output_layouts=Replicate())}

# %% grid-plan: right
# %%fsdp
from torch.distributed.tensor import Shard

plan = {"up": ColwiseParallel(output_layouts=Shard(-1)), "down": RowwiseParallel(input_layouts=Shard(-1))}

# %% grid-plan: all-reduces
# %%fsdp
plan = {}

# %% grid-plan: an older step does not count: rank
# %%fsdp
plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel()}

# %% grid-plan: an older step does not count: rank
# %%fsdp
plan = {"up": ColwiseParallel(), "down": ColwiseParallel(output_layouts=Replicate())}

# %% grid-plan: all-
# %%fsdp
plan = {"up": ColwiseParallel(output_layouts=Replicate())}

# %% grid-plan: all-
# %%fsdp
plan = {"down": RowwiseParallel(input_layouts=Replicate())}

# %% grid-plan: all-
# %%fsdp
plan = {"up": RowwiseParallel(input_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
