"""Programs as scripts: their text."""

import subprocess
import sys

import pytest

from tests.helpers.fake_cluster import SHARD_RESULT, step_result
from workbench.base.codec import decode
from workbench.errors import UsageError
from workbench.protocol.commands import (
    ON_RANKS,
    InjectFault,
    Lint,
    Load,
    Reshard,
    Run,
    Save,
    Shard,
    ShardReply,
    Snapshot,
    Step,
    StepReply,
    Unshard,
    UnshardReply,
    Verify,
    to_text,
)
from workbench.protocol.policy import ModelPolicy
from workbench.script.script_writer import MARK, write_script
from workbench.session.program import CompletedCell, CompletedCommand, Omission, Program

MODEL = CompletedCell(code="model = Net()")
NOW = ModelPolicy(
    api="fully_shard",
    strategy="",
    orig_params=False,
    wrap=("Block",),
    mesh="4",
    reshard_after_forward="auto",
    mp="off",
    offload=False,
    prefetch=0,
)


def shards(optimizers=0, **options):
    reply = decode(ShardReply, {**SHARD_RESULT, "optimizers": optimizers, "chosen": ["Block"]}, "reply")
    return CompletedCommand(command=Shard("model", **options), reply=reply)


def reshards(model="model", policy=NOW, optimizers=0, is_changed=True, **options):
    units = {"units": ["blocks.1"]} if "." in model else {}
    data = {**SHARD_RESULT, "optimizers": optimizers, "is_changed": is_changed, **units}
    return CompletedCommand(command=Reshard(model, **options), reply=decode(ShardReply, data, "reply"), policy=policy)


def unshards(optimizers=0):
    return CompletedCommand(
        command=Unshard("model"), reply=UnshardReply(model="model", num_params=3, optimizers=optimizers)
    )


def steps(count=3, **changed):
    reply = decode(StepReply, {**step_result(count), **changed}, "reply")
    return CompletedCommand(command=Step(count), reply=reply)


def script(*entries, engine="workbench", **program):
    return write_script(Program(**{"ranks_per_host": (4,), "entries": entries, **program}), engine, "train.py")


def text(*entries, **more):
    """Return the text of a script, which is valid Python."""
    found = script(*entries, **more).text
    compile(found, "train.py", "exec")
    return found


def block(line, found):
    """Return the lines below the comment with a command, up to the next empty line."""
    return found.partition(f"\n# {line}\n")[2].partition("\n\n")[0].splitlines()


def test_a_script_of_cells_a_shard_and_steps():
    found = text(MODEL, shards(wrap=["Block"]), steps(40))
    assert found.startswith(f'"""A training session on 4 ranks, written {MARK}.\n\nStart it with:\n\n    torchrun ')
    assert "\n    torchrun --nproc-per-node 4 train.py\n" in found
    assert "\nfrom workbench.engine import fully_shard\n" in found
    assert '\ndist.init_process_group("gloo")\n' in found
    assert "\n\n\nmodel = Net()\n\n\n" in found
    assert block("%fsdp shard model --wrap Block", found) == [
        "for module in reversed(list(model.modules())[1:]):  # inner modules first",
        '    if type(module).__name__ == "Block":',
        "        fully_shard(module, mesh=mesh)",
        "fully_shard(model, mesh=mesh)",
    ]
    assert block("%fsdp step 40", found) == ["run_steps(train_step, 40)"]
    assert found.endswith("\n\n\ndist.destroy_process_group()\n")


def test_torchs_engine_has_the_same_lines_and_no_import_of_the_workbench():
    entries = MODEL, shards(wrap=["Block"], mp="bf16", mesh="2x2"), steps()
    own, torchs = text(*entries), text(*entries, engine="torch")
    assert own.replace("workbench.engine", "torch.distributed.fsdp") == torchs
    assert "workbench" not in torchs


def test_the_engine_that_ran_the_models_is_the_default():
    torchs = text(MODEL, shards(engine="torch"), steps(), engine="")
    assert "\nfrom torch.distributed.fsdp import fully_shard\n" in torchs
    assert "\nfrom workbench.engine import fully_shard\n" in text(MODEL, shards(), steps(), engine="")
    with pytest.raises(UsageError, match=r"both engines have run models here.*add --engine workbench or torch"):
        script(MODEL, shards(), unshards(), steps(), shards(engine="torch"), engine="")
    assert "torch.distributed.fsdp" not in text(MODEL, shards(), shards(engine="torch"), engine="workbench")


def test_the_classes_that_shard_chose_are_named():
    assert '    if type(module).__name__ == "Block":' in text(MODEL, shards())
    assert '    if type(module).__name__ in ("A", "B"):' in text(MODEL, shards(wrap=["B", "A"]))


def test_every_option_of_fully_shard():
    found = text(
        MODEL,
        shards(
            wrap=["Block"],
            mesh="2x2",
            reshard_after_forward="false",
            mp="bf16,reduce=fp32,output=fp32,keep=*.norm*|head.*",
            offload=True,
            prefetch=2,
            ignore=["*.bias", "norm.*"],
        ),
    )
    for line in (
        "mesh_2x2 = init_device_mesh(",
        "    (2, 2),",
        '    if fnmatch(path, "*.bias") or fnmatch(path, "norm.*")',
        '    if fnmatch(path, "*.norm*") or fnmatch(path, "head.*")',
        "precision = MixedPrecisionPolicy(",
        "    param_dtype_override_fn=lambda param: param.dtype if id(param) in kept else None,",
        "    output_dtype=torch.float32,",
        "            reshard_after_forward=False,",
        "            offload_policy=CPUOffloadPolicy(),",
        "            ignored_params=ignored,",
        "            mp_policy=precision,",
        "    mp_policy=root_precision,",
        "set_prefetch(model, 2)",
    ):
        assert line in found.splitlines(), line


def test_torch_pins_host_memory_only_for_an_accelerator():
    entries = MODEL, shards(offload=True)
    assert "offload_policy=CPUOffloadPolicy(pin_memory=False)" in text(*entries, engine="torch")
    assert "offload_policy=CPUOffloadPolicy()" in text(*entries, engine="torch", device="cuda")
    assert "offload_policy=CPUOffloadPolicy()" in text(*entries)


def test_optimizers_made_before_are_carried_over():
    for engine, origin in (("workbench", "remap_optimizer, unshard"), ("torch", "def remap_optimizer(")):
        found = text(MODEL, shards(optimizers=1), engine=engine)
        assert origin.partition(",")[0] in found
        assert "optimizers = optimizers_of(model)" in found
        assert "carry_over(optimizers, params_before, model)" in found
    assert "optimizers_of" not in text(MODEL, shards())


def test_the_classic_api():
    options = {"api": "classic", "strategy": "grad", "mp": "bf16", "offload": True, "prefetch": 1, "orig_params": True}
    for engine, origin in (("workbench", "workbench.engine.classic"), ("torch", "torch.distributed.fsdp")):
        found = text(MODEL, shards(wrap=["Block"], ignore=["x"], **options), engine=engine)
        assert f"from {origin} import" in found
        own = ["    device_id=device,"] if engine == "torch" else []
        assert found.partition("model = FullyShardedDataParallel(\n")[2].partition("\n)")[0].splitlines() == [
            "    model,",
            '    auto_wrap_policy=CustomPolicy(lambda module: type(module).__name__ == "Block"),',
            "    device_mesh=mesh,",
            *own,
            "    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,",
            "    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),",
            "    cpu_offload=CPUOffload(offload_params=True),",
            "    forward_prefetch=True,",
            "    use_orig_params=True,",
            "    ignored_states=ignored,",
        ]


def test_unshard_and_classic_conversions():
    found = text(MODEL, shards(api="classic"), unshards(1))
    assert block("%fsdp unshard model", found) == ["model, _ = unwrap(model, optimizers_of(model))"]
    assert block("%fsdp unshard model", text(MODEL, shards(), steps(), unshards())) == ["unshard_module(model)"]
    found = text(MODEL, shards(api="classic"), reshards(api="fully_shard"))
    assert block("%fsdp reshard model --api fully_shard", found)[0] == "model, _ = unwrap(model)"
    assert block("%fsdp reshard model --api fully_shard", found)[-1].startswith("fully_shard(model, mesh=mesh")


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        (
            reshards(reshard_after_forward="false", optimizers=1),
            ["reshard_module(model, reshard_after_forward=False, optimizers=optimizers_of(model))"],
        ),
        (
            reshards("model.blocks.1", reshard_after_forward=2),
            ["reshard_unit(model.blocks[1], reshard_after_forward=2)"],
        ),
        (reshards(is_changed=False, offload=True), []),
        (reshards(prefetch=0), ["set_prefetch(model, 0)"]),
    ],
)
def test_reshard(entry, lines):
    assert block(f"%fsdp {to_text(entry.command)}", text(MODEL, shards(), entry)) == lines


def test_a_new_precision_changes_only_what_it_names():
    found = text(MODEL, shards(), reshards(mp="bf16"))
    assert "mp_policy=lambda module, now: replace(now, param_dtype=torch.bfloat16)" in found
    found = text(MODEL, shards(), reshards(mp="bf16,output=fp32"))
    assert "output_dtype=torch.float32 if module is model else None,\n" in found
    found = text(MODEL, shards(mp="bf16,output=fp32"), reshards(wrap=["Linear"]))
    assert "output_dtype=now.output_dtype if isinstance(module, FSDPModule) else None,\n" in found
    assert 'wrap=lambda module: class_name(module) == "Linear"' in found


def test_torchs_setters():
    found = text(MODEL, shards(), reshards(reshard_after_forward="auto", prefetch=1), engine="torch")
    assert found.count("model.set_reshard_after_forward(") == 2
    assert "\nset_prefetch(model, 1)\n" in found
    found = text(MODEL, shards(), reshards("model.blocks.1", reshard_after_forward="true"), engine="torch")
    assert "\nmodel.blocks[1].set_reshard_after_forward(True, recurse=False)\n" in found
    again = shards(reshard_after_forward="false")
    found = text(MODEL, shards(), steps(), unshards(), again, engine="torch")
    assert block("%fsdp reshard model --reshard-after-forward false", found) == [
        "model.set_reshard_after_forward(False)"
    ]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([shards(), steps(), unshards()], "cannot make a sharded model plain again, as %fsdp unshard model did"),
        ([shards(), steps(), unshards(), shards(offload=True)], "cannot make a sharded model plain again"),
        ([shards(), reshards(offload=True)], "cannot do what %fsdp reshard model --offload did"),
        ([shards(), reshards(reshard_after_forward=2)], "cannot do what %fsdp reshard model"),
        ([shards(api="classic"), reshards(prefetch=1)], "cannot do what %fsdp reshard model --prefetch 1 did"),
        ([shards(optimizers=1, api="classic")], "carried over an optimizer made before it"),
    ],
)
def test_what_torch_cannot_do_is_refused(entries, reason):
    with pytest.raises(UsageError, match=reason) as refused:
        script(MODEL, *entries, engine="torch")
    assert "leave out --engine torch" in str(refused.value).lower()
    text(MODEL, *entries)


def test_a_shard_that_is_undone_at_once_leaves_no_trace():
    found = text(MODEL, shards(), CompletedCommand(command=Verify()), unshards(), shards(offload=True))
    assert "unshard" not in found
    assert found.count("# %fsdp") == 1
    assert "unshard_module(model)" in text(MODEL, shards(), MODEL, unshards(), shards(offload=True))


def test_questions_leave_no_trace_and_omissions_are_named():
    gaps = [Omission(what="a cell that raised NameError")] * 2 + [Omission(what=f"cell {n}") for n in range(9)]
    found = script(MODEL, *gaps, CompletedCommand(command=Verify()), is_attached=True, under_way="%fsdp step 9")
    assert "%fsdp verify" not in found.text
    before, left_out, running = found.notes
    assert before == "The ranks were attached: what ran on them before that is not in the script."
    assert left_out.startswith("Left out, with whatever it changed: a cell that raised NameError (2 times); cell 0;")
    assert left_out.endswith("; and 2 more.")
    assert running == "Left out, as it has not ended: %fsdp step 9."
    assert all(note.split()[0] in found.text.partition('"""\n')[0] for note in found.notes)


def test_steps_without_a_loss_are_a_loop():
    found = text(MODEL, steps(5, losses=None))
    assert block("%fsdp step 5", found) == ["for step in range(5):", "    train_step()"]
    assert "run_steps" not in found


def test_steps_of_a_command_that_did_not_complete():
    assert "run_steps(train_step, 2)" in text(MODEL, CompletedCommand(command=Step(2)))


def test_cells_keep_their_names():
    cell = CompletedCell(code="from torch.distributed.fsdp import fully_shard\nmesh = module = run_steps = None")
    found = text(cell, shards(wrap=["Block"]), steps())
    assert "from workbench.engine import fully_shard as fully_shard_" in found
    assert "\nmesh_ = mesh  # a cell binds mesh to something else\n" in found
    assert "\n        fully_shard_(module_, mesh=mesh_)\n" in found
    assert "\nrun_steps_(train_step, 3)\n" in found


def test_what_cells_of_a_notebook_have_is_imported():
    found = text(CompletedCell(code="display(log_metric('loss', 1))"))
    assert "from IPython.display import display" in found
    assert "from workbench.watch import log_metric" in found
    assert "log_metric" not in text(MODEL)


def test_a_feature_of_the_future_comes_first():
    found = text(MODEL, CompletedCell(code="from __future__ import annotations\nx: y = 1"))
    assert found.partition('\n"""\n')[2].startswith("\nfrom __future__ import annotations\n")


def test_lines_of_ipython_are_named():
    found = script(CompletedCell(code="%matplotlib inline\nx = 1"))
    assert found.notes == ("Not Python, and so comments in the script: %matplotlib inline.",)
    assert "\n# %matplotlib inline\nx = 1\n" in found.text


def test_gpus_and_hosts():
    found = script(MODEL, device="cuda", ranks_per_host=(8, 8))
    assert found.start.startswith("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST")
    assert (
        '\ndevice = torch.device("cuda", int(os.environ["LOCAL_RANK"]))\ntorch.cuda.set_device(device)\n' in found.text
    )
    assert '\ndist.init_process_group("nccl")\n' in found.text
    assert '\nmesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("shard",))\n' in found.text


def test_nothing_done_has_no_script():
    for entries in ([], [Omission(what="a cell that raised NameError")], [shards()]):
        with pytest.raises(UsageError, match="nothing to write: a script needs a %%fsdp cell"):
            script(*entries)


def test_every_command_of_ranks_has_code_or_leaves_no_trace():
    # a script is an omission, and a program with a load is refused
    has_code, has_none = {Shard, Reshard, Unshard, Step}, {Lint, InjectFault, Verify, Save, Snapshot}
    assert set(ON_RANKS.values()) == has_code | has_none | {Run, Load}


@pytest.mark.parametrize("engine", ["workbench", "torch"])
def test_the_writers_own_lines_are_formatted_and_pass_the_linter(engine, tmp_path):
    path = tmp_path / "train.py"
    net = CompletedCell(code="class Net:\n    pass\n\n\nmodel = Net()\n\n\ndef train_step():\n    pass")
    options = {"wrap": ["Block"], "mesh": "2x2", "prefetch": 2, "ignore": ["*.b"]}
    options["mp"] = "bf16,reduce=fp32,output=fp32,keep=*.norm*|head.*"
    entries = [net, shards(optimizers=1, **options), steps(), reshards(reshard_after_forward="false", optimizers=1)]
    if engine == "workbench":
        entries += [reshards(wrap=["Linear"], mp="bf16"), unshards(1)]
    path.write_text(text(*entries, engine=engine))
    for command in (["check"], ["check", "--select", "F,E7,E9"], ["format", "--check", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", path.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
