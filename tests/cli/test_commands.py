"""Tests of commands: results on stdout, messages on stderr, and output files that are complete or absent."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
import zstandard
from rich.table import Table
from rich.text import Text
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from dragoman.cli import main as cli
from dragoman.cli.line_io import WarningLog
from dragoman.cli.main import run_command
from dragoman.phrasebook.generate import generate_phrases
from dragoman.progress import results_console
from dragoman.run_dir import RunFolder
from toy_run import (
    Call,
    Toy,
    assert_user_error,
    command,
    environment,
    files,
    make_sentences,
    start_process,
    translate_toy,
    write_lines,
)


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every command, including groups."""
    yield path
    for name, inner in getattr(group, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("path", list(commands(typer.main.get_command(cli.app))), ids=" ".join)
def test_every_command_has_help(call: Call, path: tuple[str, ...]) -> None:
    answer = call(*path, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("Usage: " + " ".join(("dragoman", *path)))


def test_no_command_prints_help(call: Call) -> None:
    answer = call()
    assert answer.code in (0, 2)
    assert "translate" in answer.out + answer.err


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"dragoman {version('dragoman')}\n", "")


# translate


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "my lines.src", make_sentences(12, seed=21))


def test_files_and_pipes_give_the_same_output(toy: Toy, tmp_path: Path, lines: Path, call: Call) -> None:
    piped = call("translate", toy.run, stdin=lines.read_bytes())
    assert (piped.code, piped.err) == (0, "")
    assert piped.out.splitlines() == [one.text for one in toy.translator.translate(lines.read_text().splitlines())]
    filed = call("translate", toy.run, "--input", lines, "--output", tmp_path / "out put")
    assert (filed.code, filed.out, filed.err) == (0, "", "")
    assert (tmp_path / "out put").read_text() == piped.out
    assert files(tmp_path) == ["my lines.src", "out put"]


def test_compressed_files_are_read(toy: Toy, tmp_path: Path, lines: Path, call: Call) -> None:
    plain = call("translate", toy.run, "--input", lines).out
    packers = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    for suffix, pack in packers.items():
        (tmp_path / f"lines{suffix}").write_bytes(pack(lines.read_bytes()))
        assert call("translate", toy.run, "--input", tmp_path / f"lines{suffix}").out == plain


def test_empty_file_gives_empty_output(toy: Toy, tmp_path: Path, call: Call) -> None:
    answer = call("translate", toy.run, "--input", write_lines(tmp_path / "none", []), "--output", tmp_path / "out")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert (tmp_path / "out").read_bytes() == b""


def test_output_over_the_input(toy: Toy, lines: Path, call: Call) -> None:
    expected = call("translate", toy.run, "--input", lines).out
    assert call("translate", toy.run, "--input", lines, "--output", lines).code == 0
    assert lines.read_text() == expected


def test_output_to_a_pipe(toy: Toy, tmp_path: Path, lines: Path, call: Call) -> None:
    """A pipe or a device is opened and written to, not replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    held: list[bytes] = []
    reader = threading.Thread(target=lambda: held.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    assert call("translate", toy.run, "--input", lines, "--output", tmp_path / "pipe").code == 0
    reader.join(timeout=60)
    assert held[0].count(b"\n") == 12
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(lines)
    assert call("translate", toy.run, "--input", lines, "--output", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert lines.read_bytes() == held[0]


def test_unwritable_output_is_refused(toy: Toy, tmp_path: Path, lines: Path, call: Call) -> None:
    for place in (tmp_path / "no" / "where", tmp_path):
        answer = call("translate", toy.run, "--input", lines, "--output", place)
        assert answer.code == 2
        assert str(place) in answer.err


def test_nbest_has_numbered_lines(toy: Toy, lines: Path, call: Call) -> None:
    answer = call("translate", toy.run, "--input", lines, "--nbest", 3)
    rows = [line.split(" ||| ") for line in answer.out.splitlines()]
    assert {len(row) for row in rows} == {3}
    assert list(dict.fromkeys(int(row[0]) for row in rows)) == list(range(12))
    best = {int(number): text for number, text, _ in reversed(rows)}
    assert [best[number] for number in range(12)] == call("translate", toy.run, "--input", lines).out.splitlines()
    for number in range(12):
        scores = [float(score) for i, _, score in rows if int(i) == number]
        assert scores == sorted(scores, reverse=True)
        assert 1 < len(scores) <= 3


def test_translate_as_json(toy: Toy, lines: Path, call: Call) -> None:
    plain = call("translate", toy.run, "--input", lines).out.splitlines()
    sources = lines.read_text().splitlines()
    for more in ([], ["--nbest", 2]):
        answer = call("translate", toy.run, "--input", lines, "--json", *more)
        records = [json.loads(line) for line in answer.out.splitlines()]
        assert [record["text"] for record in records] == plain
        assert [record["source"] for record in records] == sources
        for record in records:
            assert {"score", "logp", "tokens", "alignment", "source_tokens", "warnings"} < record.keys()
            assert len(record["alignment"]) == len(record["tokens"])
            assert len(record.get("nbest", [1, 2])) in (1, 2)
            assert ("nbest" in record) is bool(more)


def test_beam_width_one(toy: Toy, lines: Path, call: Call) -> None:
    found = toy.translator.translate(lines.read_text().splitlines(), beam=1)
    answer = call("translate", toy.run, "--input", lines, "--beam", 1)
    assert answer.out.splitlines() == [one.text for one in found]


def test_closed_pipe_is_not_an_error(toy: Toy, tmp_path: Path) -> None:
    """`| head -1` closes the pipe early."""
    many = write_lines(tmp_path / "many", make_sentences(400, seed=2))
    translate = shlex.join(command("translate", toy.run, "--input", many, "--batch", 1))
    for shell in (f"{translate} | head -1", f"{shlex.join(command('info', toy.run))} | true"):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, env=environment(), check=False)
        assert done.stderr == b""
        assert done.stdout.count(b"\n") == ("head" in shell)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_partial_files(toy: Toy, tmp_path: Path, number: signal.Signals) -> None:
    many = write_lines(tmp_path / "many", make_sentences(3000, seed=2))
    out = tmp_path / "out"
    out.write_text("what was there before\n")
    with start_process("translate", toy.run, "--input", many, "--output", out, "--batch", 1) as running:
        while not any(path.stat().st_size for path in tmp_path.glob(".out.*.tmp/out")):
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(number)
        output = running.communicate()[1]
    assert running.returncode == 128 + number, output
    assert b"Traceback" not in output
    assert out.read_text() == "what was there before\n"
    assert files(tmp_path) == ["many", "out"]


def test_translation_on_a_terminal(toy: Toy) -> None:
    """A typed line is translated before the next one is typed."""
    ours, theirs = pty.openpty()
    with start_process("translate", toy.run, stdin=theirs) as running:
        os.close(theirs)
        assert running.stdout is not None
        for line in ("ba del!", "fo."):
            os.write(ours, line.encode() + b"\n")
            assert select.select([running.stdout], [], [], 60)[0], "no answer before the input ends"
            assert running.stdout.readline().decode() == toy.translator.translate([line])[0].text + "\n"
        os.write(ours, b"\x04")
        assert running.wait() == 0
    os.close(ours)


def test_progress_bar_on_a_terminal(toy: Toy, lines: Path) -> None:
    """The bar is drawn on stderr after a delay, which is zero here."""
    at_once = "from dragoman import progress; progress.MIN_SHOWN_SECONDS = progress.REFRESH_SECONDS = 0; "
    code = at_once + "from dragoman.cli.main import main; import sys; sys.argv[0] = 'dragoman'; main()"
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-c", code, "translate", str(toy.run), "--input", str(lines), "--batch", "5"]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=theirs, env=environment(), check=True)
    os.close(theirs)
    output = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "5 of 12 lines" in output
    assert "12 of 12 lines" in output
    assert re.search(r"/s, \d+ s left", output)
    assert done.stdout.count(b"\n") == 12
    assert b"\x1b" not in done.stdout


# evaluate


def test_evaluate_scores_the_translations(toy: Toy, tmp_path: Path, call: Call) -> None:
    """The scores equal those of sacreBLEU on the output of `translate`, with one reference and with two."""
    sources = make_sentences(40, seed=31)
    source = write_lines(tmp_path / "the source", sources)
    one = write_lines(tmp_path / "reference one", map(translate_toy, sources))
    two = write_lines(tmp_path / "two", [translate_toy(line).replace("ak", "ek") for line in sources[::-1]][::-1])
    found = call("translate", toy.run, "--input", source).out.splitlines()
    for references in ([one], [one, two], [two, one]):
        texts = [path.read_text().splitlines() for path in references]
        answer = call("evaluate", toy.run, "--source", source, "--reference", *references, "--json")
        assert answer.code == 0, answer.err
        [record] = [json.loads(line) for line in answer.out.splitlines()]
        assert record["lines"] == 40
        assert record["run"] == str(toy.run)
        for name, metric in (("bleu", BLEU()), ("chrf", CHRF()), ("ter", TER())):
            assert record[name]["value"] == pytest.approx(metric.corpus_score(found, texts).score, abs=1e-12)
            assert record[name]["signature"] == str(metric.get_signature())
            assert f"nrefs:{len(references)}" in record[name]["signature"]


def test_metric_option(toy: Toy, tmp_path: Path, call: Call) -> None:
    sources = make_sentences(5, seed=31)
    source = write_lines(tmp_path / "s", sources)
    one = write_lines(tmp_path / "one", map(translate_toy, sources))
    asked = ["evaluate", toy.run, "--source", source, "--reference", one, "--metric", "wer", "--metric", "exact"]
    record = json.loads(call(*asked, "--json").out)
    assert [key for key in record if isinstance(record[key], dict) and "value" in record[key]] == ["wer", "exact"]
    assert {row.split("  ")[0] for row in call(*asked).out.splitlines()[2:4]} == {"word errors", "exact match"}
    assert_user_error(call(*asked, "--metric", "exakt"), "'exakt'", "'exact'")


@pytest.mark.parametrize("test", ["files", "phrasebook"])
@pytest.mark.parametrize("asked", ["command", "recipe"])
def test_unavailable_metric_is_refused_before_translating(
    toy: Toy, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, asked: str, test: str
) -> None:
    """The metric is named by the command, or by the recipe of a run that was trained elsewhere."""
    run = tmp_path / "run"
    shutil.copytree(toy.run, run)
    recipe = RunFolder(run).load_recipe()
    data = recipe.data.model_copy(update={"metrics": ("bleu_moses_de",)})
    RunFolder(run).save_recipe(recipe.model_copy(update={"data": data}))
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    monkeypatch.setattr("dragoman.inference.translator.Translator.translate", None)
    file = write_lines(tmp_path / "s", make_sentences(2, seed=31))
    on = ["--source", file, "--reference", file] if test == "files" else ["--phrasebook", "dev"]
    named = ["--metric", "bleu_moses_de"] if asked == "command" else []
    answer = call("evaluate", toy.run if named else run, *on, *named)
    assert_user_error(answer, "bleu_moses_de needs sacremoses", "pip install 'dragoman[moses]'")


def test_run_is_evaluated_on_data_test(small: Path, tmp_path: Path, call: Call) -> None:
    """The corpora are named in the recipe, checked before training, and used by `evaluate` without options."""
    test = f"data.test={{source: {tmp_path / 'dev.src'}, target: {tmp_path / 'dev.trg'}}}"
    assert call("train", small, test, "data.metrics=[exact]", "--out", tmp_path / "run").code == 0
    [record] = [json.loads(line) for line in call("evaluate", tmp_path / "run", "--json").out.splitlines()]
    assert record["test"] == f"{tmp_path / 'dev.src'} and {tmp_path / 'dev.trg'}"
    assert record["lines"] == 20
    assert set(record) == {"run", "test", "lines", "exact", "warnings"}
    for wrong, culprits in (("data.test={tsv: x, jsonl: y}", ["data.test"]), ("data.metrics=[exakt]", ["'exact'"])):
        assert_user_error(call("train", small, wrong, "--out", tmp_path / "other"), *culprits)


def test_reference_option_in_every_form(toy: Toy, tmp_path: Path, call: Call) -> None:
    sources = make_sentences(5, seed=31)
    source = write_lines(tmp_path / "s", sources)
    one = write_lines(tmp_path / "one", map(translate_toy, sources))
    two = write_lines(tmp_path / "two", sources)
    spellings = [
        [toy.run, "--source", source, "--reference", one, two],
        [toy.run, "--reference", one, "--reference", two, "--source", source],
        ["--source", source, "--reference", one, two, toy.run],
        [toy.run, f"--reference={one}", two, f"--source={source}"],
    ]
    answers = {call("evaluate", *spelling, "--json").out for spelling in spellings}
    assert len(answers) == 1
    assert "nrefs:2" in answers.pop()


def test_table_of_several_runs(toy: Toy, tmp_path: Path, call: Call) -> None:
    """In a pipe, every score is on one line with its signature, whatever the width of the console."""
    sources = make_sentences(5, seed=31)
    source = write_lines(tmp_path / "s", sources)
    one = write_lines(tmp_path / "one", map(translate_toy, sources))
    (tmp_path / "run [b]old").symlink_to(toy.run)
    runs = [toy.run, tmp_path / "run [b]old"]
    answer = call("evaluate", *runs, "--source", source, "--reference", one)
    assert answer.code == 0
    title, *rows = answer.out.split("\n\n")[0].splitlines()
    assert title == "test set: 5 lines"
    assert len(rows) == 7
    for run, some in zip(runs, (rows[1:4], rows[4:]), strict=True):
        for name, row in zip(("BLEU", "chrF", "TER"), some, strict=True):
            assert row.split("  ")[0] == run.name
            assert name in row
            assert re.search(r"\d+\.\d\d", row)
            assert "nrefs:1|" in row
            assert "|version:" in row


def test_warnings_are_counted(toy: Toy, tmp_path: Path, call: Call) -> None:
    long = " ".join(make_sentences(30, seed=31))
    source = write_lines(tmp_path / "s", ["ba.", long])
    answer = call("evaluate", toy.run, "--source", source, "--reference", source, "--json")
    assert json.loads(answer.out)["warnings"] == {"longer than any sentence of training": 1}
    assert answer.err == "1 line longer than any sentence of training\n"


LACK = "without a term"
CURT = ("search.max_ratio=0.01", "search.max_extra=0")  # one token at most


@pytest.mark.parametrize("way", [(), ("--stream",), ("--resume",), ("--json",)], ids=str)
def test_only_the_first_warnings_are_logged(toy: Toy, tmp_path: Path, call: Call, way: tuple[str, ...]) -> None:
    """Further warnings are only counted; the counts include all lines."""
    source = write_lines(tmp_path / "s", [line for line in make_sentences(60) if len(line.split()) > 2][:25])
    both = ("--input", source, "--output", tmp_path / "out")
    answer = call("translate", toy.run, *both, *way, "--engine", "torch", *CURT)
    assert answer.code == 0, answer.err
    messages = answer.err.splitlines()
    cut = [line for line in messages if "cut" in line]
    assert [line.split(":")[0] for line in cut[:10]] == [f"line {number}" for number in range(1, 11)]
    assert cut[10] == "further lines cut are only counted; --json prints the warnings of every line"
    assert len(cut) == 12
    assert cut[11].startswith("25 lines cut")
    assert (tmp_path / "out").read_bytes().count(b"\n") == 25
    if way == ("--json",):
        answers = map(json.loads, (tmp_path / "out").read_text().splitlines())
        assert all(one["warnings"][0].startswith("cut at 1 tokens") for one in answers)


def test_logged_warnings_are_limited_by_kind_and_process() -> None:
    messages: list[str] = []
    warned = WarningLog(lambda message, _: messages.append(message), processes=4)
    for number in range(1, 7):
        warned.log(number, ["cut at 5 tokens", f"{LACK}: 'a'", f"{LACK}: 'b'"][: 1 if number < 4 else 3])
    heads = [line.split(":")[0] for line in messages if line.startswith("line ")]
    assert heads == ["line 1", "line 2", "line 4", "line 4", "line 5", "line 5"]
    assert messages[2].startswith("further lines cut are only counted")
    assert messages[7].startswith(f"further lines {LACK} are only counted")
    assert warned.line_counts == {"cut": 6, LACK: 3}
    many = WarningLog(lambda message, _: messages.append(message), processes=64)
    messages.clear()
    for number in (1, 2, 3):
        many.log(number, ["cut at 5 tokens"])
    assert [line.partition(":")[0] for line in messages if line.startswith("line ")] == ["line 1"]


def test_phrasebook_scores_by_phenomenon(toy: Toy, call: Call) -> None:
    answer = call("evaluate", toy.run, "--phrasebook", "unseen", "--count", 12, "--beam", 1, "--json")
    assert answer.code == 0, answer.err
    record = json.loads(answer.out)
    assert record["lines"] == 12
    assert record["phenomena"]
    for counts in record["phenomena"].values():
        assert counts["percent"] == pytest.approx(100 * counts["right"] / counts["total"])


def test_hint_about_tokenised_outputs_is_logged_once(tmp_path: Path, call: Call) -> None:
    """Dragoman logs the hint, not sacreBLEU, whose parameter is no option here; and only if BLEU tokenizes."""
    one, two = (write_lines(tmp_path / name, ["ba del ."] * count) for name, count in (("one", 100), ("two", 99)))
    way = ("evaluate", "--source", one, "--reference", one, "--hypotheses", one)
    hint = f"the outputs of {one} look tokenised; --metric bleu_tokens does not tokenise them again\n"
    assert call(*way, "--hypotheses", one).err == hint
    for silent in (("--metric", "bleu_tokens"), ("--metric", "chrf"), ("--bleu-tokenize", "none")):
        answer = call(*way, *silent)
        assert (answer.code, answer.err) == (0, "")
    assert call("evaluate", "--source", two, "--reference", two, "--hypotheses", two).err == ""


# info


def test_info_prints_the_model_card(toy: Toy, call: Call) -> None:
    answer = call("info", toy.run)
    assert (answer.code, answer.err) == (0, "")
    for text in (str(toy.run), "transformer", "bpe", "train.src + train.trg", "330 steps", "BLEU"):
        assert text in answer.out
    about = json.loads(call("info", toy.run, "--json").out)
    assert about["steps"] == 330
    assert not any(line.endswith(" ") for line in answer.out.splitlines())


def test_lines_in_a_pipe_are_not_padded_or_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    for name, value in (("short", "x"), ("long", "y " * 10_000)):
        table.add_row(name, Text(value, overflow="fold"))
    results_console().print(table)
    assert capsys.readouterr().out == f"short x\nlong  {('y ' * 10_000).rstrip()}\n"


# data


@pytest.mark.parametrize("form", ["plain", "gz", "xz", "zst", "tsv", "jsonl"])
def test_statistics_of_every_corpus_format(tmp_path: Path, call: Call, form: str) -> None:
    sources = make_sentences(30, seed=5)
    pairs = [(source, translate_toy(source)) for source in sources]
    columns = ["\n".join(column).encode() + b"\n" for column in zip(*pairs, strict=True)]
    if form == "tsv":
        (tmp_path / "c.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs))
        corpus = ["--tsv", tmp_path / "c.tsv"]
    elif form == "jsonl":
        (tmp_path / "c.jsonl").write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in pairs))
        corpus = ["--jsonl", tmp_path / "c.jsonl"]
    else:
        packers = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}
        pack, suffix = packers.get(form, bytes), "" if form == "plain" else f".{form}"
        for side, column in zip(("s", "t"), columns, strict=True):
            (tmp_path / f"{side}{suffix}").write_bytes(pack(column))
        corpus = ["--source", tmp_path / f"s{suffix}", "--target", tmp_path / f"t{suffix}"]
    stats = call("data", "stats", *corpus, "--json")
    assert json.loads(stats.out)["pairs"] == 30
    assert "30 pairs" in call("data", "stats", *corpus).out
    done = call("data", "clean", *corpus, "--out", tmp_path / "clean", "max_words=3", "--json")
    counts = json.loads(done.out)
    assert sum(counts.values()) == 30
    kept = [pair for pair in pairs if len(pair[0].split()) <= 3]
    assert counts["kept"] == len(kept) > 0
    assert (tmp_path / "clean.source").read_text().splitlines() == [source for source, _ in kept]
    assert (tmp_path / "clean.target").read_text().splitlines() == [target for _, target in kept]
    assert not list(tmp_path.glob("*.tmp"))


def test_clean_prints_counts_and_reasons(tmp_path: Path, call: Call) -> None:
    write_lines(tmp_path / "c.tsv", ["ba.\tak.", "ba.\tak.", "\tak.", "ba.\tak ak ak ak ak ak ak ak.", "fo.\tol."])
    answer = call("data", "clean", "--tsv", tmp_path / "c.tsv", "--out", tmp_path / "clean")
    assert answer.err == ""
    rows = {row.split()[0]: row.split()[1:] for row in answer.out.splitlines()}
    assert rows == {
        "kept": ["2", "40.00", "%"],
        "duplicate": ["1", "20.00", "%"],
        "empty": ["1", "20.00", "%"],
        "ratio": ["1", "20.00", "%"],
    }


def test_line_break_inside_a_text_shifts_no_line(tmp_path: Path, call: Call) -> None:
    records = [{"source": "ba\nfo.", "target": "ol ak."}, {"source": "ra.", "target": "zu.\r"}]
    write_lines(tmp_path / "c.jsonl", map(json.dumps, records))
    answer = call("data", "clean", "--jsonl", tmp_path / "c.jsonl", "--out", tmp_path / "clean")
    assert (tmp_path / "clean.source").read_bytes() == b"ba fo.\nra.\n"
    assert (tmp_path / "clean.target").read_bytes() == b"ol ak.\nzu. \n"
    assert "2 texts had line breaks" in answer.err


def test_phrasebook_files(tmp_path: Path, call: Call) -> None:
    answer = call("data", "phrasebook", "--out", tmp_path / "book", "--count", 20, "--split", "dev", "--gold")
    assert (answer.code, answer.out) == (0, "")
    assert "20 pairs" in answer.err
    phrases = list(generate_phrases("dev", 20))
    assert (tmp_path / "book.en").read_text().splitlines() == [phrase.source for phrase in phrases]
    assert (tmp_path / "book.de").read_text().splitlines() == [phrase.target for phrase in phrases]
    gold = [json.loads(line) for line in (tmp_path / "book.jsonl").read_text().splitlines()]
    assert [record["source"] for record in gold] == [phrase.source for phrase in phrases]
    assert [len(record["target_heads"]) for record in gold] == [len(phrase.target_words) for phrase in phrases]


# our own faults


def test_bug_message_explains_how_to_report_it(toy: Toy, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dragoman.inference.loading.open_run", broken)
    answer = call("translate", toy.run, stdin=b"ba.\n")
    assert (answer.code, answer.out) == (1, "")
    assert "ZeroDivisionError" in answer.err
    assert "report" in answer.err.splitlines()[-1]


def test_messages_are_printed_verbatim(call: Call, tmp_path: Path) -> None:
    """Rich does not interpret square brackets as markup or colons as emoji, and does not wrap long lines."""
    name = tmp_path / ("[bold]:smile:" + "long" * 40)
    answer = call("info", name)
    assert str(name) in answer.err


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dragoman", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: dragoman ")


def test_corpus_is_split_by_sources(tmp_path: Path, call: Call) -> None:
    """No source is in two parts, dev and test have each source once, and the pairs left out are counted."""
    rows = [(f"source {i % 40}", f"target {i}") for i in range(60)]
    (tmp_path / "c.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in rows))
    command = ("data", "split", "--tsv", tmp_path / "c.tsv", "--dev", 5, "--test", 6, "--json")
    answer = call(*command, "--out", tmp_path / "part")
    counts = json.loads(answer.out)
    parts = {
        name: list(zip(*((tmp_path / f"part.{name}.{side}").read_text().splitlines() for side in ("source", "target"))))
        for name in ("train", "dev", "test")
    }
    assert {name: len(pairs) for name, pairs in parts.items()} == {name: counts[name] for name in parts}
    assert (counts["dev"], counts["test"], sum(counts.values())) == (5, 6, 60)
    sources = {name: {source for source, _ in pairs} for name, pairs in parts.items()}
    assert len(sources["dev"]) == 5
    assert set.union(*sources.values()) == {source for source, _ in rows}
    assert not sources["train"] & sources["dev"]
    assert not sources["dev"] & sources["test"]
    assert not sources["test"] & sources["train"]
    assert all(pair in rows for pairs in parts.values() for pair in pairs)
    call(*command, "--out", tmp_path / "again")
    assert (tmp_path / "again.dev.source").read_bytes() == (tmp_path / "part.dev.source").read_bytes()


@pytest.mark.parametrize("command", ["clean", "split", "phrasebook"])
def test_data_commands_create_the_output_folder(tmp_path: Path, call: Call, command: str) -> None:
    write_lines(tmp_path / "c.tsv", [f"source {i}\ttarget {i}" for i in range(20)])
    way = {"split": ("--dev", 5, "--test", 5), "phrasebook": ("--count", 2)}
    corpus = () if command == "phrasebook" else ("--tsv", tmp_path / "c.tsv")
    answer = call("data", command, *corpus, *way.get(command, ()), "--out", tmp_path / "new" / "folder" / "part")
    assert answer.code == 0, answer.err
    names = {
        "clean": ["source", "target"],
        "split": [f"{part}.{side}" for part in ("dev", "test", "train") for side in ("source", "target")],
        "phrasebook": ["de", "en"],
    }
    assert files(tmp_path / "new" / "folder") == [f"part.{name}" for name in names[command]]


def test_too_small_corpus_is_not_split(tmp_path: Path, call: Call) -> None:
    (tmp_path / "c.tsv").write_text("a\tb\nc\td\n")
    answer = call("data", "split", "--tsv", tmp_path / "c.tsv", "--out", tmp_path / "part")
    assert_user_error(answer, "c.tsv", "2 different sources")
    assert files(tmp_path) == ["c.tsv"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_out_of_memory_message(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def work() -> None:
        raise error

    assert run_command(typer.main.get_command(app), []) == 2
    output = capsys.readouterr().err
    assert output.startswith("dragoman: out of memory; free")
    assert output.count("\n") == 1


def test_names_are_readable_whatever_the_locale(tmp_path: Path) -> None:
    """Python decodes file names as ASCII here; the second name is in Latin-1 and is not valid UTF-8."""
    plain = {**environment(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name, shown in (("Zürich".encode(), "'Zürich'"), (b"Z\xfcrich", "'Z\ufffdrich'")):
        arguments = [*map(os.fsencode, command("translate")), name]
        done = subprocess.run(arguments, cwd=tmp_path, env=plain, capture_output=True, check=False)
        assert done.returncode == 2
        assert done.stderr.decode() == f"dragoman: there is no run folder {shown}\n"
