"""A rank side without torch, for tests of the two channels; it runs in the engines."""

import os
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.random  # noqa: F401 - torch imports it too, and forked ranks must not share its random state
from IPython import get_ipython

from workbench.base.codec import decode, decode_named, encode
from workbench.errors import UsageError
from workbench.protocol.commands import RankRequest
from workbench.protocol.rank_messages import Locate, Position
from workbench.protocol.starting import Address, Boot, Connect, ConnectReply

STORE = {}
HELD = threading.Event()
RELEASED = threading.Event()
TARDY = threading.Event()


def boot(data):
    boot_request = decode(Boot, data, "boot")
    rank, world_size = boot_request.rank, boot_request.world_size
    if os.environ.get("WORKBENCH_FAKE_RANK_REFUSES_AT_BOOT"):
        raise UsageError("not on a Sunday: use another day")
    if os.environ.get("WORKBENCH_FAKE_RANK_HANGS_AT_BOOT") == str(rank):
        hold()
    address = None
    if rank == 0:
        STORE["socket"] = socket.create_server(("127.0.0.1", 0))
        host, port = STORE["socket"].getsockname()
        address = Address(host=host, port=port)
    get_ipython().user_ns.update(rank=rank, world_size=world_size, device="cpu")
    STORE["info"] = ConnectReply(rank=rank, host=socket.gethostname(), device="cpu", pid=os.getpid())
    return {"surprise": 1} if os.environ.get("WORKBENCH_FAKE_RANK_SURPRISES_AT_BOOT") == str(rank) else encode(address)


def connect(data):
    meet = decode(Connect, data, "connect").address
    socket.create_connection((meet.host, meet.port), timeout=5).close()
    return encode(STORE["info"])


def shutdown():
    if "socket" in STORE:
        STORE.pop("socket").close()
    marker = os.environ.get("WORKBENCH_FAKE_RANK_SHUTDOWN")
    if marker:
        with open(marker, "a") as file:
            file.write(f"{STORE['info'].rank}\n")


@dataclass(frozen=True, kw_only=True)
class ThreadState:
    """Whether the main thread is held, the thread that answers, and some bytes."""

    held: bool
    thread: str
    first: memoryview
    second: memoryview


@dataclass(frozen=True)
class GetThreadState(RankRequest[ThreadState]):
    word: ClassVar[str] = "look"
    reply: ClassVar[Any] = ThreadState


@dataclass(frozen=True)
class Raise(RankRequest[None]):
    word: ClassVar[str] = "raise"


@dataclass(frozen=True)
class Release(RankRequest[None]):
    word: ClassVar[str] = "release"


@dataclass(frozen=True)
class AnswerLate(RankRequest[None]):
    word: ClassVar[str] = "come late"


@dataclass(frozen=True)
class Die(RankRequest[None]):
    word: ClassVar[str] = "die"


@dataclass(frozen=True)
class Variable(RankRequest[Any]):
    word: ClassVar[str] = "variable"
    reply: ClassVar[Any] = Any
    name: str


@dataclass(frozen=True)
class Answer(RankRequest[None]):
    """Requests an invalid answer: one that cannot be sent, or one of another type."""

    word: ClassVar[str] = "answer"
    amiss: str


KNOWN = {cls.word: cls for cls in (Locate, GetThreadState, Raise, Release, AnswerLate, Die, Variable, Answer)}


def handle_request(data):
    answer, buffers = None, []
    match decode_named(KNOWN, data, "request"):
        case Locate():
            answer = Position(rank=STORE["info"].rank)
        case GetThreadState():
            answer = ThreadState(
                held=HELD.is_set(),
                thread=threading.current_thread().name,
                first=memoryview(b"\x00\xff"),
                second=memoryview(b"second"),
            )
        case Raise():
            raise ValueError("no such thing")
        case Release():
            RELEASED.set()
        case AnswerLate():
            TARDY.wait()
        case Die():
            os._exit(7)
        case Variable(name=name):
            answer = get_ipython().user_ns.get(name)
        case Answer(amiss=amiss):
            return (object() if amiss == "unsendable" else {"surprise": 1}), []
    return encode(answer, buffers), buffers


def echo(*args):
    return args


def environment(*names):
    return [os.environ.get(name) for name in names]


def fail(rank_that_fails=None):
    if rank_that_fails in (None, STORE["info"].rank):
        raise ZeroDivisionError("on purpose")
    return "fine"


def call_user_function(name):
    return get_ipython().user_ns[name]()


def spin():
    """Keep the main thread busy in Python until the control channel gets a Release."""
    RELEASED.clear()
    HELD.set()
    turns = 0
    while not RELEASED.is_set():
        turns += 1
    HELD.clear()
    return turns > 0


def hold():
    """Keep the main thread in a lock until the control channel gets a Release."""
    RELEASED.clear()
    HELD.set()
    try:
        RELEASED.wait()
    finally:
        HELD.clear()
    return True


def let_the_late_one_go():
    TARDY.set()


def fork_and_print(text):
    """Print ``text`` from a forked process."""
    pid = os.fork()
    if pid == 0:
        sys.stdout.write(f"{text}\n")
        os._exit(0)
    os.waitpid(pid, 0)
