"""Errors of torch about sharded parameters get a note: the unit, its state, what freed or gathered it, and a fix."""

import gc
import re
import traceback
import weakref

import pytest
import torch
from IPython.core.ultratb import AutoFormattedTB
from torch import nn
from torch.distributed import fsdp

from tests.helpers.booted_ranks import execute, namespace, run
from workbench import engine
from workbench.engine.classic import FullyShardedDataParallel
from workbench.protocol.commands import Step
from workbench.runtime import error_notes, tracebacks
from workbench.runtime import rank as rank_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x))

    def encode(self, x):
        return self.up(x)


def fully_shard_with(api):
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    api.fully_shard(model[0])
    return api.fully_shard(model)


def wrap_with(kind, **options):
    cpu = torch.device("cpu")
    inner = kind(Block(), device_id=cpu, **options)
    return kind(nn.Sequential(inner, nn.Linear(4, 4)), device_id=cpu, **options)


MODELS = {
    "ours": lambda: fully_shard_with(engine),
    "torch": lambda: fully_shard_with(fsdp),
    "our wrapper": lambda: wrap_with(FullyShardedDataParallel),
    "our wrapper, original": lambda: wrap_with(FullyShardedDataParallel, use_orig_params=True),
    "torch's wrapper": lambda: wrap_with(fsdp.FullyShardedDataParallel),
    "torch's wrapper, original": lambda: wrap_with(fsdp.FullyShardedDataParallel, use_orig_params=True),
}
FULLY = ("ours", "torch")
WRAPPERS = tuple(name for name in MODELS if name not in FULLY)


def prepare(kind):
    """Define ``model``, and ``kept``: the weight of its first Linear as the last forward used it; run one step."""
    torch.manual_seed(0)
    ns = namespace()
    ns["model"] = model = MODELS[kind]()
    ns["x"] = torch.ones(2, 4)
    ns["kept"] = []
    up = (model.module[0].module if kind in WRAPPERS else model[0]).up
    up.register_forward_pre_hook(lambda module, _: ns["kept"].append(module.weight))
    ns["up"] = up
    rank_module._after_cell(None)
    ns["forward"] = lambda: model(ns["x"]).sum().backward()
    execute(Step(fn="forward"))
    return ns


def raised(function):
    """Run ``function`` as a step that raises; return the note of its error, empty without one."""
    namespace()["failing"] = function
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any exception
        execute(Step(fn="failing"))
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) <= 1
    explained = [text for text in (str(caught.value), *notes) if re.search(r"(parameter|part of) '", text)]
    assert len(explained) <= 1, "\n".join(explained)
    return "".join(notes)


FREED = "unit '0' is sharded: freed after its backward in step 0\nfix: "
IN_UNIT = "call model[0](...), or compute between model[0].unshard() and model[0].reshard()"
IN_WRAPPER = "call model[0](...), or compute within FullyShardedDataParallel.summon_full_params(model[0])"


def block_of(model):
    return model.module[0] if hasattr(model, "module") else model[0]


# ---- a parameter that is sharded


def calls_an_inner_module(kind):
    model = prepare(kind)["model"]
    x = torch.ones(2, 4)
    return raised(lambda: model[0].encode(x)), raised(lambda: block_of(model).up(x))


@pytest.mark.parametrize("kind", FULLY)
def test_a_sharded_parameter_is_named_with_its_unit_and_what_freed_it(kind):
    begin = f"[workbench] parameter '0.up.weight' is sharded; {FREED}"
    for of_a_method, of_a_module in run(2, calls_an_inner_module, kind):
        assert of_a_method == f"{begin}register_fsdp_forward_method(model[0], 'encode')"
        assert of_a_module == begin + IN_UNIT


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_inner_module_of_a_wrapper_gets_a_note(kind):
    for rank, (_, note) in enumerate(run(2, calls_an_inner_module, kind)):
        assert note.endswith(FREED + IN_WRAPPER) or note.endswith(
            f"{FREED}read it from its module on each use; {IN_WRAPPER}"
        )
        size = [32, 0][rank]  # the weight is in the first half of the flat parameter
        verdict = {
            "our wrapper": "unit '0' is sharded: freed after its backward in step 0",  # its message says the rest
            "torch's wrapper": "the full parameter '0.up.weight' has no values any more",
        }.get(kind, f"[{size}] is this rank's part of '0.up.weight', whose shape is [8, 4]")
        assert note.startswith(f"[workbench] {verdict}")


class BackwardInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.block(x)
        hidden.sum().backward()
        return self.head(hidden.detach())


def frees_within_a_forward(kind):
    namespace()["model"] = model = BackwardInForward()
    api = {"ours": engine, "torch": fsdp}[kind]
    api.fully_shard(model.block)
    api.fully_shard(model)
    rank_module._after_cell(None)
    x = torch.ones(2, 4)
    return raised(lambda: model(x)), raised(lambda: model.forward(x))


@pytest.mark.parametrize("kind", FULLY)
def test_a_parameter_that_its_own_forward_frees_is_told_from_a_forward_without_a_call(kind):
    for within, without in run(2, frees_within_a_forward, kind):
        assert within.endswith(
            "\nfix: a backward or reshard() within the forward of model has freed it: run that after it"
        )
        assert without.endswith("\nfix: call model(...), or compute between model.unshard() and model.reshard()")


# ---- outputs of another dtype


def computes_in_two_dtypes(kind):
    api = engine if kind == "ours" else fsdp
    half = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ns = namespace()
    ns["model"] = model = nn.Sequential(Block(), nn.Linear(4, 4))
    full = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    api.fully_shard(model[0], mp_policy=full)
    api.fully_shard(model, mp_policy=half)
    return raised(lambda: model(torch.ones(2, 4)).sum().backward())


@pytest.mark.parametrize("kind", FULLY)
def test_a_tensor_of_another_dtype_than_the_unit_computes_in_is_named_with_its_unit(kind):
    in_code = "mp_policy=MixedPrecisionPolicy(..., output_dtype=torch.bfloat16) for unit '0'"
    fix = {"ours": f"%fsdp reshard model.0 --mp output=bf16, or in code {in_code}"}
    for note in run(2, computes_in_two_dtypes, kind):
        assert note == (
            "[workbench] unit '(root)' computes in bfloat16, as parameter '1.weight', and 'input' is float32, the "
            f"output of unit '0'\nfix: {fix.get(kind, f'{in_code}, or input = input.to(torch.bfloat16)')}"
        )


class Masked(nn.Module):
    """Attention with a mask, cast to the dtype of what it is added to if ``is_cast``."""

    def __init__(self, is_cast):
        super().__init__()
        self.inner, self.is_cast = nn.Linear(4, 4), is_cast
        self.register_buffer("mask", torch.zeros(2, 2))

    def forward(self, x):
        x = self.inner(x)
        if self.is_cast:
            return self.cast(x)
        scores = x @ x.t() + self.mask
        return scores @ x

    def cast(self, x):
        scores = x @ x.t() + self.mask.to(x.dtype)
        return scores.float() @ x


def masks_in_another_dtype(kind, is_cast):
    api = engine if kind == "ours" else fsdp
    namespace()["model"] = model = nn.Sequential(Masked(is_cast), nn.Linear(4, 4))
    half = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (model[0], model):
        api.fully_shard(module, mp_policy=half)
    return raised(lambda: model(torch.ones(2, 4)))


@pytest.mark.parametrize("kind", FULLY)
def test_a_buffer_of_another_dtype_than_its_unit_computes_in_is_named(kind):
    for note in run(2, masks_in_another_dtype, kind, False):
        assert note == (
            "[workbench] buffer '0.mask' is float32 in unit '0', which computes in bfloat16: mixed precision casts "
            "inputs and parameters, not buffers\nfix: self.mask.to(torch.bfloat16)"
        )
    assert "buffer" not in str(run(2, masks_in_another_dtype, kind, True))


# ---- a full parameter that was freed


def uses_a_kept_parameter(kind):
    ns = prepare(kind)
    weight = ns["kept"][0]

    def multiply(x, matrix):
        return x @ matrix.t()

    return raised(lambda: multiply(ns["x"], weight))


@pytest.mark.parametrize("kind", MODELS)
def test_a_parameter_kept_from_before_it_was_freed_is_named(kind):
    begin = "[workbench] the full parameter '0.up.weight', kept in 'matrix', has no values any more; "
    how = IN_WRAPPER if kind in WRAPPERS else IN_UNIT
    for note in run(2, uses_a_kept_parameter, kind):
        assert note == f"{begin}{FREED}read it from its module on each use; {how}"


def checks_for_nan(weight):
    if torch.isnan(weight.sum()):
        raise FloatingPointError("the norm is NaN")


def reads_nan():
    ns = prepare("ours")
    weight = ns["kept"][0]
    other = torch.full((2,), torch.nan)
    return raised(lambda: checks_for_nan(weight)), raised(lambda: checks_for_nan(other))


def test_nan_of_a_freed_parameter_is_told_from_other_nan():
    for of_the_parameter, of_another in run(2, reads_nan):
        assert of_the_parameter.startswith("[workbench] the full parameter '0.up.weight', kept in 'weight', has no ")
        assert of_another == ""


# ---- a shape that is one rank's part


def takes_parts(kind):
    model = prepare(kind)["model"]
    part = model[0].up.weight.to_local()
    return (
        raised(lambda: torch.ones(2, 8) @ model[0].up.weight.to_local()),
        raised(lambda: torch.ones(8, 4) + part),
        raised(lambda: torch.ones(2, 5) @ model[0].up.weight.to_local()[:3]),
    )


@pytest.mark.parametrize("kind", FULLY)
def test_a_size_that_is_one_ranks_part_is_named(kind):
    verdict = f"[workbench] [4, 4] is this rank's part of '0.up.weight', whose shape is [8, 4]; {FREED}"
    for multiplied, added, _ in run(2, takes_parts, kind):
        assert multiplied == f"{verdict}model[0].up.weight.full_tensor()"
        assert added == verdict + IN_UNIT


# ---- a pending sum


def uses_pending_sums(kind):
    model = prepare(kind)["model"]

    def divides():
        total = model[0].up.weight.sum()
        return torch.ones(2) / total

    return raised(divides), raised(model[0].up.weight.sum)


@pytest.mark.parametrize("kind", FULLY)
def test_a_scalar_of_which_each_rank_has_a_part_is_named(kind):
    for divided, returned in run(2, uses_pending_sums, kind):
        assert divided.startswith("[workbench] 'total' is placed as Partial(sum) over 2 ranks: ") or divided.startswith(
            "[workbench] 'total' is placed as P(sum) over 2 ranks: "
        )
        assert divided.endswith("\nfix: total.full_tensor().item()")
        assert returned.endswith("\nfix: the result.full_tensor().item()")


# ---- errors without a note


def raises_otherwise(kind):
    model = prepare(kind)["model"]
    wrong = torch.ones(2, 5)

    def forgets():
        raise KeyError("blocks")

    return raised(lambda: model(wrong)), raised(forgets), raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3))


@pytest.mark.parametrize("kind", MODELS)
def test_an_unrelated_error_gets_no_note(kind):
    for notes in run(2, raises_otherwise, kind):
        assert notes == ("", "", "")


def fails_to_find(*_):
    raise ZeroDivisionError("within the note")


def is_not_disturbed():
    model = prepare("ours")["model"]
    x = torch.ones(2, 4)
    error_notes._sharded_params = fails_to_find
    return raised(lambda: model[0].up(x))


def test_an_error_within_a_note_hides_nothing():
    assert run(2, is_not_disturbed) == [""] * 2


def keeps_nothing():
    model = prepare("ours")["model"]

    def fails():
        x = torch.ones(2, 4)
        namespace()["ref"] = weakref.ref(x)
        model[0].up(x)

    note = raised(fails)
    gc.collect()
    return bool(note), namespace()["ref"]() is None


def test_a_note_keeps_no_tensor():
    assert run(2, keeps_nothing) == [(True, True)] * 2


# ---- states, and where notes are displayed


def in_other_states():
    ns = prepare("ours")
    model, x = ns["model"], ns["x"]
    model[0].unshard()
    model[0].reshard()
    by_a_call = raised(lambda: model[0].up(x))
    with torch.no_grad():
        model(x)
    after_forward = raised(lambda: model[0].up(x))
    ns["model"] = fresh = fully_shard_with(engine)
    rank_module._after_cell(None)
    return by_a_call, after_forward, raised(lambda: fresh[0].up(x))


def test_the_note_says_what_freed_the_unit():
    for by_a_call, after_forward, fresh in run(2, in_other_states):
        assert "sharded: freed by a call of reshard() or the like, outside forward and backward\n" in by_a_call
        assert "sharded: freed by its post-forward hook, as reshard_after_forward=True\n" in after_forward
        assert "sharded: it has not been gathered yet\n" in fresh


def rendered():
    model = prepare("torch")["model"]
    shown = []
    for mode in ("Context", "Plain"):
        render = tracebacks.fold(AutoFormattedTB(mode=mode, theme_name="nocolor").structured_traceback)
        try:
            model[0].up(torch.ones(2, 4))
        except RuntimeError as error:
            shown.append("\n".join(render(type(error), error, error.__traceback__)))
            plain = "".join(traceback.format_exception(error))
    return *shown, plain


def test_notes_are_displayed_by_ipython_and_python():
    for texts in run(2, rendered):
        for text in texts:
            lines = [line for line in text.splitlines() if line.strip()]
            assert lines[-2].startswith("[workbench] parameter '0.up.weight' is sharded; ")
            assert lines[-1].startswith("fix: call model[0](...)")
            assert "got mixed torch.Tensor and DTensor" in lines[-3]
