"""Measure what the attention heads of phrasebook models attend to, and how much they matter.

    python bench/heads.py RUN RUN RUN --out results/name
    python bench/heads.py RUN --out results/name --quick

For every score that depends on the analysis of a sentence, the best head is chosen on the dev split and reported on the
test split, where its baseline is computed too, so the choice among many heads does not flatter it. `removed` is the
change of BLEU and loss without the head, on the first pairs of the test split. For heads of pronouns, `pronouns` is the
percentage of pronouns that the model translates correctly, with and without the head.

Results are added to OUT.json, which may already have those of other runs: it has the scores of all heads of all runs.
OUT.md has the best heads as a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.inspection.head_ablation import ablate_heads, list_attention_modules, remove_head, translate_greedily
from dragoman.inspection.heads import (
    HEAD_SCORES,
    HeadReport,
    ScoredHeads,
    analyse_phrase,
    get_phrasebook_direction,
    score_heads,
)
from dragoman.inspection.records import to_plain
from dragoman.phrasebook.generate import Phrase, count_correct_phenomena, generate_phrases

PRONOUN_SCORES = ("antecedent", "predicted")
COLUMNS = ("run", "attends to", "part", "queries", "chance", "baseline", "", "head", "% dev", "% test", "mean weight",
           "BLEU", "loss", "pronouns")  # fmt: skip


def count_pronouns(translator: Translator, phrases: Sequence[Phrase]) -> float:
    """Return the percentage of pronouns that greedy search translates correctly."""
    outputs = translate_greedily(translator, [analyse_phrase(phrase) for phrase in phrases])
    pairs = zip(phrases, outputs, strict=True)
    counts = [count_correct_phenomena(phrase, output).get("pronoun", (0, 0)) for phrase, output in pairs]
    return 100 * sum(correct for correct, _ in counts) / max(sum(total for _, total in counts), 1)


def find_table(report: HeadReport, like: ScoredHeads) -> ScoredHeads:
    """Return the table of the same score and part in another report."""
    return next(table for table in report.scores if (table.name, table.part) == (like.name, like.part))


def measure(run: str, pairs: int, ablation_pairs: int) -> dict[str, Any]:
    """Return all scores of a run, and its best heads with the effects of their removal."""
    translator = load_as(Translator, run, device="cpu")
    direction = get_phrasebook_direction(translator)
    phrases = {split: list(generate_phrases(split, pairs, direction=direction)) for split in ("dev", "test")}
    corpora = {split: [analyse_phrase(phrase) for phrase in some] for split, some in phrases.items()}
    dev, test = (score_heads(translator, corpora[split]) for split in ("dev", "test"))
    ablation, _ = ablate_heads(translator, corpora["test"][:ablation_pairs], test.sizes)
    with_pronouns = [phrase for phrase in phrases["test"] if phrase.source_coref]
    pronouns = count_pronouns(translator, with_pronouns)
    modules, best = list_attention_modules(translator.model), []
    for table in (table for table in dev.scores if not HEAD_SCORES[table.name].has_fixed_rule):
        layer, head = table.rank_heads()[0]
        found = find_table(test, table)
        row = {
            "score": table.name, "title": table.title, "part": table.part, "queries": found.queries,
            "chance": found.chance, "baseline": found.baseline, "baseline_kind": found.baseline_kind,
            "layer": layer + 1, "head": head + 1, "dev_percent": float(table.percent_LH[layer, head]),
            "percent": float(found.percent_LH[layer, head]), "weight": float(found.weight_LH[layer, head]),
            "bleu_change": float(ablation.bleu_change_LH[table.part][layer, head]),
            "loss_change": float(ablation.loss_change_LH[table.part][layer, head]),
        }  # fmt: skip
        if table.name in PRONOUN_SCORES:
            with remove_head(modules[table.part][layer], head):
                row["pronouns_without"] = count_pronouns(translator, with_pronouns)
        best.append(row)
    reports = {"dev": dev.to_json(), "test": test.to_json(), "ablation": to_plain(ablation)}
    return {
        "run": Path(run).name,
        "pronouns": pronouns,
        "pronoun_sentences": len(with_pronouns),
        "best": best,
        **reports,
    }


def format_tables(results: Sequence[dict[str, Any]], pairs: int, ablation_pairs: int) -> str:
    """Return the best heads of all runs as a table in Markdown."""
    lines = [
        "# Best attention heads of phrasebook Transformers",
        "",
        f"Chosen on {pairs:,} pairs of dev, reported on {pairs:,} of test. BLEU and loss are changes without the head,",
        f"on {ablation_pairs} pairs of test with greedy search. Pronouns: per cent correct with and without the head.",
        "",
    ]
    for result in results:
        bleu, loss = result["ablation"]["bleu"], result["ablation"]["loss"]
        lines.append(f"- {result['run']}: BLEU {bleu:.2f}, loss {loss:.4f}, pronouns {result['pronouns']:.1f} %")
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for score, part in dict.fromkeys((row["score"], row["part"]) for result in results for row in result["best"]):
        for result in results:
            for row in (row for row in result["best"] if (row["score"], row["part"]) == (score, part)):
                without = row.get("pronouns_without")
                cells = [
                    result["run"], row["title"], part, f"{row['queries']:,}", f"{row['chance']:.1f}",
                    f"{row['baseline']:.1f}", row["baseline_kind"], f"{row['layer']}.{row['head']}",
                    f"{row['dev_percent']:.1f}", f"{row['percent']:.1f}", f"{row['weight']:.3f}",
                    f"{row['bleu_change']:+.2f}", f"{row['loss_change']:+.4f}",
                    "" if without is None else f"{result['pronouns']:.1f} → {without:.1f}",
                ]  # fmt: skip
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="run folders of models trained on the phrasebook")
    parser.add_argument("--pairs", type=int, default=3000, help="pairs of dev and of test")
    parser.add_argument("--ablation-pairs", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True, help="results without the ending")
    parser.add_argument("--quick", action="store_true", help="only check that the benchmark runs")
    arguments = parser.parse_args()
    pairs, ablation_pairs = (60, 5) if arguments.quick else (arguments.pairs, arguments.ablation_pairs)
    path = arguments.out.with_name(arguments.out.name + ".json")
    earlier = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else []
    results = earlier + [measure(run, pairs, ablation_pairs) for run in arguments.runs]
    about = {"pairs": pairs, "ablation_pairs": ablation_pairs}
    path.write_text(json.dumps({"about": about, "runs": results}, ensure_ascii=False) + "\n", "utf-8")
    table = format_tables(results, pairs, ablation_pairs)
    arguments.out.with_name(arguments.out.name + ".md").write_text(table, "utf-8")
    print(table)


if __name__ == "__main__":
    main()
