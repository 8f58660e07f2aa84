# %% ask-rest: right
def at_rest(params, ranks):
    return params * 12 // ranks


# %% ask-rest: right
def at_rest(params, ranks):
    shard = params / ranks
    sizes = {"shard": 4 * shard, "exp_avg": 4 * shard, "exp_avg_sq": 4 * shard}
    return sum(sizes.values())


# %% ask-rest: right
at_rest = lambda params, ranks: sum([4, 4, 4]) * (params / ranks)


# %% ask-rest: is not right: look at the two lines
def at_rest(params, ranks):
    return 16 * params / ranks


# %% ask-rest: is not right: look at the two lines
def at_rest(params, ranks):
    return 8 * params / ranks


# %% ask-rest: is not right: look at the two lines
def at_rest(params, ranks):
    return (2 + 8) * params / ranks


# %% ask-rest: is not right: look at the two lines
def at_rest(params, ranks):
    return 4 * params / ranks


# %% ask-rest: is not right: look at the two lines
def at_rest(params, ranks):
    return 4 * params / ranks + 8 * params


# %% ask-rest: is not right: look at the two lines
def at_rest(params, ranks):
    return 12 * params


# %% ask-rest: on 64 GPUs
def at_rest(params, ranks):
    return 12 * params / 8


# %% ask-rest: is not right: look at the two lines
def at_rest(params, ranks):
    return 12 * params / ranks / 2**30


# %% ask-rest: there is no answer yet
def at_rest(params, ranks):
    12 * params / ranks


# %% ask-rest: on 64 GPUs
def at_rest(params, ranks):
    return sum(classes(eight)[name] for name in ("sharded params", "optimizer state"))


# %% ask-fewest: right
def fewest(limit, few, at_few, many, at_many):
    rest = (many * at_many - few * at_few) / (many - few)
    for ranks in range(8, 100_000, 8):
        if rest + few * (at_few - rest) / ranks <= limit:
            return ranks
    return None


# %% ask-fewest: right
import numpy as np


def fewest(limit, few, at_few, many, at_many):
    constant, divided = np.linalg.solve([[1, 1 / few], [1, 1 / many]], [at_few, at_many])
    hosts = divided / (limit - constant) / 8
    return int(np.ceil(max(hosts, 1))) * 8 if hosts > 0 else None


# %% ask-fewest: right
from fractions import Fraction


def fewest(limit, few, at_few, many, at_many):
    saved = Fraction(at_few - at_many) / (Fraction(1, few) - Fraction(1, many))
    left = Fraction(limit) - (at_few - saved / few)
    return None if left <= 0 else max(8, math.ceil(saved / left / 8) * 8)


# %% ask-fewest: is not right: what do 64 GPUs save
def fewest(limit, few, at_few, many, at_many):
    return math.ceil(few * at_few / limit / 8) * 8


# %% ask-fewest: is not right: what do 64 GPUs save
def fewest(limit, few, at_few, many, at_many):
    slope = (at_many - at_few) / (many - few)
    return math.ceil((few + (limit - at_few) / slope) / 8) * 8


# %% ask-fewest: is not right: what do 64 GPUs save
def fewest(limit, few, at_few, many, at_many):
    return few if at_few <= limit else many


# %% ask-fewest: a little less than it needs on 64
def fewest(limit, few, at_few, many, at_many):
    divided = (at_few - at_many) / (1 / few - 1 / many)
    constant = at_few - divided / few
    return None if limit <= constant else max(8, round(divided / (limit - constant) / 8) * 8)


# %% ask-fewest: a little less than it needs on 64
def fewest(limit, few, at_few, many, at_many):
    divided = (at_few - at_many) / (1 / few - 1 / many)
    constant = at_few - divided / few
    return None if limit <= constant else max(8, math.ceil(divided / (limit - constant)))


# %% ask-fewest: twice what it needs on 8
def fewest(limit, few, at_few, many, at_many):
    divided = (at_few - at_many) / (1 / few - 1 / many)
    constant = at_few - divided / few
    return None if limit <= constant else min(512, max(16, math.ceil(divided / (limit - constant) / 8) * 8))


# %% ask-fewest: the answer None
def fewest(limit, few, at_few, many, at_many):
    divided = (at_few - at_many) / (1 / few - 1 / many)
    constant = at_few - divided / few
    return max(1, math.ceil(divided / (limit - constant) / 8)) * 8


# %% ask-fewest: the answer None
def fewest(limit, few, at_few, many, at_many):
    divided = (at_few - at_many) / (1 / few - 1 / many)
    constant = at_few - divided / few
    return 16_384 if limit <= constant else max(1, math.ceil(divided / (limit - constant) / 8)) * 8


# %% ask-fewest: is not right: what do 64 GPUs save
def fewest(limit, few, at_few, many, at_many):
    state = (at_few - at_many) / (1 / few - 1 / many)
    return math.ceil(state / limit / 8) * 8


# %% ask-fewest: there is no answer yet
def fewest(limit, few, at_few, many, at_many):
    divided = (at_few - at_many) / (1 / few - 1 / many)


# %% ask-fewest: is not right: what do 64 GPUs save
def fewest(limit, few, at_few, many, at_many):
    return 512


# %% ask-hosts: right
def between_hosts(params, hosts, per_host, is_hybrid):
    def sent(k, size):
        return (k - 1) / k * size

    if is_hybrid:
        shard = params / per_host
        return 2 * sent(hosts, 4 * shard)
    k = hosts * per_host
    return sent(k, 2 * params) + sent(k, 2 * params) + sent(k, 4 * params)


# %% ask-hosts: right
def between_hosts(params, hosts, per_host, is_hybrid):
    return 8 * params * ((1 - 1 / hosts) / per_host if is_hybrid else 1 - 1 / (hosts * per_host))


# %% ask-hosts: right
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks, whole, calls = (hosts, 4 * params // per_host, 2) if is_hybrid else (hosts * per_host, 8 * params, 1)
    return calls * whole * (ranks - 1) // ranks


# %% ask-hosts: by FSDP:
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks = hosts * per_host
    return 8 * params * (hosts - 1) / hosts / per_host if is_hybrid else (ranks - 1) / ranks * (2 + 4) * params


# %% ask-hosts: by FSDP:
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks = hosts * per_host
    return 8 * params * (hosts - 1) / hosts / per_host if is_hybrid else (ranks - 1) / ranks * (4 + 4 + 4) * params


# %% ask-hosts: by FSDP:
def between_hosts(params, hosts, per_host, is_hybrid):
    return 8 * params * (hosts - 1) / hosts / per_host


# %% ask-hosts: by HSDP:
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks = hosts * per_host
    return (ranks - 1) / ranks * 8 * params


# %% ask-hosts: by HSDP:
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks = hosts * per_host
    return 2 * 4 * params * (hosts - 1) / hosts if is_hybrid else (ranks - 1) / ranks * 8 * params


# %% ask-hosts: by HSDP:
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks = hosts * per_host
    return 4 * params / per_host * (hosts - 1) / hosts if is_hybrid else (ranks - 1) / ranks * 8 * params


# %% ask-hosts: by HSDP:
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks = hosts * per_host
    return 2 * 2 * params / per_host * (hosts - 1) / hosts if is_hybrid else (ranks - 1) / ranks * 8 * params


# %% ask-hosts: by HSDP on one host
def between_hosts(params, hosts, per_host, is_hybrid):
    ranks = hosts * per_host
    return 8 * params / per_host if is_hybrid else (ranks - 1) / ranks * 8 * params


# %% ask-hosts: by HSDP on one host
def between_hosts(params, hosts, per_host, is_hybrid):
    return crossing(copies if is_hybrid else wide)


# %% ask-hosts: by HSDP on one host
def between_hosts(params, hosts, per_host, is_hybrid):
    return 2 * 63 / 64 * 4 * params / 8 if is_hybrid else 511 / 512 * 8 * params


# %% ask-hosts: there is no answer yet
def between_hosts(params, hosts, per_host, is_hybrid):
    8 * params


# %% ask-budget: right
def budget(report, tokens, efficiency):
    (most, _), *_ = sorted(report.peak_bytes_by_category.items(), key=lambda item: -item[1])
    seconds = tokens / 5120 * report.step_ns / 1e9 / efficiency  # of one GPU
    peak, memory = (f"{size / 2**30:.1f}" for size in (report.peak_bytes, report.memory_bytes))
    return (
        f"{report.num_ranks} x {report.device}; {seconds / 3600:.0f} GPU-hours; {peak} of {memory} GiB at the peak, of "
        f"which {most.words} are the most."
    )


# %% ask-budget: right
def budget(report, tokens, efficiency):
    days = tokens / 5120 / report.num_ranks * (report.step_ns / 1e9 / efficiency) / 86_400
    parts = [
        "For",
        f"{days:.1f}",
        "days we need",
        str(report.num_ranks),
        "GPUs of the kind",
        report.device,
        "which are",
        f"{days * 24 * report.num_ranks:,.0f}",
        "GPU-hours. The peak is",
        f"{report.peak_bytes / 2**30:.2f}",
        "GiB of",
        f"{report.memory_bytes / 2**30:.2f}",
        "GiB, and the most are",
        next(iter(classes(report))),
    ]
    return " ".join(parts)


# %% ask-budget: right
from string import Template


def budget(report, tokens, efficiency):
    hours = tokens * report.step_ns / efficiency / (5120 * 3600 * 10**9)
    text = Template(
        "We plan $most as the largest class, in a peak of $peak GiB ($device has $memory GiB). $ranks GPUs: $hours GPU-hours."
    )
    return text.substitute(
        most=list(classes(report))[0],
        peak=round(report.peak_bytes / 1024**3, 1),
        memory=report.memory_bytes / 1024**3,
        device=report.device,
        ranks=report.num_ranks,
        hours=round(hours),
    )


# %% ask-budget: lacks the GPU-hours of the run
def budget(report, tokens, efficiency):
    steps = tokens / (5120 * report.num_ranks)
    return paragraph(report, steps * report.step_ns / 3.6e12 / efficiency)


def paragraph(report, hours):
    return (
        f"{report.num_ranks} GPUs ({report.device}), {hours:,.0f} GPU-hours, {report.peak_bytes / 2**30:.1f} of "
        f"{report.memory_bytes / 2**30:.1f} GiB, mostly {next(iter(classes(report)))}."
    )


# %% ask-budget: lacks the GPU-hours of the run
def budget(report, tokens, efficiency):
    return paragraph(report, tokens / 5120 * report.step_ns / 3.6e12)


# %% ask-budget: lacks the GPU-hours of the run
def budget(report, tokens, efficiency):
    return paragraph(report, tokens / 5120 * report.step_ns / 3.6e12 * efficiency)


# %% ask-budget: lacks the GPU-hours of the run
def budget(report, tokens, efficiency):
    return paragraph(report, tokens / 5120 * report.num_ranks * report.step_ns / 3.6e12 / efficiency)


# %% ask-budget: lacks the GPU-hours of the run
def budget(report, tokens, efficiency):
    return paragraph(report, tokens / 1024 * report.step_ns / 3.6e12 / efficiency)


# %% ask-budget: lacks the GPU-hours of the run
def budget(report, tokens, efficiency):
    return paragraph(report, tokens / 5120 * report.step_ns / 1e6 / efficiency)


# %% ask-budget: lacks the peak in GiB
def budget(report, tokens, efficiency):
    good = paragraph(report, tokens / 5120 * report.step_ns / 3.6e12 / efficiency)
    return good.replace(f"{report.peak_bytes / 2**30:.1f}", f"{report.peak_bytes / 1e9:.1f}")


# %% ask-budget: lacks the class that is the most at the peak
def budget(report, tokens, efficiency):
    good = paragraph(report, tokens / 5120 * report.step_ns / 3.6e12 / efficiency)
    return good.replace(next(iter(classes(report))), "parameters")


# %% ask-budget: lacks the device
def budget(report, tokens, efficiency):
    return paragraph(report, tokens / 5120 * report.step_ns / 3.6e12 / efficiency).replace(report.device, "A100")


# %% ask-budget: by HSDP
def budget(report, tokens, efficiency):
    return paragraph(wide, tokens / 5120 * wide.step_ns / 3.6e12 / efficiency)


# %% ask-budget: the request is a text without line breaks
def budget(report, tokens, efficiency):
    paragraph(report, tokens / 5120 * report.step_ns / 3.6e12 / efficiency)


# %% ask-budget: the request is a text without line breaks
def budget(report, tokens, efficiency):
    return paragraph(report, tokens / 5120 * report.step_ns / 3.6e12 / efficiency).replace(", ", "\n")
