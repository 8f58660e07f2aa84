"""``verify`` decodes why a step differs from that of an unsharded copy: steps with each fault, and without."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.booted_ranks import execute, namespace, run
from workbench.base.codec import decode
from workbench.engine import fully_shard
from workbench.errors import UsageError
from workbench.protocol.commands import Shard, Step, Verify, VerifyReply
from workbench.reports.verify_report import verify_report
from workbench.runtime import rank as rank_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3))


ENGINES = {
    "workbench": {"engine": "workbench"},
    "torch": {"engine": "torch"},
    "flat": {"engine": "torch", "api": "classic"},
    "pieces": {"engine": "torch", "api": "classic", "orig_params": True},
    "replicas": {},
}
"""Options of ``shard`` by engine: the last three are torch's two forms of its classic wrapper, and its DDP."""

OPTIONS = {}
"""More options of ``shard``, here and on the ranks; see :func:`on_ranks`."""


def each_engine(*left_out):
    """Return parameters for :func:`engine`; only the first and the last engine are quick."""
    names = [name for name in ENGINES if name not in left_out]
    return [n if n in {"workbench", "replicas"} else pytest.param(n, marks=pytest.mark.thorough) for n in names]


@pytest.fixture(params=each_engine())
def engine(request):
    """Each engine, which then runs the models of :func:`prepare`."""
    OPTIONS.update(ENGINES[request.param], is_replicated=request.param == "replicas")
    yield request.param
    OPTIONS.clear()


def with_options(options, function, *args):
    OPTIONS.clear()
    OPTIONS.update(options)
    return function(*args)


def on_ranks(world_size, function, *args):
    return run(world_size, with_options, OPTIONS, function, *args)


def prepare(kind="sgd", *, rows=4, **options):
    """Define a sharded ``model``, ``opt``, and ``batch()``: this rank's inputs, the same at each call."""
    ns = namespace()
    ns["model"] = make()
    options = OPTIONS | options
    if options.pop("is_replicated", False):
        ns["model"] = DistributedDataParallel(ns["model"], **options)
        rank_module._after_cell(None)
    else:
        execute(Shard(model="model", wrap=("Block",), **options))
    ns["sharded"] = id(ns["model"])  # verify would replace the model itself by its copy
    params = ns["model"].parameters()
    ns["opt"] = torch.optim.SGD(params, 0.5) if kind == "sgd" else torch.optim.AdamW(params, 1e-2)
    data = torch.randn(rows, 8, generator=torch.Generator().manual_seed(ns["rank"]))
    ns["batch"] = lambda: data
    return ns


def backward():
    ns = namespace()
    loss = ns["model"](ns["batch"]()).square().mean()
    loss.backward()
    return loss


def finish():
    namespace()["opt"].step()
    namespace()["opt"].zero_grad()


def plain(model):
    """Return the module in a wrapper."""
    return model.module if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) else model


def is_sharded_step():
    """Return whether this is not the step of verify's copy."""
    return id(namespace()["model"]) == namespace()["sharded"]


def own_grads():
    """Return this rank's parts of the gradients."""
    return [local(param.grad) for param in namespace()["model"].parameters() if param.grad is not None]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train():
    loss = backward()
    finish()
    return loss.item()


def verified(step=train, *, steps=1):
    """Return this rank's reply after ``steps`` right steps."""
    namespace()["right"], namespace()["train_step"] = train, step
    if steps:
        execute(Step(count=steps, fn="right"))
    return execute(Verify())


def report_of(world_size, function, *args):
    """Run ``function`` on ranks; return the report of their replies."""
    return verify_report([decode(VerifyReply, reply, "reply") for reply in on_ranks(world_size, function, *args)])


def facts(report):
    return [text for _, text in report.facts()]


# ---- steps without a fault


def is_right(api, kind, steps):
    prepare(kind, api=api)
    return verified(steps=steps)


@pytest.mark.parametrize("api", ["fully_shard", "classic"])
def test_a_right_step_has_no_fault(api):
    report = report_of(2, is_right, api, "adamw", 2)
    assert report.ok
    assert (report.faults, report.first_differences, report.problem) == ((), (), "")
    assert report.headline.startswith("sharded training is the same as unsharded: 10 parameters")


# ---- a norm of parts


def clip(max_norm, *, whole):
    """Clip gradients; without ``whole``, by the norm of this rank's rows."""
    if whole and hasattr(namespace()["model"], "clip_grad_norm_"):
        namespace()["model"].clip_grad_norm_(max_norm)
        return
    params = list(namespace()["model"].parameters())
    if whole:
        torch.nn.utils.clip_grad_norm_(params, max_norm)
        return
    grads = own_grads()
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(torch.clamp(max_norm / norm, max=1.0))


def clips(whole, kind="sgd", **options):
    prepare(kind, **options)

    def step():
        loss = backward()
        clip(0.01, whole=whole)
        finish()
        return loss.item()

    return verified(step, steps=2)


@pytest.mark.parametrize("engine", each_engine("replicas"), indirect=True)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_norm_of_parts(kind):
    report = report_of(2, clips, False, kind)
    assert not report.ok
    assert [fault.rule for fault in report.faults] == ["partial-norm"]
    assert report.headline.startswith("sharded training is NOT the same as unsharded: ")
    assert report.headline.endswith("clipped by the norm of each rank's own rows instead of the norm of all rows")
    assert any("it is sqrt(2) = 1.414" in text for text in facts(report))
    assert report.first_differences[0].what == "gradient"  # outputs are the same
    assert report.first_differences[0].words.startswith("2.bias, parameter 1 of 10 in the order of backward: ")
    assert report_of(2, clips, True, kind).faults == ()


def clips_with_the_wrapper(whole):
    return clips(whole, api="classic")


def test_a_norm_of_parts_with_the_wrapper():
    report = report_of(2, clips_with_the_wrapper, False)
    assert [fault.rule for fault in report.faults] == ["partial-norm"]
    assert report.first_differences[0].where == "rank 1 (elements 0-2)"
    assert report_of(2, clips_with_the_wrapper, True).faults == ()


def clips_with_replicas(whole):
    return clips(whole, mesh=(2, 2))


@pytest.mark.thorough
def test_a_norm_of_parts_with_replicas():
    report = report_of(4, clips_with_replicas, False)
    assert [fault.rule for fault in report.faults] == ["partial-norm"]
    assert report_of(4, clips_with_replicas, True).faults == ()


# ---- mean against sum


def scales(kind, factor, where):
    """Verify a step with wrongly scaled gradients: of the second block by ``factor``, or of all units if it is None."""
    ns = prepare(kind)
    model = ns["model"]
    if where == "divide":
        for module in (model, model[0], model[1]) if factor is None else (model[1],):
            module.set_gradient_divide_factor(1.0)

    def step():
        loss = namespace()["model"](namespace()["batch"]()).square().mean()
        (loss / 2 if where == "twice" and is_sharded_step() else loss).backward()
        finish()
        return loss.item()

    return verified(step, steps=0)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_sum_instead_of_a_mean(kind):
    report = report_of(2, scales, kind, None, "divide")
    assert not report.ok
    assert [fault.rule for fault in report.faults] == ["wrong-scale"]
    assert "are summed over the 2 ranks instead of averaged" in report.headline
    assert report.faults[0].evidence == ("gradients are 2 times those of the unsharded copy, on ranks 0-1",)


def test_a_sum_in_one_unit_names_its_parameters():
    report = report_of(2, scales, "sgd", 1, "divide")
    assert report.headline.endswith(
        "gradients of 4 parameters (1.down.weight, ...) are summed over the 2 ranks instead of averaged"
    ) or report.headline.endswith(
        "gradients of 4 parameters (1.down.bias, ...) are summed over the 2 ranks instead of averaged"
    )
    assert report.first_differences[0].name.startswith("1.down.")


@pytest.mark.usefixtures("engine")
def test_a_loss_divided_by_the_ranks_again():
    report = report_of(2, scales, "sgd", None, "twice")
    assert "gradients are divided by the 2 ranks twice" in report.headline


# ---- uneven batches


def weighs(before):
    ns = prepare(rows=12 if namespace()["rank"] == 0 else 4)
    weight = ns["batch"]().shape[0] * 2 / 16

    def step():
        loss = namespace()["model"](namespace()["batch"]()).square().mean()
        (loss * weight if before else loss).backward()
        if not before:
            for grad in own_grads():
                grad.mul_(weight)
        finish()
        return loss.item()

    return verified(step, steps=0)


@pytest.mark.usefixtures("engine")
def test_batches_weighed_after_the_average():
    report = report_of(2, weighs, False)
    assert [fault.rule for fault in report.faults] == ["uneven-batches"]
    assert any("the elements of the ranks' inputs: 96, 32" in text for text in facts(report))
    assert report_of(2, weighs, True).faults == ()


# ---- gradients that are never reduced


def never_reduces(is_on):
    prepare()["model"][0].set_requires_gradient_sync(is_on)
    reply = verified(steps=0)
    namespace()["model"][0].set_requires_gradient_sync(True)
    return reply, verified(steps=0)


@pytest.mark.parametrize("engine", each_engine("replicas", "flat", "pieces"), indirect=True)
@pytest.mark.usefixtures("engine")
def test_a_unit_that_is_never_reduced():
    replies = on_ranks(2, never_reduces, False)
    report = verify_report([decode(VerifyReply, reply, "reply") for reply, _ in replies])
    assert [fault.rule for fault in report.faults] == ["no-sync-left-on"]
    assert report.headline.endswith("gradients of unit 0 were never reduced")
    assert any(text.startswith("4 parameters without a gradient at the optimizer's step: 0.") for text in facts(report))
    assert all(after["ok"] for _, after in replies), "no gradient of the step that was verified is left"
    assert all(reply["ok"] for reply, _ in on_ranks(2, never_reduces, True))


def keeps_sums_of_replicas(is_on):
    prepare(mesh=(2, 1))["model"].set_requires_all_reduce(is_on)
    return verified(steps=0)


@pytest.mark.parametrize("engine", each_engine("replicas", "flat", "pieces"), indirect=True)
@pytest.mark.usefixtures("engine")
def test_an_all_reduce_of_replicas_that_is_left_off():
    report = report_of(2, keeps_sums_of_replicas, False)
    assert [fault.rule for fault in report.faults] == ["no-sync-left-on"]
    assert report.headline.endswith("gradients of units (root), 0, 1 were never reduced")
    assert report_of(2, keeps_sums_of_replicas, True).faults == ()


# ---- ranks that do not step, and other data


def steps_on_rank_0_only():
    ns = prepare()

    def step():
        loss = backward()
        if ns["rank"] == 0:
            namespace()["opt"].step()
        namespace()["opt"].zero_grad()
        return loss.item()

    return verified(step, steps=0)


@pytest.mark.usefixtures("engine")
def test_a_rank_whose_rows_never_move():
    report = report_of(2, steps_on_rank_0_only)
    assert [fault.rule for fault in report.faults] == ["rank-not-stepped"]
    assert report.faults[0].evidence == ("rank 0: 1 optimizer step", "rank 1: 0 optimizer steps")


def draws_new_data():
    ns = prepare()
    ns["batch"] = lambda: torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8).view(4, 8).float()
    return verified(steps=0)


@pytest.mark.usefixtures("engine")
def test_a_step_that_gets_other_data_each_time():
    report = report_of(2, draws_new_data)
    assert [fault.rule for fault in report.faults] == ["different-data"]


# ---- the optimizer's state, and optimizers


def resumes(change, ranks=(0, 1)):
    """Verify after three steps and a change of the optimizer's state on some ranks."""
    ns = prepare("adamw")
    ns["right"] = train
    execute(Step(count=3, fn="right"))
    states = list(ns["opt"].state.values())
    if change == "other":
        states = states if ns["rank"] in ranks else []
        for state in states:
            state["step"] += 4
    elif change == "zero":
        states[0]["step"].zero_()
    elif change == "shared":
        states[1]["step"] = states[0]["step"]
    elif change == "fewer":  # as of parameters that had no gradient in two steps
        states[1]["step"] -= 2
    elif change == "fresh":
        ns["opt"].state.pop(next(iter(ns["opt"].state)))
    elif change == "lost":
        del states[0]["step"]
    return verified(steps=0)


@pytest.mark.parametrize("engine", each_engine("flat", "pieces"), indirect=True)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("change", "verdict", "evidence"),
    [
        (
            "other",
            "the optimizer's state is of different steps on different ranks, as after a resume that failed on some, or "
            "where torch.amp.GradScaler, instead of ShardedGradScaler, looks at a rank's own shards",
            (
                "rank 0: 3 steps for 10 parameters (0.up.weight, ...)",
                "rank 1: 7 steps for 10 parameters (0.up.weight, ...)",
            ),
        ),
        (
            "zero",
            "the optimizer counts 0 steps although its moments are not zero, so it overrates them",
            ("ranks 0-1: 0 steps for 1 parameter (0.up.weight, ...)",),
        ),
        (
            "shared",
            "one step of the optimizer counted differently for parameters that all have a gradient, as if some shared "
            "one count",
            ("ranks 0-1: 1 step for 8 parameters (0.down.weight, ...), 2 steps for 2 parameters (0.up.weight, ...)",),
        ),
    ],
)
def test_wrong_numbers_of_steps_after_a_resume(change, verdict, evidence):
    report = report_of(2, resumes, change, (1,))
    assert [fault.rule for fault in report.faults] == ["optimizer-counters"]
    assert (report.faults[0].verdict, report.faults[0].evidence) == (verdict, evidence)
    assert report.problem


@pytest.mark.parametrize("engine", each_engine("flat", "pieces"), indirect=True)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("change", ["", "fewer", "fresh"])
def test_numbers_of_steps_that_training_may_have_are_no_fault(change):
    report = report_of(2, resumes, change)
    assert (report.ok, report.faults) == (True, ())


def refuses(change):
    with pytest.raises(UsageError, match="has moments without a number of steps") as caught:
        resumes(change)
    return str(caught.value)


@pytest.mark.parametrize("engine", each_engine("flat", "pieces"), indirect=True)
@pytest.mark.usefixtures("engine")
def test_moments_without_a_number_of_steps_are_refused():
    assert all(
        "for 0.up.weight, so it cannot step: load its whole state" in each for each in on_ranks(2, refuses, "lost")
    )


@pytest.mark.parametrize("engine", each_engine("workbench", "torch", "replicas"), indirect=True)
def test_numbers_of_steps_of_flat_parameters(engine):
    report = report_of(2, resumes, "other", (1,))
    assert [fault.rule for fault in report.faults] == ["optimizer-counters"]
    first = {"flat": "_flat_param", "pieces": "0._flat_param"}[engine]
    of = f"3 parameters ({first}, ...)"
    assert report.faults[0].evidence == (f"rank 0: 3 steps for {of}", f"rank 1: 7 steps for {of}")


def leaves_out(frozen):
    ns = prepare()
    first = plain(ns["model"])[0]
    first.requires_grad_(not frozen)
    inside = {id(param) for param in first.parameters()}
    ns["opt"] = torch.optim.SGD([param for param in ns["model"].parameters() if id(param) not in inside], 0.5)
    return verified(steps=0)


def test_a_unit_left_out_of_the_optimizer(engine):
    report = report_of(2, leaves_out, False)
    assert report.ok
    assert [fault.rule for fault in report.faults] == ["stale-optimizer"]
    part = "module 0.up, module 0.down" if engine == "replicas" else "unit 0"
    assert report.problem.endswith(f"compared after one step, but {part} got gradients and did not move")
    if engine != "replicas":  # DistributedDataParallel does not let parameters be frozen after it was made
        assert report_of(2, leaves_out, True).faults == ()


# ---- replicas


def has_replicas(drifted):
    ns = namespace()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = make()
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    ns["model"] = fully_shard(model, mesh=mesh)
    ns["opt"] = torch.optim.SGD(model.parameters(), 0.5)
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(ns["rank"]))
    ns["batch"] = lambda: data
    rank_module._after_cell(None)
    reply = verified(steps=2)
    if drifted and ns["rank"] == 1:
        with torch.no_grad():
            model[1].up.weight.to_local()[3] += 0.01
        reply = verified(steps=0)
    elif drifted:
        reply = verified(steps=0)
    return reply


def test_replicas_that_drift():
    report = report_of(2, has_replicas, True)
    assert not report.ok
    assert report.faults[0].rule == "drifting-replica"
    assert report.faults[0].evidence[0] == "1: the values of rank 0 differ from those of rank 1"
    assert report_of(2, has_replicas, False).faults == ()


# ---- precision


def rounds(dtype):
    ns = prepare()
    ns["opt"].param_groups[0]["lr"] = 30.0

    def step():
        loss = backward()
        for grad in own_grads() if is_sharded_step() else ():
            grad.copy_(grad.to(dtype))
        finish()
        return loss.item()

    return verified(step, steps=0)


@pytest.mark.usefixtures("engine")
def test_gradients_that_are_rounded():
    report = report_of(2, rounds, torch.bfloat16)
    assert [fault.rule for fault in report.faults] == ["precision"]
    assert report.headline.endswith("only precision differs: gradients are rounded to bfloat16")
    assert any("they agree to about 9 bits" in text or "they agree to about 8 bits" in text for text in facts(report))
    assert report_of(2, rounds, torch.float32).faults == ()


# ---- differences of which the cause is not decided


def computes_otherwise():
    """Add noise to the output of the second block, in the sharded step only."""
    ns = prepare()
    is_sharded = []
    plain(plain(ns["model"])[1]).register_forward_hook(
        lambda _, args, output: output + torch.rand_like(output) if is_sharded else None
    )

    def step():
        is_sharded[:] = [True] * is_sharded_step()
        return train()

    return verified(step, steps=0)


def test_without_a_cause_only_the_first_differences_are_said(engine):
    report = report_of(2, computes_otherwise)
    assert not report.ok
    assert report.faults == ()
    assert report.headline == "sharded training is NOT the same as unsharded: 10 parameters compared after one step"
    output, grad, param = (each.words for each in report.first_differences)
    assert output.startswith("1, module 6 of 8 in the order of execution: ")
    assert output.endswith("% of its size, on ranks 0-1")
    assert grad.startswith("2.bias, parameter 1 of 10 in the order of backward: ")
    where = {
        "flat": "rank 1 (elements 0-2)",
        "pieces": "rank 1 (elements 0-2)",
        "replicas": "ranks 0-1 (rows 0-2)",
    }
    assert grad.endswith(f"% of its size, on {where.get(engine, 'rank 0 (rows 0-1); rank 1 (row 2)')}")
    assert param.startswith("0.up.weight, parameter 1 of 10 of the model: ")
