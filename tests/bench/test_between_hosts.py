"""One whole comparison of a small model on two hosts; and the result where simulated hosts are impossible."""

from dataclasses import replace

import pytest

from bench import between_hosts
from bench.between_hosts import compare_hosts
from bench.cases import HOSTS_CASES, OF_OURS, OURS, OURS_GLOO, RECORDED, TORCH, num_params
from bench.compare import Effort

pytestmark = pytest.mark.exhaustive

LITTLE = Effort(rounds=1, steps=1, pairs=1)


def test_the_cases():
    found = {name: (case.num_ranks, case.num_hosts, case.is_copied) for name, case in HOSTS_CASES.items()}
    assert found == {"3hosts": (6, 3, False), "3hosts-copies": (6, 3, True)}
    described = HOSTS_CASES["3hosts-copies"].describe()
    assert described == ("3hosts-copies: 3.3 M parameters (4 blocks x 256), 6 ranks on 3 hosts, each with a copy, fp32")


def test_missing_hosts_are_reported_with_the_reason(monkeypatch):
    monkeypatch.setattr(between_hosts.ranks_on_hosts, "why_not", lambda: "only root can")
    assert compare_hosts(HOSTS_CASES["3hosts"], LITTLE) == {"left out": "only root can", "failed": {}}


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("is_copied", [False, True])
def test_all_are_measured_and_ours_sends_least_between_hosts(is_copied):
    case = replace(RECORDED["0.23M"], num_ranks=4, num_hosts=2, is_copied=is_copied)
    found = compare_hosts(case, LITTLE)
    assert found["failed"] == {}
    assert set(found["steps_ms"]) == set(found["peak_mb"]) == {TORCH, *OF_OURS}
    assert found["to_torch"] == found["steps_ms"][OURS] / found["steps_ms"][TORCH]
    assert found["links"] == "1000 Mbit/s, 2 ms"
    sent = found["sent_mb a host and step"]
    if is_copied:  # an all-reduce of half of the gradients from each of two ranks, by any method
        assert sent[OURS] == pytest.approx(num_params(case.config) * 4 / 1e6, rel=0.2)
    else:
        assert sent[OURS] < min(sent[OURS_GLOO], sent[TORCH])
