"""The process of a planned rank: it runs a script as rank 0 of many, on tensors without data.

All of the runtime is as on any rank, and so is the engine; only the device is simulated
(:mod:`workbench.engine.backends.simulated`), and the process group sends nothing. The process writes no file but the
trace, starts no program, and ends when the script has taken its steps.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from workbench.base.codec import decode, encode
from workbench.base.devices import HOST, SIMULATED
from workbench.base.ports import LOOPBACK, LOOPBACK_INTERFACE
from workbench.engine._torch import NO_VALUE, fakes, is_fake, lacking_kernel, without_fakes
from workbench.engine.backends import backend_of
from workbench.engine.backends.simulated import SimulatedDevice
from workbench.errors import UsageError
from workbench.events import Comm, Edge, Kind
from workbench.models._torch_private import around_reducers
from workbench.models.engines import ACTIVATIONS, use_ours_as_torchs
from workbench.plan.op_times import OpTimes
from workbench.protocol.commands import Reshard, Run
from workbench.protocol.planning import CALLED, PLANNED, PlannedRanks, PlannedRun, planned_ranks
from workbench.protocol.starting import Boot, Connect, HostInfo
from workbench.runtime import piped_rank, rank, sharding
from workbench.runtime.recorder import Recorder
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.file import save
from workbench.trace.schema import ROW_DTYPE, KeyFrame


class PlanEnded(BaseException):
    """The script has taken its steps; no handler of the script's own may catch it."""


class NoValueError(UsageError):
    """The program asks for a value, and a plan's tensors have none."""


class UnknownNumber(float):
    """A number that a plan does not know: it can be printed and calculated with, and decides nothing."""

    def __new__(cls) -> UnknownNumber:
        """Return one; it is NaN."""
        return super().__new__(cls, "nan")

    def _decide(self, *_: object) -> NoReturn:
        raise NoValueError(
            f"the program decides{_module_at_work()} by the value of a tensor, such as a loss, and a plan's tensors "
            f'have none: take the branch that most steps take if "{PLANNED}" in os.environ'
        )

    __bool__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __round__ = _decide


class OnSimulatedDevice(TorchFunctionMode):
    """Within the block, every device is the simulated one, and a tensor's number is unknown.

    The host waits for the device where it asks for a number. What depends on one is refused by a sentence.

    Args:
        device: the device.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - of the function
        """Call a function of torch."""
        if func in _READS:
            return self._read(func, args, kwargs or {})
        if func in _ARRAYS and is_fake(args[0]):
            raise NoValueError(
                f"the program takes the values of a tensor as an array{_module_at_work()}, and a plan's tensors have "
                f'none: leave that out if "{PLANNED}" in os.environ'
            )
        if func is torch.Tensor.__format__ and is_fake(args[0]) and not args[0].dim():
            return format(self._read(torch.Tensor.item, args[:1], {}), *args[1:])
        if func is torch.Tensor.cuda:
            return args[0]
        given = {name: _here(value) for name, value in (kwargs or {}).items()}
        try:
            return func(*(map(_here, args) if func is torch.Tensor.to else args), **given)
        except RuntimeError as error:
            if why := _why_unknown(error):
                raise NoValueError(why) from error
            raise

    def _read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if not is_fake(args[0]) and not isinstance(args[0], DTensor):
            with without_fakes():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except NO_VALUE:
            self._device.synchronize()
            is_number = func in {torch.Tensor.item, torch.Tensor.__float__} and args[0].dtype.is_floating_point
            return UnknownNumber() if is_number else UnknownNumber()._decide()


def _why_unknown(error: RuntimeError) -> str:
    """Say of which operation a plan does not know the result, where, and what to do; empty for another error."""
    if isinstance(error, NO_VALUE):
        return (
            f"{error.func}{_module_at_work()} returns as many elements as values decide, and a plan's tensors have "
            f'none: take a fixed number, such as that of most steps, if "{PLANNED}" in os.environ'
        )
    if op := lacking_kernel(error):
        return (
            f"{op}{_module_at_work()} is an operation without a fake kernel, which says the shape of its result: "
            f'write one with torch.library.register_fake("{op}")'
        )
    return ""


def _module_at_work() -> str:
    """Return the module whose forward calls this, in words; empty if none does."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            model = vars(sys.modules["__main__"]).get(CALLED)
            names = [name for name, each in model.named_modules() if each is module] if model is not None else []
            return f" in {' '.join(filter(None, [*names[:1], f'({type(module).__name__})']))}"
        frame = frame.f_back
    return ""


def _here(value: object) -> object:
    """Return the device of a plan's tensors for any device, and everything else as it is."""
    kind = value.type if isinstance(value, torch.device) else str(value).partition(":")[0]
    return torch.device(HOST) if isinstance(value, (str, torch.device)) and kind == _CUDA else value


_CUDA = "cuda"
_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__bool__,
    torch.Tensor.__index__,
}


_ARRAYS: set[Any] = {torch.Tensor.numpy, torch.Tensor.__array__}


def plan(given: Any) -> Any:  # noqa: ANN401 - JSON data
    """Run a script's first steps as rank 0, for a :class:`PlannedRun` as data; write the trace.

    Raises:
        ValueError: ``given`` is not one.
        BaseException: what the script raises.
    """
    run: PlannedRun = decode(PlannedRun, given, "plan")
    ranks = planned_ranks(run.device, run.num_ranks, run.num_hosts)
    os.environ[ACTIVATIONS] = "1"
    _become_rank(ranks)
    runtime = rank.this_rank()
    device = backend_of(runtime.groups.device)
    assert isinstance(device, SimulatedDevice)
    measured = ranks.machine.calibration
    device.runs_at_once = measured is not None and measured.runs_at_once
    use_ours_as_torchs()
    sys.dont_write_bytecode = True
    os.environ[PLANNED] = "1"
    _replace_what_needs_data()
    with ExitStack() as world:
        world.enter_context(_changing_nothing())
        world.enter_context(_ending_after(run.steps, runtime))
        world.enter_context(_changing_first_model(run, runtime))
        _wait_at_ends_of_steps(runtime.recorder, device)
        without_data = world.enter_context(fakes())
        world.enter_context(_loading(without_data))
        times = world.enter_context(OpTimes(device, ranks, runtime.watch.collectives))
        _note_offloads(runtime.recorder, times)
        world.enter_context(around_reducers(times.in_reducer))
        world.enter_context(OnSimulatedDevice(device))
        with suppress(PlanEnded):
            runtime.execute(Run(run.script, run.args, module=run.module))
    steps = runtime.recorder.next_step
    model = vars(sys.modules["__main__"]).get(CALLED)
    device.synchronize()
    drained = runtime.recorder.drain(0)
    rows = np.frombuffer(drained.rows, ROW_DTYPE)
    save(Trace(runtime.recorder.header, (RankTrace(0, rows, KeyFrame()),)), run.out)
    return {"steps": steps, "blocks": sorted(sharding.repeated_class(model)) if model is not None else []}


def _become_rank(ranks: PlannedRanks) -> None:
    here = HostInfo(name="host 0", identity="planned", address=LOOPBACK, interface=LOOPBACK_INTERFACE)
    boot = Boot(
        rank=0,
        local_rank=0,
        world_size=ranks.num_ranks,
        local_world_size=ranks.ranks_per_host,
        device=SIMULATED,
        host=here,
    )
    address = decode(Boot.reply, rank.boot(encode(boot)), "address")
    rank.connect(encode(Connect(address=address)))


def _replace_what_needs_data() -> None:
    """Let functions of torch that need values, a device or a compiler do without, for the rest of this process."""
    nothing = ["set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"]
    for owner, names in ((torch, ["save"]), (torch.cuda, nothing)):
        for name in names:
            setattr(owner, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_, **__: UnknownNumber())
    torch.cuda.current_device = lambda: 0
    torch.compile = _as_it_is
    begin = torch.autocast.__init__
    torch.autocast.__init__ = lambda cast, device_type, *rest, **options: begin(  # type: ignore[method-assign]
        cast, HOST if device_type == _CUDA else device_type, *rest, **options
    )
    vars(dist).update(
        all_gather_object=_everyone_has,
        gather_object=lambda value, into=None, **_: _everyone_has(into, value),
        broadcast_object_list=lambda *_, **__: None,
    )


def _as_it_is(model: Any = None, **_: Any) -> Any:  # noqa: ANN401 - as torch.compile
    return _as_it_is if model is None else model


def _everyone_has(into: list[Any] | None, value: Any, *_: object, **__: object) -> None:  # noqa: ANN401
    if into is not None:
        into[:] = [value] * len(into)


def _wait_at_ends_of_steps(recorder: Recorder, device: SimulatedDevice) -> None:
    """Let the host wait for the device at the end of each step, as in a loop that reads its loss."""
    before = recorder.before_own

    def wait(kind: Kind, edge: Edge) -> None:
        if (kind, edge) == (Kind.STEP, Edge.END):
            device.synchronize()
        before(kind, edge)

    recorder.before_own = wait


def _note_offloads(recorder: Recorder, times: OpTimes) -> None:
    """Tell ``times`` before each collective of a unit whether that unit's shards are in the host's memory."""
    record = recorder.event

    def event(kind: Kind, edge: Edge, unit: int, num_bytes: int, comm: Comm | None, t_ns: int | None) -> None:
        if kind.info.is_collective and edge is Edge.BEGIN:
            times.offloads = any(each.index == unit and each.offload for each in recorder.header.units)
        record(kind, edge, unit, num_bytes, comm, t_ns)

    recorder.event = event  # type: ignore[method-assign]


@contextmanager
def _ending_after(steps: int, runtime: rank.RankRuntime) -> Iterator[None]:
    """End the body once it has taken some steps."""

    def check(*_: object) -> None:
        if runtime.trainer.steps_of_program >= steps:
            raise PlanEnded

    handle = register_optimizer_step_post_hook(check)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _changing_first_model(run: PlannedRun, runtime: rank.RankRuntime) -> Iterator[None]:
    """In the body, change the first model that is called, just before: its sharding, and what it checkpoints."""
    call = nn.Module.__call__

    def change(model: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of the model
        nn.Module.__call__ = call  # type: ignore[method-assign]
        main = sys.modules["__main__"]
        setattr(main, CALLED, model)
        made = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        vars(main).update({f"{CALLED}_optimizer_{place}": each for place, each in enumerate(made)})  # also a function's
        if run.change != Reshard(CALLED):
            sharding.change_sharding(run.change, runtime)
        for module in sharding.modules_of_classes(model, run.checkpoint) if run.checkpoint else ():
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        return model(*args, **kwargs)

    nn.Module.__call__ = change  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


@contextmanager
def _loading(without_data: Callable[[Any], Any]) -> Iterator[None]:
    """In the body, samplers draw real indices, and loaders have no workers."""
    load = DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        loader.num_workers, loader.pin_memory = 0, False
        with without_fakes():
            batches = load(loader)
        while True:
            with without_fakes():
                batch = next(batches, None)
            if batch is None:
                return
            yield without_data(batch)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DataLoader.__iter__ = load  # type: ignore[method-assign]


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = {
    "os.remove": "remove",
    "os.rename": "rename",
    "os.rmdir": "remove",
    "os.truncate": "cut",
    "os.system": "run",
    "os.posix_spawn": "run",
    "subprocess.Popen": "run",
}
"""Audit events of Python's library: what each does."""


@contextmanager
def _changing_nothing() -> Iterator[None]:
    """In the body, refuse to change a file and to start a program; once in a process, as the guard stays."""
    is_on = True

    def check(event: str, about: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(about[2], int) and about[2] & _WRITES and about[0] != os.devnull
        if is_on and (writes or event in _REFUSED):
            raise PermissionError(
                f"a plan changes nothing, and the program wants to {_REFUSED.get(event, 'write')} {about[0]}: leave "
                f'that out if "{PLANNED}" in os.environ'
            )

    sys.addaudithook(check)
    try:
        yield
    finally:
        is_on = False


def main(requests: int, answers: int) -> None:
    """Serve :func:`plan` as :func:`workbench.runtime.piped_rank.main` does, each in a child with all modules loaded."""
    piped_rank.main(requests, answers, {"plan": plan}, forks=True)
