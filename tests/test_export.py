import json

from tests.trace.strategies import example_trace
from tests.views.test_contract import EVIL, same_with_names
from workbench.export import export, to_page
from workbench.trace import load


def test_no_name_of_a_strangers_file_becomes_part_of_the_page(tmp_path):
    trace = same_with_names(example_trace(num_ranks=2, steps=2), EVIL)
    export(trace, tmp_path / "strange.trace")
    page = to_page(load(tmp_path / "strange.trace"))
    plain = to_page(example_trace(num_ranks=2, steps=2))
    for tag in ("<script", "<a ", "</script", r"\u003cscript", r"\u003ca "):
        assert page.count(tag) == plain.count(tag), tag
    assert "evil" in page


def test_names_in_perfettos_file_are_strings_of_it(tmp_path):
    export(same_with_names(example_trace(num_ranks=1, steps=1), EVIL), tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
