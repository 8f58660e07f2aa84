"""Losses of inner tensors, passes that raise, and partial graphs: the gradients equal torch's in every case."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from tests.helpers.both_engines import CLOSE
from tests.helpers.forked_ranks import run_cases, run_ranks
from tests.helpers.pairwise import covering, quick
from tests.helpers.parity import average_grads
from workbench import engine
from workbench.engine.errors import RanksDisagreeError
from workbench.engine.explain import explain

DIM = 8
Grads = list[torch.Tensor | None]
STALE = "modified by an inplace operation"  # the values that backward needs were in a unit that is resharded


class Layers(nn.Module):
    """Four layers in a row; the module keeps the intermediate tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.l0, self.l1, self.l2, self.l3 = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.low = torch.tanh(self.l1(torch.tanh(self.l0(x))))
        self.mid = self.l2(self.low)
        return self.l3(torch.tanh(self.mid))


class Shallow(Layers):
    """The intermediate tensors need no values of the outermost unit in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.low = torch.tanh(self.l1(x))
        self.mid = self.l2(self.low)
        return self.l3(torch.tanh(self.l0(self.mid)))


LOSSES: dict[str, Callable[[Layers, torch.Tensor], torch.Tensor]] = {
    "low": lambda model, _: model.low.square().sum(),
    "mid": lambda model, _: model.mid.square().sum(),
    "both": lambda model, out: model.mid.square().sum() + out.sum(),
    "out": lambda _, out: out.square().sum(),
}


def example(seed: int, *, differentiable: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, DIM, generator=generator, dtype=torch.double).requires_grad_(differentiable)


def step(model: nn.Module, loss: str, *, seed: int = 0, differentiable: bool = False) -> None:
    LOSSES[loss](model, model(example(seed, differentiable=differentiable))).backward()


def grads_of(model: nn.Module) -> Grads:
    found = (p.grad for p in model.parameters())
    return [None if g is None else g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in found]


def expected(base: nn.Module, run: Callable[[nn.Module], None]) -> Grads:
    plain = copy.deepcopy(base)
    run(plain)
    average_grads(plain)
    return grads_of(plain)


def is_same(ours: Grads, wanted: Grads) -> bool:
    return all(
        (mine is None) == (their is None) and (mine is None or torch.allclose(mine, their, **CLOSE))
        for mine, their in zip(ours, wanted, strict=True)
    )


def tried(model: nn.Module, run: Callable[[nn.Module], None], wanted: Grads, grads: Callable = grads_of) -> str:
    """Run; return ``same``, ``raised`` or ``differs``. Raise errors that are not about freed values."""
    try:
        run(model)
    except RuntimeError as error:
        if STALE not in str(error) and "setStorage" not in str(error):
            raise
        return "raised"
    return "same" if is_same(grads(model), wanted) else "differs"


def shard(api: ModuleType, model: nn.Module, units: tuple[str, ...], **options: Any) -> nn.Module:
    for unit in units:
        api.fully_shard(getattr(model, unit), **options)
    return api.fully_shard(model, **options)


def policies(api: ModuleType) -> dict[str, dict[str, Any]]:
    return {
        "resharded": {"reshard_after_forward": True},
        "kept": {"reshard_after_forward": False},
        "auto": {},
        "offloaded": {"reshard_after_forward": True, "offload_policy": api.CPUOffloadPolicy(pin_memory=False)},
    }


UNITS = ((), ("l2",), ("l2", "l3"), ("l1", "l2", "l3"))


def accumulate(model: nn.Module, loss: str, **options: Any) -> None:
    """Run two micro-batches; do not reduce the first one."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
    step(model, loss, seed=1, **options)
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(True)
    step(model, loss, **options)


def table() -> list[tuple[tuple, str, str, str]]:
    """Return (case, torch's result, our result, our result of an ordinary step after it)."""
    torch.manual_seed(0)
    found = []
    accumulating = (Layers,), ("resharded", "kept"), UNITS[1:3], (False, True), ("mid", "both"), (accumulate,)
    cases = [
        *covering(2, (Layers, Shallow), list(policies(engine)), UNITS, (False, True), ("low", "mid"), (step,)),
        *covering(2, *accumulating),
    ]
    for kind, policy, units, differentiable, loss, run in cases:
        base = kind().double()
        inner, ordinary = partial(run, loss=loss, differentiable=differentiable), partial(step, loss="out", seed=2)
        wanted, after = expected(base, inner), expected(base, ordinary)
        theirs, ours = (shard(api, copy.deepcopy(base), units, **policies(api)[policy]) for api in (fsdp, engine))
        results = [tried(model, inner, wanted) for model in (theirs, ours)]
        ours.zero_grad()
        case = (kind.__name__, policy, units, differentiable, loss, run.__name__)
        found.append((case, *results, tried(ours, ordinary, after)))
    return found


@pytest.mark.thorough
def test_the_loss_can_be_any_tensor_made_inside():
    for rank in run_ranks(2, table):
        wrong = [row for row in rank if row[2] == "differs" or (row[2] == "raised" and row[1] != "raised")]
        assert not wrong
        assert not [row for row in rank if row[3] != "same"]
        results = [(theirs, ours) for _, theirs, ours, _ in rank]
        assert results.count(("same", "same")) > 10
        # only losses inside a resharded unit that bypass its outputs
        raised = {case[:3] for case, _, ours, _ in rank if ours == "raised"}
        assert raised
        assert all("kept" not in case and "auto" not in case for case in raised)


# ---- passes that raise


class ByTheUser(Exception):
    """Raised by a hook in the middle of a pass."""


def fail(*_: object) -> None:
    raise ByTheUser


def places(model: Layers) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each place where a pass can raise, and a function that registers a raising hook there."""
    yield "forward of a unit", lambda: model.l2.register_forward_pre_hook(fail)
    yield "forward of the root", lambda: model.l3.register_forward_hook(fail)
    yield "the last of forward", lambda: model.register_forward_hook(fail)
    yield "backward of a unit", lambda: model.l2.register_full_backward_pre_hook(fail)
    yield "backward of the root", lambda: model.l1.register_full_backward_pre_hook(fail)
    yield "the end of backward", lambda: next(model.parameters()).register_post_accumulate_grad_hook(fail)


def broken_off(policy: str, units: tuple[str, ...]) -> dict[str, bool]:
    """Raise on all ranks at each place; return whether the next step is right, by place."""
    torch.manual_seed(0)
    base = Layers().double()
    model = shard(engine, copy.deepcopy(base), units, **policies(engine)[policy])
    found = {}
    for number, (where, register) in enumerate(places(model)):
        ordinary = partial(step, loss="out", seed=number)
        handle = register()
        with pytest.raises(ByTheUser):
            step(model, "out", seed=99)
        handle.remove()
        model.zero_grad()
        ordinary(model)
        found[where] = is_same(grads_of(model), expected(base, ordinary))
        model.zero_grad()
    return found


def test_the_step_after_one_that_raised_is_right_without_a_reset():
    cases = {case: partial(broken_off, *case) for case in product(policies(engine), (("l2",), ("l2", "l3")))}
    for rank in run_cases(2, cases):
        wrong = [(case, where) for case, found in rank.items() for where, right in found.items() if not right]
        assert not wrong


def skipped(where: str) -> list[str]:
    """Rank 1 raises after its last collective and all ranks skip the batch; return the results of three steps."""
    torch.manual_seed(0)
    base = Layers().double()
    model = shard(engine, copy.deepcopy(base), ("l2", "l3"))
    register = dict(places(model))[where]
    found = []
    for number in range(3):
        handle = register() if dist.get_rank() == 1 else None
        try:
            out = model(example(9))
            if "backward" in where:
                out.square().sum().backward()
        except ByTheUser:
            found.append("raised")
        if handle is not None:
            handle.remove()
        model.zero_grad()
        ordinary = partial(step, loss="out", seed=number)
        ordinary(model)
        found.append("same" if is_same(grads_of(model), expected(base, ordinary)) else "differs")
        model.zero_grad()
    return found


@pytest.mark.parametrize("where", ["the last of forward", "the end of backward"])
def test_a_batch_that_raised_on_one_rank_can_be_skipped_by_all(where):
    assert run_ranks(2, skipped, where) == [["same"] * 3, ["raised", "same"] * 3]


def parted() -> bool:
    """Rank 1 raises in the middle of backward and continues with the next step, which both ranks refuse."""
    torch.manual_seed(0)
    base = Layers().double()
    model = shard(engine, copy.deepcopy(base), ("l2",))
    ordinary = partial(step, loss="out")
    ordinary(model)
    if dist.get_rank() == 1:
        handle = model.l2.register_full_backward_pre_hook(fail)
        with pytest.raises(ByTheUser):
            ordinary(model)
        handle.remove()
    with pytest.raises(RanksDisagreeError, match="ranks disagree on collective"):
        ordinary(model)
    engine.rebuild_groups()
    model.reset_iter_state()
    model.zero_grad()
    ordinary(model)
    return is_same(grads_of(model), expected(base, ordinary))


def test_ranks_that_part_in_backward_are_refused():
    assert run_ranks(2, parted) == [True, True]


# ---- unusual backwards


def grad_of(loss: torch.Tensor, wrt: torch.Tensor, **options: bool) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, wrt, **options)
    return grad


def twice(model: nn.Module, x: torch.Tensor) -> None:
    loss = LOSSES["out"](model, model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def grad_of_inner(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = LOSSES["out"](model, model(x))
    found = [grad_of(loss, inner, retain_graph=True) for inner in (model.mid, model.low, x)]
    loss.backward()
    return found


def grad_of_input_alone(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [grad_of(LOSSES["out"](model, model(x)), x)]


def backward_to_input_alone(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    LOSSES["out"](model, model(x)).backward(inputs=[x])
    return [x.grad]


def forward_for_nothing(model: nn.Module, x: torch.Tensor) -> None:
    _kept = model(x + 1)
    LOSSES["out"](model, model(x)).backward()


def first_of_two(model: nn.Module, x: torch.Tensor) -> None:
    first, _second = (LOSSES["out"](model, model(x + shift)) for shift in (1, 0))
    first.backward()


def evaluation_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = LOSSES["out"](model, model(x))
    with torch.no_grad():
        model(x + 1)
    loss.backward()


def part_first(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    LOSSES["mid"](model, out).backward(retain_graph=True)
    LOSSES["out"](model, out).backward()


def part_last(model: nn.Module, x: torch.Tensor) -> None:
    losses = [LOSSES[name](model, model(x)) for name in ("out",)] + [LOSSES["mid"](model, x)]
    losses[0].backward(retain_graph=True)
    losses[1].backward()


def cut(model: nn.Module, x: torch.Tensor) -> None:
    model(x)
    (model.mid.detach().square().sum() + model.low.sum()).backward()


def penalty(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = LOSSES["out"](model, model(x))
    grad = grad_of(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    return [grad.detach()]


USES = (
    twice,
    grad_of_inner,
    grad_of_input_alone,
    backward_to_input_alone,
    forward_for_nothing,
    first_of_two,
    evaluation_between,
    part_first,
    part_last,
    cut,
    penalty,
)


def used(model: nn.Module, use: Callable, wanted: Grads, values: Grads) -> str:
    """Return ``same``, ``differs``, or the error's message."""
    try:
        found = use(model, example(0, differentiable=True)) or []
    except RuntimeError as error:
        explain(error)
        return str(error)
    return "same" if is_same(grads_of(model), wanted) and is_same(found, values) else "differs"


def uses(policy: str, units: tuple[str, ...], use: Callable) -> tuple[str, str, str]:
    """Return torch's result, our result, and our result of an ordinary step after it."""
    torch.manual_seed(0)
    base = Layers().double()
    plain = copy.deepcopy(base)
    values = use(plain, example(0, differentiable=True)) or []
    average_grads(plain)
    theirs, ours = (shard(api, copy.deepcopy(base), units, **policies(api)[policy]) for api in (fsdp, engine))
    results = [used(model, use, grads_of(plain), values) for model in (theirs, ours)]
    ours.zero_grad()
    ordinary = partial(step, loss="out", seed=2)
    ordinary(ours)
    return (*results, "same" if is_same(grads_of(ours), expected(base, ordinary)) else "differs")


@pytest.mark.parametrize("policy", quick(["kept", "resharded"], ["resharded"]))
def test_any_backward_gives_torchs_gradients_or_a_clear_error(policy):
    cases = {(use.__name__, units): partial(uses, policy, units, use) for use in USES for units in ((), ("l2",))}
    for rank in run_cases(2, cases):
        assert not [case for case, (theirs, ours, _) in rank.items() if theirs == "same" and ours != "same"]
        assert not [case for case, (*_, after) in rank.items() if after != "same"]
        refused = {case: ours for case, (_, ours, _) in rank.items() if ours != "same"}
        assert {name for name, _ in refused} >= {"part_last", "penalty"}
        assert not [
            message for message in refused.values() if not message.startswith("backward needs the full parameter 'l")
        ]
        assert all("reshard_after_forward=False" in message for message in refused.values())


def penalty_with_params_kept() -> str:
    torch.manual_seed(0)
    base = Layers().double()
    plain = copy.deepcopy(base)
    values = penalty(plain, example(0, differentiable=True))
    average_grads(plain)
    model = shard(engine, copy.deepcopy(base), ("l2",), reshard_after_forward=False)
    model.set_reshard_after_backward(False)

    def use(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        found = penalty(model, x)
        for unit in (model, model.l2):
            unit.reshard()  # the gradients belong to the shards; put those back on the modules
        return found

    return used(model, use, grads_of(plain), values)


def test_the_advice_of_the_message_works():
    assert run_ranks(2, penalty_with_params_kept) == ["same", "same"]
