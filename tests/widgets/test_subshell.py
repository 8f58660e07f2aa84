from types import SimpleNamespace

from workbench.widgets.subshell import answer_while_busy


def test_a_busy_kernel_answers_in_the_subshell_that_asked():
    comm = SimpleNamespace(_reply_subshell_for=None)
    answer_while_busy(comm)
    assert comm._reply_subshell_for({}, "asked from") == "asked from"
    answer_while_busy(SimpleNamespace())
