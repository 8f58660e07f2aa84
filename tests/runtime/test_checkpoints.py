"""Checkpoints on booted ranks: saved and loaded with the same bits, refused in one sentence, and proved."""

import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.helpers.booted_ranks import execute, namespace, prepare, run
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.small_models import make_net
from workbench.base.codec import decode
from workbench.errors import UsageError
from workbench.protocol.commands import InjectFault, Load, Save, Shard, Step, Verify, VerifyReply
from workbench.reports.verify_report import verify_report
from workbench.runtime.checkpoint_files import PARTIAL, CheckpointRecord, checkpoint_at
from workbench.runtime.checkpoint_writer import CheckpointWriter, MemoryFile
from workbench.runtime.program_state import reachable
from workbench.runtime.rank import this_rank

MAKERS = [(engine, api) for engine in ("workbench", "torch") for api in ("fully_shard", "classic")]
OLD_CALLS = pytest.mark.filterwarnings("ignore::UserWarning:torch")
FULL = StateDictOptions(full_state_dict=True)


class Position:
    """A loader that knows its position, another one on each rank."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def begin(engine="workbench", api="fully_shard", seed=0, **options):
    """Shard a model that trains with a schedule, a loader and random numbers."""
    ns = prepare(seed=seed, **options)
    torch.manual_seed(100 * seed + ns["rank"])
    this_rank().trainer.trained_steps = 0
    execute(Shard(model="model", wrap=("Block",), engine=engine, api=api))
    renew(ns)
    inner = ns["train_step"]

    def train_step():
        loss = inner()
        namespace()["sched"].step()
        namespace()["loader"].position += 1
        namespace()["count"][0] += 1
        return loss + torch.rand(()).item() + namespace()["loader"].position

    ns["train_step"] = train_step
    ns["loader"], ns["count"] = Position(10 * ns["rank"]), [0]
    return ns


def renew(ns):
    ns["opt"] = torch.optim.AdamW([p for p in ns["model"].parameters() if p.requires_grad], lr=1e-2)
    ns["sched"] = torch.optim.lr_scheduler.MultiStepLR(ns["opt"], [2, 4], 0.5)


def whole(ns):
    """Return the whole model and optimizer state, by name."""
    model = get_model_state_dict(ns["model"], options=FULL)
    state = get_optimizer_state_dict(ns["model"], ns["opt"], options=FULL)["state"]
    flat = {f"{param}.{key}": value for param, own in state.items() for key, value in own.items()}
    return {name: value.clone() for name, value in {**model, **flat}.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- the same bits


def saves(folder, makers):
    """Train and save, train on, and load: here, and into a new optimizer; return the whole states that were saved."""
    found = []
    for maker in makers:
        ns, path = begin(*maker), f"{folder}/{'-'.join(maker)}"
        saved = execute(Step(count=4, save=path, every=2))["saved"]
        assert [Path(each["folder"]).name for each in saved] == ["step-2", "step-4"]
        found.append(whole(ns))
        losses = execute(Step(count=3))["losses"]
        loaded = execute(Load(path))
        assert (loaded["step"], loaded["notes"], sorted(loaded["variables"])) == (
            4,
            [],
            ["loader", "model", "opt", "sched"],
        )
        assert execute(Step(count=3))["losses"] == losses
        renew(ns)
        execute(Load(f"{path}/step-4"))
        assert execute(Step(count=3))["losses"] == losses
        assert Path(execute(Save(path))["folder"]).name == "step-7"
    return found


def loads(folder, makers, names):
    """Load the checkpoints of all makers into each kind of model; return the whole states and the notes."""
    found, notes = [], []
    for maker in makers:
        for name in names:
            ns = begin(*maker, seed=1)
            notes.append(execute(Load(f"{folder}/{name}/step-4"))["notes"])
            found.append((name, whole(ns)))
    return found, notes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of the checkpoints that two ranks saved of all kinds of models, and their states."""
    folder = tmp_path_factory.mktemp("checkpoints")
    states, _ = run(2, saves, str(folder), MAKERS)
    return folder, {"-".join(maker): state for maker, state in zip(MAKERS, states, strict=True)}


@OLD_CALLS
def test_a_training_goes_on_with_the_same_bits(saved):
    folder, states = saved
    for name in states:
        assert sorted(path.name for path in (folder / name).iterdir()) == ["step-2", "step-4", "step-7"]
        record = json.loads((folder / name / "step-4" / "workbench.json").read_text())
        assert (record["step"], record["world_size"], record["others"]) == (4, 2, ["sched", "loader"])


@OLD_CALLS
@pytest.mark.parametrize(
    ("ranks", "makers"), [(4, MAKERS[:2]), (4, MAKERS[2:3]), (2, MAKERS[3:])], ids=["4-ours", "4-torch", "2-torch"]
)
def test_another_number_of_ranks_another_api_and_torchs_engine_load_it(saved, ranks, makers):
    folder, states = saved
    for found, notes in run(ranks, loads, str(folder), makers, list(states)):
        for name, state in found:
            assert_same(state, states[name])
        for each in notes:
            assert [note.partition(" stay")[0] for note in each] == ([] if ranks == 2 else ["loader", "random numbers"])


def loads_without_us(folder):
    """Load a checkpoint as a script does that has torch alone."""
    model = make_net(seed=3, dim=16)
    for block in model.blocks:
        torch_fully_shard(block)
    torch_fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3.0)
    states = dict(zip(("model", "opt"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["opt"])
    return whole({"model": model, "opt": optimizer}), optimizer.param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_alone_loads_it(saved):
    folder, states = saved
    for name in ("workbench-fully_shard", "workbench-classic"):
        for found, rate in run_ranks(2, loads_without_us, folder / name / "step-4"):
            assert_same(found, states[name])
            assert rate == pytest.approx(1e-2 / 4)
    plain, schedule = {name: torch.empty_like(v) for name, v in make_net(dim=16).state_dict().items()}, {"sched": ()}
    dcp.load({"model": plain}, checkpoint_id=folder / "workbench-classic" / "step-4")
    assert_same(plain, {name: states["workbench-classic"][name] for name in plain})
    dcp.load(schedule, checkpoint_id=folder / "workbench-classic" / "step-4")
    assert schedule["sched"][0]["last_epoch"] == 4


# ---- refused in one sentence


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made by a pickle",)


def poison_metadata(path):
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    seal(path)


def poison_options(path):
    """Put a pickle that makes a folder into the place of an optimizer's option."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    file = MemoryFile()
    torch.save(Evil(), file)
    (path / "evil.distcp").write_bytes(file.getvalue())
    for index, place in metadata.storage_data.items():
        if index.fqn == "opt.param_groups.0.lr":
            place.relative_path, place.offset, place.length = "evil.distcp", 0, len(file.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)


def lead_outside(path):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../step-1/{place.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)


def seal(path):
    """Give a changed checkpoint the sizes of its files, as one who makes it would."""
    record = json.loads((path / "workbench.json").read_text())
    record["files"] = {name: (path / name).stat().st_size for name in record["files"]}
    (path / "workbench.json").write_text(json.dumps(record))


def cut(path):
    os.truncate(path / "__1_0.distcp", 100)


SPOILED = {
    "metadata": (poison_metadata, r"posix.mkdir does not belong into the metadata"),
    "options": (poison_options, r"opt.param_groups.0.lr of the checkpoint holds more than tensors and plain data"),
    "outside": (lead_outside, r"a file outside of it"),
    "cut": (cut, r"__1_0.distcp was saved with [\d,]+ bytes, and there are 100 bytes: the checkpoint is damaged"),
}


def prepare_refusals(folder):
    """Train a step, and make the folders that are refused; return the variables."""
    ns = begin()
    execute(Step(count=1))
    for name in ("step-1", *SPOILED):
        execute(Save(f"{folder}/{name}"))
    dist.barrier()
    if ns["rank"] == 0:
        os.chdir(folder)
        for name, (spoil, _) in SPOILED.items():
            spoil(Path(folder, name, "step-1"))
        Path(folder, "a file").touch()
        Path(folder, "empty").mkdir()
        Path(folder, "interrupted", f"{PARTIAL}step-9-host-1-ab").mkdir(parents=True)
        Path(folder, "step-1", f"{PARTIAL}step-9-host-1-ab").mkdir()
        Path(folder, "step-1", f"{PARTIAL}step-9-{socket.gethostname()}-{2**30}-ab").mkdir()  # of a killed process
    dist.barrier()
    return ns


def refuse_states(ns, folder, refused):
    """Load what does not fit optimizers and other objects."""
    execute(Save(f"{folder}/whole"))
    dcp.save({"model": get_model_state_dict(ns["model"]), "opt": ns["opt"].state_dict()}, checkpoint_id=f"{folder}/raw")
    refused("numbers", Load(f"{folder}/raw"))
    execute(Step(count=1))
    if ns["rank"] == 1:
        ns["loader"].load_state_dict = lambda state: {}["position"]
    before, step = whole(ns), this_rank().trainer.trained_steps
    refused("raises", Load(f"{folder}/whole"), kept=False)
    assert_same(whole(ns), before)
    assert this_rank().trainer.trained_steps == step
    del ns["loader"]
    ns["opt"] = torch.optim.SGD(ns["model"].parameters(), lr=1.0)
    refused("other optimizer", Load(f"{folder}/whole"), kept=False)
    assert ns["opt"].param_groups[0]["lr"] == 1.0


def refusals(folder):
    """Return what saving and loading are refused with; check that each changes nothing."""
    ns = prepare_refusals(folder)
    before, found = whole(ns), {}

    def refused(name, command, kept=True):
        with pytest.raises(UsageError) as caught:
            execute(command)
        found[name] = str(caught.value)
        if kept:
            assert_same(whole(namespace()), before)
            assert checkpoint_at(Path(folder, "step-1")).name == "step-1"

    for name in SPOILED:
        refused(name, Load(f"{folder}/{name}"))
    refused("not shared", Save(f"{folder}/step-1" if ns["rank"] == 0 else f"{folder}/empty"))
    refused("no folder", Load(f"{folder}/nothing"))
    refused("no parent", Save(f"{folder}/nothing/new"))
    refused("a file", Save(f"{folder}/a file"))
    refused("read-only", Save("/sys/kernel/new"))
    refused("empty", Load(f"{folder}/empty"))
    refused("interrupted", Load(f"{folder}/interrupted"))
    refused("named", Load(f"{folder}/step-1/{PARTIAL}step-9-host-1-ab"))
    execute(InjectFault("disk-full", rank=1))
    refused("disk full", Save(f"{folder}/step-1"))
    refused("disk full while training", Step(count=2, save=f"{folder}/step-1", every=1), kept=False)
    good = ns["train_step"]
    ns["train_step"] = lambda calls=[good, good]: calls.pop()()
    with pytest.raises(IndexError):
        execute(Step(count=3, save=f"{folder}/step-1", every=2))
    this_rank().writer.wait_alone()
    ns["train_step"] = good
    execute(InjectFault("off"))
    assert "an earlier save failed: " in execute(Save(f"{folder}/empty"))["notes"][0]
    before = whole(ns)
    ns["loader"].state_dict = lambda: {"open": open}
    refused("unsafe", Save(f"{folder}/step-1"))
    del ns["loader"].state_dict
    refuse_states(ns, folder, refused)
    ns = begin(dim=8)
    execute(Step(count=1))
    before = whole(ns)
    refused("other shape", Load(f"{folder}/step-1"))
    ns["model"] = nn.Sequential(nn.Linear(4, 4))
    execute(Shard(model="model"))
    ns["opt"] = torch.optim.AdamW(ns["model"].parameters())
    before = whole(ns)
    refused("other names", Load(f"{folder}/step-1"))
    left = sorted(str(path) for path in Path(folder).glob(f"*/{PARTIAL}*"))
    return found, left, not Path(folder, "made by a pickle").exists()


SENTENCES = {
    **{name: sentence for name, (_, sentence) in SPOILED.items()},
    "not shared": "rank 1: .*/empty on .* is not the folder that rank 0 sees: the ranks do not share this file system",
    "no folder": "there is no folder .*/nothing$",
    "no parent": "cannot write into .*/nothing/new: there is no folder .*/nothing; make it first",
    "a file": "cannot write into .*/a file: it is a file",
    "read-only": "cannot write into /sys/kernel/new: it is read-only; save into another folder",
    "empty": "/empty is no checkpoint: it has no file .metadata",
    "interrupted": "/interrupted has no whole checkpoint: saving .saving-step-9-host-1-ab was interrupted",
    "named": "was interrupted while it was saved, so it is not whole; the newest whole one is .*/step-1/step-1$",
    "disk full": "rank 1: cannot write into .*: the disk is full; .* Nothing was saved; older checkpoints are as they",
    "disk full while training": "rank 1: cannot write into .*: the disk is full",
    "unsafe": "loader holds more than tensors and plain data, which a checkpoint cannot hold safely",
    "numbers": r"has numbers instead of names of parameters in the state of opt: opt.state_dict\(\) was saved",
    "raises": r"rank 1: .*/step-\d cannot be loaded, and nothing is changed: KeyError: 'position'",
    "other optimizer": "of another optimizer than opt, an instance of SGD: it has the option amsgrad there",
    "other shape": r"is of another model than model: embed.weight is \(7, 16\) there, and \(7, 8\) here",
    "other names": r"is of another model than model: it has no 0.weight of shape \(4, 4\)",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    return run(2, refusals, str(tmp_path_factory.mktemp("refusals")))


@pytest.mark.parametrize("name", SENTENCES)
def test_what_cannot_be_saved_or_loaded_is_said_in_one_sentence(refused, name):
    for found, _, _ in refused:
        assert "\n" not in found[name]
        assert re.search(SENTENCES[name], found[name]), found[name]


def test_nothing_is_left_behind_and_no_pickle_runs(refused):
    for found, left, is_safe in refused:
        assert found.keys() == SENTENCES.keys()
        assert [Path(path).name for path in left] == [f"{PARTIAL}step-9-host-1-ab"] * 2
        assert is_safe


# ---- killed at any moment


def write_until_killed(folder, rank, moment, pipe):
    """Write one rank's part of a checkpoint of two, and die at this call that touches files; None: never."""
    calls = iter(range(10_000))
    if moment is not None:
        os.sys.addaudithook(
            lambda event, _: (
                os.kill(os.getpid(), signal.SIGKILL)
                if event in {"open", "os.rename", "os.remove", "os.listdir", "os.scandir"} and next(calls) == moment
                else None
            )
        )
    record = CheckpointRecord(step=2, world_size=2, saved_ns=0, models=(), optimizers=(), others=(), files={})
    files = {f"__{rank}_0.distcp": MemoryFile(b"x" * 4000)}
    if rank == 0:
        files[".metadata"] = MemoryFile(b"y" * 100)
    writer = CheckpointWriter(folder / "step-2", folder / f"{PARTIAL}step-2-h-1-a", record, rank, files).start()
    pipe.recv()  # that the others are dead, or have ended
    writer.abandon()
    writer.wait_alone()


def make_whole(folder):
    record = CheckpointRecord(step=1, world_size=1, saved_ns=1, models=(), optimizers=(), others=(), files={})
    (folder / "step-1").mkdir(parents=True)
    (folder / "step-1" / ".metadata").write_bytes(b"z")
    replace(record, files={".metadata": 1}).write(folder / "step-1")
    (folder / f"{PARTIAL}step-2-h-1-a").mkdir()


def moments():
    draw = random.Random(7)
    return [(seed, draw.choice([(0,), (1,), (0, 1)]), draw.randrange(12)) for seed in range(20)]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    context, ends = multiprocessing.get_context("fork"), set()
    for seed, killed, moment in moments():
        folder = tmp_path / str(seed)
        make_whole(folder)
        pipes = [context.Pipe() for _ in range(2)]
        jobs = [(folder, rank, moment if rank in killed else None, pipes[rank][0]) for rank in range(2)]
        processes = [context.Process(target=write_until_killed, args=job) for job in jobs]
        for process in processes:
            process.start()
        wait([processes[rank].sentinel for rank in killed], 2.0)
        for pipe in pipes:
            pipe[1].send("go on")
        for process in processes:
            process.join()
        found = checkpoint_at(folder)
        assert CheckpointRecord.read(found) is not None
        assert found.name == ("step-2" if (folder / "step-2").exists() else "step-1")
        ends.add(found.name)
    assert ends == {"step-1", "step-2"}


# ---- proved


def test_what_closures_and_objects_refer_to_is_found():
    optimizer = torch.optim.SGD([torch.zeros(1)])

    class Trainer:
        def __init__(self):
            self.parts = {"opt": optimizer}

    def train_step(trainer):
        return lambda: trainer

    found = [name for name, value in reachable({"step": train_step(Trainer())}) if value is optimizer]
    assert found == ["step.trainer.parts['opt']"]


def proofs(folder):
    """Return the replies of ``verify --resume`` for a sound checkpoint and for others."""
    ns, found = begin(), {}
    execute(Step(count=2))
    losses = []

    def proved(name, path):
        before = whole(ns), ns["sched"].last_epoch, torch.get_rng_state()
        found[name] = execute(Verify(resume=path))
        assert_same(whole(ns), before[0])
        assert (ns["sched"].last_epoch, torch.equal(torch.get_rng_state(), before[2])) == (before[1], True)

    execute(Save(f"{folder}/sound"))
    proved("sound", f"{folder}/sound")
    losses.append(execute(Step(count=1))["losses"])
    proved("other-step", f"{folder}/sound")
    execute(Load(f"{folder}/sound"))
    losses.append(execute(Step(count=1))["losses"])
    assert losses[0] == losses[1]

    fresh = torch.optim.AdamW(ns["model"].parameters())
    options = get_optimizer_state_dict(ns["model"], ns["opt"])["param_groups"]
    state = {"model": get_model_state_dict(ns["model"]), "optim": {**fresh.state_dict(), "param_groups": options}}
    dcp.save(state, checkpoint_id=f"{folder}/fresh")
    proved("optimizer-from-nothing", f"{folder}/fresh")

    torch.manual_seed(5)
    execute(Save(f"{folder}/random"))
    proved("equal random numbers", f"{folder}/random")
    ns["model"].head.drop = nn.Dropout(0.5)
    ns["model"].head.register_forward_pre_hook(lambda head, args: (head.drop(args[0]),))
    proved("equal-random-numbers", f"{folder}/random")
    ns["model"].head.drop.p = 0.0
    torch.manual_seed(ns["rank"])

    check_rest(ns, folder, proved)
    execute(Save(f"{folder}/values"))
    with torch.no_grad():
        ns["model"].head.weight.mul_(1.5)
    proved("other-after-resume", f"{folder}/values")
    handle = ns["model"].register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update({"head.weight": state["head.weight"].clone()})
    )
    execute(Save(f"{folder}/detached"))
    proved("detached-entries", f"{folder}/detached")
    handle.remove()
    return found


def check_rest(ns, folder, proved):
    """Save, prove and load what is no model that trains and no optimizer."""
    step = ns["train_step"]
    ns["teacher"], ns["batches"], ns["sets"] = nn.BatchNorm1d(3), iter([]), {torch.optim.SGD([torch.zeros(1)])}
    ns["teacher"].running_mean.fill_(ns["rank"])
    notes = execute(Save(f"{folder}/state"))["notes"]
    assert notes[0] == "the position of batches is left out: an iterator cannot be saved"
    assert "an instance of SGD that no public variable reaches is left out" in notes
    ns["sched"].last_epoch += 7
    proved("other-state", f"{folder}/state")
    ns["train_step"] = lambda: ([each.step() for each in ns["sets"]], step())[1]
    execute(Load(f"{folder}/state"))
    proved("optimizer-not-held", f"{folder}/state")
    ns["train_step"] = lambda: 0.0
    execute(Load(f"{folder}/state"))
    proved("no-change", f"{folder}/state")
    ns["train_step"] = step
    ns["teacher"].running_mean.fill_(9.0)
    execute(Load(f"{folder}/state"))
    assert ns["teacher"].running_mean.tolist() == [ns["rank"]] * 3
    ns["ema"] = make_net(seed=5, dim=16)
    execute(Shard(model="ema", wrap=("Block",)))
    before = get_model_state_dict(ns["ema"], options=FULL)
    assert execute(Load(f"{folder}/state"))["notes"][0] == "ema stays as it is: the checkpoint has no state of it"
    assert_same(get_model_state_dict(ns["ema"], options=FULL), before)
    del ns["ema"], ns["teacher"], ns["batches"], ns["sets"]


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    by_rank = run(2, proofs, str(tmp_path_factory.mktemp("proofs")))
    return {
        name: verify_report([decode(VerifyReply, found[name], "reply") for found in by_rank]) for name in by_rank[0]
    }


PROOFS = {
    "sound": (True, r"gives the same bits \(.* compared\); not part of it: count$"),
    "equal random numbers": (True, "gives the same bits"),
    "optimizer-not-held": (
        True,
        "but the step uses an instance of SGD that no public variable reaches, which the checkpoint does not hold",
    ),
    "other-state": (True, "but sched.last_epoch is 10 now, and 3 in the checkpoint"),
    "no-change": (True, "cannot compare: the step changes no parameter and no buffer"),
    "other-step": (False, "cannot compare: .*sound/step-2 is of step 2, and the training is at step 3"),
    "optimizer-from-nothing": (False, "the optimizer starts from nothing: the checkpoint has no state of opt"),
    "equal-random-numbers": (True, "all ranks saved the same random numbers"),
    "other-after-resume": (False, "does NOT give the same bits .* differs first after a step from the checkpoint"),
    "detached-entries": (True, "share no memory with a parameter or buffer: model.head.weight"),
}


@pytest.mark.parametrize("rule", PROOFS)
def test_verify_proves_a_checkpoint_or_names_what_is_wrong(proved, rule):
    report = proved[rule]
    ok, words = PROOFS[rule]
    assert report.ok is ok, str(report)
    is_sound = rule in {"sound", "equal random numbers"}
    assert [fault.rule for fault in report.faults][:1] == ([] if is_sound else [rule])
    assert bool(report.problem) is not is_sound
    assert re.search(words, report.headline), report.headline
