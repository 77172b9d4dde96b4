"""A Python that starts without delay: a server imports PyTorch and dragoman once, and is forked for every command.

The imports take seconds of CPU time per process, far more than training a toy model. `fast_python()` is an executable
for `python -m MODULE`, `python -c CODE` and `python FILE`. Each command is a process with its own working directory,
environment, limit of file sizes, streams and exit code. Signals reach it (SIGTSTP as SIGSTOP, since a client cannot
catch the latter), and it is killed when its client is killed.
All forks share the imports and the hash seed of the server, and end without freeing their objects; tests of imports, of
hash seeds or of the end of Python start a real Python.

`python fork_server.py SOCKET` runs the server. It ends when its standard input is closed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

# The client imports little (-IS), sends its streams and command, forwards signals, and returns its exit code.
CLIENT = """#!{python} -IS
import array, json, os, resource, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))]
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
command = json.dumps([os.getcwd(), dict(os.environ), limit, {arguments!r} + sys.argv[1:]]).encode() + b"\\n"
server.sendmsg([command[:1]], streams)
server.sendall(command[1:])
sent = {{signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGTSTP: signal.SIGSTOP}}
for number in sent:
    signal.signal(number, lambda number, _: server.send(bytes([sent[number]])))
code = int(server.recv(16) or b"1")
if code < 0:
    if -code in (signal.SIGINT, signal.SIGTERM):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def fast_python() -> str:
    """Return the path of the executable; the server starts with the first call and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
    start = [sys.executable, __file__, str(folder / "socket")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(stop, server, os.getpid())
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    return write_client(folder / "python", folder / "socket")


def stop(server: subprocess.Popen[bytes], owner: int) -> None:
    """Close the standard input of the server, so that it ends; do nothing in a fork of the process that started it."""
    if os.getpid() == owner:
        server.communicate()


def write_client(path: Path, address: Path, *arguments: str) -> str:
    """Write an executable that sends these arguments, and then its own, to the server."""
    path.write_text(CLIENT.format(python=sys.executable, address=str(address), arguments=list(arguments)))
    path.chmod(0o755)
    return str(path)


def write_fast_commands(folder: Path) -> Path:
    """Create a folder for PATH with a `python` and a `dragoman` that start without delay."""
    folder.mkdir()
    (folder / "python").symlink_to(fast_python())
    write_client(folder / "dragoman", Path(fast_python()).parent / "socket", "-m", "dragoman")
    return folder


def serve(address: str) -> None:
    """Import everything that commands need, then fork a process for each client that connects to the socket."""
    import torch
    import torch._dynamo  # PyTorch imports it with the first optimizer step
    import torch.distributed.run

    import dragoman.cli.main
    import dragoman.inference.translator
    import dragoman.serving.server
    import dragoman.smt.system
    import dragoman.training.trainer  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # garbage collections in forks, including the last, skip the imported objects
    helpers = set[int]()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        print("ready", flush=True)
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            client, _ = listening.accept()
            helpers.add(os.fork())  # one per command, so that commands run in parallel
            if 0 in helpers:
                listening.close()
                run_command(client)
                return
            client.close()
            helpers -= {helper for helper in helpers if os.waitpid(helper, os.WNOHANG)[0]}
    shutil.rmtree(Path(address).parent)


def run_command(client: socket.socket) -> None:
    """Fork the process of one command, forward signals to it, and send its exit code to the client."""
    text, ancillary, _, _ = client.recvmsg(1, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    while not text.endswith(b"\n"):
        more = client.recv(1 << 20)
        if not more:  # the client was killed
            os._exit(1)
        text += more
    folder, environment, limit, arguments = json.loads(text)
    streams = array.array("i", ancillary[0][2])
    worker = os.fork()
    if worker == 0:
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        exit_quickly(run_python, arguments)
        return
    for number in (0, 1, 2, *streams):  # otherwise readers of the output would wait for this process, too
        os.close(number)

    def forward_signals() -> None:
        while number := client.recv(1):
            os.kill(worker, number[0])
        os.kill(worker, signal.SIGKILL)

    threading.Thread(target=forward_signals, daemon=True).start()
    _, status = os.waitpid(worker, 0)
    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def exit_quickly(work: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Do the work and end this process as Python would, but without freeing all objects one by one.

    Return, or raise what `work` raised, if there is an error message to print: then Python ends in the usual way.
    """
    code = 0
    try:
        work(arguments)
    except SystemExit as end:
        if end.code and not isinstance(end.code, int):
            raise
        code = int(end.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
    sys.exit(code)


def run_python(arguments: list[str]) -> None:
    """Run a module, code or a file, as `python ARGUMENTS` would.

    Python processes that it starts are forks too if PYTHON_EXEC is set, a variable that torchrun obeys as well.
    """
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    if arguments[0] == "-u":
        stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
