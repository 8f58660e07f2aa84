"""The calculator: its numbers are those of plans, and its lines can be typed."""

import json
import shlex
from dataclasses import asdict, fields

import pytest

from tests.helpers.browser import open_offline
from workbench.base.machines import MACHINES
from workbench.base.text_formats import format_bytes
from workbench.cli import calculator_page, main
from workbench.cli.calculator_page import plan, planned_terms, policies, to_page
from workbench.cli.size_terms import Count, SizeTerms, TermsError
from workbench.errors import UsageError
from workbench.events import Category
from workbench.magics.command_lines import parse_line
from workbench.protocol.commands import Plan
from workbench.script.planner import PlannedRank
from workbench.zoo.llama import SIZES, LlamaSizes

CHECKED = "--checkpoint LlamaBlock"
POINT = {**asdict(SIZES["70b"]), "blocks": 10, "sequences": 2, "tokens": 1000}
RANKS = 24

FILL = """(values) => {
  for (const [id, value] of Object.entries(values)) document.getElementById(id).value = value;
  document.getElementById("form").dispatchEvent(new Event("change"));
}"""
SHOWN = """() => ({
  classes: Object.fromEntries([...document.querySelectorAll("#classes tr")].map((row) =>
    [row.cells[0].textContent, row.cells[1].textContent])),
  verdict: document.getElementById("verdict").textContent,
  fewest: document.getElementById("fewest").textContent,
  host: document.getElementById("host").textContent,
  isHidden: document.querySelector("[data-result]").hidden,
  lines: ["script", "plan", "shard"].map((id) => document.getElementById(id).textContent),
  bar: [...document.querySelectorAll("#bar i")].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)
    / document.getElementById("bar").getBoundingClientRect().width,
})"""
NEED = """([policy, sizes, shards]) => {
  const {peak, host} = window.need(window.plans, window.plans.policies[policy], sizes, shards);
  return [Object.fromEntries(peak.map((size, place) => [window.plans.classes[place].words, size])), host];
}"""


def made_up(count=4):
    """Return terms of every policy, of no plan."""
    moment = {
        (Category.SHARDED_PARAMS, "block.shard"): Count(6 * count, count),
        (Category.ACTIVATIONS, "one"): Count(9),
    }
    return {text: SizeTerms(moments=[moment], host={}) for text, _ in policies()}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The terms of one policy, of real plans, and what a third plan says at another point."""
    folder, said = tmp_path_factory.mktemp("plans"), []
    options = dict(policies())[CHECKED]
    with PlannedRank(lambda _: None) as rank:
        found = planned_terms(rank, {CHECKED: options}, said.append)
        report = plan(rank, POINT, f"{folder}/plan.trace", ranks=RANKS, device="a100-40gb", **options)
    assert said == [f"policy 1 of 1: {CHECKED}"]
    return found[CHECKED], report


@pytest.fixture(scope="module")
def page(planned, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "calculator.html"
    file.write_text(to_page(made_up() | {CHECKED: planned[0]}), encoding="utf-8")
    return file


def values(**more):
    """Return what the fields have: the point of the third plan, but for ``more``."""
    return {**POINT, "model": "", "ranks": RANKS, "device": "a100-40gb", "mesh": "", "checkpoint": CHECKED, **more}


@pytest.mark.browser
def test_its_numbers_are_those_of_a_plan(page, planned, chromium):
    _, report = planned
    wanted = {category.words: size for category, size in report.peak_bytes_by_category.items()}
    with open_offline(chromium, page) as opened:
        found, host = opened.page.evaluate(NEED, [CHECKED, POINT, RANKS])
        assert found == {category.words: wanted.get(category.words, 0) for category in Category}
        assert host == report.host_bytes == 0
        opened.page.evaluate(FILL, values())
        shown = opened.page.evaluate(SHOWN)
        assert shown["classes"] == {name: format_bytes(size) for name, size in wanted.items() if size}
        memory = MACHINES["a100-40gb"].memory_bytes
        assert format_bytes(report.peak_bytes) in shown["verdict"]
        assert shown["verdict"].startswith("It fits" if report.fits else "It does not fit")
        assert shown["bar"] == pytest.approx(min(1, report.peak_bytes / memory), rel=0.01)
        assert (opened.outside, opened.complaints) == ([], [])


@pytest.mark.browser
def test_the_fewest_gpus_fit_and_fewer_do_not(page, planned, chromium):
    terms, _ = planned
    memory = MACHINES["a100-40gb"].memory_bytes
    with open_offline(chromium, page) as opened:
        opened.page.evaluate(FILL, values())
        fewest = int(opened.page.evaluate(SHOWN)["fewest"].split()[0])
        assert sum(terms.peak(POINT, fewest).values()) <= memory
        fewer = fewest - 8 if fewest > 8 else fewest - 1
        assert fewer < 2 or sum(terms.peak(POINT, fewer).values()) > memory
        opened.page.evaluate(FILL, values(tokens=10_000_000))
        assert opened.page.evaluate(SHOWN)["fewest"] == "no number up to 16,384"
        assert "The largest class is activations" in opened.page.evaluate(SHOWN)["verdict"]


def test_terms_that_another_plan_contradicts_are_refused(planned):
    terms, report = planned
    with pytest.raises(TermsError, match=r"a plan on 24 ranks has .* of sharded params, where another plan suggests"):
        calculator_page._check(CHECKED, made_up()[CHECKED], report, POINT, RANKS)
    other = SizeTerms(moments=terms.moments, host={(Category.SHARDED_PARAMS, "one"): Count(1)})
    calculator_page._check(CHECKED, terms, report, POINT, RANKS)
    with pytest.raises(TermsError, match="a plan has 0 bytes on the host, and not 1"):
        calculator_page._check(CHECKED, other, report, POINT, RANKS)


@pytest.fixture
def any_page(tmp_path):
    file = tmp_path / "calculator.html"
    file.write_text(to_page(made_up()), encoding="utf-8")
    return file


WRONG = [
    ({"ranks": 1}, "Not planned: one GPU shards nothing."),
    ({"ranks": 1.5}, "GPUs: a whole number from 1 on."),
    ({"ranks": 15}, "15 GPUs do not divide into hosts of at most 8 with equally many each."),
    ({"ranks": 20_000}, "Not planned: more than 16,384 GPUs."),
    ({"ranks": 8, "mesh": "hosts"}, "A copy on each host needs two hosts or more, with two GPUs or more each."),
    ({"blocks": 7}, "Not planned: fewer than 8 blocks."),
    ({"tokens": ""}, "tokens: a whole number from 1 on."),
    ({"heads": 60}, "The heads must divide the width, and the heads of keys and values the heads."),
    ({"heads": 8}, "Not planned: more than 256 elements in a head, for which kernels of attention differ."),
]


@pytest.mark.browser
def test_numbers_that_cannot_be_planned_are_a_sentence(any_page, chromium):
    with open_offline(chromium, any_page) as opened:
        for more, sentence in WRONG:
            opened.page.evaluate(FILL, values(**more))
            shown = opened.page.evaluate(SHOWN)
            assert (shown["verdict"], shown["isHidden"]) == (sentence, True)
            opened.page.evaluate(FILL, values())
            assert not opened.page.evaluate(SHOWN)["isHidden"]
        assert opened.complaints == []


@pytest.mark.browser
def test_every_choice_is_a_policy_and_its_lines_can_be_typed(any_page, chromium):
    with open_offline(chromium, any_page) as opened:
        choices = opened.page.evaluate(
            """() => ["mp", "reshard", "checkpoint", "offload"].map((id) =>
                 [...document.getElementById(id).options].map((option) => option.value))"""
        )
        chosen = [choices[0][1], choices[1][1], choices[2][-1], choices[3][1]]
        for mp, reshard, checkpoint, offload in ([each[0] for each in choices], chosen):
            fill = {"mp": mp, "reshard": reshard, "checkpoint": checkpoint, "offload": offload, "mesh": "hosts"}
            opened.page.evaluate(FILL, values(model="70b", **fill))
            script, *lines = opened.page.evaluate(SHOWN)["lines"]
            options = [each for each in (mp, reshard, checkpoint, offload) if each]
            assert all(option in script for option in options)
            parser, parsers = main._parsers()
            main._add_plan_options(parsers["plan"])
            args, rest = parser.parse_known_args(shlex.split(script)[1:])
            assert (args.ranks, args.device, args.mesh, args.module) == (RANKS, "a100-40gb", "hosts", True)
            assert rest[0] == "70b"
            assert [name.lstrip("-").replace("-", "_") for name in rest[1::2]] == ["blocks", "sequences", "tokens"]
            commands = [parse_line(line.removeprefix("%fsdp ")) for line in lines]
            assert isinstance(commands[0], Plan)
            assert {command.mp for command in commands} <= ({"", "off"} if mp else {"bf16,reduce=fp32"})
            assert all(command.offload in (bool(offload), None) for command in commands)


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 700, 1400])
def test_it_fits_into_a_page_of_any_width_and_is_used_by_keyboard(width, any_page, chromium):
    with open_offline(chromium, any_page) as opened:
        opened.page.set_viewport_size({"width": width, "height": 900})
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        opened.page.locator("#model").focus()
        opened.page.keyboard.press("ArrowDown")
        assert opened.page.locator("#blocks").input_value() == str(list(SIZES.values())[1].blocks)
        before = opened.page.evaluate(SHOWN)["verdict"]
        opened.page.keyboard.press("Tab")
        opened.page.keyboard.type("100")
        assert opened.page.locator("#model").input_value() == ""
        assert opened.page.evaluate(SHOWN)["verdict"] != before
        labels = "() => [...document.querySelectorAll('input, select')].filter((each) => !each.labels.length).length"
        assert opened.page.evaluate(labels) == 0


def test_the_page_has_all_sizes_devices_and_policies():
    text = to_page(made_up())
    given = json.loads(text.partition('id="plans">')[2].partition("</script>")[0])
    assert given["policies"].keys() == dict(policies()).keys()
    assert given["devices"] == {name: machine.memory_bytes for name, machine in MACHINES.items()}
    assert [each["words"] for each in given["classes"]] == [category.words for category in Category]
    assert all(list(sizes) == [each.name for each in fields(LlamaSizes)] for sizes in given["sizes"].values())


def test_the_command_writes_the_page_and_says_where_it_cannot_before_it_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calculator_page, "planned_terms", lambda *_: made_up())
    assert main.main(["course", str(tmp_path / "pages"), "--calculator"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/pages/calculator.html\n"
    assert "<title>Does it fit?</title>" in (tmp_path / "pages" / "calculator.html").read_text()
    (tmp_path / "file").touch()
    monkeypatch.setattr(calculator_page, "PlannedRank", None)  # not reached
    with pytest.raises(UsageError, match=r"cannot write .*calculator.html: File exists"):
        calculator_page.write_calculator(tmp_path / "file" / "calculator.html", print)
