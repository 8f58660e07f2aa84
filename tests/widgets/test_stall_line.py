import io

from workbench.cluster.pending_replies import Output
from workbench.widgets.progress import StallLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_it_is_the_last_line_and_gives_way():
    stream = Terminal()
    line = StallLine(stream)
    emit = line.before(lambda output: stream.write(output.text))
    emit(Output("stdout", text="begun\n"))
    line.update("rank 1 has run for 3 s")
    line.update("rank 1 has run for 4 s")
    emit(Output("stdout", text="done\n"))
    line.close()
    assert stream.getvalue() == "begun\n\rrank 1 has run for 3 s\x1b[K\rrank 1 has run for 4 s\x1b[K\r\x1b[Kdone\n"


def test_in_a_file_it_is_written_once():
    stream = io.StringIO()
    line = StallLine(stream)
    for second in range(3, 60):
        line.update(f"rank 1 has run for {second} s")
    line.close()
    assert stream.getvalue() == "rank 1 has run for 3 s\n"


def test_nothing_is_written_without_a_notice():
    stream = Terminal()
    StallLine(stream).close()
    assert stream.getvalue() == ""


def test_in_a_notebook_it_is_one_display_renewed_in_place_and_escaped(monkeypatch):
    published = []

    class Handle:
        def update(self, bundle, raw):
            published.append(("update", bundle))

    def display(bundle, raw, display_id):
        published.append(("display", bundle))
        return Handle()

    monkeypatch.setattr("workbench.widgets.progress.in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    line = StallLine()
    line.update("in a < b")
    line.update("in a < b, still")
    line.close()
    assert [kind for kind, _ in published] == ["display", "update", "update"]
    assert "in a &lt; b" in published[0][1]["text/html"]
    assert published[0][1]["text/plain"] == "in a < b"
    assert published[-1][1] == {"text/html": "", "text/plain": ""}
