import json

from tests.trace.strategies import example_trace
from tests.views.test_contract import EVIL, same_with_names
from workbench.export import export


def test_names_in_perfettos_file_are_strings_of_it(tmp_path):
    export(same_with_names(example_trace(num_ranks=1, steps=1), EVIL), tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
