"""A `dragoman` for shell scripts that starts at once: one process imports everything, and is forked for each command.

A command is a process of its own, with its own folder, streams and exit code, but without the seconds that it takes to
import PyTorch. `python toy_shell.py SOCKET` is that process.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLIENT = """#!{python} -IS
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))]
    server.sendmsg([json.dumps([os.getcwd(), *sys.argv[1:]]).encode()], streams)
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16) or b"1"))
"""


@contextmanager
def fast_commands(folder: Path) -> Iterator[Path]:
    """A folder for PATH whose `dragoman` is a fork of one process, which ends with the context."""
    folder.mkdir()
    address = folder / "socket"
    client = folder / "dragoman"
    client.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    client.chmod(0o755)
    start = [sys.executable, __file__, str(address)]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        try:
            yield folder
        finally:
            server.kill()


def serve(address: str) -> None:
    import torch

    import dragoman.inference.translator  # noqa: F401 - what most commands import
    from dragoman.cli import main as cli

    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            client, _ = listening.accept()
            if os.fork() == 0:  # a helper, so that commands of one pipe run side by side
                answer(client, cli.main)
            client.close()


def answer(client: socket.socket, main: object) -> None:
    """Run one command in a further fork and send its exit code back."""
    text, ancillary, _, _ = client.recvmsg(1 << 16, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i", ancillary[0][2])
    worker = os.fork()
    if worker:
        _, status = os.waitpid(worker, 0)
        client.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
        os._exit(0)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    folder, *arguments = json.loads(text)
    os.chdir(folder)
    sys.argv = ["dragoman", *arguments]
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, encoding="utf-8") for number, mode in enumerate("rww"))  # noqa: SIM115
    assert callable(main)
    main()


if __name__ == "__main__":
    serve(sys.argv[1])
