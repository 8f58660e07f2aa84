import pytest

from tests.helpers.figure_checks import title
from tests.helpers.simulated_job import example_trace
from workbench.reports.step_progress import Progress
from workbench.trace.columns import steps
from workbench.trace.step_names import step_name
from workbench.views import draw
from workbench.widgets.progress import facts


@pytest.mark.parametrize(
    ("numbers", "words"), [((3,), "step 3"), ((0,), "step 0"), ((3, 5), "steps 3-5"), ((3, 3), "step 3"), ((-1,), "")]
)
def test_a_step_is_called_by_its_number(numbers, words):
    assert step_name(*numbers) == words


def test_the_first_step_is_step_0():
    trace = example_trace(steps=1)
    assert steps(trace) == [0]
    assert title(draw("memory", trace)).startswith("Step 0: ")
    assert facts(Progress(done=1, total=40)) == ["1 of 40 steps"]
