"""Measure the server: with batching, without batching, and against serving one request at a time with CTranslate2.

    python bench/serve.py RUN [--clients 64] [--rounds 3] [--seconds 8] [--engines auto ctranslate2] [--out F]
    python bench/serve.py RUN --device cuda --engines auto [--clients 256] [--out F]
    python bench/serve.py RUN --soak 15 [--engines ctranslate2] [--replace 5] [--out F]

Every system is a process of its own, reached by HTTP. Each client sends its next sentence when it has the translation
of the last one, over a connection that stays open. Rounds are interleaved, in rotating order, and the first one is not
counted; numbers are medians over the rounds, and a ratio is the median of the ratios within each round. Load generator
and server share the cores, so the generator's share of the CPU is part of the result. With --soak, one server is loaded
for some minutes with requests of all kinds, of which some clients leave early, and its memory is measured; with
--device cuda, that of the GPU as well. With --replace, its model is replaced so many times meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvloop

from dragoman.hardware import cpu_name, usable_cores
from dragoman.inference.loading import open_run
from dragoman.phrasebook.generate import generate_pairs
from dragoman.serving.keys import add_key

HERE = Path(__file__).parent
BATCHED, UNBATCHED, DIRECT = "server, {}", "server without batching, {}", "one request at a time, raw ctranslate2 {}"
WARM_UP = 2.0  # seconds of each system in the round that is not counted
QUANTIZATIONS = {"ctranslate2": "float32", "ctranslate2-int8": "int8"}
HEAD = b"POST /api/translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
QUICK: dict[str, Any] = {"clients": 4, "rounds": 1, "seconds": 0.3, "engines": ["auto"]}


class ServerProcess:
    """A system: a process that serves HTTP."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.port = 0

    def wait_until_ready(self) -> None:
        assert self.process.stdout
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.process.stdout.readline())
        if not found:
            raise RuntimeError(f"{self.name} has not started")
        self.port = int(found[1])

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Client(asyncio.Protocol):
    """A connection that sends one request after the other until `until`."""

    def __init__(self, next_body: Callable[[], bytes], until: float, load: Load) -> None:
        self.next_body, self.until, self.load = next_body, until, load
        self.received = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.start = time.perf_counter()
        if self.start >= self.until:
            self.ended.set_result(None)
            self.transport.close()
            return
        body = self.next_body()
        self.transport.write(HEAD + b"%d\r\n\r\n" % len(body) + body)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            return
        self.received = b""
        if head.startswith(b"HTTP/1.1 200"):
            self.load.seconds.append(time.perf_counter() - self.start)
        else:
            self.load.errors.append(body.decode()[:200])
        self.send()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.load.errors.append("the connection was lost")
            self.ended.set_result(None)


class Load:
    """The measurements of one turn: seconds of each request that was answered, and the errors of the others."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.errors: list[str] = []

    async def run(self, system: ServerProcess, bodies: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
        """Load a system with so many clients at a time; return the measurements."""
        order = iter(range(10**9))
        loop, start, cpu = asyncio.get_running_loop(), time.perf_counter(), time.process_time()
        system_cpu = system.cpu_seconds()

        def make_client() -> Client:
            return Client(lambda: bodies[next(order) % len(bodies)], start + seconds, self)

        connections = [await loop.create_connection(make_client, "127.0.0.1", system.port) for _ in range(clients)]
        await asyncio.gather(*(client.ended for _, client in connections))
        wall = time.perf_counter() - start
        ranked = sorted(self.seconds) or [float("nan")]
        return {
            "sentences_per_second": len(self.seconds) / wall,
            "p50_ms": 1000 * ranked[len(ranked) // 2],
            "p99_ms": 1000 * ranked[len(ranked) * 99 // 100],
            "server_cores": (system.cpu_seconds() - system_cpu) / wall,
            "generator_cores": (time.process_time() - cpu) / wall,
            "errors": len(self.errors),
        }


def make_command(options: argparse.Namespace, engine: str) -> list[str]:
    command = ["-m", "dragoman", "serve", str(options.run), "--port", "0", "--engine", engine, "--no-log-requests"]
    return [*command, "--device", options.device]


def start_systems(options: argparse.Namespace, beam: int) -> list[ServerProcess]:
    systems = []
    for engine in options.engines:
        command = make_command(options, engine)
        systems.append(ServerProcess(BATCHED.format(engine), command))
        if options.batching_only:
            continue
        systems.append(ServerProcess(UNBATCHED.format(engine), [*command, "--no-batching"]))
        if options.device == "cpu" and (quantization := QUANTIZATIONS.get(engine)):
            command = [str(HERE / "peers" / "ctranslate2_server.py"), str(options.run), quantization, str(beam)]
            systems.append(ServerProcess(DIRECT.format(quantization), command))
    return systems


def compare(systems: list[ServerProcess], bodies: list[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of all systems, round by round."""
    rounds: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
    for number in range(options.rounds + 1):
        shift = number % len(systems)
        for system in systems[shift:] + systems[:shift]:
            seconds = options.seconds if number else min(WARM_UP, options.seconds)
            found = uvloop.run(Load().run(system, bodies, options.clients, seconds))
            if number:
                rounds[system.name].append(found)
                print(f"  {system.name}: {found['sentences_per_second']:.0f}/s", file=sys.stderr, flush=True)
    return {
        name: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]} | {"rounds": turns}
        for name, turns in rounds.items()
    }


def find_ratios(systems: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast the fastest server with batching is as the fastest others of each kind."""

    def fastest(prefix: str) -> list[float]:
        names = [name for name in systems if name.startswith(prefix)]
        best = max(names, key=lambda name: float(systems[name]["sentences_per_second"]), default="")
        return [turn["sentences_per_second"] for turn in systems[best]["rounds"]] if best else []

    batched = fastest("server, ")
    pairs = {"without batching": fastest("server without"), "one at a time": fastest("one request")}
    ratios = {f"best against best {kind}": find_ratio(batched, other) for kind, other in pairs.items() if other}
    for name in systems:
        if name.startswith("server, "):
            engine = name.removeprefix("server, ")
            alone = DIRECT.format(QUANTIZATIONS.get(engine, ""))
            for kind, other in (("the same without batching", UNBATCHED.format(engine)), (f'"{alone}"', alone)):
                if other in systems:
                    speeds = [
                        [turn["sentences_per_second"] for turn in systems[one]["rounds"]] for one in (name, other)
                    ]
                    ratios[f"{name} against {kind}"] = find_ratio(*speeds)
    return ratios


def find_ratio(one: list[float], other: list[float]) -> float:
    return round(statistics.median(a / max(b, 1e-9) for a, b in zip(one, other, strict=True)), 2)


def format_report(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"{found['command']}\n",
        f"{found['machine']}; {found['clients']} clients, beam {found['beam']}; load average {found['load_average']}\n",
        "| system | sentences/s | p50 ms | p99 ms | cores of the server | cores of the load generator | errors |",
        "|---" * 7 + "|",
    ]
    for name, one in found["systems"].items():
        numbers = " | ".join(f"{one[key]:.0f}" for key in ("sentences_per_second", "p50_ms", "p99_ms"))
        cores = f"{one['server_cores']:.2f} | {one['generator_cores']:.2f}"
        lines.append(f"| {name} | {numbers} | {cores} | {sum(turn['errors'] for turn in one['rounds'])} |")
    lines += ["", *(f"- {name}: {ratio:.2f} times" for name, ratio in found["ratios"].items())]
    return "\n".join(lines) + "\n"


def make_mixed_bodies(lines: list[str]) -> list[bytes]:
    """Return requests of all kinds, for --soak."""
    choose = random.Random(1)
    kinds: list[dict[str, Any]] = [{}, {}, {}, {"nbest": 3}, {"beam": 1}, {"align": True}]
    texts: list[str | list[str]] = [*lines, *(choose.sample(lines, 5) for _ in range(len(lines) // 10))]
    return [json.dumps({"text": text, **choose.choice(kinds)}).encode() for text in choose.sample(texts, len(texts))]


async def leave_early(system: ServerProcess, bodies: list[bytes], until: float) -> None:
    """Send requests and close the connection before the answer."""
    while time.perf_counter() < until:
        _, writer = await asyncio.open_connection("127.0.0.1", system.port)
        body = random.choice(bodies)
        writer.write(HEAD + b"%d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(random.random() / 5)
        writer.close()


def used_gpu_mib() -> int:
    """Return the used memory of the GPU, by all processes: the server keeps what it has allocated for its tensors."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


async def replace_model(system: ServerProcess, run: Path, key: str, times: int, seconds: float) -> list[float]:
    """Replace the model by itself, spread over a time; return the seconds that each replacement took."""
    url, body = (
        f"http://127.0.0.1:{system.port}/api/models/{run.resolve().name}",
        json.dumps({"run": str(run)}).encode(),
    )
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    found = []
    for _ in range(times):
        await asyncio.sleep(seconds / (times + 1))
        start = time.perf_counter()
        request = urllib.request.Request(url, body, headers, method="PUT")
        (await asyncio.to_thread(urllib.request.urlopen, request)).close()
        found.append(round(time.perf_counter() - start, 2))
    return found


def read_gauges(system: ServerProcess) -> dict[str, float]:
    """Return the numbers of requests that the server has, and of those that use a model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{system.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    names = ("dragoman_requests_waiting", "dragoman_requests_running", "dragoman_model_leases")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name.startswith(names)}


def run_soak(options: argparse.Namespace, bodies: list[bytes], systems: list[ServerProcess]) -> dict[str, Any]:
    """Start a server, which is added to `systems`, and load it; return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        key = add_key(keys, "bench", rights=("admin",))
        command = [*make_command(options, options.engines[0]), "--keys-file", str(keys), "--open-access"]
        system = ServerProcess(BATCHED.format(options.engines[0]), command)
        systems.append(system)
        system.wait_until_ready()
        found = uvloop.run(soak(system, bodies, options, key))
        time.sleep(1)  # for requests whose clients have left
        return found | {"at_the_end": read_gauges(system)}


async def soak(system: ServerProcess, bodies: list[bytes], options: argparse.Namespace, key: str) -> dict[str, Any]:
    """Load a server for some minutes; return the measurements with its memory over time."""
    clients, minutes, device = options.clients, options.soak, options.device
    memory: list[int] = []
    gpu_memory: list[int] = []
    until = time.perf_counter() + 60 * minutes

    async def watch() -> None:
        while time.perf_counter() < until:
            memory.append(system.resident_bytes() >> 20)
            if device != "cpu":
                gpu_memory.append(used_gpu_mib())
            await asyncio.sleep(min(10, 6 * minutes))

    load = Load()
    watching = asyncio.gather(watch(), *(leave_early(system, bodies, until) for _ in range(2)))
    replacing = asyncio.create_task(replace_model(system, options.run, key, options.replace, 60 * minutes))
    found = await load.run(system, bodies, clients, 60 * minutes)
    await watching
    quarter = max(len(memory) // 4, 1)
    second, last = statistics.mean(memory[quarter : 2 * quarter] or memory), statistics.mean(memory[-quarter:])
    growth: dict[str, Any] = {"second_quarter_mib": round(second), "last_quarter_mib": round(last)}
    growth |= {"resident_mib": memory} | ({"gpu_mib": gpu_memory} if gpu_memory else {})
    if options.replace:
        growth["seconds_to_replace_the_model"] = await replacing
    return {"minutes": minutes, "system": system.name, **found, "messages": sorted(set(load.errors))[:5], **growth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of a turn")
    parser.add_argument("--engines", nargs="+", default=["auto", "ctranslate2", "ctranslate2-int8"])
    parser.add_argument("--device", default="cpu", help="device of the servers")
    parser.add_argument("--batching-only", action="store_true", help="leave out the servers without batching")
    parser.add_argument("--replace", type=int, default=0, help="times that the model is replaced during --soak")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--quick", action="store_true", help="only check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="results are written to OUT.json and OUT.md")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    beam = open_run(options.run, device="cpu").recipe.search.beam
    lines = [pair.source for pair in generate_pairs("test", 1000, seed=7)]
    found: dict[str, Any] = {"command": "python bench/serve.py " + " ".join(sys.argv[1:])}
    machine = f"{cpu_name()}, {usable_cores()} cores"
    if options.device != "cpu":
        machine = f"{torch.cuda.get_device_name(options.device)}; {machine}"
    found |= {"machine": machine, "clients": options.clients, "beam": beam}
    systems = [] if options.soak else start_systems(options, beam)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped, too
    try:
        for system in systems:
            system.wait_until_ready()
        if options.soak:
            found["soak"] = run_soak(options, make_mixed_bodies(lines), systems)
            report = json.dumps(found, indent=1) + "\n"
        else:
            bodies = [json.dumps({"text": line, "source": "en", "target": "de"}).encode() for line in lines]
            found["systems"] = compare(systems, bodies, options)
            found |= {"ratios": find_ratios(found["systems"]), "load_average": os.getloadavg()[2]}
            report = format_report(found)
    finally:
        for system in systems:
            system.stop()
    print(report)
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        if not options.soak:
            options.out.with_suffix(".md").write_text("# Serving\n\n" + report)


if __name__ == "__main__":
    main()
