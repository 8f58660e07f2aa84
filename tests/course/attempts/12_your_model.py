# %% yours-wrap: right
wrap = f"{block},Embedding"


# %% yours-wrap: right
wrap = "Embedding, " + block


# %% yours-wrap: right
wrap = ",".join(["Embedding", block])


# %% yours-wrap: 0 all-gathers of model.layers.0 (not 2)
wrap = "Embedding"


# %% yours-wrap: issued 9 all-gathers (not 11)
wrap = ""


# %% yours-wrap: 0 all-gathers of model.layers.0 (not 2)
wrap = "LlamaModel"


# %% yours-wrap: issued 17 all-gathers (not 11)
wrap = f"{block},LlamaMLP"


# %% yours-wrap: issued 19 all-gathers in step
wrap = f"{block},Embedding,LlamaMLP"


# %% yours-wrap: issued 67 all-gathers (not 11)
wrap = f"{block},Linear"


# %% yours-wrap: nothing is sharded yet
wrap = f"{block},Embeding"


# %% yours-wrap: nothing is sharded yet
wrap = f"{block},Embedding --mp bf16"


# %% yours-script: right
from pathlib import Path

stored = Path("train.py").read_text()


def edited(*changes):
    text = stored
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path("train.py").write_text(text)


early = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)\n"
moved = (early, ""), ("\ndata = torch", f"{early}\ndata = torch")
edited(*moved)


# %% yours-script: right
edited((early, ""), ("losses = []\n", f"losses = []\n{early}"))


# %% yours-script: right
edited(*moved, ("    optimizer.zero_grad()\n", ""), ("    loss = ", "    optimizer.zero_grad()\n    loss = "))


# %% yours-script: the loss of rank 0 goes from
edited((early, ""), ("for block in model:\n", f"{early}for block in model:\n"))


# %% yours-script: right
edited((early, ""), ("fully_shard(model, mesh=mesh)\n", f"{early}fully_shard(model, mesh=mesh)\n"))


# %% yours-script: the loss of rank 0 goes from
edited(("lr=3e-3", "lr=3e-1"))


# %% yours-script: the loss of rank 0 goes from
edited(("range(20)", "range(200)"))


# %% yours-script: issued 1 all-gather (not 8)
edited(*moved, ("for block in model:\n    fully_shard(block, mesh=mesh)\n", ""))


# %% yours-script: the losses
edited(*moved, ("lr=3e-3", "lr=1e-2"))


# %% yours-script: the losses
edited(*moved, ("AdamW", "SGD"), ("lr=3e-3", "lr=10.0"))


# %% yours-script: the losses
edited(*moved, ("manual_seed(dist.get_rank())", "manual_seed(0)"))


# %% yours-script: the losses
edited(*moved, ("    optimizer.zero_grad()\n", ""))


# %% yours-script: the losses
edited(*moved, ("range(20)", "range(40)"))


# %% yours-script: issued 0 all-gathers (not 8)
edited(
    *moved,
    (
        "for block in model:\n    fully_shard(block, mesh=mesh)\nfully_shard(model, mesh=mesh)\n",
        "from torch.nn.parallel import DistributedDataParallel\n\nmodel = DistributedDataParallel(model)\n",
    ),
)


# %% yours-script: no sharded unit ran, so the model was not sharded
edited(*moved, ("for block in model:\n    fully_shard(block, mesh=mesh)\nfully_shard(model, mesh=mesh)\n", ""))
