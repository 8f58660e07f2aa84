"""Each rule of ``lint`` finds its fault and names it, and is silent on every clean model, on four real ranks; so
are ``explain`` and ``verify``."""

import pytest

from tests.helpers.linted_models import CASES, TO_TRAIN, TRAINED, all_cases, faults_of, trace_of, verified
from tests.helpers.loading_scripts import ABSTAINS as UNKNOWN
from tests.helpers.loading_scripts import FAULT, SCRIPTS
from tests.helpers.pairwise import quick
from workbench.protocol.lint_reply import LintReply
from workbench.reports.explanations import ANSWERS, explain
from workbench.runtime.lint_rules import rules
from workbench.runtime.lint_target import Damage

pytestmark = pytest.mark.timeout(900)  # the first test runs all cases

EXPECTED = {
    "optimizer_before_shard": (
        "optimizer-before-shard",
        "opt was made before model was sharded, so its steps do not train the model",
        "opt (AdamW) holds 21 parameters that model no longer has, 20,880 B",
        "blocks.0.norm.weight",
        "opt = torch.optim.AdamW(model.parameters(), lr=0.001)",
    ),
    "optimizer_before_torchs_flat": ("optimizer-before-shard", "torch.optim.SGD(model.parameters(), lr=0.5)"),
    "optimizer_before_classic": ("optimizer-before-shard", "opt (AdamW) holds 21 parameters"),
    "never_written": ("never-written", "angles: 64 B", "model.get_buffer('angles').copy_(...)"),
    "never_written_parameters": ("never-written", "embed.weight, blocks.0.mlp.0.weight", "reset_parameters()"),
    "still_on_meta": ("still-on-meta", "blocks.0.norm.weight", "22 tensors", "model.to_empty(device=device)"),
    "in_no_unit": ("in-no-unit", "are not averaged: scale", "torch.distributed.all_reduce(p.grad)"),
    "added_after_ddp": ("in-no-unit", "unfrozen after DistributedDataParallel was made", "scale, head.weight"),
    "replicas_differ": (
        "replicas-differ",
        "embed.weight on ranks 0, 2: different on each of ranks 0, 2",
        "torch.manual_seed(0)",
    ),
    "ignored_parameters_differ": ("replicas-differ", "scale: the same on ranks 0-2; different on rank 3"),
    "ddp_differs": (
        "replicas-differ",
        "scale on ranks 0, 1, 2, 3: the same on ranks 0, 2-3; different on rank 1",
        "since DistributedDataParallel made them equal",
    ),
    "options_differ": (
        "options-differ",
        "ranks take steps with different learning rates of opt in 1 step",
        "the same on ranks 0, 2; the same on ranks 1, 3",
        "all-reduce what decides",
    ),
    "options_differed": (
        "options-differ",
        "learning rates of opt in 2 steps: the same on ranks 0, 2; the same on ranks 1, 3",
    ),
    "other_options_differ": ("options-differ", "opt.param_groups[0]['weight_decay']"),
    "steps_differ": (
        "options-differ",
        "the state of opt is of other steps on each rank",
        "opt: the same on ranks 1-3; different on rank 0",
        "load one checkpoint",
    ),
    "scaler_of_own_shards": ("options-differ", "a rank's own shards alone", "flat", "scaler = ShardedGradScaler()"),
    "buffers_differ": (
        "buffers-differ",
        "angles: different on each of ranks 0-3",
        "broadcast(model.get_buffer('angles'), 0)",
    ),
    "tied_in_two_units": (
        "tied-in-two-units",
        "embed.weight in unit embed",
        "head.weight in unit (root)",
        "fully_shard([model.head, model.embed])",
    ),
    "same_data": (
        "same-data",
        "loader draws the same rows",
        "loader: the same on ranks 0-3",
        "DistributedSampler(loader",
    ),
    "left_out_of_optimizer": (
        "left-out-of-optimizer",
        "head.weight",
        "2 parameters, 528 B, take gradients",
        "opts[0].add_param_group({'params': [model.get_parameter(name) for name in [",
    ),
    "left_out_of_torchs_flat": ("left-out-of-optimizer", "blocks.1._flat_param", "blocks.2._flat_param"),
    "sync_left_off": (
        "sync-left-off",
        "units (root), blocks.0",
        "2 of 3 steps of opt",
        "set_requires_gradient_sync(True)",
    ),
    "copies_left_unaveraged": (
        "sync-left-off",
        "it makes NO_SHARD of a hybrid strategy",
        "units (root), blocks.0",
        "DistributedDataParallel",
    ),
    "sync_left_off_in_ddp": ("sync-left-off", "1 of 1 step of opt", "different on each of ranks 0-3", "no no_sync()"),
    "all_reduce_left_off": (
        "sync-left-off",
        "not reduced between its copies",
        "2 of 3 steps of opt",
        "set_requires_all_reduce(True)",
    ),
    "wrapper_bypassed": ("wrapper-bypassed", "3 of 3 steps of opt", "model(x) for what is trained"),
    "wrapper_bypassed_later": ("wrapper-bypassed", "1 of 3 steps of opt", "different on each of ranks 0-3"),
    "kept_by_zero_grad": ("kept-by-zero-grad", "units (root), blocks.0", "step 1 of opt"),
    "no_zero_grad": ("no-zero-grad", "step 2 of opt", "used those of step 1 again", "opt.zero_grad()"),
    "no_set_epoch": ("no-set-epoch", "2 epochs repeated", "loader.sampler.set_epoch(epoch)"),
    "sampler_seeds_differ": ("sampler-seeds-differ", "loader.sampler: different on each of ranks 0-3"),
    **dict.fromkeys(
        ("same_stream", "same_stream_under_ddp"),
        (
            "same-data",
            "loader gave several ranks the same rows to train on: the inputs of the first 3 forwards",
            "loader: the same on ranks 0-3",
            "let Stream.__iter__ yield each rank its own part",
        ),
    ),
    "same_stream_of_a_loader_without_a_name": (
        "same-data",
        "the DataLoader of a Stream gave several ranks the same rows",
    ),
    "same_order_without_shuffle": ("same-data", "inputs of the first 4 forwards", "DistributedSampler(loader.dataset)"),
    "same_rank_of_samplers": ("same-data", "loader.sampler has the same rank", "the same on ranks 0-3"),
    "same_random_numbers": ("same-random-numbers", "the same on ranks 0-3", "torch.set_rng_state(states[rank])"),
    "optimizer_not_resumed": ("optimizer-not-resumed", "schedule (StepLR) is at step 30", "set_state_dict"),
    "not_resumed_before_the_first_step": ("optimizer-not-resumed", "schedule (StepLR) is at step 30"),
    "not_resumed_by_step": ("optimizer-not-resumed", "start_step is 40, as in the checkpoint"),
    "tie_lost": ("tie-lost", "embed.weight, head.weight were tied", "model.head.weight = model.embed.weight"),
    "tie_lost_by_assign": (
        "tie-lost",
        "tied before load_state_dict(assign=True)",
        "model.head.weight = model.embed.weight",
    ),
    "tied_in_two_units_and_trained": ("tied-in-two-units", "embed.weight in unit embed"),
    "parameters_replaced": ("parameters-replaced", "opt (AdamW) holds 21 parameters", "opt = torch.optim.AdamW("),
    "head_replaced": (
        "parameters-replaced",
        "opt (AdamW) holds 1 parameter that",
        "in no optimizer: head.weight, head.bias",
    ),
    "state_left_behind": ("parameters-replaced", "entries of state: 42, parameters in its groups: 21"),
    "method_of_a_part": ("method-without-hooks", "Outer.features uses self.net.encode: self.embed of unit (root)"),
    "call_of_a_part": ("method-without-hooks", "model.net.embed() computes", "is a part of unit (root)", "METHOD"),
    "hook_never_called": ("hook-never-called", "head.weight", "register_post_accumulate_grad_hook"),
    "low_precision_master": (
        "low-precision-master",
        "opt updates bfloat16 parameters",
        "21 parameters",
        "%fsdp shard model --mp bf16",
    ),
    "low_precision_in_torchs_classic": ("low-precision-master", "opt updates float16 parameters", "_flat_param"),
    "low_precision_in_ddp": ("low-precision-master", "opt updates bfloat16 parameters", "blocks.0.norm.weight"),
    "method_without_hooks": (
        "method-without-hooks",
        "model.encode() computes with sharded parameters",
        "Encoder.encode uses self.embed of unit (root)",
        "register_fsdp_forward_method(model, 'encode')",
    ),
    "method_with_a_parameter": ("method-without-hooks", "Encoder.scaled uses self.scale of unit (root)"),
    "unsplit_unit": (
        "unsplit-unit",
        "unit (root) holds 100% of model",
        "unit (root): 1,874,624 B of 1,874,624 B",
        "3 x Block in it: blocks.0, blocks.1, blocks.2",
        "--wrap Block",
    ),
    "unsplit_by_class": (
        "unsplit-unit",
        "its largest modules: 0, 2",
        "before fully_shard(model): fully_shard(model.0)",
    ),
    "nothing_sharded": ("nothing-sharded", "4 copies", "each rank holds 1,867,536 B of (root)", "(1, 4)"),
    "rows_lost_to_padding": (
        "rows-lost-to-padding",
        "weight: 2 rows of dim 0 for 4 ranks; place 2, 3 of the shard axis holds none of 4,194,304 B",
        "Shard(1)",
    ),
    "much_padding": ("rows-lost-to-padding", "12% of the bytes of model are padding", "2,097,152 B in weight"),
    "frozen_in_flat_parameter": ("frozen-in-flat-parameter", "unit blocks.0: 5,544,964 B reduced for 3,840 B trained"),
    "frozen_in_our_flat_parameter": ("frozen-in-flat-parameter", "unit blocks.2: 5,544,964 B reduced for 3,840 B"),
    "checkpoint_around_units": (
        "checkpoint-around-units",
        "units in it: blocks.0.0, blocks.0.1, blocks.0.2",
        "isinstance(module, Block)",
    ),
    "tiny_units": (
        "tiny-units",
        "10 of 20 units of model",
        "embed, blocks.0.norm",
        "leave Embedding, LayerNorm to the enclosing units",
    ),
    "mesh_turned_round": (
        "mesh-turned-round",
        "units (root), blocks.0, blocks.1, blocks.2: one copy is split over 2 hosts, and one host has 2 copies",
        "(2, 2)",
    ),
    **{
        f"loads_{name}": (
            "checkpoint-on-every-rank",
            "B of ",
            "the same on ranks 0-3",
            "broadcast_from_rank0=True",
            "dtype='auto'" if name.startswith("pretrained_cast") else "mmap=True",
        )
        for name, (verdict, _) in SCRIPTS.items()
        if verdict == FAULT
    },
}
"""By case: the rule, and texts in the verdict, the evidence or the fix."""

ABSTAINS = {
    "clean_ignored_by_ddp": "in-no-unit: what averages the gradients of scale, which the wrapper ignores",
    "clean_unknown_data": "same-data: whether loader has the same rows on every rank is unknown",
    "clean_activations_moved_by_itself": "same-data: ranks that send each other activations within a forward",
    "clean_before_the_optimizer": "low-precision-master: model has 16-bit parameters, and no optimizer",
    "clean_with_an_optimizer_of_its_own": "low-precision-master: whether opt (KeepsMaster) keeps float32 copies",
    "clean_hosts_of_unknown_size": "mesh-turned-round: hosts have different numbers of ranks",
    **{
        f"clean_loads_{name}": "checkpoint-on-every-rank: model.pt is in memory, and what model took of it is unknown"
        for name, (verdict, _) in SCRIPTS.items()
        if verdict == UNKNOWN
    },
}
"""By case: why the rule cannot decide."""


@pytest.fixture(scope="module", autouse=True)
def cases(request):
    """Run all cases once, also if they fail; train all if a test was chosen that not every run has."""
    if any(each.path == request.path and each.get_closest_marker("thorough") for each in request.session.items):
        TO_TRAIN.update(TRAINED)
    return all_cases()


def base(name):
    return name.partition("[")[0]


CLEAN = [name for name in CASES if name.startswith("clean_")]
FAULTY = [name for name in CASES if name not in CLEAN]


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_has_no_fault(name):
    assert faults_of(name) == ()


@pytest.mark.parametrize("name", CLEAN)
def test_a_rule_abstains_only_where_a_signal_is_missing_and_names_it(name):
    (reasons,) = {reply.abstained for reply in all_cases()[name]} - {()} or {()}
    expected = ABSTAINS.get(base(name), "")
    assert [reason[: len(expected)] for reason in reasons] == ([expected] if expected else [])


@pytest.mark.parametrize("name", quick(TRAINED, TO_TRAIN))
def test_explain_names_no_fault_after_steps_of_a_clean_model(name):
    for subject in ("", *ANSWERS):
        report = explain(trace_of(name), subject, is_live=True)
        assert report.faults == (), report.headline
        assert report.problem == ""


@pytest.mark.parametrize("name", quick(TRAINED, TO_TRAIN))
def test_verify_names_no_fault_of_a_clean_model(name):
    report = verified(name)
    assert (report.faults, report.problem) == ((), "")


@pytest.mark.parametrize("name", FAULTY)
def test_a_rule_names_its_fault_alone(name):
    rule, *texts = EXPECTED[base(name)]
    (fault,) = faults_of(name)
    assert fault.rule == rule
    assert fault.verdict
    assert fault.fix
    told = " | ".join((fault.verdict, *fault.evidence, fault.fix))
    assert [text for text in texts if text not in told] == [], told


def test_every_rule_has_a_case_and_a_description():
    assert {rule for rule, *_ in EXPECTED.values()} == {rule.name for rule in rules()}
    assert all(rule.about and rule.check.__name__ for rule in rules())


def test_the_worst_damage_comes_first():
    assert [rule.damage for rule in rules()] == sorted(rule.damage for rule in rules())
    assert rules()[0].damage is Damage.NUMBERS


def test_all_rules_run_on_every_model():
    assert all(
        reply.rules == tuple(rule.name for rule in rules()) for replies in all_cases().values() for reply in replies
    )
    assert LintReply().rules == ()
