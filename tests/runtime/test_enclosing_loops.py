"""The loops around a line of a source file."""

from workbench.runtime.enclosing_loops import loop_words, loops_around

SOURCE = """\
def main():
    for epoch in range(3):
        while step():
            train()
        else:
            evaluate()
        def hook():
            for x in y:
                call()
            return x
        run(hook)
    save()
"""


def test_every_line_of_a_file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    found = {line: loops_around(str(path), line) for line in range(1, 13)}
    assert found == {
        1: (),
        2: (2,),
        3: (2, 3),
        4: (2, 3),
        5: (2,),
        6: (2,),
        7: (),  # a function's first line is part of it
        8: (8,),
        9: (8,),
        10: (),
        11: (2,),
        12: (),
    }


def test_a_file_that_cannot_be_parsed_has_no_loops(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("for x in y:\n  (")
    assert loops_around(str(path), 2) == ()
    assert loops_around(str(tmp_path / "missing.py"), 2) == ()


def test_the_files_of_libraries_are_not_parsed(tmp_path):
    for folder, words in [("src", ", loop 2, 3"), ("site-packages", "")]:
        path = tmp_path / folder / "train.py"
        path.parent.mkdir()
        path.write_text(SOURCE)
        assert loop_words(str(path), 3) == words
