"""Send hostile requests to a running server, and check that it still answers afterwards and that its memory is flat.

    python bench/hostile.py http://127.0.0.1:5000 --requests 10000 --pid PID

Broken JSON, huge fields, deep nesting, bad encodings, odd Unicode, broken HTTP, slow clients and half-closed sockets.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Lock, Thread
from urllib.parse import urlsplit

PATHS = ("/api/translate", "/api/stream", "/translate", "/v2/translate", "/detect", "/api/words", "/api/documents")
ODD_TEXTS = (
    "\u202e\u200b\u2066", "\x00\x01\x7f", "e" + "\u0301" * 500, "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 50,
    "\ufdfa" * 100, "\ud800", "\r\n\u2028\x85\x0c", "'\"><script>alert(1)</script>", "../../etc/passwd", "%00%ff", "",
    " " * 3000, "\ufeff\ufffe", "𝔞" * 500, "A" * 3000,
)  # fmt: skip
Address = tuple[str, int]


def make_request(path: str, body: bytes, content_type: str = "application/json", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {content_type}", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "Connection: close", "", ""]).encode() + body


def send_broken_json(random: Random) -> bytes:
    body = json.dumps({"text": "ab", "q": "ab", "source": "auto", "target": "de", "target_lang": "DE"}).encode()
    cut = random.randrange(len(body))
    return make_request(
        random.choice(PATHS), random.choice([body[:cut], body + b"}", body[:cut] + b"\xff" + body[cut:]])
    )


def send_odd_values(random: Random) -> bytes:
    values: list[object] = [*ODD_TEXTS, None, 1e308, -1, 10**30, [], {}, [[]], True, ["a"] * 5000, {"a": "b"}]
    names = ["text", "q", "source", "target", "target_lang", "model", "beam", "nbest", "prefix", "terms", "format", "x"]
    body = {name: random.choice(values) for name in random.sample(names, 5)}
    return make_request(random.choice(PATHS), json.dumps(body).encode())


def send_odd_text(random: Random) -> bytes:
    text = random.choice(ODD_TEXTS)
    body = {"text": text, "q": text, "source": "auto", "target": "de"}
    return make_request(random.choice(PATHS), json.dumps({k: body[k] for k in random.sample(list(body), 3)}).encode())


def send_deep_nesting(random: Random) -> bytes:
    depth = random.choice([50, 1000, 100_000])
    return make_request(random.choice(PATHS), random.choice([b"[", b'{"a":', b'{"text":[']) * depth)


def send_huge_field(random: Random) -> bytes:
    return make_request(random.choice(PATHS), json.dumps({"text": "a" * random.choice([30_000, 1_000_000])}).encode())


def send_bad_encoding(random: Random) -> bytes:
    body = random.choice(["ü", "漢"]).encode(random.choice(["utf-16", "utf-32", "utf-8"])) + random.randbytes(20)
    types = [
        "application/json; charset=utf-7",
        "text/xml",
        "multipart/form-data; boundary=x",
        "multipart/form-data",
        "",
        "a/b/c",
    ]
    types.append("application/x-www-form-urlencoded; charset=ebcdic")
    return make_request(random.choice(PATHS), body, random.choice(types))


def send_broken_multipart(random: Random) -> bytes:
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.\xff.txt"\r\n\r\nabc\r\n'
    return make_request("/api/documents", part * random.choice([1, 2000]), "multipart/form-data; boundary=x")


def send_broken_http(random: Random) -> bytes:
    return random.choice([
        random.randbytes(200), b"GET / HTTP/9.9\r\n\r\n", b"GET /%zz%00/../.. HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /api/translate HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /api/translate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"GET /" + b"a" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"POST /api/translate HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    ])  # fmt: skip


MAKERS: tuple[Callable[[Random], bytes], ...] = (
    send_broken_json, send_odd_values, send_odd_text, send_deep_nesting, send_huge_field, send_bad_encoding,
    send_broken_multipart, send_broken_http,
)  # fmt: skip
ENDINGS = ("read", "read", "read", "half-close", "reset", "leave", "slow")


def send(address: Address, random: Random) -> str:
    """Send one request and end the connection in some way; return the status of the answer, or how it ended."""
    data, ending = random.choice(MAKERS)(random), random.choice(ENDINGS)
    try:
        with socket.create_connection(address, timeout=60) as connection:
            if ending == "slow":
                for position in range(0, min(len(data), 60), 20):
                    connection.sendall(data[position : position + 20])
                    time.sleep(0.005)
                return ending
            connection.sendall(data)
            if ending == "half-close":
                connection.shutdown(socket.SHUT_WR)
            elif ending == "reset":  # closing sends RST
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return ending
            elif ending == "leave":
                return ending
            connection.settimeout(30 if ending == "half-close" else 5)
            head = connection.recv(64)
            return head[9:12].decode("ascii", "replace") if head else "closed"
    except TimeoutError:
        return "timeout"
    except OSError:
        return "refused"


def attack(url: str, count: int, *, clients: int = 16, seed: int = 1) -> Counter[str]:
    """Send `count` hostile requests; return how many ended in each way."""
    host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
    results: Counter[str] = Counter()
    lock = Lock()

    def run(number: int) -> None:
        random = Random(seed * 1000 + number)
        for _ in range(count // clients + (number < count % clients)):
            result = send((host, port), random)
            with lock:
                results[result] += 1

    threads = [Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def read_memory(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pid", type=int, help="process of the server, to watch its memory")
    arguments = parser.parse_args()
    parts, done = 10, Counter[str]()
    for part in range(parts):
        start = time.monotonic()
        done += attack(arguments.url, arguments.requests // parts, seed=part)
        memory = f", {read_memory(arguments.pid):.0f} MB" if arguments.pid else ""
        print(f"{sum(done.values())} requests, {time.monotonic() - start:.1f} s{memory}", file=sys.stderr)
    print(json.dumps(dict(sorted(done.items()))))


if __name__ == "__main__":
    main()
