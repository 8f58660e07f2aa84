"""A rank side without torch: what tests put behind the two doors. Runs in the engines."""

import os
import socket
import threading

from IPython import get_ipython

from workbench.errors import UsageError

STORE = {}
HELD = threading.Event()
RELEASED = threading.Event()
TARDY = threading.Event()


def boot(rank, world_size, device, address):
    if device == "cuda":
        raise UsageError(f"{world_size} ranks need {world_size} GPUs, there are 0: use --device cpu")
    if os.environ.get("FAKE_RANK_HANGS_AT_BOOT") == str(rank):
        hold()
    if rank == 0 and address is None:
        STORE["socket"] = socket.create_server(("127.0.0.1", 0))
        address = STORE["socket"].getsockname()
    get_ipython().user_ns.update(rank=rank, world_size=world_size, device="cpu")
    STORE["info"] = {"rank": rank, "host": socket.gethostname(), "device": "cpu", "pid": os.getpid()}
    return {"address": list(address) if address else None}


def connect(address):
    socket.create_connection(tuple(address), timeout=5).close()
    return STORE["info"]


def shutdown():
    if "socket" in STORE:
        STORE.pop("socket").close()
    marker = os.environ.get("FAKE_RANK_SHUTDOWN")
    if marker:
        with open(marker, "a") as file:
            file.write(f"{STORE['info']['rank']}\n")


def side_door(request):
    if request["op"] == "raise":
        raise ValueError("no such thing")
    if request["op"] == "release":
        RELEASED.set()
    if request["op"] == "late":
        TARDY.wait()
    if request["op"] == "die":
        os._exit(7)
    if request["op"] == "variable":
        return {"value": get_ipython().user_ns.get(request["name"])}, []
    if request["op"] == "unanswerable":
        return {"value": object()}, []
    return {"held": HELD.is_set(), "thread": threading.current_thread().name}, [b"\x00\xff", b"second"]


def echo(*args):
    return args


def environment(*names):
    return [os.environ.get(name) for name in names]


def fail(rank_that_fails=None):
    if rank_that_fails in (None, STORE["info"]["rank"]):
        raise ZeroDivisionError("on purpose")
    return "fine"


def call_user_function(name):
    return get_ipython().user_ns[name]()


def spin():
    """Keep the main thread busy in Python until the side door says otherwise."""
    RELEASED.clear()
    HELD.set()
    turns = 0
    while not RELEASED.is_set():
        turns += 1
    HELD.clear()
    return turns > 0


def hold():
    """Keep the main thread in a lock until the side door says otherwise."""
    RELEASED.clear()
    HELD.set()
    try:
        RELEASED.wait()
    finally:
        HELD.clear()
    return True


def let_the_late_one_go():
    TARDY.set()
