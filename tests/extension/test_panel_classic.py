"""The classic API in the panel's form, in a browser on real ranks: shard, train, reshard to fully_shard, train."""

import re

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import jupyterlab, open_notebook
from tests.helpers.notebook_model import CELL
from tests.helpers.panel_page import SHOW, headline, panel, reply, section, shot, tool

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.browser,
    pytest.mark.lasting_browser,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]

CELLS = ["%load_ext workbench", "%fsdp start -n 2 --device cpu", f"%%fsdp{CELL}", "%fsdp history"]
SHARD = "%fsdp shard model --wrap Block --api classic --strategy grad --orig-params"
RESHARD = "%fsdp reshard model --reshard-after-forward auto --api fully_shard"


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """A JupyterLab with the panel open, on two ranks that have a plain model."""
    expect.set_options(timeout=PATIENCE_MS)
    with (
        jupyterlab(tmp_path_factory.mktemp("lab"), CELLS, panel=built_panel()) as url,
        open_notebook(url, chromium) as lab,
    ):
        lab.page.evaluate(f"() => {SHOW}")
        for cell in range(3):
            lab.do(cell)
        yield lab


@pytest.fixture
def form(lab):
    return section(lab, "Shard")


def amount(form, name):
    """Return the form's preview of ``name``."""
    return form.get_by_role("row").filter(has_text=name).get_by_role("cell")


def train(lab, steps, last):
    """Train until the step of number ``last`` has ended."""
    panel(lab).get_by_label("Training steps").fill(str(steps))
    tool(lab, f"Train {steps} steps").click()
    expect(panel(lab).locator(".fsdp-Numbers")).to_have_text(re.compile(rf"step {last}$"))
    expect(headline(lab)).to_have_text("2 ranks, idle")


def test_the_form_offers_torchs_engine_with_the_same_units(form):
    engine = form.get_by_label("Engine")
    expect(engine.locator("option")).to_have_text(["the workbench's", "torch's own"])
    engine.select_option("torch")
    expect(form.get_by_role("row").first).to_have_text("units4")
    engine.select_option("workbench")


def test_the_form_has_the_options_of_the_api(form):
    expect(form.get_by_label("After forward")).to_be_visible()
    expect(form.get_by_label("Strategy")).to_have_count(0)
    form.get_by_label("API").select_option("classic")
    expect(form.get_by_label("After forward")).to_have_count(0)
    expect(form.get_by_label("Mesh")).to_have_count(0)
    expect(form.get_by_label("Strategy").locator("option")).to_have_text(
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    )
    expect(form.get_by_role("row").first).to_have_text("units4")


def test_a_strategy_is_previewed_or_refused_in_the_form(lab, form):
    half, full = amount(form, "each rank keeps").inner_text(), amount(form, "in full").inner_text()
    assert half != full
    form.get_by_label("Strategy").select_option("NO_SHARD")
    expect(amount(form, "each rank keeps")).to_have_text(full)
    form.get_by_label("Strategy").select_option("HYBRID_SHARD")
    expect(form.get_by_role("status")).to_have_text(
        "strategy hybrid needs a mesh of replicas x shard ranks: --mesh 2x2"
    )
    expect(form.locator("button[type=submit]")).to_be_disabled()
    shot(lab, "classic_refused")
    form.get_by_label("Mesh").fill("2x1")
    expect(amount(form, "each rank keeps")).to_have_text(full)
    form.get_by_label("Strategy").select_option("SHARD_GRAD_OP")
    expect(form.get_by_label("Mesh")).to_have_count(0)
    expect(amount(form, "each rank keeps")).to_have_text(half)


def test_it_shards_and_its_line_can_be_copied(lab, form):
    form.get_by_label("Originals").check()
    lab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    form.locator("button[type=submit]").click(button="right")
    lab.page.get_by_text("Copy as %fsdp Line").click()
    lab.page.wait_for_function(f"async () => (await navigator.clipboard.readText()) === '{SHARD}'")
    shot(lab, "classic_form")
    form.locator("button[type=submit]").click()
    expect(section(lab, "Commands")).to_contain_text("classic: one flat parameter per unit")
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(5)
    expect(form.get_by_label("API")).to_have_value("classic")
    expect(form.get_by_label("Strategy")).to_have_value("grad")
    expect(form.get_by_label("Originals")).to_be_checked()
    train(lab, 3, last=2)


def test_a_flat_parameter_is_shown_with_its_parts(lab):
    units = section(lab, "Units")
    units.locator("[data-fsdp-unit='blocks.1'] .fsdp-Unit-row").click()
    names = units.get_by_role("button", name=re.compile(r"^blocks\.1\."))
    inside = ["norm.weight", "norm.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    expect(names).to_have_text(["_flat_param", *inside])
    expect(units).to_contain_text("6 parameters in one flat parameter")
    cut = units.get_by_role("listitem").filter(has_text="mlp.0.bias")
    expect(cut).to_contain_text("32 float32, split over shards 0-1")
    expect(cut).to_have_attribute("title", "elements in blocks.1._flat_param, per rank: 8, 24")
    shot(lab, "classic_unit")


def test_it_goes_over_to_fully_shard_and_trains_on(lab, form):
    form.get_by_label("API").select_option("fully_shard")
    after_forward = form.get_by_label("After forward")
    expect(after_forward).to_have_value("false")  # like SHARD_GRAD_OP
    expect(form.get_by_role("row").first).to_have_text("units4")
    kept = amount(form, "each rank sends per step").inner_text()
    after_forward.select_option("auto")
    expect(amount(form, "each rank sends per step")).not_to_have_text(kept)
    shot(lab, "classic_to_fully_shard")
    form.locator("button[type=submit]").click()
    expect(section(lab, "Commands")).to_contain_text(RESHARD)  # the beginning of the line
    expect(reply(lab)).to_contain_text("resharded in place")
    expect(section(lab, "Units")).to_contain_text("blocks")
    expect(form.get_by_label("API")).to_have_value("fully_shard")
    expect(after_forward).to_have_value("auto")
    expect(form.get_by_role("row").first).to_have_text("units4")
    train(lab, 4, last=6)


def test_actions_are_in_the_command_history(lab):
    lab.do(3)
    lab.reads(3, SHARD)
    lab.reads(3, RESHARD)


def test_no_outside_requests_and_no_console_errors(lab):
    assert lab.outside == []
    assert lab.errors == []
