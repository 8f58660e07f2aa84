# %% two-translate
# %%fsdp
def translated(net):
    options = {
        "reshard_after_forward": False,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


# %% two-resume
# %%fsdp
whole = StateDictOptions(full_state_dict=True)


def resume(model, opt, checkpoint):
    set_model_state_dict(model, checkpoint["model"], options=whole)
    set_optimizer_state_dict(model, opt, checkpoint["optimizer"], options=whole)
