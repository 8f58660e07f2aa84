import html
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest

from tests.helpers.browser import open_offline
from tests.helpers.trace_strategies import example_trace
from tests.views.test_theme import contrast
from workbench.base.glossary import MEANINGS
from workbench.base.text_formats import ERROR_TEXT
from workbench.protocol.commands import ON_RANKS, StepReply, VerifyReply
from workbench.protocol.rank_messages import ModelInfo
from workbench.reports.output_report import CellReport
from workbench.reports.pause_reports import EndReport
from workbench.reports.record_reports import ExportReport, OpenReport
from workbench.reports.report_makers import REPORT_MAKERS
from workbench.reports.sharding_reports import ReshardReport, ShardReport, UnshardReport
from workbench.reports.status_report import ModelStatus, RankStatus, StartReport, StatusReport, sharded_models
from workbench.reports.step_reports import StepReport, step_report
from workbench.reports.verify_report import VerifyReport, verify_report
from workbench.trace.schema import ClockReading, Header, HostClock

EVIL = "<img src=x onerror=alert(1)>"
SHARD = ShardReport(
    model=EVIL,
    units=(EVIL, ""),
    num_params=2,
    num_elements=1_000,
    bytes_unsharded=4_000,
    bytes_at_rest=(2_000, 2_000, 1_000),
)
VERIFY = VerifyReport(
    num_params=2,
    max_abs_diff=1e-8,
    max_rel_diff=1e-7,
    worst_param=EVIL,
    loss_sharded=1.0,
    loss_reference=1.5,
    equal_bits=1,
    ok=True,
    tolerance="rtol 0.001",
)
RESHARD = ReshardReport(**vars(SHARD) | {"policy": ("computes in bfloat16", EVIL)}, optimizers=1)
REPORTS = [
    SHARD,
    RESHARD,
    VERIFY,
    UnshardReport(model=EVIL, num_params=2, optimizers=0),
    StepReport(steps_done=2, losses=(2.0, 1.0), seconds=(0.1, 0.3), optimizer_steps=2),
    CellReport(texts={0: EVIL, 1: ""}, remarks=""),
    ExportReport(path=Path(EVIL), what="all events", num_bytes=10),
    StartReport(num_ranks=2, devices=(EVIL, "cpu"), seconds=1.5),
    StatusReport(
        running=True,
        ranks=(RankStatus(rank=0, alive=True, host=EVIL, device="cpu", pid=1),),
        models=(ModelStatus(name=EVIL, units=(EVIL,), policy=(EVIL,)),),
    ),
    OpenReport(name=EVIL, num_ranks=1, steps=(), models=(ModelStatus(units=(EVIL,)),), num_rows=1, notes=(EVIL,)),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_every_report_is_a_sentence_and_an_escaped_table(report):
    assert str(report).splitlines()[0] == report.headline
    bundle = report._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == str(report)
    assert "<img" not in bundle["text/html"]
    assert (EVIL in str(report)) == ("&lt;img src=x onerror=alert(1)&gt;" in bundle["text/html"])


def test_shard_reports_bytes_before_and_after_by_rank():
    assert str(SHARD).splitlines()[1:] == [
        f"  units            {EVIL}, (root)",
        "  full model       3.91 KiB",
        "  each rank keeps  1.95 KiB (50%) on ranks 0-1; 1000 B (25%) on rank 2 between uses",
    ]
    assert replace(SHARD, terms=("unit",)).facts()[1] == ("unit", MEANINGS["unit"])


def test_many_units_with_long_names_are_abbreviated():
    names = tuple(f"layers.{i}.{'inner.' * 40}weight{i}" for i in range(1000))
    text = str(ShardReport(**{**vars(SHARD), "units": names}))
    assert len(text) < 1500
    assert "layers.0.inner." in text
    assert "inner.weight999" in text
    assert "... 989 more ..." in text


def test_reshard_reports_changes_and_carried_state():
    assert str(RESHARD).startswith(f"resharded in place, {EVIL}: 2 units on 3 ranks, ")
    assert RESHARD.headline.endswith(", state of 1 optimizer carried over")
    assert f"policy           computes in bfloat16; {EVIL}" in str(RESHARD)
    assert "policy" not in str(SHARD)


def test_many_units_are_cut():
    many = ShardReport(**{**vars(SHARD), "units": (*(f"blocks.{i}" for i in range(48)), "")})
    assert "blocks.9, ... 38 more ..., (root)" in str(many)


@pytest.mark.parametrize(
    ("report", "headline"),
    [
        (
            StepReport(steps_done=1, losses=(2.0,), seconds=(0.5,), optimizer_steps=1),
            "1 step, loss 2, 500 ms a step (median)",
        ),
        (StepReport(steps_done=0, losses=None, seconds=(), optimizer_steps=0), "0 steps"),
        (
            UnshardReport(model="m", num_params=1, optimizers=2),
            "m is a plain module again on every rank: 1 parameter, state of 2 optimizers carried over",
        ),
        (StatusReport(running=False), "no ranks are running: %fsdp start -n 4"),
        (CellReport(texts={1: "", 3: ""}), "ran on ranks 1, 3"),
    ],
)
def test_headlines(report, headline):
    assert report.headline == headline


def test_no_step_has_no_median():
    assert str(StepReport(steps_done=0, losses=None, seconds=(), optimizer_steps=0).median_seconds) == "nan"


def test_verify_without_a_loss_leaves_it_out():
    quiet = VerifyReport(**{**vars(VERIFY), "loss_sharded": None, "max_abs_diff": 0.0, "max_rel_diff": 0.0})
    assert "loss" not in str(quiet)
    assert EVIL not in str(quiet)


@pytest.mark.parametrize(
    ("largest", "share", "words"),
    [
        (1e-8, 1e-7, f"1e-08; 1e-07 of the update, in {EVIL}"),
        (1e-8, 0.0, "1e-08; no more than rounding"),
        (0.0, 0.0, "none"),
    ],
)
def test_verify_names_a_difference_that_rounding_explains(largest, share, words):
    assert dict(replace(VERIFY, max_abs_diff=largest, max_rel_diff=share).facts())["largest difference"] == words


def test_status_reports_what_is_missing():
    lost = StatusReport(running=True, num_rows=1, num_lost=5)
    assert "nothing yet: %fsdp shard MODEL" in str(lost)
    assert "1 event, 5 lost" in str(lost)


def test_status_says_which_collectives_are_seen():
    assert "collectives" not in str(StatusReport(running=True))
    assert "  collectives  all of them\n" in str(StatusReport(running=True, collectives="all of them"))


def test_ranks_without_a_loss_do_not_count():
    quiet = StepReply(steps_done=1, losses=None, seconds=(0.2,), optimizer_steps=1, first_step=0)
    assert step_report([quiet, quiet]).losses is None
    loud = replace(quiet, losses=(3.0,), seconds=(0.4,))
    report = step_report([quiet, loud])
    assert (report.losses, report.seconds) == ((3.0,), (0.4,))


def test_gradients_that_no_reduction_took_are_named_with_their_ranks():
    quiet = StepReply(steps_done=1, losses=None, seconds=(0.2,), optimizer_steps=1, first_step=0)
    loud = replace(quiet, unreduced=("", "blocks.1"))
    assert step_report([quiet, quiet]).unreduced == ""
    some, every = step_report([quiet, loud]).headline, step_report([loud, loud]).headline
    assert "; gradients of (root), blocks.1 were not reduced on rank 1: call backward after" in some
    assert "; gradients of (root), blocks.1 were not reduced on every rank: call backward after" in every


def test_losses_belong_to_their_steps():
    done = StepReply(steps_done=3, losses=(None, 2.0, None), seconds=(0.2,) * 3, optimizer_steps=3, first_step=0)
    report = step_report([done, replace(done, losses=(1.0, 4.0, None))])
    assert report.losses == (1.0, 3.0, None)
    assert "3 steps, loss 1 -> 3, " in report.headline


def test_every_rank_command_has_a_handler_and_a_report():
    assert set(REPORT_MAKERS) == set(ON_RANKS.values())
    assert all(word.reply is not NoneType for word in REPORT_MAKERS)


def test_lines_of_a_headline_stay_lines_and_are_text():
    report = EndReport(sentence="aborted; idle again\ngradients of <b> are left")
    shown = report._repr_mimebundle_()
    assert shown["text/plain"] == "aborted; idle again\ngradients of <b> are left"
    assert shown["text/html"] == "<div><strong>aborted; idle again</strong><br>gradients of &lt;b&gt; are left</div>"


def test_status_reports_dropped_events():
    text = str(StatusReport(running=False, num_rows=2_000_000, num_dropped=12_345))
    assert "2,000,000 events, 12,345 older ones dropped: the limit is reached" in text


def test_status_shows_the_request_and_the_attached_cluster():
    going = "%fsdp step 400 --background: 372 of 400 steps"
    facts = dict(StatusReport(running=True, under_way=going, cluster="the cluster of profile 'mine'").facts())
    assert facts["sharded"] == "nothing yet: %fsdp shard MODEL"
    assert facts["under way"] == going
    assert facts["attached"] == "the cluster of profile 'mine'"
    assert {"under way", "attached"}.isdisjoint(dict(StatusReport(running=True).facts()))


def test_status_names_the_processes_that_stay_for_the_next_start():
    assert ("kept", "processes 4, 12, so that the next start is quick") in StatusReport(
        running=False, kept=(4, 12)
    ).facts()
    assert "kept" not in dict(StatusReport(running=False).facts())


def units_of_two_models():
    """Return the units of a model with two copies, and of one without; the names are not in order."""
    hybrid = {"replicate_size": 2, "compute_dtype": "bfloat16", "reduce_dtype": "bfloat16", "shard_size": 2}
    first = [make_unit(i, 0, name=name, **hybrid) for i, name in enumerate(("", "layers.10", "layers.2"))]
    second = [make_unit(3, 3, name=""), make_unit(4, 3, name="layers.2")]
    return (*first, *second, make_unit(5, 3, name="undone", retired=True))


def make_unit(index, root, **more):
    return replace(example_trace().header.units[0], index=index, root=root, **more)


def test_each_sharded_model_is_listed_with_units_and_policy():
    header = Header(units=units_of_two_models())
    first = "3 units: (root), layers.2, layers.10; HSDP 2x2: 2 replicas, each sharded over 2 ranks; compute in bfloat16"
    assert [str(model) for model in sharded_models(header)] == [first, "2 units: (root), layers.2"]
    held = [model_info("block", 1), model_info("teacher", 3, 4), model_info("model", 0, 1, 2)]
    named = sharded_models(header, held)
    assert [str(model) for model in named] == [f"model, {first}", "teacher, 2 units: (root), layers.2"]
    for report in (
        StatusReport(running=True, models=named),
        OpenReport(name="a.trace", num_ranks=1, steps=(), models=named, num_rows=1),
    ):
        models = [text for name, text in report.facts() if name == "sharded"]
        assert models == [f"model, {first}", "teacher, 2 units: (root), layers.2"]


def test_a_policy_that_a_reshard_changed_is_listed_with_its_first_step():
    unit = make_unit(0, 0).following(None, 0)
    changed = replace(unit, reshard_after_forward=False)
    (model,) = sharded_models(Header(units=(changed.following(unit, 8),)))
    assert model.policy == ("unsharded from forward to backward", "this policy since step 8")
    (model,) = sharded_models(Header(units=(changed.following(unit, 0),)))
    assert model.policy == ("unsharded from forward to backward",)


def test_the_report_of_open_lists_the_views():
    notes = ("rank 1 is missing", "a file is cut")
    report = OpenReport(name="a.trace", num_ranks=1, steps=(0,), models=(), num_rows=1, notes=notes)
    assert report.facts() == [
        ("steps", "0"),
        ("sharded", "nothing"),
        ("note", "rank 1 is missing"),
        ("note", "a file is cut"),
        ("now", "%fsdp explain, %fsdp dashboard, or a view: layout, memory, timeline, states, comms, training"),
    ]


def test_before_the_first_forward_the_units_of_a_model_are_one_model():
    header = Header(units=(make_unit(0, -1, name="layers.0"), make_unit(1, -1, name="")))
    assert [str(model) for model in sharded_models(header)] == ["2 units: (root), layers.0"]


def test_separately_sharded_parts_are_one_model_in_a_file():
    units = (make_unit(0, 0, name="encoder"), make_unit(1, 1, name="decoder"), make_unit(2, 1, name="decoder.0"))
    alone = make_unit(3, 3, name="")
    models = [str(model) for model in sharded_models(Header(units=(*units, alone)))]
    assert models == ["3 units: decoder, decoder.0, encoder", "1 unit: (root)"]


def model_info(name, *units):
    """Return a variable with a model that has these units."""
    counts = {"num_params": 1, "num_elements": 1, "num_bytes": 4}
    return ModelInfo(name=name, class_name="M", is_sharded=True, classes=(), suggested=(), units=units, **counts)


def test_ranks_of_several_hosts_are_grouped_by_host():
    ranks = tuple(
        RankStatus(rank=rank, alive=True, host=host, device="cpu", pid=10 + rank, doing="idle")
        for rank, host in enumerate(["a", "a", "b"])
    )
    grouped = StatusReport(running=True, ranks=ranks).facts()[:5]
    assert grouped == [
        ("a", "ranks 0-1"),
        ("  rank 0", "cpu, pid 10; idle"),
        ("  rank 1", "cpu, pid 11; idle"),
        ("b", "rank 2"),
        ("  rank 2", "cpu, pid 12; idle"),
    ]


def test_status_shows_clocks_other_than_rank_0s():
    ranks = tuple(
        RankStatus(rank=rank, alive=True, host=host, device="cpu", pid=10 + rank, doing="idle")
        for rank, host in enumerate("aabc")
    )
    clocks = tuple(
        HostClock(
            ranks=(rank,),
            readings=(
                ClockReading(t_ns=1, offset_ns=1, error_ns=1),
                ClockReading(t_ns=2, offset_ns=offset_ns, error_ns=400_000),
            ),
        )
        for rank, offset_ns in ((2, 7_200_000_000_000), (3, -5_000_000))
    )
    facts = dict(StatusReport(running=True, ranks=ranks, clocks=clocks).facts())
    assert facts["a"] == "ranks 0-1"
    assert facts["b"] == "rank 2; its clock is 7200 s ahead of rank 0's, ± 400 µs"
    assert facts["c"] == "rank 3; its clock is 5.00 ms behind rank 0's, ± 400 µs"
    assert StatusReport(running=True, ranks=ranks[:2]).facts()[0] == ("rank 0", "cpu on a, pid 10; idle")


def test_verify_of_nan_only_cannot_compare():
    """A difference of 0 without any equal parameter would be confusing."""
    nan = math.nan
    alike = replace(VERIFY, num_params=2, not_finite=("a", "b"), equal_bits=0, loss_sharded=nan, loss_reference=nan)
    facts = dict(alike.facts())
    assert set(facts) == {"loss", "NaN or infinity in", "next"}
    assert "then %fsdp break add nan" in facts["next"]
    assert facts["loss"] == "NaN sharded, NaN unsharded"
    for other in (replace(alike, not_finite=("a",)), replace(alike, ok=False)):
        assert "largest difference" in dict(other.facts())


@pytest.mark.parametrize(("losses", "expected"), [((2.0, math.nan), "loss 2 -> NaN"), ((math.nan,), "loss NaN")])
def test_nonfinite_losses_are_formatted_as_in_the_panel(losses, expected):
    assert expected in StepReport(steps_done=2, losses=losses, seconds=(), optimizer_steps=2).headline


@pytest.mark.parametrize(
    ("buffers", "since", "expected"),
    [
        ([("b",), ("b",)], [3, 3], ("b on every rank", "the loss has not been finite since step 3 on every rank")),
        ([(), ("b", "c")], [None, 3], ("b, c on rank 1", "the loss has not been finite since step 3, first on rank 1")),
        ([(), ()], [None, None], ("", "")),
    ],
)
def test_verify_names_ranks_as_step_does(buffers, since, expected):
    same = {"num_params": 1, "max_abs_diff": 0.0, "max_rel_diff": 0.0, "worst_param": "", "equal_bits": 1, "ok": True}
    report = verify_report(
        [
            VerifyReply(
                **same, tolerance="", loss_sharded=None, loss_reference=None, buffers_not_finite=bad, since=step
            )
            for bad, step in zip(buffers, since, strict=True)
        ]
    )
    assert (report.buffers, report.since) == expected


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([(1.0, 2.0), (1.0, 2.0)], ""),
        ([(1.0, NAN, NAN), (1.0, NAN, NAN)], "loss is NaN from step 6 on, on every rank"),
        ([(1.0, 2.0, 3.0), (1.0, NAN, 3.0)], "loss is NaN in step 6, first on rank 1"),
        ([(INF, INF), (1.0, 2.0)], "loss is infinite from step 5 on, first on rank 0"),
        ([None, (1.0, NAN)], "loss is NaN from step 6 on, first on rank 1"),
    ],
)
def test_a_step_names_the_first_nonfinite_loss(losses, expected):
    same = {"seconds": (0.1, 0.1, 0.1), "optimizer_steps": 3, "first_step": 5, "unreduced": ()}
    report = step_report([StepReply(steps_done=3, losses=own, **same) for own in losses])
    assert report.not_finite == expected
    assert expected in str(report)
    assert bool(expected) == ("loss is" in str(report))


STEP = StepReport(
    steps_done=3,
    losses=(1.0, NAN, NAN),
    seconds=(0.1, 0.1, 0.1),
    optimizer_steps=3,
    not_finite="loss is NaN from step 6 on, first on rank 1",
)
DIFFERENT = replace(VERIFY, ok=False)
GONE = StatusReport(running=True, ranks=(RankStatus(rank=0, alive=False, host="h", device="cpu", pid=1),))
BROKEN = StatusReport(
    running=True, obstacle="ranks 0-1 still run, and the notebook no longer waits:\n%fsdp stop, then %fsdp start"
)


@pytest.mark.parametrize(
    ("report", "red"),
    [
        (STEP, ["loss is NaN from step 6 on, first on rank 1"]),
        (replace(STEP, unreduced="gradients of <a> were lost"), [f"{STEP.not_finite}; gradients of <a> were lost"]),
        (DIFFERENT, [DIFFERENT.headline]),
        (replace(VERIFY, not_finite=("a", "b")), [replace(VERIFY, not_finite=("a", "b")).headline]),
        (GONE, [GONE.headline]),
        (BROKEN, BROKEN.obstacle.split("\n")),
    ],
)
def test_problems_have_the_error_colour(report, red):
    marked = [f'<span style="color:{ERROR_TEXT}">{html.escape(text)}</span>' for text in red]
    page = report._repr_html_()
    assert [page.count(text) for text in marked] == [1] * len(red)
    assert page.count(ERROR_TEXT) == len(red)
    assert all(text in str(report) for text in red)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_success_has_no_error_colour(report):
    assert report.problem == ""
    assert ERROR_TEXT not in report._repr_html_()


_SEEN = """() => {
    const text = document.querySelector("span"), page = getComputedStyle(document.body).backgroundColor;
    const paint = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
    const pixel = (colour) => {
        paint.fillStyle = colour;
        paint.fillRect(0, 0, 1, 1);
        return "#" + [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3)
            .map((part) => part.toString(16).padStart(2, "0")).join("");
    };
    return [pixel(page), pixel(getComputedStyle(text).color)];
}"""
THEMES = {
    "theme-light": ":root {color-scheme: light}",
    "theme-dark": ":root {color-scheme: dark}",
    "": ":root {color-scheme: light dark}",  # a page outside of JupyterLab
}


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
def test_an_error_is_red_and_legible_on_light_and_dark_pages(theme, chromium, tmp_path):
    file = tmp_path / "page.html"
    sheet = Path(sys.prefix) / f"share/jupyter/lab/themes/@jupyterlab/{theme}-extension/index.css"
    rules = THEMES[theme] + (sheet.read_text("utf-8") if theme else "")
    page = "background: var(--jp-layout-color0, Canvas); color: var(--jp-ui-font-color1, CanvasText)"
    file.write_text(f"<!doctype html><style>{rules}</style><body style='{page}'>{STEP._repr_html_()}", "utf-8")
    with open_offline(chromium, file) as opened:
        for scheme in ("light", "dark"):
            opened.page.emulate_media(color_scheme=scheme)
            behind, colour = opened.page.evaluate(_SEEN)
            assert contrast(colour, behind) >= 4.5
            red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
            assert red > 2 * max(green, blue)
