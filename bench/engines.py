"""Check that all engines and export formats translate alike: one run, the same lines.

    python bench/engines.py RUN [--lines 1000] [--source F --reference F] [--only engines] [--quick] [--out STEM]
    python bench/engines.py RUN --classes [--out STEM]

The run is exported to every format, and the Hugging Face export is imported again. All systems translate the same
lines (by default test sentences of the phrasebook) with the beam size of the run. They are compared with the PyTorch
engine in float32: the fraction of equal texts, the difference in score of the others, and BLEU. The score of a text
is its log-probability per token under the run's model in float32.

Required: in full precision 99 % of the texts equal and the others within 0.001 in score; in lower precision BLEU within
0.2. The table is printed, and written to STEM.json and STEM.md. The exit code is 1 if a system violates this, or if one
in full precision cannot run. A precision that the CPU does not support may be refused.

`--classes` runs the engines once for each older class of CPU that environment variables can simulate.
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
from dragoman.inference.export import EXPORT_FORMATS, Disagreement, export, import_run
from dragoman.inference.loading import ENGINES, load_as
from dragoman.inference.translator import Translator
from dragoman.io import read_lines
from dragoman.metrics.metrics import METRICS
from dragoman.phrasebook.generate import generate_pairs
from dragoman.progress import ProgressBar, log
from translators import describe_machine

MIN_SAME, MAX_GAP, MAX_BLEU_GAP = 0.99, 1e-3, 0.2  # required
QUICK = 20  # lines: only checks that the benchmark runs
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "CT2_FORCE_CPU_ISA": "AVX2"}
CLASSES = {  # class of CPU -> environment variables that limit the instructions libraries use
    "this one": {},
    "AVX-512 without VNNI": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": AVX2,
    "AVX2, CTranslate2 with MKL": {**AVX2, "CT2_USE_MKL": "1", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "CT2_FORCE_CPU_ISA": "GENERIC"},
}
PORTION = 500  # lines per call: some systems have one length limit per call

TranslateLines = Callable[[Sequence[str]], list[str]]


class System(NamedTuple):
    """A way to translate lines, opened when it is needed."""

    open: Callable[[], TranslateLines]
    full: bool = True  # full precision


def use_translator(translator: Translator) -> TranslateLines:
    return lambda lines: [one.text for one in translator.translate(lines, align=False)]


def use_engine(translator: Translator, name: str) -> TranslateLines:
    """Translate as `dragoman translate --engine NAME` does."""
    return use_translator(replace(translator, engine=ENGINES[name](translator, None)))


def use_export(translator: Translator, run: Path, folder: Path, to: str, quantization: str) -> TranslateLines:
    """Export the run and translate with the exported model."""
    out = folder / f"{to}-{quantization}"
    export(run, to=to, out=out, quantization=quantization)
    return use_translator(replace(translator, engine=EXPORT_FORMATS[to].engine(translator, out, quantization)))


def use_transformers(folder: Path) -> TranslateLines:
    """Translate with the exported folder as users of `transformers` do: its tokenizer and settings."""
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


def use_import(folder: Path, out: Path) -> TranslateLines:
    import_run(folder, out)
    return use_translator(load_as(Translator, out, device="cpu"))


def list_systems(translator: Translator, run: Path, folder: Path, only: str = "") -> dict[str, System]:
    """Return the systems by their names in the table; formats with quantization also in int8."""
    names = [name for name in ENGINES if name != "auto"]  # which is torch
    found = {f"--engine {name}": System(partial(use_engine, translator, name), "-" not in name) for name in names}
    if only == "engines":
        return found
    for to, kind in EXPORT_FORMATS.items():
        for quantization in [each for each in ("float32", "int8") if each in kind.quantizations]:
            write = partial(use_export, translator, run, folder, to, quantization)
            found[f"export --to {to}, {quantization}"] = System(write, quantization == "float32")
    there = folder / "huggingface-float32"
    found["huggingface folder, transformers alone"] = System(partial(use_transformers, there))
    found["huggingface folder, imported again"] = System(partial(use_import, there, folder / "back"))
    return found


def translate_portions(answer: TranslateLines, lines: Sequence[str], name: str) -> list[str]:
    texts: list[str] = []
    with ProgressBar(name, total=len(lines), unit="lines") as bar:
        for start in range(0, len(lines), PORTION):
            texts += answer(lines[start : start + PORTION])
            bar.set_done(len(texts))
    return texts


def hash_texts(texts: Sequence[str]) -> str:
    """Return a digest of texts, to compare the texts of different CPUs."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=6).hexdigest()


def score_gaps(translator: Translator, lines: Sequence[str], truth: Sequence[str], texts: Sequence[str]) -> list[float]:
    """Return how much lower the model scores each text that differs from its float32 translation."""
    other = [i for i in range(len(lines)) if truth[i] != texts[i]]
    sources = [lines[i] for i in other]
    own, found = (translator.score(sources, [side[i] for i in other]) for side in (truth, texts))
    return [a.mean - b.mean for a, b in zip(own, found, strict=True)]


def compare(run: Path, lines: Sequence[str], references: Sequence[str], only: str = "") -> dict[str, dict[str, Any]]:
    translator = load_as(Translator, run, device="cpu")
    truth = translate_portions(use_translator(translator), lines, "the run as it is")
    bleu = METRICS["bleu"](truth, [references]).value
    results: dict[str, dict[str, Any]] = {"the run as it is": {"bleu": bleu, "digest": hash_texts(truth)}}
    with tempfile.TemporaryDirectory() as folder:
        for name, system in list_systems(translator, run, Path(folder), only).items():
            try:
                texts = translate_portions(system.open(), lines, name)
            except UserError as lack:
                log(f"{name}: {lack}")
                results[name] = {"refused": str(lack), "good": not system.full and not isinstance(lack, Disagreement)}
                continue
            apart = score_gaps(translator, lines, truth, texts)
            found: dict[str, Any] = {
                "same": 1 - len(apart) / len(lines),
                "gap": max(map(abs, apart), default=0.0),
                "gaps": apart,
            }
            found |= {"bleu": METRICS["bleu"](texts, [references]).value, "digest": hash_texts(texts)}
            found["bleu_of_the_run"] = METRICS["bleu"](texts, [truth]).value
            exact = found["same"] >= MIN_SAME and found["gap"] <= MAX_GAP
            results[name] = {**found, "good": exact if system.full else abs(found["bleu"] - bleu) <= MAX_BLEU_GAP}
            log(f"{name}: {found['same']:.1%}")
    return results


def format_table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
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


def run_classes(run: Path, lines: int) -> dict[str, dict[str, Any]]:
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


def format_class_table(found: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table; the last column says whether texts equal those on this CPU without limits."""
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
        rows.append(f"| {cpu} | {first} | | {plain['bleu']:.2f} | | | {same_texts(plain, here[first])} |")
        for name, way in others:
            if "refused" in way:
                rows.append(f"| {cpu} | `{name}` | {way['refused']} | | | | |")
                continue
            cells = [f"{way['same']:.1%}", f"{way['bleu']:.2f}", f"{way['bleu'] - plain['bleu']:+.2f}"]
            cells += [f"{way['bleu_of_the_run']:.2f}", same_texts(way, here[name])]
            rows.append(f"| {cpu} | `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def same_texts(one: dict[str, Any], other: dict[str, Any]) -> str:
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
    parser.add_argument("--source", type=Path, help="plain text; default: test sentences of the phrasebook")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--only", choices=("", "engines"), default="", help="leave out export formats")
    parser.add_argument("--classes", action="store_true", help="simulate other classes of CPU")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} lines, engines only: shows that it runs")
    parser.add_argument("--out", type=Path, help="write results to this path with the suffixes .json and .md")
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
        found = run_classes(options.run, options.lines)
        write(options.out, "Engines on other classes of CPU", about, found, format_class_table(found))
        results = {f"{cpu}: {name}": way for cpu, one in found.items() for name, way in one["results"].items()}
    else:
        results = compare(options.run, lines, references, options.only)
        write(options.out, f"Engines, {corpus}", about, results, format_table(results))
    sys.exit(0 if all(one.get("good", True) for one in results.values()) else 1)


if __name__ == "__main__":
    main()
