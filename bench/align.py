"""Compare word aligners: alignment error rate, CPU time, wall time and memory of Dragoman, eflomal and fast_align.

    python bench/align.py --train F.en F.fr --test T.en T.fr --gold T.align --pairs 100000 --out results/name
    python bench/align.py --phrasebook 20000 --out results/name
    python bench/align.py ... --peers PEERS/bin/python      with: PEERS/bin/pip install eflomal systran-align
    python bench/align.py ... --quick

The test sentences are appended to the training pairs, as in the published results, and every system aligns all pairs.
A system is a process of its own; CPU time and peak memory are those of the process and its children (wait4). Rounds are
interleaved. Dragoman and eflomal use all cores that the benchmark may use; fast_align decides for itself. Systems that
are not installed are left out.

Results are added to OUT.json, which may already have those of other systems or sizes, and OUT.md has them as a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.hardware import cpu_features, cpu_name, usable_cores
from dragoman.io import read_lines
from dragoman.metrics.alignment import GoldLinks, format_links, parse_links, score_alignments
from dragoman.phrasebook.generate import generate_phrases
from dragoman.smt.symmetrization import SYMMETRIZATIONS, combine_links

QUICK = {"pairs": 200, "phrasebook": 200, "rounds": 1}  # only checks that the benchmark runs
METHODS = ("joint-hmm", "hmm", "ibm1")  # of `dragoman align`
# fast_align has no command on PyPI; these are the options that its authors recommend (-d -o -v).
FAST_ALIGN = """
import sys
import systran_align
joint, forward, backward, out = sys.argv[1:]
options = dict(favor_diagonal=True, optimize_tension=True, variational_bayes=True)
systran_align.generate_alignment_probabilities(joint, forward, backward, **options)
aligner = systran_align.Aligner(forward, backward)
with open(joint, encoding="utf-8", newline="\\n") as lines, open(out, "w") as file:
    for line in lines:
        source, target = line.split(" ||| ")
        links = aligner.align(source.split(), target.split())["alignments"]
        print(*(f"{i}-{j}" for i, j in links), file=file)
"""
# Runs a command and prints its exit code and usage. A separate small process, because the peak memory that the system
# reports for a child is at least that of the process that started it.
MEASURE = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - start
peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, seconds, peak]))
"""


class Corpus(NamedTuple):
    """Training pairs followed by test pairs, as files, and the gold links of the test pairs."""

    folder: Path
    pairs: int
    gold: list[GoldLinks]
    lengths: list[tuple[int, int]]  # of the test pairs, in words

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def joint(self) -> Path:
        """The pairs in the format of fast_align: source ||| target."""
        return self.folder / "joint"


class Usage(NamedTuple):
    """What a process and its children used."""

    cpu_seconds: float
    wall_seconds: float
    peak_memory: int  # in bytes, of the largest process


RunSystem = Callable[[Corpus], tuple[Usage, dict[str, float]]]  # returns usage, and error rates by symmetrisation


def write_corpus(folder: Path, sources: Sequence[str], targets: Sequence[str], gold: Sequence[str]) -> Corpus:
    """Write the files of a corpus whose last pairs have gold links."""
    corpus = Corpus(
        folder,
        len(sources),
        [parse_links(line, f"gold line {number}") for number, line in enumerate(gold, 1)],
        [(len(s.split()), len(t.split())) for s, t in zip(sources[-len(gold) :], targets[-len(gold) :], strict=True)],
    )
    for path, lines in ((corpus.source, sources), (corpus.target, targets)):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with corpus.joint.open("w", encoding="utf-8") as file:
        file.writelines(f"{source} ||| {target}\n" for source, target in zip(sources, targets, strict=True))
    return corpus


def read_corpus(options: argparse.Namespace, folder: Path) -> Corpus:
    """Write the training pairs and the test pairs into one corpus."""
    if options.phrasebook:
        phrases = list(generate_phrases("train", options.phrasebook))
        gold = [format_links(phrase.alignment) for phrase in phrases]
        texts = [" ".join(phrase.source_words) for phrase in phrases], [" ".join(p.target_words) for p in phrases]
        return write_corpus(folder, *texts, gold)
    sides = [
        [*islice(read_lines(train), options.pairs), *read_lines(test)]
        for train, test in zip(options.train, options.test, strict=True)
    ]
    return write_corpus(folder, sides[0], sides[1], list(read_lines(options.gold)))


def measure(command: Sequence[object]) -> Usage:
    """Run a command; raise an error with its messages if it fails."""
    with tempfile.TemporaryFile() as messages:
        done = subprocess.run(
            [sys.executable, "-I", "-c", MEASURE, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=messages,
            check=False,
        )
        code, *usage = json.loads(done.stdout)
        if code:
            messages.seek(0)
            raise RuntimeError(messages.read().decode(errors="replace")[-2000:])
    return Usage(*usage)


def read_test_links(path: Path, corpus: Corpus) -> list[set[tuple[int, int]]]:
    """Return the links of the test pairs, which are the last lines of the output of a system."""
    return [parse_links(line, str(path)).sure for line in list(read_lines(path))[-len(corpus.gold) :]]


def run_dragoman(method: str, corpus: Corpus) -> tuple[Usage, dict[str, float]]:
    """Train and align with Dragoman; score the symmetrisation of the method and, for comparison, grow-diag."""
    links, model = corpus.folder / f"{method}.links", corpus.folder / f"{method}.model"
    subprocess.run(["rm", "-rf", str(model)], check=True)
    align = [sys.executable, "-m", "dragoman", "align", "-q"]
    files = ["--source", corpus.source, "--target", corpus.target, "--output", links]
    usage = measure([*align, method, *files, "--save", model])
    found = {"default": read_test_links(links, corpus)}
    for name in ("grow-diag", "intersection"):
        # Only the test pairs are aligned again, with the saved model.
        test = [corpus.folder / f"test.{side}" for side in ("source", "target")]
        for path, full in zip(test, (corpus.source, corpus.target), strict=True):
            lines = list(read_lines(full))[-len(corpus.gold) :]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        measure([*align, model, "--source", test[0], "--target", test[1], "--output", links, f"symmetrize={name}"])
        found[name] = read_test_links(links, corpus)
    return usage, {name: round(score_alignments(some, corpus.gold).aer, 2) for name, some in found.items()}


def run_eflomal(python: Path, corpus: Corpus) -> tuple[Usage, dict[str, float]]:
    """Train and align with the defaults of eflomal; symmetrise both directions."""
    out = [corpus.folder / f"eflomal.{direction}" for direction in ("forward", "reverse")]
    command = [python.parent / "eflomal-align", "--overwrite", "-s", corpus.source, "-t", corpus.target]
    usage = measure([*command, "-f", out[0], "-r", out[1]])
    return usage, score_directions(read_test_links(out[0], corpus), read_test_links(out[1], corpus), corpus)


def run_fast_align(python: Path, corpus: Corpus) -> tuple[Usage, dict[str, float]]:
    """Train and align with fast_align, whose package symmetrises the links itself."""
    out = corpus.folder / "fast_align.links"
    tables = [corpus.folder / f"fast_align.{direction}" for direction in ("forward", "backward")]
    usage = measure([python, "-c", FAST_ALIGN, corpus.joint, *tables, out])
    return usage, {"default": round(score_alignments(read_test_links(out, corpus), corpus.gold).aer, 2)}


def score_directions(
    forward: list[set[tuple[int, int]]], reverse: list[set[tuple[int, int]]], corpus: Corpus
) -> dict[str, float]:
    """Return the alignment error rate of each symmetrisation of two directions."""
    scores, pairs = {}, list(zip(forward, reverse, corpus.lengths, strict=True))
    for method in SYMMETRIZATIONS:
        links = [combine_links(one, two, method, lengths) for one, two, lengths in pairs]
        scores[method] = round(score_alignments(links, corpus.gold).aer, 2)
    return scores


def list_systems(options: argparse.Namespace) -> dict[str, RunSystem]:
    """Return a function for each system that is installed and was not deselected."""
    systems: dict[str, RunSystem] = {f"dragoman {method}": partial(run_dragoman, method) for method in METHODS}
    peers = {"eflomal": ("eflomal", run_eflomal), "fast_align": ("systran_align", run_fast_align)}
    for name, (module, run) in peers.items():
        check = [str(options.peers), "-c", f"import {module}"]
        if options.peers and subprocess.run(check, capture_output=True, check=False).returncode == 0:
            systems[name] = partial(run, options.peers)
        else:
            print(f"{name} is left out: give --peers the Python of an environment with {module}", file=sys.stderr)
    return {name: run for name, run in systems.items() if not options.systems or name in options.systems}


def summarize(
    corpus_name: str, name: str, pairs: int, usages: Sequence[Usage], aer: dict[str, float]
) -> dict[str, Any]:
    """Return the result of a system: medians over the rounds."""
    return {
        "corpus": corpus_name,
        "system": name,
        "pairs": pairs,
        "cpu_seconds": round(statistics.median(usage.cpu_seconds for usage in usages), 1),
        "wall_seconds": round(statistics.median(usage.wall_seconds for usage in usages), 1),
        "peak_memory_gb": round(max(usage.peak_memory for usage in usages) / 1e9, 2),
        "rounds": len(usages),
        "aer": aer,
    }


def format_table(found: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    rows = ["| corpus | pairs | system | AER | by symmetrisation | CPU s | wall s | peak GB |", "|---" * 8 + "|"]
    for result in sorted(found["results"], key=lambda one: (one["corpus"], one["pairs"])):
        aer = dict(result["aer"])
        best = aer.pop("default", None) or aer["grow-diag"]
        others = ", ".join(f"{name} {value:.1f}" for name, value in aer.items())
        rows.append(
            f"| {result['corpus']} | {result['pairs']:,} | {result['system']} | {best:.1f} | {others} | "
            f"{result['cpu_seconds']:,.0f} | {result['wall_seconds']:,.0f} | {result['peak_memory_gb']:.2f} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, nargs=2)
    parser.add_argument("--test", type=Path, nargs=2)
    parser.add_argument("--gold", type=Path)
    parser.add_argument("--pairs", type=int, help="number of training pairs, the first of the files; default: all")
    parser.add_argument("--phrasebook", type=int, default=0, help="number of pairs of the built-in corpus, all tested")
    parser.add_argument("--peers", type=Path, help="Python of an environment with eflomal and systran-align")
    parser.add_argument("--systems", nargs="+", help="run only these, such as 'dragoman joint-hmm' eflomal")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--name", default="", help="name of the corpus in the table")
    parser.add_argument("--folder", type=Path, help="folder for temporary files, which are large")
    parser.add_argument("--quick", action="store_true", help="few pairs, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.rounds = QUICK["pairs"], QUICK["rounds"]
        options.phrasebook = options.phrasebook and QUICK["phrasebook"]
    if not (options.phrasebook or (options.train and options.test and options.gold)):
        parser.error("give --phrasebook, or --train, --test and --gold")
    systems = list_systems(options)
    corpus_name = options.name or ("phrasebook" if options.phrasebook else options.train[0].name.split(".")[0])
    usages: dict[str, list[Usage]] = {name: [] for name in systems}
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        corpus = read_corpus(options, Path(folder))
        for number in range(1, options.rounds + 1):
            for name, run in systems.items():
                usage, aer = run(corpus)
                usages[name].append(usage)
                print(f"round {number}: {name} {usage} {aer}", file=sys.stderr, flush=True)
                if number == options.rounds:
                    results.append(summarize(corpus_name, name, corpus.pairs, usages[name], aer))
                    if options.out:
                        write_results(options.out, results)
    found = {"results": results}
    print(format_table(found), end="")


def write_results(out: Path, results: Sequence[dict[str, Any]]) -> None:
    """Add results to OUT.json, in place of earlier ones of the same system and size; write OUT.md."""
    path = out.with_name(out.name + ".json")
    found = json.loads(path.read_text()) if path.exists() else {"results": []}
    new = {(one["corpus"], one["system"], one["pairs"]) for one in results}
    old = [one for one in found["results"] if (one["corpus"], one["system"], one["pairs"]) not in new]
    machine = [cpu_name(), str(cpu_features()), f"{usable_cores()} cores", f"Python {platform.python_version()}"]
    found = {"machine": machine, "results": [*old, *results]}
    path.write_text(json.dumps(found, indent=1) + "\n")
    out.with_name(out.name + ".md").write_text(f"{'; '.join(machine)}\n\n{format_table(found)}")


if __name__ == "__main__":
    main()
