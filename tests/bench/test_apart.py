"""A function in a new process returns, raises, or takes too long; it leaves nothing behind."""

import time

import pytest

from bench import apart
from bench.apart import ApartFailure, call_apart

HERE = __name__


def doubled(number):
    return {"twice": 2 * number}


def refuse():
    raise ValueError("no such luck")


def wait_long():
    time.sleep(600)


def test_arguments_and_values_are_data():
    assert call_apart(f"{HERE}:doubled", number=21) == {"twice": 42}


def test_a_failure_is_reported_and_the_others_continue():
    from bench.live import measured  # imports torch, which the answering process does without

    with pytest.raises(ApartFailure, match=r"(?s)^Traceback.*ValueError: no such luck$"):
        call_apart(f"{HERE}:refuse")
    found = measured("cells", lambda: call_apart(f"{HERE}:refuse"))
    assert found["failed"]["cells"].endswith("ValueError: no such luck")
    assert measured("cells", lambda: {"a": 1}) == {"a": 1, "failed": {}}


def test_a_slow_function_is_ended(monkeypatch):
    monkeypatch.setattr(apart, "GRACE_S", 5)
    with pytest.raises(ApartFailure, match=f"{HERE}:wait_long did not return within 1 s"):
        call_apart(f"{HERE}:wait_long", timeout_s=1)
