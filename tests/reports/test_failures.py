import contextlib
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.ipython_shell import ipython_shell
from workbench.errors import RankDied, RankError
from workbench.reports.failures import (
    Aftermath,
    Failure,
    death_sentence,
    first_cause,
    left_behind,
    losses_in_words,
    place_of,
    shorten_traceback,
    to_error,
)

DIVISION = Failure(rank=2, ename="ZeroDivisionError", evalue="division by zero")
ABORTED = [Failure(rank=r, ename="StepAborted", evalue="rank 2 raised ZeroDivisionError") for r in (0, 1, 3)]
CLOSED = Failure(rank=1, ename="RuntimeError", evalue="[/x/gloo/transport/tcp/pair.cc:538] Connection closed by peer")
DEAD = Failure(rank=1, evalue="rank 1 died: the process was killed by SIGKILL", died=True)
NEXT = "Correct the code."

CELL_TRACEBACK = """\
\x1b[31m------\x1b[39m
\x1b[31mZeroDivisionError\x1b[39m         Traceback (most recent call last)
\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[1]\x1b[39m\x1b[32m, line 2\x1b[39m
\x1b[32m----> \x1b[39m\x1b[32m2\x1b[39m f()

\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[1]\x1b[39m\x1b[32m, line 3\x1b[39m, in \x1b[36mf\x1b[34m()\x1b[39m
\x1b[32m----> \x1b[39m\x1b[32m3\x1b[39m     return x / 0

\x1b[31mZeroDivisionError\x1b[39m: division by zero"""

APPLY_TRACEBACK = """\
Traceback (most recent call last):
  File "/env/workbench/cluster/_ipyparallel.py", line 70, in call
    return {"value": resolve(name)(*args)}
                     ^^^^^^^^^^^^^
  File "/env/workbench/runtime/trainer.py", line 88, in run
    losses.append(self._one_step(function))
  File "/tmp/ipykernel_41/123456.py", line 6, in train_step
    1 / 0
    ~~^~~
  File "/env/lib/maths.py", line 2, in divide
ZeroDivisionError: division by zero
"""


def test_the_cause_is_named_with_place_and_next_thing():
    cause = Failure(**{**vars(DIVISION), "traceback": APPLY_TRACEBACK})
    error = to_error(
        [ABORTED[0], cause, *ABORTED[1:]], {2: Aftermath(step=7, phase="backward", unit="blocks.1")}, next_thing=NEXT
    )
    assert isinstance(error, RankError)
    assert str(error).splitlines() == [
        "rank 2 raised ZeroDivisionError: division by zero (line 6, in train_step; step 7, backward, unit blocks.1)",
        NEXT,
    ]
    assert (error.rank, error.ename, error.evalue, error.also) == (2, "ZeroDivisionError", "division by zero", ())


def test_equal_errors_are_counted_and_others_named():
    same = [Failure(rank=r, ename="NameError", evalue="no x") for r in (3, 0, 1)]
    error = to_error([*same, Failure(rank=2, ename="KeyError", evalue="'y'")], {}, next_thing=NEXT)
    assert str(error).splitlines() == [
        "rank 0 raised NameError: no x",
        "same error on ranks 1, 3",
        "rank 2: KeyError: 'y'",
        NEXT,
    ]
    assert error.also == (1, 3)


def test_a_dead_rank_names_the_survivors():
    closed = Failure(**{**vars(CLOSED), "rank": 0})
    error = to_error([closed, DEAD], {0: Aftermath(), 2: Aftermath()}, next_thing=NEXT)
    assert isinstance(error, RankDied)
    assert error.ranks == (1,)
    assert str(error).splitlines() == [
        "rank 1 died: the process was killed by SIGKILL",
        "without rank 1 no step is possible: %fsdp heal replaces what is lost, or %fsdp stop, then %fsdp start; "
        "ranks 0, 2 can still run cells with %%fsdp -t 0,2",
    ]


def test_an_error_that_killed_another_rank_stays_the_cause():
    error = to_error([DIVISION, DEAD], {}, next_thing=NEXT)
    assert isinstance(error, RankError)
    assert "without rank 1 no step is possible" in str(error)
    assert NEXT not in str(error)


def test_ranks_whose_optimizer_went_ahead_are_named():
    counts = {rank: Aftermath(optimizer_steps=5 if rank < 2 else 4) for rank in range(4)}
    error = to_error([DIVISION, *ABORTED], counts, next_thing=NEXT)
    assert "applied on ranks 0-1 but not on ranks 2-3" in str(error)
    level = {rank: Aftermath(optimizer_steps=5) for rank in range(4)}
    assert "optimizer" not in str(to_error([DIVISION], level, next_thing=NEXT))


def test_leftover_gradients_are_reported():
    left = {0: Aftermath(), 1: Aftermath(left_gradients=True), 2: Aftermath(left_gradients=True)}
    message = str(to_error([DIVISION], left, next_thing=NEXT))
    assert "gradients of that step remain on ranks 1-2, and the next backward adds to them" in message
    assert message.endswith(NEXT)
    assert left_behind({0: Aftermath()}) == []
    assert "gradients" not in str(to_error([DEAD], left, next_thing=NEXT))  # there is no next backward


@given(st.permutations([DIVISION, *ABORTED, Failure(**{**vars(CLOSED), "rank": 4})]))
def test_the_cause_does_not_depend_on_the_order_of_consequences(failures):
    assert first_cause(failures) is DIVISION


def test_a_death_takes_precedence_over_its_consequences():
    assert first_cause([CLOSED, DEAD]) is DEAD
    assert first_cause([CLOSED]) is CLOSED


@pytest.mark.parametrize(
    ("failure", "place"),
    [
        (Failure(rank=0, traceback=CELL_TRACEBACK, line=3), "line 3, in f"),
        (Failure(rank=0, traceback=CELL_TRACEBACK.split("\n\n", maxsplit=1)[0]), "line 2 of the cell"),
        (Failure(rank=0, traceback=APPLY_TRACEBACK), "line 6, in train_step"),
        (Failure(rank=0, traceback=APPLY_TRACEBACK.replace("train_step", "<module>")), "line 6 of the cell"),
        (Failure(rank=0, line=4), "line 4 of the cell"),
        (Failure(rank=0, traceback=CELL_TRACEBACK, line=7), "line 7, in f"),
        (Failure(rank=0, traceback=CELL_TRACEBACK, line=7, script="train.py"), "line 7 of train.py"),
        (Failure(rank=0), ""),
    ],
)
def test_the_place_in_the_users_code(failure, place):
    assert place_of(failure) == place


def test_frames_of_the_machinery_are_left_out():
    assert shorten_traceback(APPLY_TRACEBACK).splitlines() == [
        "Traceback (most recent call last):",
        '  File "/tmp/ipykernel_41/123456.py", line 6, in train_step',
        "    1 / 0",
        "    ~~^~~",
        '  File "/env/lib/maths.py", line 2, in divide',
        "ZeroDivisionError: division by zero",
    ]


def test_so_are_those_that_ipython_rendered():
    machinery = (
        "\x1b[36mFile \x1b[39m\x1b[32m/env/workbench/runtime/rank.py:50\x1b[39m, in execute(command)\n---> 50 do()\n\n"
    )
    head, frames = CELL_TRACEBACK.split("\x1b[36mCell", maxsplit=1)
    library = "\x1b[36mFile \x1b[39m/env/torch/nn.py:3, in f()\n----> 3 g()\n\n"
    whole = f"{head}{machinery}{machinery}{library}\x1b[36mCell{frames}"
    assert shorten_traceback(whole) == shorten_traceback(f"{head}{library}\x1b[36mCell{frames}")


def test_a_cell_has_no_number_for_the_notebook_counts_others():
    plain = re.sub(r"\x1b\[[0-9;]*m", "", CELL_TRACEBACK)
    assert shorten_traceback(plain) == plain.replace("Cell In[1], line", "Cell, line")
    assert re.sub(r"\x1b\[[0-9;]*m", "", shorten_traceback(CELL_TRACEBACK)) == shorten_traceback(plain)


@pytest.mark.parametrize("text", ["", "no traceback", "a\nb\nc\n\nd"])
def test_other_tracebacks_stay_whole(text):
    assert shorten_traceback(text) == text


def test_ipython_still_renders_a_cells_frame_like_this():
    """A regular expression reads IPython's rendering: this test notices a change of it."""
    with ipython_shell() as shell, contextlib.redirect_stdout(io.StringIO()) as out:
        shell.run_cell("def f():\n    1 / 0\nf()", store_history=True)
    assert place_of(Failure(rank=0, traceback=out.getvalue())) == "line 2, in f"


def test_death_sentence_without_survivors():
    assert death_sentence([0, 1], []) == (
        "without ranks 0-1 no step is possible: %fsdp stop, then %fsdp start; "
        "views and %fsdp export still show what was recorded"
    )
    assert str(Failure(rank=0, died=True)) == "its process is gone"


def test_equal_deaths_are_merged():
    assert losses_in_words({0: "died: a", 1: "died: b", 2: "died: a"}) == "ranks 0, 2 died: a; rank 1 died: b"
    assert losses_in_words({}) == ""


def test_position_in_words():
    assert str(Aftermath()) == ""
    assert str(Aftermath(step=-1, phase="idle")) == ""
    assert str(Aftermath(step=3, phase="forward", unit="")) == "step 3, forward, unit (root)"


def test_without_an_obstacle_the_advice_is_to_correct_what_failed():
    cell, script = (Failure(rank=1, ename="ValueError", line=3, script=script) for script in ("", "train.py"))
    assert str(to_error([cell], {}, next_thing="")).endswith("correct the code and run its cell again")
    error = to_error([script], {}, next_thing="")
    assert str(error).splitlines() == [
        "rank 1 raised ValueError (line 3 of train.py)",
        "the ranks are idle again and keep their variables: correct train.py and run it again",
    ]
    assert (error.line, error.script) == (3, "train.py")


def test_after_a_script_its_model_is_not_spoken_of():
    left = Aftermath(step=2, phase="forward", optimizer_steps=1, left_gradients=True).without_training_state()
    assert left_behind({0: left, 1: Aftermath(optimizer_steps=0)}) == []
    assert str(left) == "step 2, forward"


def test_a_unit_is_named_only_where_it_is_at_work():
    assert str(Aftermath(step=-1, phase="idle", unit="")) == ""
    assert str(Aftermath(step=-1, phase="forward", unit="")) == "forward, unit (root)"
