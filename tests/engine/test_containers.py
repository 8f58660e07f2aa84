"""Tensors in containers of every kind: found in module inputs and outputs, cast, and put back in place."""

import copy
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.modeling_outputs import BaseModelOutput

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.parity import average_grads
from tests.helpers.wrapped_models import CPU, OURS, THEIRS
from workbench import engine
from workbench.engine.tensor_trees import cast_floats, differentiable_in, map_tensors, tensors_in

DIM = 4


class Dict(dict):
    pass


class Attributes(dict):
    """Items are attributes, through methods."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = dict.__setitem__


class AttributeDict(dict):
    """Items are attributes, because it is its own ``__dict__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Ordered(OrderedDict):
    pass


class Frozen(dict):
    def __setitem__(self, *_: object) -> None:
        raise TypeError

    def __init__(self, required: object, value: object) -> None:
        super().__init__({required: value})


class Default(defaultdict):
    pass


class List(list):
    def __init__(self, *items: object) -> None:
        super().__init__(items)


class Tuple(tuple):
    def __new__(cls, first: object, second: object) -> "Tuple":
        return super().__new__(cls, (first, second))


class Deque(deque):
    pass


class Set(set):
    pass


Pair = namedtuple("Pair", "y n")


class NamedPair(Pair):
    """A named tuple with a ``__dict__``."""


@dataclass
class Plain:
    y: Any
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = [self.y]


@dataclass(frozen=True, slots=True)
class Slots:
    y: Any


@dataclass
class Both(dict):
    y: Any

    def __post_init__(self) -> None:
        self["y"] = self.y


def own(container: Any, **attributes: Any) -> Any:
    vars(container).update(attributes)
    return container


MAKE: dict[str, Callable[[Any], Any]] = {
    "dict": lambda y: {"y": y, "n": 1},
    "subclass of dict": lambda y: Dict(y=y),
    "dict by attributes": lambda y: Attributes(y=y),
    "dict that is its __dict__": lambda y: AttributeDict(y=y),
    "dict with attributes": lambda y: own(Dict(n=1), y=y),
    "frozen dict": lambda y: Frozen("y", y),
    "OrderedDict": lambda y: OrderedDict(y=y),
    "subclass of OrderedDict": lambda y: Ordered(n=1, y=y),
    "defaultdict": lambda y: defaultdict(int, y=y),
    "subclass of defaultdict": lambda y: Default(list, y=y),
    "list": lambda y: [y],
    "subclass of list": lambda y: List(1, y),
    "tuple": lambda y: (y, 1),
    "subclass of tuple": lambda y: Tuple(y, 1),
    "namedtuple": lambda y: Pair(y, 1),
    "subclass of namedtuple": lambda y: own(NamedPair(1, 2), z=y),
    "deque": lambda y: deque([1, y], maxlen=2),
    "subclass of deque": lambda y: Deque([y], maxlen=2),
    "set": lambda y: {y},
    "subclass of set": lambda y: Set([y]),
    "frozenset": lambda y: frozenset([y]),
    "dataclass": Plain,
    "frozen dataclass with slots": Slots,
    "dataclass and dict": Both,
    "ModelOutput": lambda y: BaseModelOutput(last_hidden_state=y, hidden_states=(y,)),
    "nested": lambda y: Dict(a=List(Pair(Slots(y), [None, "text"])), n=torch.Size([2])),
}


def first_in(value: Any) -> torch.Tensor:
    return next(tensors_in(value))


@pytest.mark.parametrize("kind", MAKE)
def test_a_container_is_copied_as_its_type_with_other_tensors(kind):
    y = torch.ones(2, dtype=torch.double)
    value = MAKE[kind](y)
    before = str(value)
    found = cast_floats(value, torch.half)
    assert type(found) is type(value)
    assert [t.dtype for t in tensors_in(found)] == [torch.half]  # one tensor, in every place of the original
    assert [t is y for t in tensors_in(value)] == [True]
    assert str(found) == before.replace("torch.float64", "torch.float16")
    assert cast_floats(value, torch.double) is value
    for attribute in ("maxlen", "default_factory", "n"):
        assert getattr(found, attribute, None) == getattr(value, attribute, None)
    if isinstance(getattr(value, "y", None), torch.Tensor):
        assert found.y.dtype == torch.half
    if isinstance(value, AttributeDict):
        found.other = 1
        assert found["other"] == 1


def test_a_packed_sequence_is_one_still():
    packed = pack_sequence([torch.ones(2, DIM), torch.ones(1, DIM)])
    found = cast_floats(packed, torch.half)
    assert isinstance(found, PackedSequence)
    assert found.data.dtype == torch.half
    assert found.batch_sizes is packed.batch_sizes
    assert packed.data.dtype == torch.float


def test_containers_may_hold_themselves():
    y = torch.ones(2)
    loop: dict[str, Any] = {"y": y, "list": List(y)}
    loop["list"].append((loop, loop["list"]))
    assert [id(t) for t in tensors_in(loop)] == [id(y)]
    found = cast_floats(loop, torch.half)
    assert found["y"].dtype == torch.half
    assert found["list"][0] is found["y"]
    assert found["list"][1][0] is found
    assert found["list"][1][1] is found["list"]
    pair = ([y],)
    pair[0].append(pair)
    found = cast_floats(pair, torch.half)
    assert found[0][1] is found


def test_results_of_functions_and_empty_containers():
    values = torch.tensor([[1.0, 2.0]])
    result = torch.max(values, 1)
    found = cast_floats(result, torch.half)
    assert type(found) is type(result)
    assert found.values.dtype == torch.half
    assert found.indices is result.indices
    unchanged = [torch.Size([1]), Counter("a"), range(3), SimpleNamespace(y=values), nn.Linear(1, 1), None, "text"]
    both = [unchanged, values]
    found = cast_floats(both, torch.half)
    assert found[0] is unchanged
    assert [t is values for t in tensors_in(SimpleNamespace(y=UserDict(y=values)))] == [True]


def test_a_repeated_tensor_is_changed_once():
    x, y = torch.ones(1, requires_grad=True), torch.ones(1)
    value = Dict(a=[x, y], b=(x, x))
    assert [id(t) for t in differentiable_in(value)] == [id(x)]
    found = map_tensors(value, torch.clone)
    assert found["a"][0] is found["b"][0] is found["b"][1]


# ---- in modules


class TakesContainer(nn.Module):
    """Takes and returns a container."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(DIM, DIM), make

    def forward(self, value: Any) -> Any:
        self.took = value
        return self.make(torch.tanh(self.linear(first_in(value))))


class Model(nn.Module):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.second = TakesContainer(make), TakesContainer(make)

    def forward(self, value: Any) -> Any:
        return self.second(self.first(value))


def with_modules(api: Any, model: nn.Module, *, nested: bool, precise: bool) -> nn.Module:
    policy = {} if precise else {"mp_policy": api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    options = {"reshard_after_forward": True} | policy
    for unit in (model.first, model.second) if nested else ():
        api.fully_shard(unit, **options)
    api.fully_shard(model, **options)
    return model


def with_wrappers(api: Any, model: nn.Module, *, nested: bool, precise: bool) -> nn.Module:
    options: dict[str, Any] = {"use_orig_params": True, "device_id": CPU}
    if not precise:
        options["mixed_precision"] = api.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    if nested:
        options["auto_wrap_policy"] = api.ModuleWrapPolicy({TakesContainer})
    return api.FullyShardedDataParallel(model, **options)


def whole_grads(model: nn.Module) -> list[torch.Tensor]:
    if not isinstance(model, OURS.FullyShardedDataParallel | THEIRS.FullyShardedDataParallel):
        return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    with type(model).summon_full_params(model, with_grads=True):
        return [p.grad.clone() for p in model.parameters()]


def contained(kinds: tuple[str, ...], precise: bool) -> dict[tuple, str]:
    """Return the failures by case."""
    wrong = {}
    for kind in kinds:
        base = Model(MAKE[kind])
        x = MAKE[kind](torch.full((2, DIM), float(dist.get_rank() + 1), requires_grad=True))
        plain = copy.deepcopy(base)
        first_in(plain(x)).square().sum().backward()
        average_grads(plain)
        for make, api, nested in [
            (with_modules, engine, True), (with_modules, engine, False),
            (with_wrappers, OURS, True), (with_wrappers, OURS, False),
        ]:  # fmt: skip
            model = make(api, copy.deepcopy(base), nested=nested, precise=precise)
            out = model(x)
            took = model.second.took
            first_in(out).square().sum().backward()
            if not (type(out) is type(took) is type(x)):
                wrong[kind, make.__name__, nested] = f"types {type(took)}, {type(out)}"
            if not precise and first_in(model.first.took).dtype != torch.bfloat16:
                wrong[kind, make.__name__, nested] = "not cast"
            tolerance = {} if precise else {"rtol": 0.1, "atol": 0.1}
            try:
                torch.testing.assert_close(whole_grads(model), whole_grads(plain), check_dtype=False, **tolerance)
            except AssertionError as error:
                wrong[kind, make.__name__, nested] = str(error)
    return wrong


@pytest.mark.parametrize("precise", quick([True, False], [True]))
def test_units_take_and_return_containers_of_every_kind(precise):
    assert run_ranks(2, contained, tuple(MAKE), precise) == [{}, {}]


def as_torchs() -> dict[str, bool]:
    """Return whether our gradients equal torch's, for the kinds of containers that torch's engine looks into."""
    found = {}
    for kind in (
        "dict",
        "subclass of dict",
        "namedtuple",
        "frozen dataclass with slots",
        "subclass of list",
        "ModelOutput",
    ):
        base = Model(MAKE[kind])
        grads = []
        for api in (fsdp, engine):
            model = with_modules(api, copy.deepcopy(base), nested=True, precise=True)
            first_in(model(MAKE[kind](torch.full((2, DIM), dist.get_rank() + 1.0)))).sum().backward()
            grads.append(whole_grads(model))
        found[kind] = all(map(torch.equal, *grads))
    return found


def test_gradients_are_torchs_where_it_looks_into_containers():
    for found in run_ranks(2, as_torchs):
        assert all(found.values()), found
