"""``verify`` names the rank that does something else than the others, the first parameter, and how it differs."""

import re

import pytest

from tests.helpers.booted_ranks import execute, namespace, run
from tests.runtime.test_verify_recipes import SETUP
from workbench.base.codec import decode
from workbench.errors import UsageError
from workbench.protocol.commands import Step, Verify, VerifyReply
from workbench.reports.verify_report import verify_report
from workbench.runtime import rank as rank_module

STEP = """
x, y = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank)), torch.arange(6) % 4
model.train(False)
def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
def train_step():
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()
"""
REPLICAS = """
model = nn.parallel.DistributedDataParallel(nn.Sequential(Block(), nn.Linear(8, 4)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
FAULTS = {
    "lr": ("opt.param_groups[0]['lr'] *= 1 + rank", "other-settings", "lr is 0.02 on rank 1, and 0.01 on rank 0"),
    "decay": ("opt.param_groups[0]['weight_decay'] = 0.5 * rank", "other-settings", "weight_decay.*0.5 on rank 1"),
    "negated": (
        "{    opt.step|if rank: local(next(model.parameters()).grad).mul_(-1)}",
        "other-gradients",
        "rank 1.*-1",
    ),
    "twice": ("{    opt.zero|if rank: opt.step()}", "rank-stepped-twice", "rank 1: more"),
    "never": (
        "{    opt.zero|if rank: local(next(model.parameters()).data).add_(0.01)}",
        "changed-parameters",
        "rank 1.*0.up.w",
    ),
    "nan": ("{    loss.backward|if rank: loss = loss * float('nan')}", "not-finite", "rank 1 are NaN"),
}
NOT_COMPARED = {
    "an optimizer from before": ("opt = torch.optim.AdamW(nn.Linear(2, 2).parameters())", "made before sharding"),
    "no graph": ("{    loss.backward|loss = loss.detach().requires_grad_()}", "reaches no parameter"),
    "no step": ("{    opt.step()|pass}", "takes no optimizer step"),
    "of a DTensor": (
        "{    opt.zero|next(model.parameters()).grad.to_local()}",
        "uses .to_local of a DTensor, in <string>:57 in train_step",
    ),
}
PRECISIONS = {
    "bf16": "from workbench.engine import MixedPrecisionPolicy as MP\npolicy = MP(param_dtype=torch.bfloat16)",
    "fp16": "from workbench.engine import MixedPrecisionPolicy as MP\npolicy = MP(param_dtype=torch.float16)",
    "fp32": "policy = None",
}
OPTIMIZERS = {
    "momentum": "torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)",
    "adamw": "torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.1)",
}
SOUND = """
{precision}
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
    def forward(self, x):
        return x + torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.norm(x)
model = nn.Sequential(Attention(), Block(), nn.Linear(8, 4))
for layer in (*model, model):
    fully_shard(layer, **({{"mp_policy": policy}} if policy else {{}}))
opt = {optimizer}
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=policy is not None)
def train_step():
    loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    return loss.item()
"""


def step_with(change):
    """Return the source of a step; ``{before|line}`` inserts a line before the one that begins so."""
    inserted = re.fullmatch(r"\{(.*?)\|(.*)\}", change, re.DOTALL)
    if inserted is None:
        return f"{STEP}\n{change}\n"
    before, line = inserted.groups()
    return STEP.replace(before, f"    {line}\n{before}" if before != "    opt.step()" else f"    {line}", 1)


def replies_to(*sources):
    """Return this rank's replies, or errors, to the steps that sources define."""
    found = []
    for name, source in sources:
        exec(SETUP + source, namespace())
        rank_module._after_cell(None)
        try:
            if name in {"sound", "nan"}:  # NaN on one rank is on all after a step
                execute(Step(count=2))
            found.append(execute(Verify()))
        except UsageError as error:
            found.append(str(error))
    return found


def reports_of(*sources):
    by_rank = run(2, replies_to, *sources, timeout_s=600)
    return [
        each[0] if isinstance(each[0], str) else verify_report([decode(VerifyReply, reply, "reply") for reply in each])
        for each in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize("model", ["", REPLICAS], ids=["sharded", "replicas"])
def test_a_rank_that_does_something_else_is_named(model):
    sources = [(name, model + step_with(change)) for name, (change, *_) in FAULTS.items()]
    for (name, (_, rule, words)), report in zip(FAULTS.items(), reports_of(*sources), strict=True):
        assert [fault.rule for fault in report.faults][:1] == [rule], (name, report)
        assert re.search(words, str(report), re.DOTALL), (name, str(report))
        assert report.could_compare


def test_why_a_step_cannot_be_compared_is_said():
    sources = [(name, step_with(change)) for name, (change, _) in NOT_COMPARED.items()]
    for (name, (_, words)), message in zip(NOT_COMPARED.items(), reports_of(*sources), strict=True):
        assert words in message, (name, message)


def test_a_sound_step_is_the_same_in_each_precision():
    sources = [
        ("sound", STEP + SOUND.format(precision=precision, optimizer=optimizer))
        for precision in PRECISIONS.values()
        for optimizer in OPTIMIZERS.values()
    ]
    for report in reports_of(*sources):
        assert report.ok, str(report)
        assert report.faults == ()
        assert report.max_rel_diff < 0.02


def verify_of_a_destroyed_group():
    wrapped = "model = nn.parallel.DistributedDataParallel(Block(), process_group=group)"
    group, end = "group = torch.distributed.new_group()", "torch.distributed.destroy_process_group(group)"
    exec("\n".join([SETUP, STEP, group, wrapped, end]), namespace())
    rank_module._after_cell(None)
    with pytest.raises(UsageError, match="the process group of the sharded model is destroyed"):
        execute(Verify())


def test_a_model_whose_group_is_destroyed_is_refused():
    run(2, verify_of_a_destroyed_group)


UNUSED = """
class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 8)
    def forward(self, x):
        return self.used(x)
model = FullyShardedDataParallel(Partly(), use_orig_params={orig_params})
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
"""


def test_unused_parts_of_a_flat_parameter_decay_in_both():
    wrapper = "from workbench.engine.classic import FullyShardedDataParallel\n"
    for report in reports_of(*(("", STEP + wrapper + UNUSED.format(orig_params=each)) for each in (True, False))):
        assert report.ok, str(report)


def test_batches_of_other_sizes_are_named():
    (report,) = reports_of(("", STEP.replace("torch.arange(6) % 4", "torch.arange(6) % 4\nx, y = x[rank:], y[rank:]")))
    assert report.ok
    assert "inputs have 48, 40 elements. Both steps weigh them alike" in report.notes[0]
