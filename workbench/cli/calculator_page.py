"""``workbench course --calculator``: a page that says whether a model fits, on how many GPUs, and what is the most.

The page opens from a file, without a server or a network. It computes with the terms of plans
(:mod:`workbench.cli.size_terms`), which are made for it, and refused if other plans contradict them.
"""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from workbench import __version__
from workbench.base.machines import DEFAULT, MACHINES
from workbench.base.text_formats import format_bytes
from workbench.cli.size_terms import ENDS, PARAMS, Moment, Sizes, SizeTerms, TermsError, bytes_at, read_off
from workbench.errors import UsageError
from workbench.events import Category
from workbench.protocol.commands import Plan
from workbench.protocol.planning import CALLED, MAX_RANKS
from workbench.protocol.policy import HOSTS
from workbench.reports.plan_report import NOT_COUNTED, PlanReport
from workbench.script.fit_search import HALF_PRECISION
from workbench.script.planner import PlannedRank, plan_script
from workbench.trace import load
from workbench.views.theme import CATEGORY_COLOURS
from workbench.widgets.js_bundle import STATIC, joined
from workbench.widgets.trace_page import content_policy
from workbench.zoo.llama import SIZES

SCRIPT = "workbench.zoo.llama"

Say = Callable[[str], object]

_SMALL: Sizes = {
    "blocks": 2 * ENDS + 3,
    "width": 96,
    "heads": 6,
    "kv_heads": 2,
    "hidden": 202,
    "vocab": 307,
    "sequences": 3,
    "tokens": 17,
}
_OTHER: Sizes = {
    "blocks": 2 * ENDS + 5,
    "width": 1005,
    "heads": 15,
    "kv_heads": 5,
    "hidden": 2702,
    "vocab": 5003,
    "sequences": 2,
    "tokens": 301,
}
"""Of the plans that are read: no two quantities have equal bytes, and no dimension divides by the ranks. There are more
blocks in the middle than are gathered at once."""

_SMALL_RANKS = 5
_OTHER_RANKS, _OTHER_SHARDS = 16, 8
"""Ranks of these plans; 16 are two hosts with 8 each."""

_CHOICES: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "mp": {
        "computed in bfloat16": ("", {}),
        "float32": ("--mp off", {"mp": "off"}),
    },
    "reshard": {
        "freed, gathered again": ("", {}),
        "kept for backward": ("--reshard-after-forward false", {"reshard_after_forward": "false"}),
    },
    "checkpoint": {
        "all are kept": ("", {}),
        **{
            f"recomputed: {words}": (f"--checkpoint {name}", {"checkpoint": (name,)})
            for words, name in (("blocks", "LlamaBlock"), ("attention", "LlamaAttention"), ("MLP", "LlamaMLP"))
        },
    },
    "offload": {
        "on the GPU": ("", {}),
        "in the host's memory": ("--offload", {"offload": True}),
    },
}
"""What each field of the page offers: the words, the option as typed, and fields of :class:`Plan`."""


def policies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options of each policy as typed, and as fields of :class:`Plan`."""
    for chosen in product(*(choices.values() for choices in _CHOICES.values())):
        options: dict[str, Any] = {}
        for _, given in chosen:
            options |= given
        yield " ".join(text for text, _ in chosen if text), options


def write_calculator(page: Path, say: Say) -> Path:
    """Plan all policies, and write the page; return its path. A page that is there is replaced.

    Raises:
        UsageError: the page cannot be written.
        TermsError: plans are no sums of terms, or contradict each other.
        RankError, RankDied, Interrupted: a plan failed, or was interrupted.
    """
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        with PlannedRank(lambda _: None) as rank:
            page.write_text(to_page(planned_terms(rank, dict(policies()), say)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {page}: {error.strerror}") from error
    return page


def planned_terms(rank: PlannedRank, wanted: Mapping[str, Mapping[str, Any]], say: Say) -> dict[str, SizeTerms]:
    """Return the terms of each policy, read off a plan and checked with another.

    Args:
        rank: plans.
        wanted: by their text, options of each policy.
        say: called with a line on each policy.

    Raises:
        TermsError: plans are no sums of terms, or contradict each other.
        RankError, RankDied, Interrupted: a plan failed, or was interrupted.
    """
    found = {}
    with tempfile.TemporaryDirectory(prefix="workbench-plan-") as folder:
        trace = f"{folder}/plan.trace"
        for place, (text, options) in enumerate(wanted.items()):
            say(f"policy {place + 1} of {len(wanted)}: {text or 'as the script has it'}")
            is_offloaded = bool(options.get("offload"))
            plan(rank, _SMALL, trace, ranks=_SMALL_RANKS, **options)
            found[text] = read_off(load(trace), _SMALL, _SMALL_RANKS, is_offloaded=is_offloaded)
            has_copies = bool(place.bit_count() % 2)  # under each value of each option, some do
            mesh, shards = ({"mesh": HOSTS}, _OTHER_SHARDS) if has_copies else ({}, _OTHER_RANKS)
            report = plan(rank, _OTHER, trace, ranks=_OTHER_RANKS, **options, **mesh)
            _check(text, found[text], report, _OTHER, shards)
            if read_off(load(trace), _OTHER, shards, is_offloaded=is_offloaded) != found[text]:
                raise TermsError(f"under the policy {text!r}, a model with more blocks has other moments in a step")
    return found


def plan(rank: PlannedRank, sizes: Sizes, out: str, **options: Any) -> PlanReport:  # noqa: ANN401 - fields of Plan
    """Plan a model of some sizes; write the trace to ``out``."""
    args = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    return plan_script(SCRIPT, ["8b", *args], Plan(CALLED, **options), out, rank, module=True)


def _check(text: str, terms: SizeTerms, report: PlanReport, sizes: Sizes, shards: int) -> None:
    """Check that a plan's bytes are those of the terms.

    Raises:
        TermsError: they are not.
    """
    peak = terms.peak(sizes, shards)
    for category, planned in report.peak_bytes_by_category.items():
        if planned != peak.get(category, 0):
            raise TermsError(
                f"under the policy {text!r}, the bytes of a step are no sum of terms: a plan on {report.num_ranks} "
                f"ranks has {planned} of {category.words}, where another plan suggests {peak.get(category, 0)}"
            )
    host = sum(bytes_at(terms.host, sizes, shards).values())
    if host != report.host_bytes:
        raise TermsError(f"under the policy {text!r}, a plan has {report.host_bytes} bytes on the host, and not {host}")


def to_page(found: Mapping[str, SizeTerms]) -> str:
    """Return the page, with the terms of each policy."""
    program = joined("calculator.js")
    devices = {name: machine.memory_bytes for name, machine in MACHINES.items()}
    plans = {
        "params": PARAMS,
        "ends": ENDS,
        "perHost": MACHINES[DEFAULT].devices_per_host,
        "maxRanks": MAX_RANKS,
        "classes": [{"words": each.words, "colour": CATEGORY_COLOURS[each]} for each in Category],
        "sizes": {name: asdict(sizes) for name, sizes in SIZES.items()},
        "devices": devices,
        "policies": {
            text: {"moments": [_sent(moment) for moment in terms.moments], "host": _sent(terms.host)}
            for text, terms in found.items()
        },
    }
    memory = {f"{name}: {format_bytes(size)}": name for name, size in devices.items()}
    fields = {
        name: _select(name, {words: option for words, (option, _) in choices.items()})
        for name, choices in _CHOICES.items()
    }
    return _PAGE.format(
        policy=content_policy(program),
        style="".join((STATIC / name).read_text("utf-8") for name in ("page.css", "calculator.css")),
        models=_select("model", {**{f"Llama 3 {name.upper()}": name for name in SIZES}, "own numbers": ""}),
        devices=_select("device", memory, DEFAULT),
        **fields,
        version=__version__,
        num_plans=2 * len(found),
        not_counted=NOT_COUNTED,
        precision=HALF_PRECISION,
        plans=json.dumps(plans, separators=(",", ":")).replace("<", "\\u003c"),
        program=program,
    )


def _sent(moment: Moment) -> list[tuple[int, str, int, int]]:
    return [(int(category), quantity, count.ends, count.middle) for (category, quantity), count in moment.items()]


def _select(name: str, values: Mapping[str, str], chosen: str | None = None) -> str:
    options = "".join(
        f'<option value="{html.escape(value)}"{" selected" if value == chosen else ""}>{html.escape(words)}</option>'
        for words, value in values.items()
    )
    return f'<select id="{name}">{options}</select>'


_PAGE = """<!DOCTYPE html>
<html lang="en">
<!-- written by workbench course -->
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Does it fit?</title>
<style>{style}</style>
</head>
<body>
<header><h1>Does it fit?</h1>
<p>What a GPU needs at most in a training step with FSDP, for models with the shape of Llama.</p></header>
<main>
<form id="form">
<fieldset><legend>Model</legend>
<label>Sizes of {models}</label>
<label>Blocks <input id="blocks" type="number" min="1"></label>
<label>Width <input id="width" type="number" min="1"></label>
<label>Heads <input id="heads" type="number" min="1"></label>
<label>Heads of keys and values <input id="kv_heads" type="number" min="1"></label>
<label>Width within the MLP <input id="hidden" type="number" min="1"></label>
<label>Vocabulary <input id="vocab" type="number" min="1"></label>
</fieldset>
<fieldset><legend>Batch of each GPU</legend>
<label>Sequences <input id="sequences" type="number" min="1"></label>
<label>Tokens of a sequence <input id="tokens" type="number" min="1"></label>
</fieldset>
<fieldset><legend>GPUs</legend>
<label>Device {devices}</label>
<label>Number of GPUs <input id="ranks" type="number" min="2" value="16"></label>
<label>Copies of the model <select id="mesh"><option value="">one over all GPUs: FSDP</option>\
<option value="hosts">one on each host: HSDP</option></select></label>
</fieldset>
<fieldset><legend>Policy</legend>
<label>Precision {mp}</label>
<label>Full parameters after forward {reshard}</label>
<label>Activations {checkpoint}</label>
<label>Shards and optimizer {offload}</label>
</fieldset>
</form>
<section id="result" aria-label="Result">
<p id="verdict" role="status"></p>
<div data-result>
<div id="bar" role="img"></div>
<table><tbody id="classes"></tbody></table>
<table class="facts"><tbody>
<tr><th scope="row">Parameters</th><td id="params"></td></tr>
<tr id="host-row"><th scope="row">In the host's memory, for each GPU</th><td id="host"></td></tr>
<tr><th scope="row">Under this policy it fits from</th><td id="fewest"></td></tr>
</tbody></table>
<h2>Plan it: bytes, collectives and time</h2>
<div class="line"><code id="script"></code><button type="button" data-copy="script">copy</button></div>
<h2>Your own model, in a notebook</h2>
<div class="line"><code id="plan"></code><button type="button" data-copy="plan">copy</button></div>
<div class="line"><code id="shard"></code><button type="button" data-copy="shard">copy</button></div>
</div>
</section>
</main>
<footer>
<p>These numbers come from {num_plans} plans by the FSDP engine of the workbench, version {version}. For each policy, a
plan of a small model says which buffers there are at each moment of a step, and of which size; a plan of a larger one
on 16 GPUs, for half of the policies with a copy on each host, had the same moments, and the bytes of each class that
are computed from these. What is chosen here is computed in the same way: the first line above plans it.</p>
<p>The model trains with AdamW and float32 shards, each block is one FSDP unit, and a GPU is rank 0. In bfloat16,
gradients are reduced in float32 (<code>--mp {precision}</code>). Not counted: {not_counted}, and what an operation
needs only while it runs.</p>
</footer>
<script type="application/json" id="plans">{plans}</script>
<script type="module">{program}</script>
</body>
</html>
"""
