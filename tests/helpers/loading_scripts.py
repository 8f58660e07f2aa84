"""Programs that load a checkpoint before or after sharding, as people write them, each with the right verdict.

They were written before the rule that judges them. Each runs on every rank of one host, finds the files of
:func:`write_files` in ``folder``, and leaves ``model``. In ``SCRIPTS``: the verdict, and the program.
"""

import os
import textwrap

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict as of_dcp

from tests.helpers.small_models import make_net

WIDTH = 160
FAULT, SILENT, ABSTAINS = "fault", "silent", "abstains"

PRELUDE = """
import io
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from tests.helpers.small_models import Block, make_net

by_block = ModuleWrapPolicy({Block})

def build():
    return make_net(dim=160, num_blocks=3)

def shard(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model

def from_pretrained(file, dtype=None):
    \"\"\"Return a model as those of transformers are made: tests/engine/test_huggingface.py has them.\"\"\"
    from safetensors.torch import load_file
    with torch.device('meta'):
        model = build()
    for name, value in load_file(file).items():
        owner, _, own = name.rpartition('.')
        setattr(model.get_submodule(owner), own, torch.nn.Parameter(value.to(dtype or value.dtype)))
    return model.eval()

def broadcast(model, state):
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model
"""

_PROGRAMS = {
    # ---- every rank reads all of it
    "plain": (FAULT, "model = build()\nmodel.load_state_dict(torch.load(f'{folder}/model.pt'))\nshard(model)"),
    "of_training_in_ddp": (
        FAULT,
        """
        checkpoint = torch.load(f'{folder}/training.pt', map_location='cpu', weights_only=False)
        model = build()
        model.load_state_dict({k.removeprefix('module.'): v for k, v in checkpoint['model'].items()})
        del checkpoint
        shard(model)
        """,
    ),
    "wrapper": (
        FAULT,
        """
        net = build()
        net.load_state_dict(torch.load(f'{folder}/model.pt', weights_only=True))
        model = FSDP(net, auto_wrap_policy=by_block, device_id=torch.device('cpu'), use_orig_params=True)
        del net
        """,
    ),
    "whole_module": (FAULT, "model = shard(torch.load(f'{folder}/module.pt', weights_only=False))"),
    "set_by_each": (
        FAULT,
        """
        model = shard(build())
        state = torch.load(f'{folder}/model.pt')
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        """,
    ),
    "one_after_another": (
        FAULT,
        """
        model = build()
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                model.load_state_dict(torch.load(f'{folder}/model.pt'))
            dist.barrier()
        shard(model)
        """,
    ),
    "from_bytes": (
        FAULT,
        """
        model = build()
        with open(f'{folder}/model.pt', 'rb') as file:
            model.load_state_dict(torch.load(io.BytesIO(file.read())))
        shard(model)
        """,
    ),
    "assigned_to_meta": (
        FAULT,
        """
        with torch.device('meta'):
            model = build()
        model.load_state_dict(torch.load(f'{folder}/model.pt'), assign=True)
        shard(model)
        """,
    ),
    "safetensors_in_half": (
        FAULT,
        """
        from safetensors.torch import load_file
        model = build()
        model.load_state_dict({k: v.to(torch.bfloat16) for k, v in load_file(f'{folder}/model.safetensors').items()})
        shard(model)
        """,
    ),
    "mapped_in_half": (
        FAULT,
        """
        state = {k: v.half() for k, v in torch.load(f'{folder}/model.pt', mmap=True).items()}
        model = build()
        model.load_state_dict(state)
        shard(model)
        """,
    ),
    "pretrained_cast": (FAULT, "model = shard(from_pretrained(f'{folder}/model.safetensors', torch.float64))"),
    "pretrained_cast_later": (FAULT, "model = shard(from_pretrained(f'{folder}/model.safetensors').double())"),
    "pretrained_and_set_by_each": (
        FAULT,
        """
        source = from_pretrained(f'{folder}/model.safetensors', torch.bfloat16)
        model = shard(build())
        set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
        del source
        """,
    ),
    # ---- sound
    "pretrained": (SILENT, "model = shard(from_pretrained(f'{folder}/model.safetensors'))"),
    "pretrained_then_cast_shards": (SILENT, "model = shard(from_pretrained(f'{folder}/model.safetensors')).double()"),
    "pretrained_on_rank_0": (
        SILENT,
        """
        file = f'{folder}/model.safetensors'
        source = from_pretrained(file, torch.bfloat16) if dist.get_rank() == 0 else torch.nn.Module()
        model = broadcast(shard(build()), source.state_dict())
        del source
        """,
    ),
    "pretrained_teacher": (
        SILENT,
        """
        teacher = from_pretrained(f'{folder}/model.safetensors', torch.bfloat16).requires_grad_(False)
        model = shard(build())
        """,
    ),
    "rank_0_and_broadcast": (
        SILENT,
        """
        with torch.device('meta'):
            model = build()
        shard(model)
        model.to_empty(device='cpu')
        state = torch.load(f'{folder}/model.pt') if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        """,
    ),
    "rank_0_and_wrapper": (
        SILENT,
        """
        from workbench.engine.classic import FullyShardedDataParallel as OurFSDP  # torch's syncs GPUs alone
        net = build()
        if dist.get_rank() == 0:
            net.load_state_dict(torch.load(f'{folder}/model.pt'))
        model = OurFSDP(net, auto_wrap_policy=by_block, use_orig_params=True, sync_module_states=True)
        del net
        """,
    ),
    "rank_0_and_broadcast_by_hand": (
        SILENT,
        """
        model = build()
        if dist.get_rank() == 0:
            state = torch.load(f'{folder}/model.pt')
            model.load_state_dict(state)
        for param in model.parameters():
            dist.broadcast(param.data, 0)
        shard(model)
        """,
    ),
    "mapped": (
        SILENT,
        "model = build()\nmodel.load_state_dict(torch.load(f'{folder}/model.pt', mmap=True))\nshard(model)",
    ),
    "dcp": (
        SILENT,
        """
        import torch.distributed.checkpoint as dcp
        with torch.device('meta'):
            model = build()
        shard(model)
        model.to_empty(device='cpu')
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f'{folder}/dcp')
        model.load_state_dict(state)
        """,
    ),
    "small_tensors": (
        SILENT,
        "stats = torch.load(f'{folder}/stats.pt')\nmodel = shard(build())",
    ),
    "head_alone": (
        SILENT,
        "model = build()\nmodel.load_state_dict(torch.load(f'{folder}/head.pt'), strict=False)\nshard(model)",
    ),
    "own_shard": (
        SILENT,
        """
        model = shard(build())
        mine = torch.load(f'{folder}/shard_{dist.get_rank()}.pt')
        for name, param in model.named_parameters():
            param.to_local().data.copy_(mine[name])
        """,
    ),
    "safetensors": (
        SILENT,
        """
        from safetensors.torch import load_file
        model = build()
        model.load_state_dict(load_file(f'{folder}/model.safetensors'))
        shard(model)
        """,
    ),
    "safetensors_one_by_one": (
        SILENT,
        """
        from safetensors import safe_open
        from torch.distributed.tensor import distribute_tensor
        model = shard(build())
        with safe_open(f'{folder}/model.safetensors', framework='pt') as file:
            for name, param in model.named_parameters():
                part = distribute_tensor(file.get_tensor(name).to(param.dtype), param.device_mesh, param.placements)
                param.to_local().data.copy_(part.to_local())
        """,
    ),
    "safetensors_copied_on_rank_0": (
        SILENT,
        """
        from safetensors.torch import load_file
        model = shard(build())
        file = f'{folder}/model.safetensors'
        state = {k: v.clone() for k, v in load_file(file).items()} if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        """,
    ),
    "whole_teacher": (
        SILENT,
        """
        teacher = build()
        teacher.load_state_dict(torch.load(f'{folder}/model.pt'))
        teacher.requires_grad_(False)
        model = shard(build())
        """,
    ),
    "shapes_alone": (SILENT, "shapes = torch.load(f'{folder}/model.pt', map_location='meta')\nmodel = shard(build())"),
    "not_sharded": (
        SILENT,
        """
        net = build()
        net.load_state_dict(torch.load(f'{folder}/model.pt'))
        model = torch.nn.parallel.DistributedDataParallel(net)
        del net
        """,
    ),
    "mended": (  # as in a cell that is run again
        SILENT,
        """
        model = build()
        model.load_state_dict(torch.load(f'{folder}/model.pt'))
        model = build()
        if dist.get_rank() == 0:
            model.load_state_dict(torch.load(f'{folder}/model.pt'))
        for param in model.parameters():
            dist.broadcast(param.data, 0)
        shard(model)
        """,
    ),
    # ---- what became of it is unknown
    "distributed_by_hand": (
        ABSTAINS,
        """
        from torch.distributed.tensor import distribute_tensor
        state = torch.load(f'{folder}/model.pt')
        model = shard(build())
        for name, param in model.named_parameters():
            part = distribute_tensor(state[name], param.device_mesh, param.placements)
            param.to_local().data.copy_(part.to_local())
        """,
    ),
}

SCRIPTS = {name: (verdict, PRELUDE + textwrap.dedent(text)) for name, (verdict, text) in _PROGRAMS.items()}


def write_files(folder, shard):
    """Write the files that the programs load; on every rank, with a function that shards a model."""
    sharded = shard(make_net(dim=WIDTH, num_blocks=3))
    own = {name: param.to_local().detach().clone() for name, param in sharded.named_parameters()}
    torch.save(own, os.path.join(folder, f"shard_{dist.get_rank()}.pt"))
    dcp.save(of_dcp.get_model_state_dict(sharded), checkpoint_id=os.path.join(folder, "dcp"))
    if dist.get_rank() == 0:
        net = make_net(dim=WIDTH, num_blocks=3)
        state = net.state_dict()
        optimizer = torch.optim.AdamW(net.parameters())
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        training = {
            "model": {f"module.{name}": value for name, value in state.items()},
            "optimizer": optimizer.state_dict(),
            "step": 1,
        }
        files = {
            "model": state,
            "module": net.requires_grad_(requires_grad=True),
            "training": training,
            "stats": {"mean": torch.zeros(3), "std": torch.ones(3)},
            "head": {name: value for name, value in state.items() if name.startswith("head")},
        }
        for param in net.parameters():
            param.grad = None
        for name, value in files.items():
            torch.save(value, os.path.join(folder, f"{name}.pt"))
        save_file({name: value.contiguous() for name, value in state.items()}, f"{folder}/model.safetensors")
    dist.barrier()
