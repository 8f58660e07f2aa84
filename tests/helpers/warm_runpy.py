"""The two ends of a warm Python (:mod:`tests.helpers.warm_python`): the process that forks, and the command that asks.

A command sends its arguments, environment, directory and open files, forwards SIGINT and SIGTERM to the fork, and ends
as the fork ends. Each fork is a session of its own, which is killed when the command that asked for it ends.

Stacks of a program begin with calls of this file, as they begin with calls of ``runpy`` otherwise.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import types

PRELOAD = ("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp")
_NUMBER = struct.Struct("=i")
_MAX_FILES = 64

# by its file: a program that imports the package has to import all of it
_END = os.path.join(os.path.dirname(__file__), "..", "..", "workbench", "base", "process_end.py")


# ---- the command


def ask(path, args, python):
    """Have the warm Python run a command line, whose ``sys.executable`` is ``python``; end as it ends."""
    forwarded = signal.SIGINT, signal.SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # the fork may run before this process knows its number
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        listed = [int(name) for name in os.listdir("/proc/self/fd")]
        files = [file for file in listed if file != server.fileno() and _is_open(file)]
        request = {"args": args, "env": dict(os.environ), "cwd": os.getcwd(), "files": files, "python": python}
        data = json.dumps(request).encode()
        socket.send_fds(server, [_NUMBER.pack(len(data))], files)
        server.sendall(data)
        child = _number(server)
        for number in forwarded:
            signal.signal(number, lambda number, _: os.kill(child, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        for file in files:
            os.close(file)  # its output has ended when that of the fork has
        code = _number(server)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(file):
    return os.path.exists(f"/proc/self/fd/{file}")  # that of the listed folder is closed again


def _number(connection):
    return _NUMBER.unpack(_received(connection, _NUMBER.size))[0]


def _received(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the other end has closed the connection")
        data += more
    return data


# ---- the process that forks


def serve(path):
    """Fork for each command until there is something to read."""
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("process_end", _END)
    end = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(end)
    gc.freeze()
    gc.enable()
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that it is written to the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wakes)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(_MAX_FILES)
    os.write(1, b"ready\n")
    asked = {}  # the connection of each fork's command
    while True:
        ready, _, _ = select.select([0, woken, listener, *asked.values()], (), ())
        if woken in ready:
            os.read(woken, 1 << 16)
            _reap(asked)
        for child in [child for child, connection in asked.items() if connection in ready or 0 in ready]:
            _kill(child)  # its command has ended
            asked.pop(child).close()
        if 0 in ready:
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            head, files, _, _ = socket.recv_fds(connection, _NUMBER.size, _MAX_FILES)
            request = json.loads(_received(connection, _NUMBER.unpack(head)[0]))
            if child := os.fork():
                asked[child] = connection
                _send(connection, child)
            else:
                _close(connection, listener, woken, wakes, *asked.values())
                run(request, files, end.end_process)
            _close(*files)


def _close(*files):
    for file in files:
        file.close() if isinstance(file, socket.socket) else os.close(file)


def _send(connection, number):
    with contextlib.suppress(OSError):  # the command has ended
        connection.sendall(_NUMBER.pack(number))


def _reap(asked):
    with contextlib.suppress(ChildProcessError):
        while found := os.waitpid(-1, os.WNOHANG):
            child, status = found
            if not child:
                return
            if child in asked:
                with asked.pop(child) as connection:
                    _send(connection, os.waitstatus_to_exitcode(status))


def _kill(child):
    for kill in (os.killpg, os.kill):  # it may not be a session yet
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def run(request, files, end_process):
    """Run in this fork what a command asks for, and end as an interpreter ends, without freeing torch's objects."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _become(request, files)()
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        end_process(error)
    end_process()


def _become(request, files):
    """Turn this fork into the interpreter that a command asks for; return the call that it has to make."""
    numbers = request["files"]
    above = 1 + max([2, *files, *numbers])
    for place, file in enumerate(files):
        os.dup2(file, above + place)
    for file in {0, 1, 2, *files}:
        os.close(file)
    for place, number in enumerate(numbers):
        os.dup2(above + place, number)
        os.close(above + place)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.executable = request["python"] or sys.executable
    sys.modules["numpy"].random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    args = request["args"]
    if args[0] == "-u":
        del args[0]
        sys.stdout.reconfigure(write_through=True)
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in {"", *sys.path}]
    what, program = args[0], args[1] if len(args) > 1 else ""
    sys.path.insert(0, {"-m": os.getcwd(), "-c": ""}.get(what, os.path.dirname(os.path.abspath(what))))
    if what == "-c":
        sys.argv[:] = ["-c", *args[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        return lambda: exec(compile(program, "<string>", "exec"), vars(main))
    if what == "-m":
        sys.argv[:] = args[1:]
        return lambda: runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.argv[:] = args
    return lambda: runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    serve(sys.argv[1])
