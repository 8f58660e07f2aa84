import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.session.outputs import MAX_GROUPS, MAX_LINES, compare


@pytest.mark.parametrize(
    ("texts", "shown", "expected"),
    [
        ({0: "hello\n", 1: "hello\n", 2: "hello\n", 3: "hello\n"}, 0, "--- 4 ranks agree\n"),
        ({0: "", 1: "", 2: ""}, 0, ""),
        ({1: "alone"}, 1, ""),
        ({0: "a\n", 1: "a\n", 2: "b\n"}, 0, "--- rank 2:\nb\n--- ranks 0-1 agree\n"),
        ({0: "0\n", 1: "1\n"}, 0, "--- rank 1:\n1\n--- above: rank 0\n"),
        ({0: "", 3: "x"}, 0, "--- rank 3:\nx\n--- above: rank 0\n"),
        ({1: "x", 3: "", 5: ""}, 1, "--- ranks 3, 5:\n(no output)\n--- above: rank 1\n"),
    ],
)
def test_what_is_left_to_print(texts, shown, expected):
    assert compare(texts, shown) == expected


def test_64_ranks_that_all_differ_stay_readable():
    text = compare({rank: f"I am {rank}" for rank in range(64)}, 0)
    assert text.count("I am") == MAX_GROUPS
    assert "--- ranks 9-63: different again, not shown\n" in text


def test_long_output_is_cut():
    text = compare({0: "a", 1: "\n".join(map(str, range(1000)))}, 0)
    assert len(text.splitlines()) == MAX_LINES + 3
    assert "... 960 lines more" in text


@given(st.dictionaries(st.integers(0, 7), st.sampled_from(["", "a", "b\nc"]), min_size=2))
def test_every_rank_is_named_or_all_agree(texts):
    shown = min(texts)
    text = compare(texts, shown)
    agree = len(set(texts.values())) == 1
    assert (text.endswith(f"{len(texts)} ranks agree\n") or text == "") == agree
    assert text.count("---") == (len(set(texts.values())) if text else 0)
