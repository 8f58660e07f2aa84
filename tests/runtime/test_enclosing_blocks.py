"""The loops and branches around a line of a source file."""

from workbench.runtime.enclosing_blocks import block_words, branches_around, loops_around

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


BRANCHES = """\
if rank == 0:
    a()
    def hook():
        b()
elif rank > 1:
    c()
else:
    for x in y:
        if x > 0 and rank:
            d()
if __name__ == "__main__":
    e()
with file, lock:
    try:
        f()
    except (OSError, EOFError):
        g()
    except:
        h()
"""


def test_every_branch_of_a_file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BRANCHES)
    lock = (13, "with", "lock")
    first, other = (1, "if", "rank == 0"), (5, "if", "not (rank > 1)")
    found = {line: branches_around(str(path), line) for line in range(1, 20)}
    assert {line: each for line, each in found.items() if each} == {
        2: (first,),
        6: ((5, "if", "rank > 1"),),
        8: (other,),
        9: (other,),
        10: (other, (9, "if", "x > 0 and rank")),
        **dict.fromkeys([14, 15, 16, 18], (lock,)),
        17: (lock, (16, "except", "(OSError, EOFError)")),
        19: (lock, (18, "except", "")),
    }
    assert block_words(str(path), 19) == ", with 13 `lock`, except 18 ``"
    assert block_words(str(path), 10) == ", loop 8, if 5 `not (rank > 1)`, 9 `x > 0 and rank`"


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
        assert block_words(str(path), 3) == words
