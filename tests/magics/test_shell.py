import json

import plotly.graph_objects as go
import pytest
from IPython.core.magic import MAGIC_NO_VAR_EXPAND_ATTR

from tests.helpers.fake_cluster import SHARD_RESULT, blocks, gives, prints, raises, step_result, writes
from tests.magics.test_completion import SHARD_FLAGS
from workbench import load_ipython_extension, unload_ipython_extension
from workbench.base.glossary import INTRODUCED, MEANINGS
from workbench.cluster.pending_replies import Output
from workbench.errors import Interrupted, RankError, UsageError
from workbench.magics import register, unregister
from workbench.protocol.example import EXAMPLE, INSERTED
from workbench.reports.sharding_reports import ShardReport
from workbench.session.outputs import WIDGET_MIME, WIDGET_NOTE
from workbench.session.waiter import ASK_S
from workbench.views.theme import PLOTLY_MIME
from workbench.workbench import Workbench


@pytest.fixture
def sharded(notebook):
    notebook.fake.sharded()
    notebook.fake.script["step"] = notebook.fake.trains(3)
    return notebook


# ---- help and usage


def test_help(bare):
    assert "usage: %fsdp COMMAND ..." in bare.ok("%fsdp").out
    assert bare.ok("%fsdp help").out == bare.ok("%fsdp -h").out
    assert bare.ok("%fsdp help shard").out == bare.ok("%fsdp shard --help").out
    assert "%fsdp shard model --wrap Block" in bare.ok("%fsdp help shard").out
    assert "usage: %%fsdp [-h] [-t RANKS]" in bare.ok("%%fsdp -h\npass").out
    assert bare.ok("%fsdp help ' \t'").out == bare.ok("%fsdp help").out
    for unknown in ("shrad", "'shard model'"):
        assert "did you mean 'shard'?" in str(bare.run(f"%fsdp help {unknown}").error)


@pytest.mark.parametrize("line", ["{}", "help {}", "step {}", "step --{}", "open {}"])
def test_the_error_for_an_unknown_command_is_short(bare, line):
    assert len(str(bare.run("%fsdp " + line.format("x" * 5000)).error)) < 2500


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%fsdp shrad model", "did you mean 'shard'?"),
        ("%fsdp shard model --warp Block", "did you mean '--wrap'?"),
        ("%fsdp step", "No ranks are running yet. Start them with %fsdp start -n 4"),
        ("%fsdp memory", "No ranks are running yet"),
        ("%%fsdp\n1", "No ranks are running yet"),
        ("%%fsdp -t x\n1", "such as 1,3 or 0-2"),
        ("%%fsdp shard model\n1", "on a line of its own write: %fsdp shard model"),
        ("%fsdp start -n {ranks}", "there is no notebook variable 'ranks'"),
    ],
)
def test_a_wrong_line_raises_and_shows_one_clean_message(bare, line, message):
    cell = bare.run(line)
    assert isinstance(cell.error, UsageError)
    assert cell.out.startswith("UsageError: ")
    assert message in cell.out
    assert "Traceback" not in cell.out
    assert "workbench/magics" not in cell.out


def test_an_error_ends_the_cell(bare):
    bare.run("%fsdp shrad\nreached = True")
    assert "reached" not in bare.shell.user_ns


# ---- start, stop


def test_start_and_stop(bare):
    assert "4 ranks started" in bare.ok("%fsdp start -n 4 --device cpu").shown[0]["text/plain"]
    assert (bare.fake.num_ranks, bare.fake.settings["device"]) == (4, "cpu")
    assert "The ranks are already running" in bare.ok("%fsdp start -n 4 --device cpu").out
    assert "%fsdp stop first" in bare.run("%fsdp start -n 2").out
    assert len(bare.fakes) == 1
    assert "stopped" in bare.ok("%fsdp stop").out
    assert "No ranks are running" in bare.ok("%fsdp stop").out
    assert "no ranks are running" in bare.ok("%fsdp status").shown[0]["text/plain"]
    bare.ok("%fsdp start -n 2")
    assert [fake.num_ranks for fake in bare.fakes] == [4, 2]


def test_a_stop_names_unreachable_hosts(bare, monkeypatch):
    bare.ok("%fsdp start -n 2")
    monkeypatch.setattr(bare.fake, "stop", lambda: "node3 was not reached")
    assert bare.ok("%fsdp stop").out.splitlines()[-2:] == [
        "Ranks stopped. The trace is kept: views still work",
        "node3 was not reached",
    ]


def test_a_start_after_a_death_reports_it_and_replaces_dead_ranks(bare):
    bare.ok("%fsdp start -n 2")
    bare.fake.lose(1)
    assert "rank 1 died: the process was killed by SIGKILL" in bare.run("%fsdp start -n 2").out
    bare.fake.lose(0)
    assert "ranks 0-1 of 2 died" in bare.ok("%fsdp status").shown[0]["text/plain"]
    assert "2 ranks started" in bare.ok("%fsdp start -n 2").shown[0]["text/plain"]


def test_a_dashboard_opened_before_the_start_shows_the_new_ranks(bare):
    bare.ok("early = %fsdp dashboard\n%fsdp start -n 2")
    early = bare.shell.user_ns["early"]
    assert early._views._workbench.running
    bare.ok("%fsdp stop\n%fsdp start -n 3")
    assert early._views._workbench.pulse().states.keys() == {0, 1, 2}
    early.close()


def test_an_explanation_is_shown_with_the_picture_below_it(notebook):
    notebook.fake.sharded()
    notebook.fake.script["step"] = notebook.fake.trains(3)
    notebook.ok("%fsdp step 3")
    text, figure = notebook.ok("%fsdp explain step").shown
    assert text["text/plain"].startswith("step 2 took ")
    assert figure["text/plain"].startswith("Step 2: ")
    assert text["text/html"].count("<button") == notebook.fake.num_ranks
    cell = notebook.ok("found = %fsdp explain blocks.0")
    assert cell.shown == []
    assert notebook.shell.user_ns["found"].headline == "blocks.0 is sharded: freed after backward in step 2"
    assert {"peak", "wait", "blocks.1", "rank"} <= set(notebook.complete("%fsdp explain "))


def test_each_first_result_says_what_to_type_next(bare, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(Workbench, "models", lambda self: {})
        started = bare.ok("%fsdp start -n 2").shown[0]["text/plain"]
    assert started.endswith("  next  a model in a %%fsdp cell, such as that of %fsdp example")
    assert bare.ok("%fsdp status").shown[0]["text/plain"].endswith("  next      %fsdp shard model")
    bare.fake.variables = {0: ["model"], 1: ["model"]}
    bare.fake.script["shard"] = gives(SHARD_RESULT)
    bare.fake.sharded()
    sharded = bare.ok("%fsdp shard model").shown[0]["text/plain"]
    assert sharded.endswith("  an optimizer of model and train_step() in a %%fsdp cell, then %fsdp step 5")
    bare.fake.variables = {0: ["model", "optimizer", "train_step"], 1: ["model", "optimizer", "train_step"]}
    assert bare.ok("%fsdp status").shown[0]["text/plain"].endswith("  next      %fsdp step 5")
    bare.fake.script["step"] = bare.fake.trains(3)
    stepped = [bare.ok("%fsdp step 3").shown[-1]["text/plain"]]
    bare.fake.script["step"] = gives(step_result(3))
    stepped.append(bare.ok("%fsdp step 3").shown[-1]["text/plain"])
    assert stepped[0].splitlines()[-1].split()[:3] == ["next", "%fsdp", "explain,"]
    assert "next" not in stepped[1] + bare.ok("%fsdp shard model").shown[0]["text/plain"]
    bare.ok("%fsdp stop")
    assert "next" not in bare.ok("%fsdp start -n 2").shown[0]["text/plain"]


@pytest.mark.parametrize("colors", ["nocolor", "linux"])
def test_the_traceback_of_a_rank_has_the_shells_colours(notebook, colors):
    notebook.fake.sharded()
    notebook.shell.colors = colors
    red = raises("ValueError", "no", traceback="\x1b[31mValueError\x1b[0m: no")
    notebook.fake.script["step"] = [red] * 4
    shown = "\n".join(notebook.run("%fsdp step").error._render_traceback_())
    assert shown.startswith("ValueError: no\n" if colors == "nocolor" else "\x1b[31mValueError")


def test_a_term_is_explained_where_it_is_first_met(bare):
    bare.ok("%fsdp start -n 2")
    bare.fake.script["shard"] = gives(SHARD_RESULT)
    bare.fake.sharded()
    bare.fake.script["step"] = bare.fake.trains(3)
    lines = ["shard model", "shard model", "step 3", "explain step", "explain step"]
    shown = [
        "".join(each["text/plain"] for each in bare.ok(f"%fsdp {line}").shown if "text/plain" in each) for line in lines
    ]
    assert [[term for term in INTRODUCED if MEANINGS[term] in text] for text in shown] == [
        ["unit"],
        [],
        [],
        ["transfers and copies"],
        [],
    ]


def test_what_was_done_before_is_not_advised(notebook):
    notebook.fake.sharded()
    notebook.fake.script["step"] = notebook.fake.trains(3)
    notebook.ok("dash = %fsdp dashboard\ndash.close()")
    assert "next" not in notebook.ok("%fsdp step 3").shown[-1]["text/plain"]


def test_the_example_is_a_cell_below_or_in_a_terminal_its_text(bare, monkeypatch):
    assert bare.ok("%fsdp example").out == EXAMPLE
    inserted = []
    monkeypatch.setattr("workbench.magics.shell.in_notebook", lambda: True)
    monkeypatch.setattr(bare.shell, "set_next_input", inserted.append)
    assert bare.ok("%fsdp example").out == f"{INSERTED}\n"
    assert inserted == [EXAMPLE.rstrip("\n")]


def test_names_in_braces_are_variables_of_the_notebook(bare):
    bare.ok("n = 3\nwho = [0, 2]\n%fsdp start -n {n}")
    assert bare.fake.num_ranks == 3
    bare.fake.sharded()
    bare.ok("%%fsdp -t {who}\nx = '{n}'")
    assert ("cell", "x = '{n}'\n", (0, 2)) in bare.fake.log
    bare.fake.script["step"] = bare.fake.trains(3)
    assert "3 steps" in bare.ok("%fsdp step {n}").shown[-1]["text/plain"]
    unknown = bare.run("%fsdp step {m}")
    assert isinstance(unknown.error, UsageError)
    assert "there is no notebook variable 'm' for {m}" in unknown.out
    assert "for a literal {m} write {{m}}" in unknown.out
    assert "there is no file '{m}'" in bare.run("%fsdp stop\n%fsdp open {{m}}").out


def test_ipython_does_not_expand_lines(bare):
    magics = bare.shell.magics_manager.registry["FsdpMagics"]
    assert getattr(magics.fsdp, MAGIC_NO_VAR_EXPAND_ATTR)


# ---- commands


def test_a_command_shows_its_report_or_returns_it(notebook):
    notebook.fake.script["shard"] = gives(SHARD_RESULT)
    shown = notebook.ok("%fsdp shard model --wrap Block").shown
    assert "model: 3 units on 4 ranks" in shown[0]["text/plain"]
    assert "<strong>" in shown[0]["text/html"]
    assert notebook.ok("report = %fsdp shard model").shown == []
    assert isinstance(notebook.shell.user_ns["report"], ShardReport)


def test_step_shows_a_bar_and_its_report(sharded):
    cell = sharded.ok("%fsdp step 3")
    assert "3 of 3 steps" in cell.out
    assert "3 steps, loss 4.5 -> 4.3" in cell.shown[-1]["text/plain"]


def test_a_name_that_only_the_notebook_has(notebook):
    notebook.ok("net = object()")
    assert "'net' is in this notebook, not on the ranks: put the code" in notebook.run("%fsdp shard net").out


def test_an_exception_on_a_rank_is_shown_once_and_raised(sharded):
    traceback = (
        'Traceback (most recent call last):\n  File "/tmp/ipykernel_1/2.py", line 3, in train_step\nValueError: no\n'
    )
    sharded.fake.script["step"] = [blocks, raises("ValueError", "no", line=3, traceback=traceback), blocks, blocks]
    cell = sharded.run("%fsdp step 3\nreached = True")
    assert isinstance(cell.error, RankError)
    assert "reached" not in sharded.shell.user_ns
    assert cell.out.count("Traceback") == 1
    assert "RankError: rank 1 raised ValueError: no (line 3, in train_step)" in cell.out
    assert "workbench/" not in cell.out


def test_an_interrupt_is_one_line(sharded):
    def press(cluster, rank, answer):
        raise Interrupted("Interrupted. The ranks are idle again")

    sharded.fake.script["cell"] = press
    cell = sharded.run("%%fsdp\nx")
    assert isinstance(cell.error, KeyboardInterrupt)
    assert cell.out.strip() == "Interrupted. The ranks are idle again"


# ---- cells


def test_a_cell_streams_one_rank_and_compares_the_rest(notebook):
    notebook.fake.script["cell"] = prints("hello\n")
    assert notebook.ok("%%fsdp\nprint('hello')").out == "hello\n--- 4 ranks agree\n"
    notebook.fake.script["cell"] = [prints(f"{rank}\n") for rank in range(4)]
    cell = notebook.ok("%%fsdp -t 1,3\nprint(rank)")
    (shown,) = cell.shown  # displays that are updated in place are for notebooks only
    assert (cell.out, shown["text/plain"]) == ("", "--- rank 1:\n1\n--- rank 3:\n3")


def test_rich_output_of_the_first_rank_is_shown(notebook):
    picture = Output("display", data={"image/png": "abc", "text/plain": "<Figure>"}, metadata={"x": 1}, display_id="d")
    update = Output("update", data={"text/plain": "newer"}, display_id="d")
    widget = Output("result", data={WIDGET_MIME: {"model_id": "1"}, "text/plain": "Slider()"})
    notebook.fake.script["cell"] = writes(picture, update, widget, Output("stderr", text="warning\n"), Output("clear"))
    cell = notebook.ok("%%fsdp\nplot()")
    assert [data.get("text/plain") for data in cell.shown[:3]] == ["<Figure>", "newer", f"Slider() {WIDGET_NOTE}"]
    assert cell.shown[0]["image/png"] == "abc"
    assert cell.shown[0]["transient"] == cell.shown[1]["transient"] == {"display_id": "d"}
    assert cell.shown[1]["update"]
    assert WIDGET_MIME not in cell.shown[2]
    assert "warning\n" in cell.err


# ---- views


def test_a_view_is_displayed_at_any_position_in_a_cell(sharded):
    sharded.ok("%fsdp step 3")
    cell = sharded.ok("%fsdp layout\n%fsdp training\nx = 1")
    shown = cell.shown
    assert len(shown) == 2
    assert cell.out.count("%fsdp export page.html") == 1  # this shell shows titles only
    for data in shown:
        assert set(data) >= {PLOTLY_MIME, "text/plain"}
        assert "text/html" not in data
        json.dumps(data[PLOTLY_MIME])
    assert "Each of 4 ranks keeps" in shown[0]["text/plain"]


def test_a_view_that_is_assigned_is_returned_and_not_displayed(sharded):
    assert sharded.ok("fig = %fsdp layout --fold true").shown == []
    assert isinstance(sharded.shell.user_ns["fig"], go.Figure)


def test_views_and_export_work_after_stop(sharded, tmp_path):
    sharded.ok("%fsdp step 3\n%fsdp stop")
    assert sharded.ok("%fsdp training").shown
    shown = sharded.ok(f"%fsdp export '{tmp_path}/my run.trace'").shown
    assert "my run.trace" in shown[0]["text/plain"]
    assert (tmp_path / "my run.trace").exists()


# ---- completion


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%fsdp st", {"start", "status", "stop", "step", "states"}),
        ("%fsdp shard mo", {"model"}),
        ("%fsdp shard ", {"model", *SHARD_FLAGS}),
        ("%fsdp shard model --w", {"--wrap"}),
        ("%fsdp shard model --reshard-after-forward f", {"false"}),
        ("%fsdp shard model --reshard-after-forward=", {"auto", "true", "false"}),
        ("%fsdp step --fn tr", {"train_step"}),
        ("%fsdp shard model --wrap B", {"Block"}),
        ("%fsdp shard model --wrap=B", {"Block"}),
        ("%fsdp eval tr", {"train_step"}),
        ("%fsdp eval 1 + me", {"mesh"}),
        ("%fsdp start --device c", {"cpu", "cuda"}),
        ("%fsdp help sha", {"shard"}),
        ("%%fsdp --t", {"--targets"}),
    ],
)
def test_completion(notebook, line, expected):
    assert set(notebook.complete(line)) == expected


def test_files_complete_what_compares_and_exports(bare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("before.trace", "run.json", "notes.txt"):
        (tmp_path / name).touch()
    assert bare.complete("%fsdp compare b") == ["before.trace"]
    assert "last" in bare.complete("%fsdp compare before.trace ")
    assert bare.complete("%fsdp open b") == ["before.trace"]
    assert "last" not in bare.complete("%fsdp open ")
    assert bare.complete("%fsdp export r") == ["run.json"]
    assert "notes.txt" not in bare.complete("%fsdp export ")


def test_completion_waits_for_an_unresponsive_rank_a_moment_only(sharded):
    sharded.ok("%fsdp step 3")
    sharded.fake.patience.clear()
    sharded.fake.silent.add(1)
    assert "model" in sharded.complete("%fsdp shard m")
    assert sharded.complete("%fsdp break add forward:bl")
    assert {seconds for _, seconds in sharded.fake.patience} == {ASK_S}


def test_reshard_completes_unit_names(sharded):
    units = ["model.blocks.0", "model.blocks.1"]
    assert sharded.complete("%fsdp reshard model.") == units
    assert sharded.complete("%fsdp reshard model.b") == units
    assert sharded.complete("%fsdp reshard --mp bf16 model.blocks.1") == units[1:]
    sharded.fake.modules[1] = ["model", "teacher"]  # with several models, each completes its own units
    assert sharded.complete("%fsdp reshard model.blocks.") == units
    assert sharded.complete("%fsdp reshard teacher.") == []
    assert set(sharded.complete("%fsdp unshard ")) >= {"model", "teacher"}
    assert sharded.complete("%fsdp unshard model.") == []  # only a whole model can be unsharded


def test_completion_in_a_fresh_shell_and_after_nonsense(bare):
    assert "start" in bare.complete("%fsdp sta")
    assert "--wrap" in bare.complete("%fsdp shard --")
    for line in ("%fsdp nonsense x", "%fsdp step 3 x", "%fsdp start -n "):
        assert isinstance(bare.complete(line), list)


# ---- loading


def test_the_extension_is_loaded_once_and_unloaded(bare):
    first = bare.shell.magics_manager.registry["FsdpMagics"]
    assert register(bare.shell) is first
    bare.ok("%fsdp start")
    unload_ipython_extension(bare.shell)
    assert bare.fake.log[-1] == ("stop",)
    assert "not found" in bare.run("%fsdp status").err
    assert "start" not in bare.complete("%fsdp sta")
    unregister(bare.shell)
    load_ipython_extension(bare.shell)
    assert "No ranks are running yet" in bare.run("%fsdp status").out
    unload_ipython_extension(bare.shell)
    unload_ipython_extension(bare.shell)
