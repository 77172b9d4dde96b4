"""Do all engines say the same? One run through every engine and every format, there and back, on the same lines.

    python bench/engines.py RUN [--lines 1000] [--source F --reference F] [--only engines] [--quick] [--out STEM]
    python bench/engines.py RUN --classes [--out STEM]

The run is exported to every format, and what Hugging Face holds is imported again. All of them translate the same
lines, test sentences of the phrasebook if no file is named, with the run's own beam. They are measured by what the run
itself gives by PyTorch in float32: how many texts are the same, how far apart in score the others are, and BLEU.
A score is the log-probability per token that the run itself gives to a text, whoever found it.

Required: in full precision 99 of 100 texts the same and the others within a thousandth in score, in less BLEU within
0.2. The table is printed, STEM.json and STEM.md are written; the exit code is 1 where one is off, or where full
precision is refused. A precision that the CPU has no instructions for may be refused.

`--classes` runs the engines once for each class of CPU below this one that environment variables can simulate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does

import torch

sys.path.insert(0, str(Path(__file__).parent))
from dragoman.errors import UserError
from dragoman.inference.export import FORMATS, Disagreement, export, import_run
from dragoman.inference.loading import ENGINES, load_as, open_engine
from dragoman.inference.translator import Translator
from dragoman.io import read_lines
from dragoman.metrics.metrics import METRICS
from dragoman.phrasebook.generate import generate_pairs
from dragoman.progress import ProgressBar, log
from translators import describe_machine

ALIKE, NEAR, BLEU = 0.99, 1e-3, 0.2  # what is required
QUICK = 20  # lines, which show nothing but that it runs
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "CT2_FORCE_CPU_ISA": "AVX2"}
CLASSES = {  # by the environment that keeps libraries from using more
    "this one": {},
    "AVX-512 without VNNI": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": AVX2,
    "AVX2, CTranslate2 with MKL": {**AVX2, "CT2_USE_MKL": "1", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "CT2_FORCE_CPU_ISA": "GENERIC"},
}
PORTION = 500  # lines at a time: whoever has one limit for a call makes many small calls of few lines

Answer = Callable[[Sequence[str]], list[str]]


class Way(NamedTuple):
    """From lines to texts: opened when its turn comes."""

    open: Callable[[], Answer]
    full: bool = True  # precision


def texts_of(translator: Translator) -> Answer:
    return lambda lines: [one.text for one in translator.translate(lines, align=False)]


def engine(translator: Translator, name: str) -> Answer:
    """`dragoman translate --engine NAME`."""
    return texts_of(replace(translator, engine=open_engine(name, translator)))


def exported(translator: Translator, run: Path, folder: Path, to: str, quantization: str) -> Answer:
    """What answers from the folder that `dragoman export` writes."""
    out = folder / f"{to}-{quantization}"
    export(run, to=to, out=out, quantization=quantization)
    return texts_of(replace(translator, engine=FORMATS[to].engine(translator, out, quantization)))


def transformers_alone(folder: Path) -> Answer:
    """The exported folder as a user of `transformers` runs it: their tokenizer, their settings, one call."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    if not (folder / "tokenizer.json").exists():
        raise UserError("the tokenizer of this run is not one that transformers has")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

    @torch.inference_mode()
    def answer(lines: Sequence[str]) -> list[str]:
        found = model.generate(**tokenizer(list(lines), return_tensors="pt", padding=True))
        texts: list[str] = tokenizer.batch_decode(found, skip_special_tokens=True)
        return texts

    return answer


def imported(folder: Path, out: Path) -> Answer:
    import_run(folder, out)
    return texts_of(load_as(Translator, out, device="cpu"))


def ways(translator: Translator, run: Path, folder: Path, only: str = "") -> dict[str, Way]:
    """By what a table calls them; formats that hold less than full precision are asked for int8 too."""
    names = [name for name in ENGINES if name != "auto"]  # which is torch
    found = {f"--engine {name}": Way(partial(engine, translator, name), "-" not in name) for name in names}
    if only == "engines":
        return found
    for to, kind in FORMATS.items():
        for quantization in [each for each in ("float32", "int8") if each in kind.quantizations]:
            write = partial(exported, translator, run, folder, to, quantization)
            found[f"export --to {to}, {quantization}"] = Way(write, quantization == "float32")
    there = folder / "huggingface-float32"
    found["huggingface folder, transformers alone"] = Way(partial(transformers_alone, there))
    found["huggingface folder, imported again"] = Way(partial(imported, there, folder / "back"))
    return found


def answered(answer: Answer, lines: Sequence[str], name: str) -> list[str]:
    texts: list[str] = []
    with ProgressBar(name, total=len(lines), unit="lines") as bar:
        for start in range(0, len(lines), PORTION):
            texts += answer(lines[start : start + PORTION])
            bar.update(len(texts))
    return texts


def digest(texts: Sequence[str]) -> str:
    """Return what is the same for the same texts on another CPU."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=6).hexdigest()


def gaps(translator: Translator, lines: Sequence[str], truth: Sequence[str], texts: Sequence[str]) -> list[float]:
    """By how much the run itself scores other texts than its own lower, or higher if below 0."""
    other = [i for i in range(len(lines)) if truth[i] != texts[i]]
    sources = [lines[i] for i in other]
    own, found = (translator.score(sources, [side[i] for i in other]) for side in (truth, texts))
    return [a.mean - b.mean for a, b in zip(own, found, strict=True)]


def compared(run: Path, lines: Sequence[str], references: Sequence[str], only: str = "") -> dict[str, dict[str, Any]]:
    translator = load_as(Translator, run, device="cpu")
    truth = answered(texts_of(translator), lines, "the run as it is")
    bleu = METRICS["bleu"](truth, [references]).value
    results: dict[str, dict[str, Any]] = {"the run as it is": {"bleu": bleu, "digest": digest(truth)}}
    with tempfile.TemporaryDirectory() as folder:
        for name, way in ways(translator, run, Path(folder), only).items():
            try:
                texts = answered(way.open(), lines, name)
            except UserError as lack:
                log(f"{name}: {lack}")
                results[name] = {"refused": str(lack), "good": not way.full and not isinstance(lack, Disagreement)}
                continue
            apart = gaps(translator, lines, truth, texts)
            found: dict[str, Any] = {
                "same": 1 - len(apart) / len(lines),
                "gap": max(map(abs, apart), default=0.0),
                "gaps": apart,
            }
            found |= {"bleu": METRICS["bleu"](texts, [references]).value, "digest": digest(texts)}
            found["bleu_of_the_run"] = METRICS["bleu"](texts, [truth]).value
            exact = found["same"] >= ALIKE and found["gap"] <= NEAR
            results[name] = {**found, "good": exact if way.full else abs(found["bleu"] - bleu) <= BLEU}
            log(f"{name}: {found['same']:.1%}")
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown, for bench/results."""
    first, *others = results
    bleu = results[first]["bleu"]
    rows = ["| | same text | largest gap in score | BLEU | difference | as required |", "|---" * 6 + "|"]
    rows.append(f"| {first} | | | {bleu:.2f} | | |")
    for name in others:
        one, shown = results[name], f"`{name}`" if name.startswith(("-", "export")) else name
        if "refused" in one:
            rows.append(f"| {shown} | {one['refused']} | | | | |")
            continue
        cells = [f"{one['same']:.1%}", f"{one['gap']:.1e}" if one["gap"] else "", f"{one['bleu']:.2f}"]
        cells += [f"{one['bleu'] - bleu:+.2f}", "yes" if one["good"] else "**no**"]
        rows.append(f"| {shown} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def by_class(run: Path, lines: int) -> dict[str, dict[str, Any]]:
    """Return the results of all engines for each class of CPU, each in a process of its own."""
    found = {}
    for name, limits in CLASSES.items():
        with tempfile.TemporaryDirectory() as folder:
            stem = Path(folder) / "result"
            asked = [str(run), "--lines", str(lines), "--only", "engines", "--out", str(stem)]
            log(f"as on a CPU with {name}")
            subprocess.run([sys.executable, __file__, *asked], env={**os.environ, **limits}, check=False)
            found[name] = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    return found


def class_table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown; the last column says whether texts are to the letter those on this CPU with all it has."""
    head = (
        "CPU",
        "engine",
        "same text as float32",
        "BLEU",
        "difference",
        "BLEU against float32",
        "texts as on this CPU",
    )
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    here = next(iter(found.values()))["results"]
    for cpu, one in found.items():
        (first, plain), *others = one["results"].items()
        rows.append(f"| {cpu} | {first} | | {plain['bleu']:.2f} | | | {yes(plain, here[first])} |")
        for name, way in others:
            if "refused" in way:
                rows.append(f"| {cpu} | `{name}` | {way['refused']} | | | | |")
                continue
            cells = [f"{way['same']:.1%}", f"{way['bleu']:.2f}", f"{way['bleu'] - plain['bleu']:+.2f}"]
            cells += [f"{way['bleu_of_the_run']:.2f}", yes(way, here[name])]
            rows.append(f"| {cpu} | `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def yes(one: dict[str, Any], other: dict[str, Any]) -> str:
    return "yes" if one.get("digest") == other.get("digest") else "no"


def write(out: Path | None, title: str, about: dict[str, Any], results: dict[str, Any], shown: str) -> None:
    print(shown, end="")
    if out:
        whole = json.dumps({**about, "results": results}, indent=1) + "\n"
        out.with_suffix(".json").write_text(whole, encoding="utf-8")
        head = "\n".join(f"- {key}: {value}" for key, value in about.items())
        out.with_suffix(".md").write_text(f"# {title}\n\n{head}\n\n{shown}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--source", type=Path, help="plain text; by default test sentences of the phrasebook")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--only", choices=("", "engines"), default="", help="without the formats of others")
    parser.add_argument("--classes", action="store_true", help="the engines, as on other CPUs too")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} lines, engines only: shows that it runs")
    parser.add_argument("--out", type=Path, help="the results, without an ending")
    if parser.parse_args().quick:
        parser.set_defaults(lines=QUICK, only="engines")
    options = parser.parse_args()
    if (options.source is None) != (options.reference is None):
        parser.error("--source and --reference belong together")
    recipe = load_as(Translator, options.run, device="cpu").recipe
    if options.source:
        lines, references = (list(read_lines(each))[: options.lines] for each in (options.source, options.reference))
    else:
        pairs = list(generate_pairs("test", options.lines, direction=recipe.data.direction))
        lines, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
    corpus = options.source.name if options.source else "phrasebook, test"
    about: dict[str, Any] = {"date": date.today().isoformat(), "machine": ", ".join(describe_machine())}
    about |= {"run": options.run.name, "corpus": corpus, "lines": len(lines), "beam": recipe.search.beam}
    if options.classes:
        found = by_class(options.run, options.lines)
        write(options.out, "Engines on other classes of CPU", about, found, class_table(found))
        results = {f"{cpu}: {name}": way for cpu, one in found.items() for name, way in one["results"].items()}
    else:
        results = compared(options.run, lines, references, options.only)
        write(options.out, f"Engines, {corpus}", about, results, table(results))
    sys.exit(0 if all(one.get("good", True) for one in results.values()) else 1)


if __name__ == "__main__":
    main()
