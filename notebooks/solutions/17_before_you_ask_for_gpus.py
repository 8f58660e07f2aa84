# %% ask-rest
def at_rest(params, ranks):
    return (4 + 2 * 4) * params / ranks  # a shard, and two moments


# %% ask-fewest
def fewest(limit, few, at_few, many, at_many):
    divided = (at_few - at_many) / (1 / few - 1 / many)
    constant = at_few - divided / few
    if limit <= constant:
        return None
    return max(1, math.ceil(divided / (limit - constant) / 8)) * 8


# %% ask-hosts
def between_hosts(params, hosts, per_host, is_hybrid):
    if is_hybrid:
        return 2 * (hosts - 1) / hosts * 4 * params / per_host  # the gradient of its shard
    ranks = hosts * per_host
    return (ranks - 1) / ranks * (2 + 2 + 4) * params


# %% ask-budget
def budget(report, tokens, efficiency):
    steps = tokens / (5120 * report.num_ranks)
    gpu_hours = steps * report.step_ns / 3.6e12 * report.num_ranks / efficiency
    most = max(report.peak_bytes_by_category, key=report.peak_bytes_by_category.get)
    return (
        f"We ask for {report.num_ranks} GPUs ({report.device}) for {gpu_hours:,.0f} GPU-hours. Planned, a rank needs "
        f"{report.peak_bytes / 2**30:.1f} of {report.memory_bytes / 2**30:.1f} GiB, most of it {most.words}; a step is "
        f"expected to take {report.step_ns / 1e6 / efficiency:,.0f} ms, at {efficiency:.0%} of the published peaks."
    )
