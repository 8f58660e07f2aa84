import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.cluster.pending_replies import Answer, Output, PendingReplies, settle
from workbench.session.outputs import DISPLAY_GRACE_S, GRACE_S, RENEW_S, Stream, _Text, text_of, written_at_once

PNG = Output("display", data={"image/png": "...", "text/plain": "<Figure>"})


class Job:
    """A request whose ranks write when the test lets them, and its forwarded output."""

    def __init__(self, num_ranks=3, first=0):
        self.now = 0.0
        self.answers = {first + rank: Answer() for rank in range(num_ranks)}
        self.stream = Stream(PendingReplies(self.answers), first, lambda: self.now)
        self.outputs = []

    def write(self, texts, **more):
        """Write ``texts``: of all ranks, or by rank."""
        for rank, text in (texts if isinstance(texts, dict) else dict.fromkeys(self.answers, texts)).items():
            self.answers[rank].outputs.append(text if isinstance(text, Output) else Output("stdout", text=text))
        return self.look(**more)

    def look(self, after_s=0.0):
        """Return the output forwarded now."""
        self.now += after_s
        return self.reported(self.stream.forward)

    def reported(self, method, **more):
        outputs = []
        method(outputs.append, **more)
        self.outputs += outputs
        return outputs

    def end(self, *ranks):
        for rank in ranks or self.answers:
            settle(self.answers[rank].future, None)

    def finish(self, **more):
        self.end()
        return self.reported(self.stream.finish, also_agreement=True, **more)


def texts(outputs):
    return [output.text for output in outputs]


def plain(output):
    return output.data["text/plain"]


def tabs(outputs):
    """Return the two displays of the outputs."""
    upper, lower = outputs
    assert [output.display_id.rpartition("-")[2] for output in outputs] == ["tabs", "panes"]
    assert upper.is_draft
    return upper, lower


def marked(lower):
    """Return the ranks whose tabs the lower display marks."""
    (marks, *_) = re.findall(r"^(label.*)::after \{content", lower.data["text/html"], re.MULTILINE) or [""]
    return [int(rank) for rank in re.findall(r"-r(\d+)\)", marks)]


# ---- they agree


def test_common_output_is_passed_on_immediately():
    job = Job()
    assert texts(job.write("hello\n")) == ["hello\n"]
    assert texts(job.write("again\n")) == ["again\n"]
    assert texts(job.finish()) == ["--- 3 ranks agree\n"]


def test_output_of_the_first_rank_alone_waits_briefly():
    job = Job()
    assert job.write({0: "hello\n"}) == []
    assert job.look(GRACE_S / 2) == []
    assert texts(job.look(GRACE_S / 2)) == ["hello\n"]
    assert job.write({1: "hel", 2: "hello\n"}) == []
    assert job.write({1: "lo\n"}) == []
    assert texts(job.finish()) == ["--- 3 ranks agree\n"]


def test_it_does_not_wait_for_ended_ranks():
    job = Job()
    job.end(1, 2)
    assert texts(job.write({0: "hello\n"})) == ["hello\n"]


def test_output_that_arrives_earlier_from_others_is_no_difference():
    job = Job()
    assert job.write({1: "a\nb\n", 2: "a\n"}) == []
    assert texts(job.write({0: "a\nb\n"})) == []  # rank 2 may still write something else
    assert texts(job.write({2: "b\n"})) == ["a\nb\n"]


def test_a_rank_that_wrote_alone_is_named_in_a_line():
    job = Job()
    job.write({0: "hello\n"})
    assert texts(job.finish()) == ["hello\n", "--- above: rank 0; ranks 1-2 wrote nothing\n"]


def test_silence_and_a_single_rank_need_no_line():
    assert Job().finish() == []
    job = Job(1)
    assert texts(job.write("x")) == ["x"]
    assert job.finish() == []


def test_a_failure_shows_only_differences():
    job = Job()
    job.write("hello\n")
    job.end()
    assert job.reported(job.stream.finish, also_agreement=False) == []


def test_figures_of_the_first_rank_appear_in_order():
    job = Job()
    assert job.write({0: "a\n"}) == job.write({0: PNG}) == job.write({0: "b\n"}) == []
    for output in (Output("stdout", text="a\n"), PNG, Output("stdout", text="b\n")):
        job.write({1: output, 2: output})
    assert [output.text or plain(output) for output in job.outputs] == ["a\n", "<Figure>", "b\n"]


# ---- they differ


def test_tabs_begin_with_the_line_in_which_ranks_differ():
    job = Job()
    job.write("same\n")
    upper, lower = tabs(job.write({0: "loss 1\n", 1: "loss 1\n", 2: "loss 2\n"}))
    assert (upper.kind, lower.kind) == ("display", "display")
    assert plain(lower) == "--- ranks 0-1:\nloss 1\n--- rank 2:\nloss 2"
    assert marked(lower) == [2]
    assert lower.is_draft
    assert texts(job.outputs[:1]) == ["same\n"]
    (last,) = job.finish()
    assert (last.kind, last.display_id, last.is_draft) == ("update", lower.display_id, False)
    assert plain(last) == plain(lower)


def test_the_text_of_all_outputs_has_each_line_once():
    job = Job()
    for number in range(3):
        job.write({rank: f"loss {rank + number}\n" for rank in range(3)})
    job.finish()
    by_rank = "".join(f"--- rank {n}:\nloss {n}\nloss {n + 1}\nloss {n + 2}\n" for n in range(3))
    assert text_of(job.outputs) == by_rank


def test_a_line_with_a_common_beginning_is_complete_in_the_tabs():
    job = Job(2)
    job.write("a\nrank ")
    assert texts(job.outputs) == ["a\nrank "]
    _, lower = tabs(job.write({0: "0\n", 1: "1\n"}))
    assert plain(lower) == "--- rank 0:\nrank 0\n--- rank 1:\nrank 1"


def test_one_output_is_divided_where_ranks_part():
    job = Job(2)
    first, *rest = job.write({0: "a\nb\n", 1: "a\nc\n"})
    assert first.text == "a\n"
    assert plain(tabs(rest)[1]) == "--- rank 0:\nb\n--- rank 1:\nc"


def test_panes_are_renewed_in_time_and_the_tabs_never():
    job = Job()
    _, lower = tabs(job.write({0: "0\n", 1: "1\n"}))
    assert job.write({0: "0\n"}) == []
    (again,) = job.look(2 * RENEW_S)
    assert (again.kind, again.display_id) == ("update", lower.display_id)
    assert plain(again) == "--- rank 0:\n0\n0\n--- rank 1:\n1\n--- rank 2:\n(no output)"
    assert job.look(2 * RENEW_S) == []
    assert marked(again) == [1]
    (again,) = job.write({2: "2\n"})
    assert (again.kind, again.display_id) == ("update", lower.display_id)
    assert marked(again) == [1, 2]


def test_a_rank_that_parts_earlier_moves_the_beginning():
    job = Job()
    job.write({0: "a\nb\n", 1: "a\nx\n", 2: "a"})
    job.write({2: "!\n"})
    (lower,) = job.finish()
    assert plain(lower) == "--- rank 0:\na\nb\n--- rank 1:\na\nx\n--- rank 2:\na!"


def test_a_rank_with_less_output_differs():
    job = Job(2)
    job.write("a\n")
    job.write({0: "b\n"}, after_s=1)
    _, lower = tabs(job.finish())
    assert plain(lower) == "--- rank 0:\nb\n--- rank 1:\n(no output)"
    assert marked(lower) == [1]


def test_the_first_rank_is_the_first_target():
    job = Job(2, first=2)
    job.write({2: "two\n", 3: "three\n"})
    assert plain(job.outputs[-1]).startswith("--- rank 2:\ntwo\n")


def test_figures_are_shown_and_texts_that_differ_are_not_shown_twice():
    job = Job(2)
    job.write({0: "0\n", 1: "1\n"})
    value = Output("result", data={"text/plain": "7"})
    outputs = job.write({0: value, 1: value}) + job.write({0: PNG, 1: PNG})
    assert outputs == [PNG]
    assert plain(job.finish()[-1]) == "--- rank 0:\n0\n7\n--- rank 1:\n1\n7"


def test_clearing_the_output_removes_the_tabs():
    job = Job(2)
    upper, _ = tabs(job.write({0: "0\n", 1: "1\n"}))
    clear, new, _ = [*job.write({0: Output("clear")}), *job.look(2 * RENEW_S)]
    assert clear.kind == "clear"
    assert new.kind == "display"
    assert new.display_id != upper.display_id


def test_output_shown_at_a_stop_is_not_shown_again():
    job = Job(2)
    job.write("same\n")
    assert texts(job.reported(job.stream.pause)) == ["--- 2 ranks agree\n"]
    job.write({0: "0\n", 1: "1\n"})
    (last,) = job.reported(job.stream.pause)
    assert not last.is_draft
    assert texts(job.write("after\n")) == ["after\n"]
    assert texts(job.finish()) == ["--- 2 ranks agree\n"]


def test_a_rank_stopped_earlier_is_compared_later():
    job = Job(2)
    job.write({0: "a\nb\n", 1: "a\n"})
    assert texts(job.reported(job.stream.pause)) == ["a\nb\n", "--- 2 ranks agree\n"]
    job.write({1: "b\n"})
    assert texts(job.finish()) == ["--- 2 ranks agree\n"]


def test_output_written_immediately():
    outputs = []
    assert written_at_once({1: "a", 2: "a"}, outputs.append) == "--- 2 ranks agree\n"
    assert texts(outputs) == ["a", "--- 2 ranks agree\n"]
    reported = "--- rank 1:\na\n--- rank 2:\nb\n"
    assert written_at_once({1: "a", 2: "b"}, outputs.append) == reported
    assert plain(outputs[-1]) == reported.rstrip("\n")


# ---- displays and log lines


def shown(data, plain="<Figure>", **more):
    return Output("display", data={**data, "text/plain": plain}, **more)


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        ({"image/png": "AAAA"}, {"image/png": "BBBB"}),
        ({"text/html": "<b>rank 0</b>"}, {"text/html": "<b>rank 1</b>"}),
        ({"image/svg+xml": "<svg>0</svg>"}, {"image/svg+xml": "<svg>1</svg>"}),
        ({"application/json": {"a": 1}}, {"application/json": {"a": 2}}),
        ({"image/png": "AAAA"}, {}),
    ],
)
def test_displays_that_differ_in_any_form_are_in_tabs(mine, yours):
    job = Job(2)
    job.write("before\n")
    _, lower = tabs(job.write({0: shown(mine), 1: shown(yours)}))
    if "application/json" not in mine:
        assert plain(lower) == "--- rank 0:\n<Figure>\n--- rank 1:\n<Figure>"
    assert texts(job.outputs[:-2]) == ["before\n"]
    (last,) = job.finish()
    for data in (mine, yours):
        for mime, value in data.items():
            assert (f"data:{mime}" if mime.startswith("image") else str(value)[-3:-1]) in last.data["text/html"]


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        ("<svg><path id='m1a2b'/><use href='#m1a2b'/></svg>", "<svg><path id='m7f00'/><use href='#m7f00'/></svg>"),
        ('<p id="T_1">1</p><style>#T_1 {}</style>', '<p id="T_2">1</p><style>#T_2 {}</style>'),
        ("<date>2026-11-29T10:11:12.123</date>", "<date>2026-11-29T10:11:12.456</date>"),
        ("<i>f at 0x7f0123456789</i>", "<i>f at 0x7f0123456700</i>"),
    ],
)
def test_names_drawn_at_random_are_no_difference(mine, yours):
    job = Job(2)
    outputs = job.write({0: shown({"text/html": mine}), 1: shown({"text/html": yours})})
    assert outputs == [shown({"text/html": mine})]
    assert texts(job.finish()) == ["--- 2 ranks agree\n"]


def test_a_display_waits_longer_for_other_ranks():
    job = Job(2)
    assert job.write({0: PNG}, after_s=GRACE_S) == job.look(GRACE_S) == []
    assert job.look(DISPLAY_GRACE_S) == [PNG]


def test_what_displays_show_at_the_end_is_compared():
    job = Job(2)
    job.write({rank: shown({"text/html": "begins"}, display_id=f"id {rank}") for rank in (0, 1)})
    update = [Output("update", data={"text/html": f"<b>{rank}</b>"}, display_id=f"id {rank}") for rank in (0, 1)]
    assert job.write({0: update[0]}) == [update[0]]
    job.write({1: update[1]})
    lower = job.finish()[-1]
    assert re.findall("<b>.</b>", lower.data["text/html"]) == ["<b>0</b>", "<b>1</b>"]


def test_cleared_output_is_not_in_the_tabs():
    job = Job(2)
    job.write({0: "0\n", 1: "1\n"})
    job.write(Output("clear"))
    job.write({0: "new 0\n", 1: "new 1\n"})
    assert plain(job.finish()[-1]) == "--- rank 0:\nnew 0\n--- rank 1:\nnew 1"


LINES = {
    "warning": "/tmp/ipykernel_{pid}/{pid}99.py:6: UserWarning: careful\n  f(x)\n",
    "torch": "[rank{rank}]:W1128 11:06:36.{pid}000 {pid} torch/a.py:12] careful\n",
    "logging": "2026-11-28 11:06:36,{pid} INFO careful\n",
    "object": "<generator f at 0x7f0000{pid}>\n",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_lines_that_differ_only_in_their_process_are_one(line, in_pieces):
    job = Job(2)
    whole = {rank: line.format(rank=rank, pid=311 + rank) for rank in (0, 1)}
    if in_pieces:
        job.write({rank: text[:30] for rank, text in whole.items()})
        job.write({rank: text[30:] for rank, text in whole.items()})
    else:
        job.write(whole)
    job.write("and then\n")
    assert texts(job.finish()) == ["--- 2 ranks agree\n"]
    job = Job(2)
    job.write({0: whole[0], 1: whole[1].replace("careful", "other").replace("f at", "g at")})
    assert "differs" not in "".join(texts(job.finish()))
    assert plain(job.outputs[-1]).count("---") == 2


def test_an_unfinished_line_that_differs_appears_soon():
    job = Job(2)
    assert job.write({0: "rank 0 ...", 1: "rank 1 ..."}) == []
    _, lower = tabs(job.look(2 * GRACE_S))
    assert plain(lower) == "--- rank 0:\nrank 0 ...\n--- rank 1:\nrank 1 ..."
    job = Job(2)
    job.write({0: "rank 0 ...", 1: "rank 1 ..."})
    assert plain(job.reported(job.stream.pause)[-1]) == plain(lower)


# ---- laws

PIECES = st.lists(st.sampled_from(["a\n", "b", "\n", "long line\n", ""]), max_size=6)


def test_ranks_that_differ_in_an_empty_line_are_distinguished():
    job = Job(2)
    job.write({0: "a\na\n", 1: "a\n\na\n"})
    job.finish()
    assert plain(job.outputs[-1]).count("---") == 2


@given(st.lists(PIECES, min_size=2, max_size=4), st.data())
def test_nothing_is_lost_and_all_agree_or_every_rank_is_named(written, data):
    """For any order of arrival of the ranks' output."""
    job = Job(len(written))
    left = {rank: list(pieces) for rank, pieces in enumerate(written)}
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank, pieces in left.items() if pieces]))
        job.write({rank: left[rank].pop(0)}, after_s=data.draw(st.sampled_from([0.0, 0.3])))
    job.finish()
    whole = ["".join(pieces) for pieces in written]
    streamed = "".join(output.text for output in job.outputs if not output.text.startswith("---"))
    panes = [plain(output) for output in job.outputs if output.display_id.endswith("panes")]
    assert whole[0].startswith(streamed)
    if not panes:
        assert streamed == whole[0]
        assert len({text.strip() for text in whole[1:]}) == 1
        return
    assert not job.outputs[-1].is_draft
    shown = panes[-1]
    for rank, text in enumerate(whole):
        lines = text.splitlines()
        assert not lines or lines[-1] in shown or text.startswith(streamed[: len(text)]), rank
    assert shown.count("---") >= 2 or len({text.strip() for text in whole}) == 1


@given(st.lists(st.text("ab\n", max_size=5), max_size=8), st.data())
def test_a_part_of_a_text_in_pieces_is_that_of_the_whole(pieces, data):
    text = _Text()
    for piece in pieces:
        text.add(piece)
    whole = "".join(pieces)
    assert len(text) == len(whole)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    assert text.part(begin, end) == whole[begin:end]
    assert text.line_start(end) == whole.rfind("\n", 0, end) + 1


@pytest.mark.parametrize("differs", [False, True])
def test_much_output_of_many_ranks_is_read_once(differs):
    """The characters compared or shown are linear in those written, not quadratic."""
    job, looked = Job(64), []
    part = _Text.part

    def counted(self, begin, end):
        looked.append(end - begin)
        return part(self, begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Text, "part", counted)
        for turn in range(300):
            job.write({rank: f"{turn} {rank * differs}\n" + "x" * 99 + "\n" for rank in job.answers}, after_s=0.02)
        job.finish()
    num_renewed = sum(output.display_id.endswith("panes") for output in job.outputs)
    size = max((len(plain(output)) for output in job.outputs if output.data), default=0)
    assert sum(looked) < 64 * 300 * 110 * 3 + (num_renewed + 1) * 64 * 6_000
    assert size < 400_000


# ---- bars, which each rank draws at its own pace


def bar(percent, speed, more=""):
    return f"\r{percent:3}%|{'#' * (percent // 10):10}| {percent}/100 [00:0{speed}<00:0{speed}, {speed}.5it/s{more}]"


def test_bars_that_differ_only_in_speed_are_merged():
    job = Job(2)
    job.write(bar(0, 0))
    job.write({0: bar(40, 2), 1: bar(50, 3)})
    job.look(GRACE_S)
    job.write({0: bar(80, 2)})
    job.look(GRACE_S)
    job.write({0: bar(100, 2) + "\n", 1: bar(90, 3) + bar(100, 3) + "\n"})
    job.write("and then\n")
    assert texts(job.finish()) == ["--- 2 ranks agree\n"]
    shown = "".join(texts(job.outputs[:-1]))
    assert shown == bar(0, 0) + bar(40, 2) + bar(80, 2) + bar(100, 2) + "\nand then\n"


def test_a_bar_moves_on_while_another_rank_is_slow():
    job = Job(2)
    job.write(bar(0, 0))
    assert job.write({0: bar(40, 2)}) == []
    assert texts(job.look(GRACE_S)) == [bar(40, 2)]


@pytest.mark.parametrize("end", ["\n", "\r" + " " * 60 + "\r"])
def test_bars_with_different_ends_are_distinguished_at_the_end(end):
    job = Job(2)
    job.write(bar(0, 0))
    job.write({0: bar(30, 2) + bar(100, 2, ", loss=1") + end, 1: bar(50, 3) + bar(100, 3, ", loss=2") + end})
    found = job.finish()
    if end == "\n":
        _, lower = tabs([output for output in job.outputs if output.display_id][:2])
        assert "loss=1" in plain(lower)
        assert "loss=2" in plain(lower)
    else:  # nothing of them is visible any more
        assert texts(found)[-1] == "--- 2 ranks agree\n"


def test_after_merged_bars_ranks_differ_from_their_own_line_on():
    job = Job(2)
    job.write({0: bar(0, 0) + bar(100, 2) + "\n", 1: bar(0, 0) + bar(50, 9) + bar(100, 9) + "\n"})
    found = job.write({0: "mine\nrest\n", 1: "yours\nrest\n"})
    assert texts(job.outputs[:-2]) == [bar(0, 0) + bar(100, 2) + "\n"]
    assert plain(tabs(found[-2:])[1]) == "--- rank 0:\nmine\nrest\n--- rank 1:\nyours\nrest"


def test_a_bar_above_the_tabs_is_drawn_to_its_end():
    job = Job(2)
    job.write(bar(0, 0))
    job.write({0: bar(60, 2)})
    job.look(GRACE_S)
    job.write({1: "\nan error\n"})
    found = job.write({0: bar(100, 2) + "\nbehind\n"})
    assert [output.text for output in found if output.kind == "stdout"] == [bar(100, 2) + "\n"]


def test_a_bar_within_a_stopped_step_is_compared_from_its_line_on_later():
    job = Job(2)
    job.write(bar(0, 0))
    job.write({0: bar(40, 2), 1: bar(50, 3)})
    assert "differ" not in "".join(texts(job.reported(job.stream.pause)))
    job.write({0: bar(100, 2) + "\n", 1: bar(100, 3) + "\n"})
    assert texts(job.finish())[-1] == "--- 2 ranks agree\n"


def test_panes_of_bars_that_differ_only_in_speed_are_merged():
    job = Job(3)
    found = job.write({0: "a\n" + bar(100, 2) + "\n", 1: "a\n" + bar(100, 3) + "\n", 2: "b\n" + bar(100, 4) + "\n"})
    assert plain(tabs(found[-2:])[1]).count("---") == 2
