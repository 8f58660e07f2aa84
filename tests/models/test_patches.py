"""A program that is watched goes on as without it, whichever patch or hook fails: same losses, and one sentence."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import OF_TORCHS_FSDP2, ignoring_warnings
from tests.helpers.watched import make_blocks, shard_by_torch, train
from tests.models.test_torch_wrapper import wrapped
from workbench.engine import probe
from workbench.engine.errors import StepAborted
from workbench.events import C10D, UNWATCHED
from workbench.models._torch_private import HAS_HOOKS
from workbench.models.c10d import CollectiveWatch
from workbench.models.engines import Watch
from workbench.models.patches import RESULT, Patches
from workbench.replay.collectives import closed_form
from workbench.replay.units import unseen_words
from workbench.runtime.loop_steps import LoopSteps
from workbench.runtime.recorder import Recorder
from workbench.trace import Trace, check
from workbench.trace.columns import RankTrace
from workbench.trace.keyframe import KeyFrame
from workbench.trace.schema import ROW_DTYPE, Header, RankInfo

ON_FOUR_RANKS = "FSDPParamGroup._to_sharded_post_forward"
"""Of all patches, the one that two ranks do not reach."""


def losses():
    """Train every kind of model, and call functional and asynchronous collectives, on this rank."""
    sharded, replicated = shard_by_torch(make_blocks(2)), DistributedDataParallel(make_blocks(2))
    found = [*train(sharded, 1), *train(wrapped("FULL_SHARD"), 1), *train(replicated, 1)]
    if hasattr(DistributedDataParallel, "finalize_backward"):  # torch 2.15
        sharded.set_manual_backward_finalization(True)
        replicated.require_manual_backward_finalization = True
        for model in (sharded, replicated):
            model(torch.ones(2, 16)).sum().backward()
            model.finalize_backward()
            found += [(param.grad * 1).sum().item() for param in model.parameters()]
    one = torch.full((4,), float(dist.get_rank()))
    found += _functional_collectives.all_reduce(one, "sum", dist.group.WORLD).tolist()
    dist.all_reduce(one, group=dist.new_group([0, 1]), async_op=True).wait()
    return [*found, *one.tolist()]


class Failing:
    """Makes one patch or hook fail: before its original, after it, or as if torch did not have it."""

    def __init__(self, patch, number=-1, how=""):
        self._number, self._how = number, how
        self.names, self._wrap, self._hook, self._guarded = [], Patches.wrap, Patches.hook, Patches.guarded
        for name in ("wrap", "hook", "guarded"):
            method = getattr(self, name)
            patch.setattr(Patches, name, lambda *a, _method=method, **k: _method(*a, **k))  # gets the patches, too

    def _is_next(self, where):
        """Return whether this one is to fail; those of each group, output or backward are one."""
        if where not in self.names:
            self.names.append(where)
        return self.names.index(where) == self._number

    def wrap(self, patches, owner, name, watcher, **options):
        if self._how == "missing" and self._is_next(f"{owner.__name__}.{name}"):
            name += "_of_another_version"
        self._wrap(patches, owner, name, watcher, **options)

    def guarded(self, patches, original, watcher, where, **options):
        def failing(*args, **kwargs):
            if self._how == "after":
                yield from watcher(*args, **kwargs)
            raise ZeroDivisionError("of ours")

        fails = self._how != "missing" and self._is_next(where)
        return self._guarded(patches, original, failing if fails else watcher, where, **options)

    def hook(self, patches, run, where):
        def failing(*args):
            if self._how == "after":
                run(*args)
            raise ZeroDivisionError("of ours")

        fails = self._how != "missing" and self._is_next(where)
        return self._hook(patches, failing if fails else run, where)


def watched_losses(number, how):
    """Return the losses with a patch that fails, the names of all patches, what was said, and wrong rows."""
    recorder, said = Recorder(Header(world_size=dist.get_world_size())), []
    recorder.set_run(RankInfo(rank=dist.get_rank(), host="one", device="cpu", pid=1), mesh_shape=(2,), mesh_axes=("r",))
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch, number, how)
        patch.setattr(probe, "active", recorder)
        watch = Watch(said.append).begin()
        hooks = LoopSteps(recorder).install(Patches("steps are", said.append))
        found = losses()
        watch.end()
        for hook in hooks:
            hook.remove()
    drained = recorder.drain()
    rows = torch.frombuffer(bytearray(drained.rows), dtype=torch.uint8).numpy().view(ROW_DTYPE)
    trace = Trace(recorder.header, (RankTrace(dist.get_rank(), rows, KeyFrame()),))
    return found, failing.names, said, check(trace)


@ignoring_warnings(*OF_TORCHS_FSDP2)
def every_patch_in_turn(how):
    expected = losses()
    found, names, said, broken = watched_losses(-1, how)
    assert (found, said, broken) == (expected, [], [])
    wrong = []
    for number, name in enumerate(names):
        found, _, said, broken = watched_losses(number, how)
        is_said = len(said) == 1 and name.rpartition(".")[2] in said[0]
        # without hooks, each of c10d's functions is a patch, of which few are called here
        is_unreached = name == ON_FOUR_RANKS or (not HAS_HOOKS and name.startswith(("ProcessGroup.", "torch.ops.")))
        if found != expected or broken or not (is_said or (is_unreached and said == [])):
            wrong.append((name, found, said, broken))
    return names, wrong


@pytest.mark.parametrize("how", ["before", "after", "missing"])
def test_losses_are_the_same_whichever_patch_fails_and_one_sentence_says_so(how):
    (names, wrong), other = run_ranks(2, every_patch_in_turn, how)
    assert wrong == other[1] == []
    assert len(names) > (20 if how == "missing" else 25)


def abandons_collectives():
    """Train a model before and a model after watching collectives fails; return what is expected of their units."""
    recorder = Recorder(Header(world_size=dist.get_world_size()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "active", recorder)
        said = []
        watch = Watch(said.append).begin()
        train(shard_by_torch(make_blocks(2)), 1)
        before = [unit.comm for unit in recorder.header.units], len(closed_form(recorder.header)), len(said)
        patch.setattr(CollectiveWatch, "issued", lambda *_: 1 / 0)
        dist.all_reduce(torch.ones(1))
        train(shard_by_torch(make_blocks(2)), 1)
        watch.end()
    units = recorder.header.units
    return before, [unit.comm for unit in units], closed_form(recorder.header), unseen_words(recorder.header), len(said)


@ignoring_warnings(*OF_TORCHS_FSDP2)
def test_nothing_is_expected_of_units_whose_collectives_are_not_watched():
    for before, comms, expected, words, said in run_ranks(2, abandons_collectives):
        assert before == ([C10D] * 3, 6, 0)
        assert (comms, expected, said) == ([UNWATCHED] * 6, (), 1)
        assert words.startswith("collectives of c10d are not all in it")


# ---- what a failing patch must leave alone


class Owner:
    """Has a function that is replaced."""

    @staticmethod
    def call(value):
        if value < 0:
            raise LookupError("the original's own")
        return value


@pytest.fixture
def patched():
    said, made = [], []

    def make(watcher):
        made.append(Patches("calls are", said.append))
        made[-1].wrap(Owner, "call", watcher)
        return said

    original = vars(Owner)["call"]
    yield make
    for patches in made:
        patches.undo()
    assert vars(Owner)["call"] is original


def test_a_function_is_watched_until_that_is_undone(patched):
    seen = []

    def watcher(value):
        seen.extend((value, (yield RESULT)))

    said = patched(watcher)
    assert (Owner.call(3), seen, said) == (3, [3, 3], [])


def test_a_watcher_may_see_a_part_of_the_calls_and_replace_arguments(patched):
    def watcher(value):
        if value > 1:
            yield (7,)

    said = patched(watcher)
    assert (Owner.call(1), Owner.call(3), said) == (1, 7, [])


def test_the_originals_own_error_is_passed_on_and_no_failure(patched):
    left = []

    def watcher(value):
        try:
            yield
            left.append("not reached")
        finally:
            left.append(value)

    said = patched(watcher)
    with pytest.raises(LookupError) as raised:
        Owner.call(-1)
    assert (left, said, raised.value.__context__) == ([-1], [], None)


@pytest.mark.parametrize("is_before", [True, False])
def test_the_originals_own_error_is_passed_on_also_if_the_watcher_fails(patched, is_before):
    def watcher(value):
        try:
            assert not is_before
            yield
        finally:
            raise KeyError("ours")

    said = patched(watcher)
    with pytest.raises(LookupError) as raised:
        Owner.call(-1)
    assert (len(said), raised.value.__context__) == (1, None)


@pytest.mark.parametrize("error", [StepAborted("abort"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("is_before", [True, False])
def test_what_the_workbench_raises_into_a_step_on_purpose_is_passed_on(patched, error, is_before):
    def watcher(value):
        if is_before:
            raise error
        yield
        raise error

    said = patched(watcher)
    with pytest.raises(type(error)):
        Owner.call(1)
    assert said == []


def test_an_error_of_the_programs_own_signal_handler_is_passed_on(patched):
    def handler(*_):
        raise TimeoutError("the program's own")

    def watcher(value):
        os.kill(os.getpid(), signal.SIGUSR1)
        yield

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        said = patched(watcher)
        with pytest.raises(TimeoutError):
            Owner.call(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert said == []


def test_what_a_watcher_would_see_after_another_one_failed_within_its_call_is_left_out():
    said, seen = [], []
    patches = Patches("calls are", said.append)

    def failing():
        raise KeyError("ours")

    def outer():
        seen.append((yield RESULT))

    inner = patches.guarded(lambda: 5, failing, "inner")
    assert patches.guarded(inner, outer, "outer")() == 5
    assert (seen, len(said)) == ([], 1)
