"""Compare published models at their published sizes with transformers, and write the result as a table.

    python tools/check_published_models.py [opus-mt-en-de m2m100_418M] [--out bench/results/DATE-published-models]

The weights are random, as nothing is downloaded: the configurations, the sizes and the numbers of tokens are the
published ones. A model is written as transformers saves it and imported. Compared are all logits of some lines, the
token ids of both sides, and the translations of beam 4 with their scores. A small one is fine-tuned too.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

from dragoman.data.batches import BatchPlan, Widths, collate_pairs  # noqa: E402
from dragoman.inference.directions import choose_direction  # noqa: E402
from dragoman.inference.engines.huggingface import HuggingFaceEngine, import_huggingface  # noqa: E402
from dragoman.inference.loading import load_as  # noqa: E402
from dragoman.inference.translator import Translator  # noqa: E402
from dragoman.io import format_json  # noqa: E402
from dragoman.types import BOS, EOS  # noqa: E402
from published_models import phrasebook_sides, write_m2m, write_marian  # noqa: E402
from toy_run import read_run_events, train_quietly, write_lines  # noqa: E402

LIMIT = 1e-4  # of the difference of two logits or scores
OPUS: dict[str, Any] = {
    "vocabulary": 58101, "encoder_layers": 6, "decoder_layers": 6, "d_model": 512, "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
}  # fmt: skip
M2M: dict[str, Any] = {
    "vocabulary": 128112, "encoder_layers": 12, "decoder_layers": 12, "d_model": 1024, "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
    "max_position_embeddings": 1024,
}  # fmt: skip
# Random weights as large in relation to the width as in the tests, and peaked distributions over the larger vocabulary.
MODELS: dict[str, Callable[[Path], Any]] = {
    "opus-mt-en-de": partial(write_marian, **OPUS, sharpness=18.0, init_std=0.02 * (32 / 512) ** 0.5),
    "m2m100_418M": partial(write_m2m, **M2M, sharpness=11.0, init_std=0.02 * (32 / 1024) ** 0.5),
}


@torch.no_grad()
def compare_logits(translator: Translator, tag: str, model: Any, orders: tuple[list[int], list[int]]) -> dict[str, Any]:
    """Return the greatest difference of a logit, and how large the logits are."""
    ours: Any = translator.model
    source_order, order = orders
    is_output = torch.arange(len(order)) != BOS
    difference, spread = 0.0, 0.0
    for example in translator.make_examples(*phrasebook_sides(3), tag=tag):
        batch = collate_pairs(BatchPlan([[0]], Widths(len(example.source) + 1, len(example.target) + 1)), [example])
        logits = ours.compute_logits(ours(batch))[0][:, : len(order)]
        source = [source_order[i] for i in (*example.source.tolist(), EOS)]
        target = [order[i] for i in (BOS, *example.target.tolist())]
        output = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]))
        theirs = output.logits[0][:, order]
        difference = max(difference, float((logits - theirs)[:, is_output].abs().max()))
        spread = max(spread, float(theirs[:, is_output].abs().max()))
    return {"greatest difference of a logit": difference, "greatest logit": round(spread, 2)}


def compare_tokens(translator: Translator, tag: str, folder: Path, order: list[int], lines: list[str]) -> int:
    """Return how many lines have the token ids of transformers, languages and EOS included."""
    from transformers import AutoTokenizer

    codes = [code.strip("_") for code in tag.replace("=>", "").split()]
    languages = {"src_lang": codes[0], "tgt_lang": codes[1]} if len(codes) == 2 else {}
    theirs: Any = AutoTokenizer.from_pretrained(folder, **languages)
    tokenizers = translator.tokenizers
    ours = [[*tokenizers.tag_ids(tag), *tokenizers.source.encode(line), EOS] for line in lines]
    return sum([order[i] for i in ids] == theirs(line)["input_ids"] for ids, line in zip(ours, lines, strict=True))


def fine_tune(run: Path, folder: Path) -> dict[str, Any]:
    """Return the loss per token at the start and at the end of a short training."""
    write_lines(folder / "a.tsv", [f"{one}\t{other}" for one, other in zip(*phrasebook_sides(60), strict=True)])
    sections: dict[str, Any] = {
        "data": {"train": {"tsv": str(folder / "a.tsv")}, "dev": []},
        "train": {"steps": 8, "tokens": 300, "lr": 0.0005, "warmup": 1, "log_every": 1, "device": "cpu", "threads": 1},
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(sections))  # JSON is YAML
    tuned = train_quietly(recipe, folder / "tuned", init_from=run)
    losses = [event["loss"] for event in read_run_events(tuned) if event["event"] == "train"]
    return {"losses of fine-tuning": [round(loss, 3) for loss in losses]}


def check_model(name: str, folder: Path) -> dict[str, Any]:
    """Build, import and compare a model; return what was measured."""
    start = time.perf_counter()
    model = MODELS[name](folder / name)
    id_map = import_huggingface(folder / name, folder / "run")
    assert id_map
    translator = load_as(Translator, folder / "run")
    tag = choose_direction(translator, "en", "de").tag
    row: dict[str, Any] = {"model": name, "parameters": sum(parameter.numel() for parameter in model.parameters())}
    row |= {"vocabulary": model.config.vocab_size}
    row |= compare_logits(translator, tag, model, (list(id_map.source), list(id_map.target)))
    del model
    gc.collect()
    lines = phrasebook_sides(50)[0]
    row["lines with the same token ids"] = compare_tokens(translator, tag, folder / name, list(id_map.source), lines)
    row["lines tokenized"] = len(lines)
    lines = lines[:6]
    theirs = replace(translator, engine=HuggingFaceEngine(folder / name, id_map))
    options = translator.make_options(beam=4, count=2, search={"max_tokens": 16}, tag=tag)
    found, expected = (one.translate_nbest(lines, options) for one in (translator, theirs))
    pairs = [(a, b) for some, others in zip(found, expected, strict=True) for a, b in zip(some, others, strict=True)]
    row["the same hypotheses"] = sum(a.tokens == b.tokens for a, b in pairs)
    row["hypotheses of beam 4"] = len(pairs)
    row["different first hypotheses"] = len({tuple(some[0].tokens) for some in found})
    row["greatest difference of a score"] = max(abs(a.score - b.score) for a, b in pairs)
    del translator, theirs
    gc.collect()
    if name == "opus-mt-en-de":
        row |= fine_tune(folder / "run", folder)
    return {**row, "seconds": round(time.perf_counter() - start)}


def find_failures(row: dict[str, Any]) -> list[str]:
    """Return what differs, or is compared in vain."""
    losses = row.get("losses of fine-tuning", [2.0, 2.0, 1.0, 1.0])
    checks = {
        "logits": row["greatest difference of a logit"] < LIMIT,
        "token ids": row["lines with the same token ids"] == row["lines tokenized"],
        "hypotheses": row["the same hypotheses"] == row["hypotheses of beam 4"],
        "scores": row["greatest difference of a score"] < LIMIT,
        "variety of the hypotheses": row["different first hypotheses"] > 1,
        "fine-tuning": sum(losses[-2:]) < sum(losses[:2]),
    }
    return [name for name, passed in checks.items() if not passed]


def make_table(rows: list[dict[str, Any]]) -> str:
    """Return the measurements with one column for each model."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "model"))
    lines = ["# Published models at their published sizes", "", "Random weights, float32, CPU, beam 4."]
    lines += ["Made by `python tools/check_published_models.py`.", ""]
    lines += ["| | " + " | ".join(row["model"] for row in rows) + " |", "|---|" + "---|" * len(rows)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(format_cell(row.get(name, "-")) for row in rows) + " |")
    return "\n".join(lines) + "\n"


def format_cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.2g}" if isinstance(value, float) and value < 0.01 else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--out", type=Path, help="path of the results, without its extension")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(check_model(name, Path(folder)))
        print(make_table(rows[-1:]), flush=True)
        gc.collect()
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(format_json(rows), encoding="utf-8")
        arguments.out.with_suffix(".md").write_text(make_table(rows), encoding="utf-8")
    failures = [f"{row['model']}: {failure}" for row in rows for failure in find_failures(row)]
    print("different: " + "; ".join(failures) if failures else "everything is the same")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
