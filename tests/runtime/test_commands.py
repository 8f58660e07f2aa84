"""Commands on real ranks: replies, refusals, and leftovers."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.helpers.booted_ranks import assert_refused, drain, execute, namespace, prepare, run
from tests.helpers.stopped_step import Channel
from workbench.base.codec import decode
from workbench.engine import FSDPModule, RanksDisagreeError
from workbench.events import Category, Edge, Kind
from workbench.protocol.commands import Shard, ShardReply, Step, Unshard, Verify, VerifyReply
from workbench.protocol.rank_messages import ListNames, Locate
from workbench.replay.units import unmanaged_notes
from workbench.reports.sharding_reports import shard_report
from workbench.reports.verify_report import verify_report
from workbench.runtime import model_summary
from workbench.runtime import rank as rank_module
from workbench.runtime.trainer import find_step_function
from workbench.trace import header_from_dict, key_frame_from_dict
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.header import join
from workbench.trace.invariants import check
from workbench.trace.schema import ROW_DTYPE, KeyFrame


def trace_of(content, buffers):
    rows = np.frombuffer(buffers[0], ROW_DTYPE)
    return Trace(
        header=header_from_dict(content.header),
        ranks=(RankTrace(rank=content.position.rank, rows=rows, start=KeyFrame(), lost=0),),
    )


def refused(command):
    try:
        execute(command)
    except Exception as error:  # noqa: BLE001 - the test checks which one
        return f"{type(error).__name__}: {error}"
    return "accepted"


def life_of_a_model():
    ns = prepare()
    out = {"shard": execute(Shard(model="model", wrap=("Block",)))}
    out["optimizer holds DTensors"] = all(isinstance(p, DTensor) for p in ns["opt"].param_groups[0]["params"])
    out["step"] = execute(Step(count=3))
    out["verify"] = execute(Verify())
    out["next"] = execute(Step(count=1))
    content, buffers = drain()
    trace = trace_of(content, buffers)
    rows = trace.ranks[0].rows
    out["rules"] = check(trace)
    out["steps"] = rows["step"][(rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.END)].tolist()
    metrics = rows[rows["kind"] == Kind.METRIC]
    out["losses"] = metrics["value"].tolist()
    out["metrics"] = {trace.header.strings[index] for index in metrics["module"].tolist()}
    ends = {edge: rows["t_ns"][(rows["kind"] == Kind.STEP) & (rows["edge"] == edge)] for edge in (Edge.BEGIN, Edge.END)}
    out["recorded_s"] = ((ends[Edge.END] - ends[Edge.BEGIN]) / 1e9).tolist()
    out["frame"] = key_frame_from_dict(content.key_frame)
    out["units"] = [u.name for u in trace.header.units]
    out["unshard"] = execute(Unshard(model="model"))
    out["plain"] = type(ns["model"]).__name__
    out["after"] = execute(Step(count=1))
    return out


def loaded_by_a_first_shard():
    prepare()
    before = set(sys.modules)
    execute(Shard(model="model", wrap=("Block",)))
    return sorted(set(sys.modules) - before)


@pytest.mark.thorough
def test_modules_for_sharding_are_imported_before_the_fork():
    """In a new process: other tests import more than the ranks' module does."""
    code = (
        "from tests.helpers import booted_ranks; from tests.runtime import test_commands as t;"
        "print(*booted_ranks.run(2, t.loaded_by_a_first_shard))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[] []\n"


@pytest.mark.parametrize("world_size", [1, 2])
def test_shard_step_verify_unshard(world_size):
    for out in run(world_size, life_of_a_model):
        shard = out["shard"]
        assert shard["units"] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
        assert shard["optimizers"] == 1
        assert shard["bytes_unsharded"] == 4 * shard["num_elements"]
        assert out["optimizer holds DTensors"]
        assert out["step"]["optimizer_steps"] == 3
        assert (out["step"]["first_step"], out["next"]["first_step"]) == (0, 3)
        assert out["metrics"] == {"loss"}
        # the time around a step holds what is recorded of it
        for told, recorded in zip(out["step"]["seconds"], out["recorded_s"], strict=False):
            assert recorded <= told < recorded + 60
        assert out["verify"]["ok"]
        assert out["verify"]["max_abs_diff"] < 1e-6
        assert out["verify"]["loss_sharded"] == pytest.approx(out["verify"]["loss_reference"], abs=1e-6)
        # verify left parameters, optimizer and the random state of the data unchanged
        assert out["next"]["losses"] == [out["verify"]["loss_sharded"]]
        assert out["rules"] == []
        assert out["steps"] == [0, 1, 2, 3]
        assert out["losses"] == out["step"]["losses"] + out["next"]["losses"]
        assert sorted(out["units"]) == ["", "blocks.0", "blocks.1", "blocks.2"]
        live = out["frame"].bytes_by_category
        assert live[Category.SHARDED_PARAMS] == shard["bytes_at_rest"]
        assert live[Category.OPTIMIZER_STATE] > 0
        kept = (Category.SHARDED_PARAMS, Category.OPTIMIZER_STATE, Category.RESERVED)
        assert sum(live) == sum(live[category] for category in kept)
        assert out["unshard"] == {"model": "model", "num_params": 21, "optimizers": 1}
        assert out["plain"] == "Net"
        assert out["after"]["steps_done"] == 1


def classes_chosen():
    ns = prepare()
    named = execute(Shard(model="model", wrap=("Block",)))
    execute(Unshard(model="model"))
    ns["one"] = torch.nn.Linear(4, 4)
    return [
        decode(ShardReply, reply, "reply") for reply in (named, execute(Shard(model="model")), execute(Shard("one")))
    ]


def test_an_automatic_wrap_class_is_reported_and_a_given_one_is_not():
    for replies in run(1, classes_chosen):
        assert [reply.chosen for reply in replies] == [None, ("Block",), ()]
        named, chosen, alone = (dict(shard_report([reply]).facts()) for reply in replies)
        assert "wrapped" not in named
        assert chosen["wrapped"] == "Block, the class repeated most; to choose another: --wrap CLASS"
        assert alone["wrapped"] == "nothing: no list of modules repeats a class; to choose another: --wrap CLASS"


def losses_with(reshard):
    prepare()
    execute(Shard(model="model", reshard_after_forward=reshard))
    losses = execute(Step(count=2))["losses"]
    execute(Unshard(model="model"))
    execute(Shard(model="model", reshard_after_forward="true"))
    return losses + execute(Step(count=2))["losses"]


def test_policies_do_not_change_numbers_and_training_continues_after_a_reshard():
    auto, true, false = (run(2, losses_with, policy) for policy in ("auto", "true", "false"))
    assert auto == true == false


def wrong_requests():
    ns = prepare()
    ns["number"] = 3
    ns["with_batch"] = lambda model, batch, *, lr=0.1, **options: None
    ns["decorated"] = functools.wraps(ns["with_batch"])(lambda: None)  # which passes the arguments
    assert find_step_function("decorated") is ns["decorated"]
    texts = [
        refused(Shard(model="nothing")),
        refused(Shard(model="model.nothing")),
        refused(Shard(model="number")),
        refused(Shard(model="model", wrap=("Blok",))),
        refused(Shard(model="model", ignore=("nope*",))),
        refused(Unshard(model="model")),
        refused(Step(fn="nothing")),
        refused(Step(fn="number")),
        refused(Step(fn="with_batch")),
        refused(Verify()),
        refused(Verify(model="model")),
    ]
    untouched = not any(isinstance(m, FSDPModule) for m in ns["model"].modules())
    execute(Shard(model="model"))
    texts.append(refused(Shard(model="model")))
    ns["twin"] = prepare()["model"]
    execute(Shard(model="twin"))
    ns["model"] = torch.nn.Linear(2, 2)
    execute(Shard(model="model"))
    texts.append(refused(Verify()))
    return untouched, texts


def test_every_wrong_request_gives_a_remedy():
    untouched, texts = run(1, wrong_requests)[0]
    assert untouched
    parts = [
        "no variable 'nothing'",
        "'model' has no attribute 'nothing'",
        "'number' is a int, not a torch.nn.Module",
        "did you mean Block?",
        "--ignore nope* matches no parameter; parameters: ",
        "not sharded; shard it first: %fsdp shard model",
        "no variable 'nothing'",
        "'number' is a int, not a function",
        "with_batch() wants model, batch, but a step is called without arguments: define one that passes them, such as "
        "def step(): return with_batch(model, batch), and name it with --fn step",
        "no model is sharded",
        "'model' is not sharded",
        "sharded already; change how: %fsdp reshard model, or undo it first: %fsdp unshard model",
        "several models are sharded: model, twin",
    ]
    assert_refused(texts, parts)


def refuse_half_way():
    ns = prepare()
    ns["model"].scale = torch.nn.Parameter(torch.tensor(1.0))  # the root's own: the blocks are sharded first
    texts = refused(Shard(model="model"))
    return texts, [type(m).__name__ for m in ns["model"].modules() if isinstance(m, FSDPModule)]


def test_a_refused_shard_leaves_the_model_as_it_was():
    for texts, sharded in run(2, refuse_half_way):
        assert texts.startswith("ValueError: parameter 'scale' is a scalar")
        assert sharded == []


def different_models():
    ns = prepare(dim=8 + 8 * namespace()["rank"])
    texts = refused(Shard(model="model"))
    return texts, isinstance(ns["model"], FSDPModule)


def test_different_models_are_reported_before_anything_changes():
    for texts, sharded in run(2, different_models):
        assert texts.startswith(RanksDisagreeError.__name__)
        assert "rank 0 has" in texts
        assert "rank 1 has" in texts
        assert not sharded


def closure_step():
    ns = prepare()
    execute(Shard(model="model"))
    model, opt = ns["model"], ns["opt"]

    def train_step():
        model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        opt.step()
        opt.zero_grad()

    ns["train_step"] = train_step
    return execute(Verify())


def test_verify_takes_a_step_whose_model_is_in_a_closure():
    (reply,) = run(1, closure_step)
    assert reply["ok"]


def own_loop():
    ns = prepare()
    execute(Shard(model="model"))
    for _ in range(2):
        ns["train_step"]()
    with torch.no_grad():
        ns["model"](torch.zeros(1, 2, dtype=torch.long))
    trace = trace_of(*drain())
    rows = trace.ranks[0].rows
    steps = rows[rows["kind"] == Kind.STEP]
    return steps["step"].tolist(), check(trace), int(rows["step"][-1])


def test_the_user_s_own_loop_is_recorded_in_steps():
    for steps, broken, last in run(2, own_loop):
        assert steps == [0, 0, 1, 1]
        assert broken == []
        assert last == -1  # an evaluation is not a step


def returns(kind):
    ns = prepare()
    execute(Shard(model="model"))
    values = {"none": None, "text": "x", "int": 3, "tensor": torch.tensor(2.5), "bool": True}
    values["dtensor"] = next(iter(ns["model"].parameters()))
    ns["train_step"] = lambda: values[kind]
    try:
        return execute(Step())["losses"]
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "expected"), [("none", None), ("text", None), ("bool", None), ("int", [3.0]), ("tensor", [2.5])]
)
def test_a_number_returned_is_the_loss(kind, expected):
    assert run(1, returns, kind) == [expected]


def test_a_loss_that_is_a_dtensor_is_refused():
    assert "full_tensor().item()" in run(1, returns, "dtensor")[0]


def made_again():
    """Run a cell that makes a model, twice; return the units in use after each, and after a step."""
    found = []
    for _ in range(2):
        prepare()
        execute(Shard(model="model", wrap=("Block",)))
        found.append([unit.name for unit in trace_of(*drain()).header.units if unit.in_use])
    execute(Step(count=1))
    units = trace_of(*drain()).header.units
    return [*found, [unit.name for unit in units if unit.in_use]], [unit.gone for unit in units]


def test_a_model_that_was_made_again_takes_the_place_of_the_one_before():
    for (first, second, after), gone in run(2, made_again):
        assert len(first) == len(set(after)) == len(after)
        assert len(second) == len(first)
        assert gone == [True] * len(first) + [False] * len(first)


def position_and_names():
    prepare()
    where, names = Channel()(Locate()), Channel()(ListNames())
    refusals = []
    for data in ({"word": "dance"}, {"word": "locate", "loud": True}, {"word": "give up"}, {}, ["where"]):
        try:
            rank_module.handle_request(data)
        except ValueError as error:
            refusals.append(str(error))
    return where, names, refusals


def test_the_control_channel_reports_position_and_variables():
    where, names, refusals = run(1, position_and_names)[0]
    assert (where.rank, where.unfinished, where.optimizer_steps) == (0, 0, 0)
    assert "model" in names.modules
    assert {"rank", "world_size", "device", "mesh", "log_metric"} <= set(names.variables)
    assert refusals[0].startswith("unknown request 'dance'; known: locate, stacks, line")
    assert refusals[1] == "request 'locate' has unknown ['loud']"
    assert refusals[2] == "request 'give up' lacks ['reason']"
    assert all(texts.startswith("unknown request None; known: ") for texts in refusals[3:])


class Trainee(torch.nn.Linear):
    """Calls backward within its own forward if ``is_inside``."""

    is_inside = False

    def forward(self, x):
        loss = super().forward(x).square().mean()
        if self.is_inside:
            loss.backward()
        return loss


def missed_gradients():
    """Return the replies of steps whose backward runs inside of forward, or that keep gradients, on purpose or not."""
    ns = namespace()
    ns["model"] = model = Trainee(4, 4)
    x = torch.ones(2, 4)

    def train_step():
        model.zero_grad()
        loss = model(x)
        if not model.is_inside:
            loss.backward()

    ns["train_step"] = train_step
    execute(Shard(model="model"))
    texts = {"usual": execute(Step())}
    model.set_requires_gradient_sync(False)
    texts["kept"] = execute(Step())
    model.set_requires_gradient_sync(True)
    texts["kept before"] = execute(Step())
    model.is_inside = True
    texts["inside"] = execute(Step())
    texts["inside, then usual"] = missed_in_the_first_of_two(model)
    model.reset_iter_state()
    return {name: stepped["unreduced"] for name, stepped in texts.items()}


def missed_in_the_first_of_two(model):
    """Take two steps of one command, of which only the first leaves gradients; return the reply."""
    train_step = namespace()["train_step"]

    def then_usual():
        train_step()
        model.is_inside = False

    namespace()["train_step"] = then_usual
    return execute(Step(count=2))


def test_a_step_names_unreduced_gradients():
    for texts in run(2, missed_gradients):
        assert texts == {"usual": [], "kept": [], "kept before": [], "inside": [""], "inside, then usual": [""]}


class Adapted(torch.nn.Module):
    """Has an ignored parameter, and a buffer with different values on each rank."""

    def __init__(self, rank):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(4, 4, bias=False), torch.nn.Parameter(torch.ones(3))
        self.register_buffer("drawn", torch.full((2,), float(rank)))
        self.register_buffer("same", torch.ones(2, dtype=torch.bool))

    def forward(self, x):
        return self.layer(x) * self.scale.sum()


def evaluated(api, orig_params):
    """Return the parameters reported in no unit, and the sizes, after an evaluation that leaves the root unsharded."""
    ns = namespace()
    ns["model"] = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 2)))
    execute(Shard(model="model", wrap=("Sequential",), api=api, orig_params=orig_params))
    with torch.no_grad():
        ns["model"](torch.ones(2, 4))
    names = [name for size in model_summary.sizes_of(ns["model"]) for name in size.names]
    return model_summary.unmanaged(model_summary.sharded_variables()).params, sorted(names)


APIS = pytest.mark.parametrize(("api", "orig_params"), [("fully_shard", False), ("classic", False), ("classic", True)])


@APIS
def test_an_unsharded_root_does_not_have_its_parameters_in_no_unit(api, orig_params):
    names = ["0.bias", "0.weight", "1.0.bias", "1.0.weight"]
    assert [tuple(map(tuple, found)) for found in run(2, evaluated, api, orig_params)] == [((), tuple(names))] * 2


def hooked(api, orig_params):
    """Return the hooks reported as never called: before and after an evaluation, and after their removal."""
    ns = namespace()
    ns["model"] = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Sequential(torch.nn.Linear(4, 2)))
    execute(Shard(model="model", wrap=("Sequential",), api=api, orig_params=orig_params))
    handles = [param.register_hook(lambda grad: grad) for param in ns["model"].parameters()]
    texts = [model_summary.unmanaged(model_summary.sharded_variables()).hooks]
    with torch.no_grad():
        ns["model"](torch.ones(2, 4))
    texts.append(model_summary.unmanaged(model_summary.sharded_variables()).hooks)
    for handle in handles:
        handle.remove()
    return [*texts, model_summary.unmanaged(model_summary.sharded_variables()).hooks]


@APIS
def test_hooks_on_a_root_that_an_evaluation_left_unsharded_are_named_as_before(api, orig_params):
    for before, after, removed in run(2, hooked, api, orig_params):
        assert len(before) == (2 if (api, orig_params) == ("classic", False) else 3)
        assert sorted(after) == sorted(before)
        assert removed == ()
        if len(before) == 3:
            assert sorted(before) == ["model.0.weight", "model.1.0.bias", "model.1.0.weight"]


def unmanaged():
    ns = namespace()
    ns["model"] = model = Adapted(ns["rank"])
    ns["opt"] = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = execute(Shard(model="model", ignore=("scale",)))
    model.layer.weight.register_hook(lambda grad: grad)
    model.adapter = torch.nn.Linear(4, 4)
    ns["same"], ns["part"] = model, model.layer

    def train_step():
        ns["model"](torch.ones(2, 4)).sum().backward()
        ns["opt"].step()
        ns["opt"].zero_grad()

    ns["train_step"] = train_step
    headers = [rank_module.this_rank().recorder.header]
    execute(Step(count=1))
    headers.append(rank_module.this_rank().recorder.header)
    verified = execute(Verify())
    model.drawn.zero_()
    rank_module._after_cell(None)
    headers.append(rank_module.this_rank().recorder.header)
    return sharded, verified, headers


def test_unmanaged_parameters_are_named_with_a_remedy():
    replies = run(2, unmanaged)
    shard = shard_report([decode(ShardReply, sharded, "reply") for sharded, *_ in replies])
    verify = verify_report([decode(VerifyReply, verified, "reply") for _, verified, _ in replies])
    assert shard.bytes_at_rest == (4 * (8 + 3), 4 * (8 + 3))
    assert shard.bytes_unsharded == 4 * (16 + 3)
    carried, params = shard.notes
    assert carried == ("1 optimizer made before sharding was carried over; in a script, make it after fully_shard")
    assert "in no unit, so their gradients are not averaged: scale. " in params
    assert "p = model.get_parameter('scale'); torch.distributed.all_reduce(p.grad); p.grad /= world_size" in params
    assert params.endswith(". 1 further fault: %fsdp lint model")  # the buffers
    after_shard, after_step, after_cell = zip(*(headers for *_, headers in replies), strict=True)
    assert [header.unmanaged for header in after_shard] == [("model.scale",)] * 2
    added = ("model.scale", "model.adapter.weight", "model.adapter.bias")
    assert [header.unmanaged for header in after_step] == [added] * 2
    assert [header.hooks for header in (*after_shard, *after_step)] == [()] * 2 + [("model.layer.weight",)] * 2
    reported = unmanaged_notes(join(*after_step))
    assert [note.partition(":")[0] for note in reported] == [note.partition(":")[0] for note in verify.notes]
    assert "differ between ranks: drawn. If they should not, for each: torch.distributed.broadcast(" in reported[2]
    assert unmanaged_notes(join(*after_cell)) == reported[:2]
    params, hooks, buffers = verify.notes
    assert "their gradients are not averaged: scale, adapter.weight, adapter.bias. " in params
    assert "register_hook is never called on a sharded parameter: layer.weight. " in hooks
    assert "differ between ranks: drawn. " in buffers
