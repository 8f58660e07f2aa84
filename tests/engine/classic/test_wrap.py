"""Which modules become units, in which order and with which options: compared with torch on the same models."""

import copy
import functools
import warnings
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed.fsdp.wrap as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecision as TheirMixedPrecision
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from tests.helpers import huggingface_models
from workbench.engine.classic import (
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from workbench.engine.classic import wrap as ours
from workbench.engine.classic.wrap import auto_wrap, enable_wrap, plan_units, wrap, wrap_units
from workbench.zoo import GPT, Attention, Block, GPTConfig

KWARGS = {
    "sharding_strategy": ShardingStrategy.FULL_SHARD,
    "mixed_precision": None,
    "sync_module_states": False,
    "use_orig_params": False,
}


@dataclass
class Log:
    """Records each wrapped module's name in the plain model, and its wrapper's options."""

    model: nn.Module
    calls: list[tuple[str, dict]] = field(default_factory=list)

    def wrapper(self):
        names = {module: name for name, module in self.model.named_modules()}

        class Wrapper(nn.Module):
            def __init__(wrapper, module, **kwargs):
                super().__init__()
                wrapper.module = module
                self.calls.append((names[module], kwargs))

            def forward(wrapper, *args, **kwargs):
                return wrapper.module(*args, **kwargs)

        return Wrapper

    @property
    def names(self):
        return [name for name, _ in self.calls]


def wrapped(model, policy, ignored_modules=(), **kwargs):
    log = Log(model)
    auto_wrap(model, policy, log.wrapper(), KWARGS | kwargs, ignored_modules=ignored_modules)
    return log


def wrapped_unchecked(model, policy, **kwargs):
    """Wrap as :func:`wrapped`, but allow units that separate tied parameters, as torch does."""
    log = Log(model)
    wrap_units(model, plan_units(model, policy, KWARGS | kwargs), log.wrapper())
    return log


def wrapped_by_torch(model, policy, ignored_modules=(), **kwargs):
    """Wrap as :func:`wrapped`, with torch's recursion."""
    log = Log(model)
    ignored = {module for top in ignored_modules for module in top.modules()}
    ignored_params = {p for module in ignored for p in module.parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Both mixed precision and an auto_wrap_policy", UserWarning)
        _auto_wrap(model, policy, ignored, ignored_params, KWARGS | kwargs, log.wrapper())
    for _, given_kwargs in log.calls:
        given_kwargs.pop("auto_wrap_policy", None)  # torch passes None
    return log


def gpt(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(num_blocks=2, width=16, num_heads=2, vocab_size=31, max_tokens=8, **changes))


def gpt_tied():
    return gpt(tie_weights=True)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convolutions():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


MODELS = {
    "GPT": gpt,
    "GPT, tied": gpt_tied,
    "Llama": functools.partial(huggingface_models.make, "Llama"),
    "T5": functools.partial(huggingface_models.make, "T5"),
    "encoder": encoder,
    "convolutions": convolutions,
}


def layers(model):
    """Return the classes that a user would wrap."""
    if hasattr(model, "_no_split_modules"):
        return {type(block) for block in huggingface_models.blocks(model)}
    return {Block, nn.TransformerEncoderLayer, nn.Conv2d}


def policies(lib, model):
    """Return the same policies from either library."""
    size = lib.size_based_auto_wrap_policy
    transformer = functools.partial(lib.transformer_auto_wrap_policy, transformer_layer_cls=layers(model))
    linear = functools.partial(lib.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear))
    return {
        "classes": lib.ModuleWrapPolicy(layers(model)),
        "classes, as a function": functools.partial(lib._or_policy, policies=[lib.ModuleWrapPolicy(layers(model))]),
        "transformer": transformer,
        "lambda": linear,
        "either": functools.partial(lib._or_policy, policies=[transformer, linear]),
        "size 2000": functools.partial(size, min_num_params=2000),
        "size 3000, leaves": functools.partial(size, min_num_params=3000, force_leaf_modules=layers(model)),
        "size 2000, excluded": functools.partial(size, min_num_params=2000, exclude_wrap_modules=layers(model)),
        "size, by default": size,
        "custom": lib.CustomPolicy(lambda m: isinstance(m, tuple(layers(model)))),
        "custom options": lib.CustomPolicy(
            lambda m: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if type(m) in layers(model) else {}
        ),
    }


# with a mixed precision torch also wraps below leaves
CASES = [(name, precise) for name in policies(theirs, nn.Identity()) for precise in (False, True)]


@pytest.mark.parametrize(("policy", "precise"), [case for case in CASES if case != ("size 3000, leaves", True)])
@pytest.mark.parametrize("name", MODELS)
def test_the_units_their_order_and_their_options_are_torchs(name, policy, precise):
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    log = wrapped_unchecked(model, policies(ours, model)[policy], mixed_precision=MixedPrecision() if precise else None)
    like = wrapped_by_torch(
        twin, policies(theirs, twin)[policy], mixed_precision=TheirMixedPrecision() if precise else None
    )
    assert log.names == like.names
    assert plain(log.calls) == plain(like.calls)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in twin.named_modules()]


def plain(calls):
    """Return the options with each library's mixed precision as a bool."""
    return [kwargs | {"mixed_precision": kwargs["mixed_precision"] is not None} for _, kwargs in calls]


def test_a_transformer_is_wrapped_block_by_block_children_first():
    policy = functools.partial(
        _any, [functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, Attention})]
    )
    log = wrapped(gpt(), policy)
    assert log.names == ["blocks.0.attention", "blocks.0", "blocks.1.attention", "blocks.1"]
    assert [kwargs for _, kwargs in log.calls] == [KWARGS] * 4


def _any(queries, **question):
    return ours._or_policy(**question, policies=queries)


def test_always_wraps_everything_but_the_root():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    log = wrapped(model, always_wrap_policy)
    assert log.names == ["0.0", "0.1", "0", "1"]
    assert model(torch.ones(1, 2)).shape == (1, 1)


@pytest.mark.parametrize("policy", ["classes", "transformer", "lambda", "size 2000", "custom"])
def test_ignored_modules_are_neither_wrapped_nor_counted_as_in_torch(policy):
    model = gpt()
    twin = copy.deepcopy(model)
    log = wrapped(model, policies(ours, model)[policy], [model.blocks[0], model.head])
    assert log.names == wrapped_by_torch(twin, policies(theirs, twin)[policy], [twin.blocks[0], twin.head]).names
    assert not [name for name in log.names if name.startswith(("blocks.0", "head"))]
    assert log.names


def test_ignored_parameters_are_not_counted():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 9))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=95)
    assert [u.name for u in plan_units(model, policy, KWARGS)] == ["0", "1"]
    units = plan_units(model, policy, KWARGS, ignored_params=[model[1].bias, model[0].bias])
    assert [(u.name, u.params) for u in units] == [("0", (model[0].weight,))]


class Translator(nn.Module):
    """A module and its two parts share one embedding."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(5, 4)
        self.encoder = nn.ModuleDict({"embed": self.shared, "layer": nn.Linear(4, 4)})
        self.decoder = nn.ModuleDict({"embed": self.shared, "layer": nn.Linear(4, 4)})


@pytest.mark.parametrize("policy", [ModuleWrapPolicy({nn.Embedding}), always_wrap_policy], ids=["classes", "always"])
def test_a_module_with_several_parents_is_wrapped_once_and_its_wrapper_is_in_every_place(policy):
    model = Translator()
    embedding = model.shared
    names = wrapped(model, policy).names
    assert names.count("shared") == 1
    assert len(set(names)) == len(names)
    everywhere = [m for name, m in model.named_modules(remove_duplicate=False) if name.endswith(("shared", "embed"))]
    assert len(everywhere) == 3
    assert set(everywhere) == {model.shared}
    assert model.shared.module is embedding


@pytest.mark.parametrize(
    ("make", "policy", "names"),
    [
        (gpt_tied, ModuleWrapPolicy({nn.Linear}), ("tokens.weight", "head.weight")),
        (gpt_tied, ModuleWrapPolicy({nn.Embedding, nn.Linear}), ("tokens.weight", "head.weight")),
        (Translator, ModuleWrapPolicy({nn.ModuleDict}), ("shared.weight", "encoder.embed.weight")),
    ],
    ids=["unit and root", "two units", "a module in two units"],
)
def test_a_parameter_that_would_be_in_two_units_is_refused(make, policy, names):
    message = f"^parameters '{names[0]}' and '{names[1]}' are tied, but would be in two units: have the policy wrap a"
    refused(make(), ValueError, message, policy)


def test_modules_of_one_unit_may_share_a_parameter():
    assert wrapped(gpt_tied(), ModuleWrapPolicy({Block})).names == ["blocks.0", "blocks.1"]
    model = nn.Sequential(gpt_tied())
    assert wrapped(model, ModuleWrapPolicy({GPT})).names == ["0"]
    model = gpt_tied()
    assert wrapped(model, ModuleWrapPolicy({nn.Linear}), [model.tokens]).names[-1] == "head"


def test_a_module_twice_in_one_parent_is_wrapped_in_both_places():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert wrapped(model, ModuleWrapPolicy([nn.Linear])).names == ["0"]
    assert model[0] is model[2]
    assert model[0].module is layer


def test_each_parameter_is_taken_by_the_first_unit_above_it():
    model = gpt()
    units = plan_units(model, ModuleWrapPolicy({Attention, Block}), KWARGS)
    inner, outer = units[:2]
    assert set(inner.params) == set(model.blocks[0].attention.parameters())
    assert set(outer.params) == set(model.blocks[0].parameters()) - set(inner.params)


trees = st.recursive(
    st.tuples(st.integers(1, 6), st.integers(1, 6)), lambda below: st.lists(below, max_size=4), max_leaves=12
)


def built(tree):
    """Build a tree of modules: a pair becomes a layer, a list a container."""
    return nn.Linear(*tree) if isinstance(tree, tuple) else nn.Sequential(*map(built, tree))


@settings(max_examples=60, deadline=None)
@given(trees.map(lambda tree: [tree]), st.integers(0, 80), st.sets(st.sampled_from([nn.Linear, nn.Sequential])))
def test_by_size_any_tree_is_wrapped_as_torch_does_and_no_unit_is_too_small(tree, enough, excluded):
    model, twin = built(tree), built(tree)
    exclude = {"min_num_params": enough, "exclude_wrap_modules": excluded}
    policy = functools.partial(size_based_auto_wrap_policy, **exclude)
    units = plan_units(model, policy, KWARGS)
    like = wrapped_by_torch(twin, functools.partial(theirs.size_based_auto_wrap_policy, **exclude))
    assert [unit.name for unit in units] == like.names
    assert all(sum(p.numel() for p in unit.params) >= enough for unit in units)
    assert all(not isinstance(unit.module, tuple(excluded)) for unit in units)
    taken = [p for unit in units for p in unit.params]
    assert len(taken) == len(set(taken))


def test_defaults_of_the_size_are_torchs():
    for name in ("FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"):
        assert getattr(size_based_auto_wrap_policy, name) == getattr(theirs.size_based_auto_wrap_policy, name)


def test_with_a_mixed_precision_leaves_stay_leaves():
    """Torch wraps the leaf's children in this case, though attention never calls its inner layer."""
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    names = wrapped(encoder(), policy, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)).names
    assert names == wrapped(encoder(), policy).names
    assert names
    assert not [name for name in names if "self_attn" in name]


def test_batch_norms_are_full_precision_units_that_cast_inputs_and_outputs():
    model, twin = convolutions(), convolutions()
    twin.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="every BatchNorm2d becomes a separate unit"):
        log = wrapped(model, ModuleWrapPolicy({nn.Conv2d}), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    wrapped_by_torch(
        twin, theirs.ModuleWrapPolicy({nn.Conv2d}), mixed_precision=TheirMixedPrecision(param_dtype=torch.bfloat16)
    )
    assert {name: kwargs["mixed_precision"] is None for name, kwargs in log.calls} == {
        "0.0": False,
        "0.1": True,
        "1.0": False,
        "1.1": True,
    }
    inputs = torch.randn(2, 4, 5, 5, dtype=torch.bfloat16)
    out, like = model[0][1](inputs), twin[0][1](inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, like, rtol=0, atol=0)
    assert model[0][1](inputs.float()).dtype == torch.float32


def test_a_module_of_its_own_precision_computes_in_the_dtype_of_its_parameters():
    model = nn.Sequential(nn.BatchNorm1d(3)).double()
    with pytest.warns(UserWarning, match="every BatchNorm1d becomes a separate unit"):
        wrapped(model, ModuleWrapPolicy({nn.Linear}), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    ran = []
    model[0].module.register_forward_pre_hook(lambda _, args: ran.append(args[0].dtype))
    assert copy.deepcopy(model)(torch.randn(4, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert ran == [torch.float64]


def test_options_of_a_custom_policy_are_over_the_roots():
    other = ShardingStrategy.SHARD_GRAD_OP
    model = gpt()
    log = wrapped(model, CustomPolicy(lambda m: {"sharding_strategy": other} if m is model.head else type(m) is Block))
    assert log.calls == [("blocks.0", KWARGS), ("blocks.1", KWARGS), ("head", KWARGS | {"sharding_strategy": other})]


def refused(model, error, message, policy, **kwargs):
    """Expect an error; nothing may be wrapped."""
    with pytest.raises(error, match=message):
        wrapped(model, policy, **kwargs)
    assert "Wrapper" not in {type(module).__name__ for module in model.modules()}


def test_an_invalid_answer_of_a_custom_policy_is_refused():
    message = "^CustomPolicy: lambda_fn must return a bool or a dict of options, got 1 for a Block$"
    refused(gpt(), TypeError, message, CustomPolicy(lambda m: 1 if type(m) is Block else type(m) is nn.Embedding))


def test_an_option_that_does_not_exist_is_refused():
    message = (
        "auto_wrap_policy returned the unknown option 'shard' for module 'blocks.0.attention.qkv'; the options are "
        "sharding_strategy, mixed_precision, sync_module_states, use_orig_params$"
    )
    refused(gpt(), ValueError, message, CustomPolicy(lambda m: {"shard": 1} if type(m) is nn.Linear else False))


@pytest.mark.parametrize("policy", [{Block}, Block, "Block", theirs.CustomPolicy(lambda _: True)])
def test_an_invalid_policy_is_refused(policy):
    message = "^auto_wrap_policy must be a ModuleWrapPolicy, a CustomPolicy or a function of module, recurse and"
    refused(gpt(), TypeError, message, policy)


@pytest.mark.parametrize("classes", [Block, [Block(4, 1)], "Block"])
def test_classes_of_modules_are_classes_of_modules(classes):
    message = "must be a set or a sequence of subclasses of nn.Module, got "
    with pytest.raises(TypeError, match="^ModuleWrapPolicy: module_classes " + message):
        ModuleWrapPolicy(classes)
    transformer = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    refused(gpt(), TypeError, "^transformer_auto_wrap_policy: transformer_layer_cls " + message, transformer)


def test_a_unit_that_is_frozen_in_part_is_refused_unless_original_parameters_are_kept():
    model = gpt()
    model.blocks[1].ln_1.weight.requires_grad_(False)
    policy = ModuleWrapPolicy({Block})
    message = (
        "^unit 'blocks.1' has parameters with requires_grad=True, such as 'blocks.1.ln_1.bias', and with "
        "requires_grad=False, such as 'blocks.1.ln_1.weight': pass use_orig_params=True, or have the policy"
    )
    refused(model, ValueError, message, policy)
    assert wrapped(model, policy, use_orig_params=True).names == ["blocks.0", "blocks.1"]


def test_a_tree_in_which_something_is_wrapped_is_refused():
    model = gpt()
    wrapper_cls = Log(model).wrapper()
    model.blocks[1] = wrapper_cls(model.blocks[1])
    message = (
        "^auto_wrap_policy: module 'blocks.1' is wrapped in Wrapper already; wrap with a policy or by hand, not both$"
    )
    with pytest.raises(ValueError, match=message):
        auto_wrap(model, ModuleWrapPolicy({Block}), wrapper_cls, KWARGS)
    assert type(model.blocks[0]) is Block


def test_a_wrapper_may_be_a_function():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    auto_wrap(model, ModuleWrapPolicy({nn.Linear}), lambda module, **_: nn.Sequential(module), KWARGS)
    assert type(model[0]) is nn.Sequential


def test_the_repr_of_a_policy():
    assert repr(ModuleWrapPolicy([nn.Linear, Block])) == "ModuleWrapPolicy({Block, Linear})"


def test_a_lambda_is_called_only_for_modules_it_may_wrap():
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module is not None and False)
    assert wrapped(gpt(), policy).calls == []


def made():
    return nn.Sequential(wrap(nn.Linear(1, 1)), nn.Linear(1, 1), wrap(nn.Linear(1, 1), use_orig_params=True))


def test_wrap_wraps_only_within_enable_wrap():
    log = Log(nn.Identity())
    given_kwargs = []

    def wrapper(module, **kwargs):
        given_kwargs.append(kwargs)
        return nn.Sequential(module)

    with enable_wrap(wrapper_cls=wrapper, **KWARGS):
        model = made()
        with enable_wrap(wrapper_cls=nn.Sequential):
            assert type(wrap(nn.Linear(1, 1))) is nn.Sequential
        assert given_kwargs == [KWARGS, KWARGS | {"use_orig_params": True}]
        wrap(nn.Linear(1, 1))
        assert len(given_kwargs) == 3
    assert [type(module) for module in model] == [nn.Sequential, nn.Linear, nn.Sequential]
    assert [type(module) for module in made()] == [nn.Linear] * 3
    assert log.calls == []


def test_enable_wrap_ends_with_an_error_too():
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=nn.Sequential):
        raise KeyError
    assert type(wrap(nn.Linear(1, 1))) is nn.Linear
