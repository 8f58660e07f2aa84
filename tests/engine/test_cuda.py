"""Behaviour that needs a GPU: NCCL, streams, no host synchronisation in a step, pinned memory, peak memory.

One rank is enough for most tests: a mesh of one rank has no collectives, so that copies and streams are seen alone.
Two ranks show the collectives; if there is only one device, they share it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from tests.helpers.forked_ranks import ON_GPUS, run_on_gpus
from tests.helpers.simulated_device import ByRows
from tests.helpers.small_models import Block, Net
from workbench import engine
from workbench.engine import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, probe
from workbench.engine.backends import backend_of
from workbench.engine.backends.streams import DeviceStreams
from workbench.engine.collective_order import Collective
from workbench.engine.fsdp_state import states_below, units_of
from workbench.engine.shard_layout import ShardLayout
from workbench.events import BESIDE, COLLECTIVES, Kind
from workbench.replay.device import on_device
from workbench.replay.spans import spans
from workbench.runtime.recorder import Recorder
from workbench.trace import RankTrace, Trace, check
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # warnings of NCCL and of torch's engine
]
RANKS = [1, 2]
DIM, VOCAB, LENGTH = 256, 64, 32


@pytest.fixture(scope="module", autouse=True)
def ranks_stay():
    """The module has its own ranks: its first test starts them, its last one ends them."""
    yield
    ON_GPUS.end()


def make(**options: object) -> Net:
    torch.manual_seed(0)
    return Net(**({"dim": DIM, "vocab": VOCAB, "num_blocks": 4} | options)).cuda()


def mesh() -> torch.distributed.device_mesh.DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))


def shard(model: nn.Module, by: Callable[..., nn.Module] = fully_shard, **options: object) -> nn.Module:
    for block in model.blocks:
        by(block, mesh=mesh(), **options)
    return by(model, mesh=mesh(), **options)


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(VOCAB, (4, LENGTH), generator=generator).cuda()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise if the body makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- numbers


def parity(options: dict[str, object], tolerance: dict[str, float]) -> None:
    plain = make()
    sharded = shard(copy.deepcopy(plain), **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, sharded)]
    for step in range(5):
        batch = tokens(step)
        losses = [loss_of(m, batch) for m in (plain, sharded)]
        for loss in losses:
            loss.backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
        torch.testing.assert_close(losses[1], losses[0], **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for value, wanted in zip(sharded.parameters(), plain.parameters(), strict=True):
        full = value.detach().to(value.device_mesh.device_type).full_tensor()
        torch.testing.assert_close(full, wanted, **tolerance)


CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LOOSE = {"rtol": 5e-2, "atol": 2e-2}
WAYS = {
    "plain": ({}, CLOSE),
    "kept after forward": ({"reshard_after_forward": False}, CLOSE),
    "offloaded": ({"offload_policy": CPUOffloadPolicy()}, CLOSE),
    "offloaded, pageable": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, CLOSE),
    "bf16": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, LOOSE),
    "bf16 sums": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}, LOOSE),
}


@pytest.mark.parametrize(("options", "tolerance"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("world_size", RANKS)
def test_equals_an_unsharded_copy(world_size, options, tolerance):
    run_on_gpus(world_size, parity, options, tolerance)


def divided() -> None:
    """The user's factor applies even where there is no reduce-scatter to apply it."""
    model, twin = shard(make()), shard(make())
    for block in twin.blocks:
        block.set_gradient_divide_factor(4 * dist.get_world_size())
    for m in (model, twin):
        loss_of(m, tokens(0)).backward()
    for value, wanted in zip(twin.blocks.parameters(), model.blocks.parameters(), strict=True):
        torch.testing.assert_close(4 * value.grad.to_local(), wanted.grad.to_local(), **CLOSE)


@pytest.mark.parametrize("world_size", RANKS)
def test_a_divide_factor_of_the_users(world_size):
    run_on_gpus(world_size, divided)


def fed_from_the_host() -> None:
    model = shard(make())
    batch = tokens(0)
    assert torch.equal(model(batch[:, :-1].cpu()), model(batch[:, :-1]))
    assert model.blocks[0](torch.ones(1, DIM)).is_cuda


@pytest.mark.parametrize("world_size", RANKS)
def test_inputs_on_the_host_are_moved(world_size):
    run_on_gpus(world_size, fed_from_the_host)


# ---- offloading


def offloaded(*, is_fused: bool) -> None:
    model = shard(make(), offload_policy=CPUOffloadPolicy())
    for _ in range(2):
        loss_of(model, tokens(0)).backward()
    for param in model.parameters():
        assert param.to_local().is_pinned()
        assert param.grad.to_local().device.type == "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    optimizer.step()
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    engine.reshard_module(model, offload_policy=engine.OffloadPolicy(), optimizers=[optimizer])
    for name, param in model.named_parameters():
        assert param.to_local().is_cuda
        assert param.grad.to_local().is_cuda
        assert torch.equal(param.to_local().cpu(), before[name])
    optimizer.step()
    engine.reshard_module(model, offload_policy=CPUOffloadPolicy(), optimizers=[optimizer])
    assert all(p.to_local().is_pinned() for p in model.parameters())
    assert all(s["exp_avg"].to_local().device.type == "cpu" for s in optimizer.state.values())
    loss_of(model, tokens(1)).backward()
    optimizer.step()
    plain = engine.unshard_module(model, [optimizer])
    assert all(p.is_cuda for p in plain.values())
    optimizer.step()


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("world_size", RANKS)
def test_offloaded_shards_are_pinned_and_copied_in_place(world_size, is_fused):
    run_on_gpus(world_size, partial(offloaded, is_fused=is_fused))


def copied_beside_backward() -> None:
    """Backward waits for no copy to the host; after it all copies are complete, however far the device lags."""
    offloading, twin = shard(make(), offload_policy=CPUOffloadPolicy()), shard(make())
    for step in range(4):
        for model in (offloading, twin):
            loss = loss_of(model, tokens(step))
            torch.cuda._sleep(20_000_000)
            if step:  # the first step waits for the other ranks and fills the allocators
                with no_synchronisation():
                    loss.backward()
            else:
                loss.backward()
        for param, wanted in zip(offloading.parameters(), twin.parameters(), strict=True):
            assert param.grad.to_local().is_pinned()
            assert torch.equal(param.grad.to_local(), wanted.grad.to_local().cpu())  # no wait since backward
        if step < 2:  # from then on gradients accumulate
            offloading.zero_grad()
            twin.zero_grad()


@pytest.mark.parametrize("world_size", RANKS)
def test_offloaded_gradients_are_copied_during_backward(world_size):
    run_on_gpus(world_size, copied_beside_backward)


def brought_without_waiting() -> None:
    """Shards go to the device in one copy each; the host does not wait for it, even with a single rank."""
    model = shard(make(), offload_policy=CPUOffloadPolicy())
    for step in range(2):
        loss_of(model, tokens(step)).backward()
    batch = tokens(2)
    with no_synchronisation():
        loss = loss_of(model, batch)
    loss.backward()


@pytest.mark.parametrize("world_size", RANKS)
def test_the_host_does_not_wait_for_offloaded_shards(world_size):
    run_on_gpus(world_size, brought_without_waiting)


def stepped_within_backward() -> None:
    """A hook that steps within backward reads the gradient on the host."""
    seen: dict[str, torch.Tensor] = {}
    model, twin = shard(make(), offload_policy=CPUOffloadPolicy()), shard(make())
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.to_local().clone()}))
    for m in (model, twin):
        loss = loss_of(m, tokens(0))
        torch.cuda._sleep(20_000_000)
        loss.backward()
    for name, param in twin.named_parameters():
        assert torch.equal(seen[name], param.grad.to_local().cpu())


@pytest.mark.parametrize("world_size", RANKS)
def test_hooks_see_offloaded_gradients(world_size):
    run_on_gpus(world_size, stepped_within_backward)


# ---- streams


def asynchronous(options: dict[str, object]) -> None:
    model = shard(make(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(2):
        loss_of(model, tokens(step)).backward()  # the first step waits for the other ranks and fills the allocator
        optimizer.step()
        optimizer.zero_grad()
    batch = tokens(2)
    with no_synchronisation():
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", RANKS)
def test_a_step_never_lets_the_host_wait_for_the_device(world_size, options):
    run_on_gpus(world_size, asynchronous, options)


def recorded() -> None:
    """Each event gets one device time, after it was issued; recording adds no synchronisation."""
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = Recorder(Header(world_size=dist.get_world_size()))
    recorder.device_clock = backend_of(device).clock()
    probe.active = recorder
    model = shard(make())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        batch = tokens(step)
        with no_synchronisation() if step == 2 else nullcontext():
            recorder.begin_step()
            loss_of(model, batch).backward()
            torch.cuda._sleep(50_000_000)
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step()
    recorder.wait_for_device(torch.cuda.synchronize)
    probe.active = None
    rows = np.frombuffer(recorder.drain().rows, ROW_DTYPE)
    whole = RankTrace(dist.get_rank(), rows)
    assert check(Trace(recorder.header, (whole,))) == []
    device_rows = rows[rows["kind"] == Kind.DEVICE]
    assert sorted(device_rows["value"].tolist()) == rows["seq"][~np.isin(rows["kind"], BESIDE)].tolist()
    found = on_device(whole, RankTrace(whole.rank, rows, KeyFrame()), recorder.header)
    assert found is not None
    steps, collectives = spans(found.part.rows, (Kind.STEP,)), spans(found.part.rows, COLLECTIVES)
    assert ((steps.end_ns - steps.begin_ns)[1:] > 10_000_000).all()  # the device spins for longer
    assert (collectives.end_ns >= collectives.begin_ns).all()
    assert len(collectives) == 0 or dist.get_world_size() > 1


@pytest.mark.parametrize("world_size", RANKS)
def test_the_device_reports_when_it_reached_each_event(world_size):
    run_on_gpus(world_size, recorded)


def lagging_device() -> None:
    """The device sleeps, so that data without stream ordering would be read too early or overwritten too soon."""
    plain = make()
    sharded = shard(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(3):
        batch = tokens(step)
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            loss = loss_of(model, batch)
            torch.cuda._sleep(20_000_000)
            loss.backward()
            if model is plain:
                for param in model.parameters():
                    dist.all_reduce(param.grad)
                    param.grad.div_(dist.get_world_size())
            torch.cuda._sleep(20_000_000)
            optimizer.step()
            optimizer.zero_grad()
        sharded.unshard()  # manually, right after the step
        sharded.reshard()
    for value, wanted in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value.full_tensor(), wanted, **CLOSE)


@pytest.mark.parametrize("world_size", RANKS)
def test_numbers_do_not_depend_on_how_far_the_device_lags(world_size):
    run_on_gpus(world_size, lagging_device)


def stream_of_each_gather() -> None:
    seen: list[tuple[str, torch.cuda.Stream]] = []
    model = shard(make())
    loss_of(model, tokens(0)).backward()
    for unit in units_of(states_below(model)):
        original = unit.comm_choice.pair.gather.__call__

        def gather(*args, name=unit.name, original=original, **kwargs):
            seen.append((name, torch.cuda.current_stream()))
            return original(*args, **kwargs)

        wrapped = type(
            "Watched", (), {"allocate": unit.comm_choice.pair.gather.allocate, "__call__": staticmethod(gather)}
        )
        unit.use_comm(unit.comm_choice.custom(gather=wrapped()))
    ctx, compute = model._get_fsdp_state()._comm_ctx, torch.cuda.current_stream()
    loss_of(model, tokens(1)).backward()
    blocks = [f"blocks.{i}" for i in range(4)]
    assert [name for name, _ in seen] == ["", *blocks, *blocks[::-1]]  # forward, then backward one unit ahead
    assert {stream for _, stream in seen} == {ctx.streams.copy_in}
    assert ctx.streams.copy_in != compute != ctx.streams.reduce


def test_all_gathers_are_issued_one_ahead_in_their_own_stream():
    run_on_gpus(2, stream_of_each_gather)


def test_each_context_has_three_streams_besides_compute():
    streams = DeviceStreams(backend_of(torch.device("cuda", torch.cuda.current_device())))
    with streams.gathering():
        assert torch.cuda.current_stream() == streams.copy_in
    with streams.reducing(after_compute=True):
        assert torch.cuda.current_stream() == streams.reduce
        with streams.trailing(torch.ones(1, device="cuda")):
            assert torch.cuda.current_stream() == streams.trail
    assert len({streams.copy_in, streams.reduce, streams.trail, torch.cuda.current_stream()}) == 4


def kernels_of(body: Callable[[], object]) -> int:
    """Count the kernels, copies and fills that ``body`` launches."""
    body()  # one-time setup
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        body()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def test_many_parameters_are_copied_by_few_kernels():
    layouts = [ShardLayout(torch.Size((rows, 3)), 0, 4) for rows in range(1, 65)]
    grads = [torch.rand(layout.shape, device="cuda") for layout in layouts]
    chunks = torch.empty(4, sum(layout.slot_numel for layout in layouts), device="cuda")
    fulls = [torch.empty(4 * layout.slot_numel, device="cuda") for layout in layouts]
    targets = [layout.by_rank(full) for layout, full in zip(layouts, fulls, strict=True)]
    backend = backend_of(chunks.device)
    assert kernels_of(lambda: backend.copy_in([ByRows(la) for la in layouts], [[grad] for grad in grads], chunks)) < 8
    assert kernels_of(lambda: backend.copy_out(chunks, targets)) < 8
    for layout, full, grad in zip(layouts, fulls, grads, strict=True):
        assert torch.equal(layout.full_view(full), grad)


# ---- aborted


def spinning_kernel() -> None:
    """Rank 1 does not join the last all-gather; rank 0's kernel waits for it until the group is released."""
    group = engine.groups.group_of((0, 1), "cuda")
    own, rows = torch.ones(4, device="cuda"), torch.empty(8, device="cuda")
    call = Collective("all-gather", "a", rows.nbytes)
    for number in range(3):
        if number < 2 or dist.get_rank() == 0:
            group.issue(dist.all_gather_into_tensor, rows, own, collective=call)
        if number < 2:
            torch.cuda.synchronize()
            engine.groups.end_iteration([group])
    engine.groups.rebuild_all()
    torch.cuda.synchronize()  # would hang otherwise
    pending = group.issue(dist.all_gather_into_tensor, rows, own, collective=call)
    pending.wait()  # the stream waits, not the host
    pending.finish()
    assert rows.tolist() == [1.0] * 8


def test_a_kernel_that_waits_for_a_peer_ends_with_its_group():
    run_on_gpus(2, spinning_kernel)


# ---- memory


def peaks() -> None:
    """Compare our allocator peak in a settled step with that of torch's engine on the same model."""
    peak = {}
    for api in (fsdp, engine):
        model = shard(make(num_blocks=8), api.fully_shard)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            if step == 3:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            loss_of(model, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        peak[api] = torch.cuda.max_memory_allocated() - before
        del model, optimizer
    block = sum(p.numel() for p in Block(DIM).parameters()) * 4
    assert peak[engine] <= peak[fsdp] + block // 8  # the allocator rounds up


@pytest.mark.parametrize("world_size", RANKS)
def test_a_step_needs_no_more_memory_than_torchs(world_size):
    run_on_gpus(world_size, peaks)
