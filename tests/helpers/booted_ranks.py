"""Run a function on N forked ranks, booted as the cluster boots them, with a small model to train."""

import sys

import torch

from tests.helpers.forked_ranks import Group, run_ranks
from tests.helpers.small_models import Block, adamw, batch, loss_of, make_net
from workbench.base.codec import decode, encode
from workbench.base.ports import LOOPBACK, LOOPBACK_INTERFACE
from workbench.errors import UsageError
from workbench.protocol import commands
from workbench.protocol.rank_messages import Drain, DrainReply, RecordSummary
from workbench.protocol.starting import Address, Boot, Connect, HostInfo
from workbench.runtime import rank as rank_module
from workbench.runtime import shard_planning
from workbench.trace.row_compression import from_wire


def namespace():
    return sys.modules["__main__"].__dict__


def prepare(dim=16, clip=None, **options):
    """Add a model, its optimizer and ``train_step`` to the cells' variables, as :func:`use` does."""
    return use(make_net(dim=dim, **options), clip)


def use(model, clip=None):
    """Add this model, an optimizer of its trained parameters and ``train_step`` to the cells' variables.

    ``clip`` is the norm that gradients are clipped to. Every rank of every test works out again how
    DTensors are clipped.
    """
    ns = namespace()
    ns["model"] = model
    ns["generator"] = torch.Generator().manual_seed(ns["rank"])
    ns["opt"] = adamw(param for param in model.parameters() if param.requires_grad)

    def train_step():
        tokens = torch.randint(7, (4, 6), generator=ns["generator"])
        loss = loss_of(ns["model"], tokens)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(ns["model"].parameters(), clip)
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    return ns


def execute(command):
    return rank_module.execute(commands.to_dict(command))


def models_here():
    """Return the descriptions of the models among this rank's variables."""
    here = rank_module.this_rank()
    return shard_planning.models(here.watch.models_in, here.history.never_cleared)


def drain(next_seq=0, version=0):
    """Return the rank's reply with what it recorded since ``next_seq``, and its rows unpacked."""
    known = {namespace()["rank"]: RecordSummary(next_seq=next_seq, header_version=version)}
    recorded = _reply(*rank_module.handle_request(encode(Drain(known=known))))
    return recorded, [from_wire(recorded.rows)]


def _reply(data, buffers):
    return decode(DrainReply, data, "reply", buffers)


def boot_of(rank, world_size, device="cpu"):
    """Return the message that makes this process one of ``world_size`` ranks on this host."""
    here = HostInfo(name="here", identity="this host", address=LOOPBACK, interface=LOOPBACK_INTERFACE)
    return Boot(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        device=device,
        host=here,
    )


class BootedGroup(Group):
    """Ranks as the cluster boots them."""

    @staticmethod
    def join(rank, ports, _, device):
        first = rank_module.boot(encode(boot_of(rank, len(ports), device)))
        torch.set_num_threads(1)  # OpenMP's threads do not survive the fork: a parallel loop would wait for them
        if rank == 0:
            ports[0].send(first)
        rank_module.connect(encode(Connect(address=Address(**(ports[rank].recv() if rank else first)))))

    @staticmethod
    def leave():
        rank_module.shutdown()


def run(world_size, fn, *args, **options):
    """Return ``fn(*args)`` of every rank, in order, as :func:`run_ranks` does; if a rank raised, fail."""
    return run_ranks(world_size, fn, *args, group=BootedGroup, **options)


def assert_refused(messages, parts):
    """Check that each message is that of a UsageError and contains the part at the same index."""
    for message, part in zip(messages, parts, strict=True):
        assert message.startswith(f"{UsageError.__name__}: "), message
        assert part in message


__all__ = ["Block", "assert_refused", "batch", "drain", "execute", "namespace", "prepare", "run"]
