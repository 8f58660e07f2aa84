"""A panel on a fake cluster, over a comm that records its messages."""

from dataclasses import dataclass, field

import pytest

from tests.helpers.fake_cluster import FakeCluster
from tests.helpers.waiting import wait_until
from workbench.live.messages import VERSION
from workbench.panel.client import Client
from workbench.workbench import Workbench


@dataclass
class FakeComm:
    """A comm without a browser: ``sent`` has the messages to the browser, with their buffers."""

    comm_id: str = "a"
    sent: list = field(default_factory=list)
    is_closed: bool = False

    def send(self, data, *, buffers=None):
        assert not self.is_closed
        self.sent.append((data, buffers))

    def on_msg(self, callback):
        self.receive = lambda data: callback({"content": {"data": data}})

    def on_close(self, callback):
        self.leave = lambda: callback({})

    def close(self):
        self.is_closed = True


@dataclass
class Browser:
    """Sends requests to a panel, and waits for its answers."""

    workbench: Workbench
    panel: Client
    comm: FakeComm
    fakes: list
    num_requests: int = 0

    @property
    def fake(self):
        return self.fakes[-1]

    def ask(self, word, **fields):
        """Return the answer to a request."""
        self.num_requests += 1
        self.comm.receive({"word": word, "number": self.num_requests, **fields})
        return self.answer_to(self.num_requests)

    def answer_to(self, number):
        def answers():
            return [data for data, _ in self.comm.sent if data["number"] == number]

        wait_until(answers)
        return answers()[-1]

    def hello(self):
        return self.ask("hello", version=VERSION, extension="0.2.0")

    def look(self, **fields):
        return self.ask("look", **fields)

    def do(self, word, **fields):
        return self.ask("do", command={"word": word, **fields})


@pytest.fixture
def browser():
    """A browser that has said hello."""
    fakes = []

    def factory(*args, **settings):
        fakes.append(FakeCluster(*args, **settings))
        return fakes[-1]

    workbench = Workbench(cluster_factory=factory)
    comm = FakeComm()
    panel = Client(workbench, comm, version="0.2.0")
    made = Browser(workbench, panel, comm, fakes)
    made.hello()
    yield made
    panel.close()
    workbench.close()


@pytest.fixture
def started(browser):
    """A browser with four ranks."""
    assert not browser.do("start", num_ranks=4)["is_error"]
    return browser
