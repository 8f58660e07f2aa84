"""The words of the pictures and their meanings: the tables of docs/glossary.md, and the hover texts of legends."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workbench.events import ROOT

SECTIONS: dict[str, dict[str, str]] = {
    "The parts": {
        "rank": "a process that trains, with a number from 0; on GPUs, one rank has one GPU",
        "host": (
            "a machine with some of the ranks; in the timeline of GPUs, the row that shows when it enqueued the work"
        ),
        "parameter": (
            "a tensor that training changes, such as a weight; its full shape is the one that the model defines"
        ),
        "shard": "the part of a parameter that a rank holds: some of its rows",
        "row": "an index of the dimension along which a parameter is cut, usually the first",
        "padding": "rows without content, so that all shards are equally large",
        "unit": (
            "parameters that are gathered and freed together: those of one module for which `fully_shard` was called"
        ),
        ROOT.strip("()"): "the unit of the outermost module; it has the parameters that are in no other unit",
        "flat parameter": "all parameters of a unit, concatenated into one",
        "policy": (
            "how a model is sharded: its units, mesh, dtypes, prefetch, and whether units are freed after forward"
        ),
        "mesh": "how ranks are arranged: `2x4` is two replicas of four shard ranks",
        "replica": "a complete copy of the model, sharded over some of the ranks",
        "process group": "the ranks that take part in a collective",
    },
    "What happens in a step": {
        "step": "one call of `train_step()`: forward, backward, and a step of the optimizer",
        "forward": "computing outputs; here, of one unit, without the units inside it",
        "backward": "computing gradients; of one unit, from the gradient of its output to those of its parameters",
        "optimizer": "a step of the optimizer, which changes the parameters by their gradients",
        "unshard": "making the whole parameters of a unit usable: its all-gather, the wait for it, and the copies",
        "reshard": "freeing the whole parameters of a unit",
        "prefetch": "issuing the all-gather of a unit while another one computes",
        "copy-in": "copying into the input of a collective",
        "copy-out": "copying out of the output of a collective",
        "offload": "copying between a GPU and its host, to keep shards in the host's memory",
        "held at a gate": "stopped at a breakpoint, or by a pause; time axes leave this out",
        "step aborted": "the step ended early; units are sharded again",
    },
    "Communication": {
        "collective": "an operation in which every rank of a group takes part",
        "all-gather": "every rank gets the shards of all ranks",
        "reduce-scatter": "values are summed over the ranks; each rank gets the sum for its own shard",
        "all-reduce": "values are summed over the ranks; every rank gets the whole sum",
        "broadcast": "one rank sends the same to all others",
        "all-to-all": "each rank sends a different part to each other rank",
        "reduce": "values are summed over the ranks; one rank gets the sum",
        "gather": "one rank gets the parts of all ranks",
        "scatter": "one rank sends a different part to each rank",
        "barrier": "no rank continues before all have arrived",
        "send": "sending to one other rank",
        "recv": "receiving from one other rank",
        "issue": "to start a collective; it runs while the rank continues",
        "issue to wait": "the time from the issue of a collective to the wait for it, in which compute may go on",
        "wait": "the time in which a rank's compute blocks until a collective has ended",
        "wait for readers": (
            "the time in which a rank blocks until other ranks have read its memory, which it shares with them"
        ),
        "exposed communication": "the part of communication that compute waits for",
        "transfers and copies": "waits from when all ranks have issued a collective on, and copies into and out of it",
        "straggler": "the rank that begins a collective last, so that the others wait",
        "payload": (
            "the logical size of a collective: the whole output of an all-gather, the whole input of a "
            "reduce-scatter, the input of one rank for an all-reduce"
        ),
        "ring": (
            "a way to run a collective: each rank sends to the next; with F ranks, each sends (F - 1) / F of "
            "the payload"
        ),
        "transport": "what carries the bytes: shared memory, gloo, or NCCL",
        "closed form": "the numbers and bytes of collectives that follow from units and policy",
    },
    "States of a unit": {
        "sharded": "each rank holds its shard only",
        "all-gather in flight": "an all-gather is under way, and fills its output",
        "unsharded": "the whole parameters are there",
        "reducing": "a reduction of its gradients is under way",
    },
    "Memory": {
        "peak": "the most bytes in use at once, and the moment of it",
        "sharded params": "the shards of this rank, with padding",
        "unsharded params": "whole parameters of units, from unshard to reshard",
        "all-gather buffers": "inputs and outputs of all-gathers",
        "unsharded grads": "whole gradients of units, from backward to the reduction",
        "reduce-scatter buffers": "inputs of reductions",
        "sharded grads": "this rank's part of the averaged gradients",
        "optimizer state": "what the optimizer keeps for each parameter of the shard; for Adam, two numbers",
        "activations": "what forward keeps for backward, and of checkpoints their inputs; a storage counts once",
        "snapshots": "copies of the training state in the host's memory, from which a lost rank is healed",
        "reserved": "bytes that are kept for reuse, and not in use",
        "resident": "memory of the whole process in RAM, as the operating system counts it",
    },
    "The timeline": {
        "compute": "the row with forward, backward and the optimizer",
        "other": "the row of all collectives besides all-gathers and reduce-scatters",
        "copies": "on a GPU: the row of copies beside compute",
        "arrow": "leads from a collective to the wait for it",
        "loss": (
            "the number that `train_step()` returns; the mean over the ranks, with a band from the lowest to "
            "the highest"
        ),
        "step time": "the time from the begin to the end of a step, on the slowest rank",
    },
}
"""Meanings of terms in Markdown, by section and term."""

MEANINGS = {term: meaning.replace("`", "") for section in SECTIONS.values() for term, meaning in section.items()} | {
    "exposed": SECTIONS["Communication"]["exposed communication"]
}
"""Meanings in plain text, by term; also of short forms of terms."""

INTRODUCED = (
    "unit",
    "exposed communication",
    "transfers and copies",
    "wait for readers",
    "held at a gate",
    "copy-in",
    "copy-out",
    "reserved",
)
"""Terms that reports explain where a session first meets them."""

_INTRODUCED = re.compile(rf"\b({'|'.join(INTRODUCED)})s?\b")
_TERM = re.compile(rf"\b({'|'.join(map(re.escape, sorted(MEANINGS, key=len, reverse=True)))})\b")


def introduced(text: str) -> tuple[str, ...]:
    """Return the terms of :data:`INTRODUCED` in a text, also in the plural."""
    return tuple(dict.fromkeys(_INTRODUCED.findall(text)))


def explained(text: str) -> str:
    """Return the terms in a text and their meanings, a line each; empty without a term.

    Example: ``"time exposed"`` -> ``"exposed: the part of communication that compute waits for"``.
    """
    return "\n".join(f"{term}: {MEANINGS[term]}" for term in dict.fromkeys(_TERM.findall(text)))


def meanings(terms: Iterable[str]) -> list[tuple[str, str]]:
    """Return terms with their meanings, as facts of a report."""
    return [(term, MEANINGS[term]) for term in terms]
