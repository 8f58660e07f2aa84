"""``verify`` of recipes as people write them: whatever a step draws from, both steps get the same, and it stays."""

import gc

import pytest
import torch

from tests.helpers.booted_ranks import execute, namespace, run
from tests.helpers.waiting import eventually
from workbench.errors import UsageError
from workbench.protocol.commands import Step, Verify
from workbench.runtime import rank as rank_module

SETUP = """
import functools, itertools, random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from workbench.engine import fully_shard

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(F.dropout(F.relu(self.up(x)), 0.1, self.training))

class Noisy(Dataset):
    def __init__(self):
        self.x, self.reads = torch.randn(24, 8, generator=torch.Generator().manual_seed(rank)), 0
        self.rng = np.random.default_rng(5)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads += 1
        noise = random.random() + np.random.rand() + torch.rand(()).item() + self.rng.random() + self.reads
        return self.x[i] + 0.1 * noise, i % 4

def train(batch, model, opt):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
model = nn.Sequential(Block(), nn.Linear(8, 4))
fully_shard(model[0])
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
"""

RECIPES = {
    "iterator": """
it = iter(loader)
def train_step():
    global it
    try:
        batch = next(it)
    except StopIteration:
        it = iter(loader)
        batch = next(it)
    return train(batch, model, opt)
""",
    "endless generator": """
sampler = DistributedSampler(loader.dataset, 2, rank)
loader = DataLoader(loader.dataset, batch_size=4, sampler=sampler)
def endless():
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader
batches = endless()
def train_step():
    return train(next(batches), model, opt)
""",
    "micro-batches": """
batches = itertools.cycle(loader)
def train_step():
    for i, (x, y) in enumerate(itertools.islice(batches, 3)):
        model.set_requires_gradient_sync(i == 2)
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    return loss.item()
""",
    "loop inside": """
def train_step():
    for batch in loader:
        loss = train(batch, model, opt)
    return loss
""",
    "workers": """
loader = DataLoader(loader.dataset, batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="fork")
def train_step():
    for batch in itertools.islice(loader, 2):
        loss = train(batch, model, opt)
    return loss
""",
    "trainer": """
class Trainer:
    def __init__(self, model, opt):
        self.model, self.opt, self.step, self.losses = model, opt, 0, []
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        opt.step()  # before the first step of a scheduler
        self.data = [next(iter(loader)) for _ in range(3)]

    def train_step(self):
        self.scheduler.step()
        loss = train(self.data[self.step % 3], self.model, self.opt)
        self.step += 1
        self.losses.append(loss)
        return loss + len(self.losses)
trainer = Trainer(model, opt)
train_step = trainer.train_step
""",
    "closure": """
def make(model, opt, it, params, calls=[0]):
    seen = 0
    def train_step():
        nonlocal seen
        seen, calls[0] = seen + 1, calls[0] + 1
        x, y = next(it)
        x += seen
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.1)
        opt.step()
        opt.zero_grad()
        return loss.item() + calls[0] + seen
    return train_step
train_step = make(model, opt, itertools.cycle(loader), list(model.parameters()))
""",
    "partial": """
batches = map(tuple, itertools.cycle(loader))
train_step = functools.partial(lambda it, model, opt: train(next(it), model, opt), batches, model, opt=opt)
del batches
""",
    "state in a named tuple": """
import collections
state = collections.namedtuple("State", "model opt")(model, opt)
batches = itertools.cycle(loader)
def train_step():
    return train(next(batches), *state)
""",
    "method of the model": """
class Learner(nn.Sequential):
    def train_step(self):
        return train(next(batches), self, opt)
model = Learner(Block(), nn.Linear(8, 4))
fully_shard(model[0])
fully_shard(model)
opt, batches = torch.optim.AdamW(model.parameters(), lr=1e-2), itertools.cycle(loader)
train_step = model.train_step
""",
    "whole gradients": """
batches = itertools.cycle(loader)
def train_step():
    loss = F.cross_entropy(model(next(batches)[0]), torch.zeros(4).long())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    model[1].weight.grad.full_tensor().zero_()  # another tensor, which nothing uses
    opt.step()
    opt.zero_grad()
    return loss.item() + norm.item()
""",
    "reader": """
class Reader:
    position = 0
    def __init__(self):
        self.tokens = np.random.default_rng(rank).integers(0, 4, 400)
        self.generator = torch.Generator().manual_seed(rank)

    def next_batch(self):
        own = torch.as_tensor(self.tokens[self.position : self.position + 36]).float().view(4, 9)
        Reader.position += 36
        self.tokens[0] += 1
        noise = torch.rand(4, 8, generator=self.generator)
        return own[:, :8] + noise + self.tokens[0], own[:, 8].long()
reader = Reader()
ema = Block()
def train_step():
    loss = train(reader.next_batch(), model, opt)
    with torch.no_grad():
        for param in ema.parameters():
            param.mul_(0.9).add_(loss)
    return loss + sum(param.sum().item() for param in ema.parameters())
""",
    "two sharded models": """
critic = fully_shard(nn.Sequential(Block(), nn.Linear(8, 1)))
critic_opt = torch.optim.AdamW(critic.parameters(), lr=1e-2)
batches = itertools.cycle(loader)
def train_step():
    x, y = next(batches)
    F.softplus(critic(x)).mean().backward()
    critic_opt.step()
    critic_opt.zero_grad()
    loss = F.cross_entropy(model(x), y) + critic(model(x).repeat(1, 2)).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()
""",
    "ended schedule": """
scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: float(step < 1))
batches = itertools.cycle(loader)
def train_step():
    loss = train(next(batches), model, opt)
    scheduler.step()
    return loss + scheduler.last_epoch + opt.param_groups[0]["lr"]
""",
    "stream": """
class Stream(IterableDataset):
    def __iter__(self):
        for i in itertools.count():
            yield torch.full((8,), torch.rand(()).item() + i), i % 4
batches = zip(DataLoader(Stream(), batch_size=4), itertools.count())
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
def train_step():
    (x, y), number = next(batches)
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    return loss.item() + number + scaler.get_scale()
""",
}


def losses_of(recipe, *, verifies):
    """Run a recipe for some steps, with or without a verify between them; return its replies, and the losses."""
    ns = namespace()
    exec(SETUP + recipe, ns)
    rank_module._after_cell(None)
    replies, losses = [], []
    for count, num_verifies in ((2, 2), (4, 1), (2, 0)):  # an epoch has 6 batches
        losses += execute(Step(count=count))["losses"]
        replies += [execute(Verify(model="model")) for _ in range(num_verifies if verifies else 0)]
    return replies, losses, ns["model"][0].calls, type(ns.get("it"))


def with_and_without_verify():
    return {
        name: (losses_of(recipe, verifies=True), losses_of(recipe, verifies=False)) for name, recipe in RECIPES.items()
    }


@pytest.fixture(scope="module")
def verified_recipes():
    return run(2, with_and_without_verify, timeout_s=600)


@pytest.mark.parametrize("name", RECIPES)
def test_both_steps_get_the_same_and_training_goes_on_as_without(verified_recipes, name):
    for by_name in verified_recipes:
        (replies, *state), (_, *expected) = by_name[name]
        assert [reply["ok"] for reply in replies] == [True] * 3
        assert replies[0]["loss_sharded"] == pytest.approx(replies[0]["loss_reference"], rel=1e-5)
        assert replies[0] == replies[1]
        assert [reply["initial_rate"] for reply in replies] == [0.01 * (name == "ended schedule")] * 3
        assert state[0] == expected[0]
        assert state == expected


def tensors_now():
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return len(tensors), sum(each.untyped_storage().nbytes() for each in tensors)


def kept_by_verify():
    """Return the tensors before and after verifies that find a difference, that find none, and that raise."""
    exec(SETUP, namespace())
    fixed = "batch = next(iter(loader))\ndef train_step():\n    return train(batch, model, opt)\n"
    exec(fixed, namespace())
    rank_module._after_cell(None)
    execute(Step(count=1))
    found = [tensors_now()]
    for lines in (
        fixed,
        "opt.param_groups[0]['lr'] = 0.01 * (1 + rank)",
        "def train_step():\n    model(batch[0]).sum().backward()",
        "def train_step():\n    train(batch, model, opt)\n    raise KeyError",
    ):
        exec(lines, namespace())
        try:
            ok = execute(Verify())["ok"]
        except (UsageError, KeyError) as error:
            ok = type(error)
        eventually(lambda: tensors_now() == found[0])  # gloo lets go of what it has sent a while later
        found.append((ok, *tensors_now()))
    return found


def test_nothing_is_kept_whatever_verify_finds():
    for (num_tensors, num_bytes), *found in run(2, kept_by_verify):
        assert [ok for ok, *_ in found] == [True, False, UsageError, KeyError]
        assert {tuple(each) for _, *each in found} == {(num_tensors, num_bytes)}


CLIPS = """
batch = next(iter(loader))
def train_step():
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    grads = [getattr(p.grad, "to_local", lambda: p.grad)() for p in model.parameters()]
    total = sum(grad.square().sum() for grad in grads)
    if {sums}:
        torch.distributed.all_reduce(total)
    for grad in grads:
        grad.mul_(0.001 / total.sqrt())
    opt.step()
    opt.zero_grad()
    return loss.item()
"""
AVERAGES = """
ema = [p.detach().clone() for p in model.parameters()]
batch = next(iter(loader))
def train_step():
    loss = train(batch, model, opt)
    for mean, param in zip(ema, model.parameters()):
        mean.lerp_(param.detach(), 0.1)
    return loss
"""


def refused_by_verify():
    found = []
    for recipe in (CLIPS.format(sums=True), CLIPS.format(sums=False), AVERAGES):
        exec(SETUP + recipe, namespace())
        rank_module._after_cell(None)
        execute(Step(count=1))
        try:
            found.append(execute(Verify())["ok"])
        except UsageError as error:
            found.append(str(error))
    return found


def test_a_step_is_refused_whose_copy_cannot_be_right():
    for by_hand, by_part, averages in run(2, refused_by_verify):
        assert "as where it clips by a norm that it sums over ranks" in by_hand
        assert by_part is False, "each rank clips by the norm of its own rows"
        assert "the step computes with DTensors that it keeps beside the model, in" in averages
