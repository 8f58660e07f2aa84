# %% two-translate: right
# %%fsdp
def translated(net):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in [*net.blocks, net]:
        fully_shard(module, reshard_after_forward=False, mp_policy=policy)
    return net


# %% two-translate: right
# %%fsdp
from functools import partial


def translated(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=False)
    net.blocks.apply(lambda each: shard(each) if isinstance(each, Block) else None)
    return shard(net)


# %% two-translate: right
# %%fsdp
def translated(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    net.set_reshard_after_forward(False)
    return net


# %% two-translate: the class of the model is FullyShardedDataParallel
# %%fsdp
def translated(net):
    return old(net)


# %% two-translate: bfloat16 and bfloat16
# %%fsdp
def translated(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=False, mp_policy=policy)
    return fully_shard(net, reshard_after_forward=False, mp_policy=policy)


# %% two-translate: float32 and float32; with the classic wrapper, bfloat16 and float32
# %%fsdp
def translated(net):
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=False)
    return fully_shard(net, reshard_after_forward=False)


# %% two-translate: issued 9 all-gathers in step
# %%fsdp
def translated(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


# %% two-translate: dtypes in which units compute and reduce
# %%fsdp
def translated(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=False, mp_policy=policy)
    return fully_shard(net, reshard_after_forward=False)


# %% two-translate: issued 1 all-gather (not 5)
# %%fsdp
def translated(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(net, reshard_after_forward=False, mp_policy=policy)


# %% two-translate: the class of the model is Net
# %%fsdp
def translated(net):
    return net


# %% two-translate: an older step does not count
# %%fsdp
def translated(net):
    fully_shard(net)


# %% two-translate: dtype of the shards, and whether they are trained, are not those
# %%fsdp
def translated(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = net.bfloat16()
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=False, mp_policy=policy)
    return fully_shard(net, reshard_after_forward=False, mp_policy=policy)


# %% two-resume: right
# %%fsdp
whole = StateDictOptions(full_state_dict=True)


def resume(model, opt, checkpoint):
    set_optimizer_state_dict(model, opt, checkpoint["optimizer"], options=whole)
    set_model_state_dict(model, checkpoint["model"], options=whole)


# %% two-resume: right
# %%fsdp
from torch.distributed.checkpoint.state_dict import set_state_dict


def resume(model, opt, checkpoint):
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, opt, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optimizer"], options=options
    )


# %% two-resume: right
# %%fsdp
def resume(model, opt, checkpoint):
    whole = StateDictOptions(full_state_dict=True, strict=True)
    for load, state in (
        (lambda s: set_model_state_dict(model, s, options=whole), "model"),
        (lambda s: set_optimizer_state_dict(model, opt, s, options=whole), "optimizer"),
    ):
        load(checkpoint[state])


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    set_model_state_dict(model, checkpoint["model"], options=StateDictOptions(full_state_dict=True))


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    set_optimizer_state_dict(model, opt, checkpoint["optimizer"], options=StateDictOptions(full_state_dict=True))


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    pass


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    for _ in range(3):
        train_step()


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, checkpoint["model"], options=whole)
    fresh = torch.optim.AdamW(model.parameters(), lr=3e-3)
    set_optimizer_state_dict(model, fresh, checkpoint["optimizer"], options=whole)


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, {k: v.bfloat16().float() for k, v in checkpoint["model"].items()}, options=whole)
    set_optimizer_state_dict(model, opt, checkpoint["optimizer"], options=whole)


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, checkpoint["model"], options=whole)
    set_optimizer_state_dict(model, opt, checkpoint["optimizer"], options=whole)
    for state in opt.state.values():
        state["exp_avg"].zero_()


# %% two-resume: the losses after the checkpoint are not those of the reference
# %%fsdp
def resume(model, opt, checkpoint):
    losses.extend(uninterrupted)
