"""The scores of attention heads as a table for the terminal and as an HTML page with a map of the heads.

Shapes   L layers   H heads
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from dragoman.inspection.heads import HEAD_SCORES, HeadReport, ScoredHeads
from dragoman.inspection.page import load_page_template
from dragoman.inspection.sentence import ATTENTION_TITLES

BEST_HEADS = 3  # heads per score in the tables


def list_best_heads(report: HeadReport) -> list[dict[str, Any]]:
    """Return the best heads of every score and part, best first, as rows of a table. Layers and heads count from 1."""
    return [
        {
            "table": table,
            "rank": rank,
            "head": f"{layer + 1}.{head + 1}",
            "percent": float(table.percent_LH[layer, head]),
            "weight": float(table.weight_LH[layer, head]),
            **describe_removal(report, table.part, layer, head),
        }
        for table in report.scores
        for rank, (layer, head) in enumerate(table.rank_heads()[:BEST_HEADS])
    ]


def describe_removal(report: HeadReport, part: str, layer: int, head: int) -> dict[str, float | None]:
    """Return the changes of BLEU and loss without a head; None if they were not computed."""
    if report.ablation is None or part not in report.ablation.bleu_change_LH:
        return {"bleu_change": None, "loss_change": None}
    return {
        "bleu_change": float(report.ablation.bleu_change_LH[part][layer, head]),
        "loss_change": float(report.ablation.loss_change_LH[part][layer, head]),
    }


def render_heads_table(report: HeadReport) -> Table:
    """Return a table of the best heads of each score. A percentage above the baseline is bold."""
    title = f"{report.pairs:,} pairs of {report.corpus}" if report.corpus else f"{report.pairs:,} pairs"
    if report.ablation:
        title += f"; BLEU {report.ablation.bleu:.1f}, loss {report.ablation.loss:.4f}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("attends to", "part"):
        table.add_column(heading, no_wrap=True)
    changes = ("BLEU change", "loss change") if report.ablation else ()
    for heading in ("queries", "chance %", "baseline %", "", "layer.head", "%", "mean weight", *changes):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in list_best_heads(report):
        scored: ScoredHeads = row["table"]
        about = (scored.title, scored.part, f"{scored.queries:,}", f"{scored.chance:.1f}", f"{scored.baseline:.1f}")
        percent = f"{row['percent']:.1f}"
        cells = [*(about if not row["rank"] else [""] * len(about)), scored.baseline_kind if not row["rank"] else ""]
        cells += [row["head"], f"[bold]{percent}[/]" if row["percent"] > scored.baseline else percent]
        cells.append(f"{row['weight']:.3f}")
        if changes:
            bleu, loss = row["bleu_change"], row["loss_change"]
            cells += ["-", "-"] if bleu is None else [f"{bleu:+.1f}", f"{loss:+.4f}"]
        table.add_row(*cells)
    return table


def map_functions(report: HeadReport, part: str) -> list[list[dict[str, Any]]]:
    """Return a grid of heads, each with its function: the score with the largest gain over its baseline, if any."""
    tables = [table for table in report.scores if table.part == part]
    gain_SLH = np.stack([table.compute_gains() for table in tables])
    layers, heads = report.sizes[part]
    grid = []
    for layer in range(layers):
        row = []
        for head in range(heads):
            best = int(gain_SLH[:, layer, head].argmax())
            gain = float(gain_SLH[best, layer, head])
            row.append(
                {
                    "table": tables[best] if gain > 0 else None,
                    "colour": list(HEAD_SCORES).index(tables[best].name),
                    "percent": float(tables[best].percent_LH[layer, head]),
                    "gain": max(gain, 0.0),
                    "percents": [(table, float(table.percent_LH[layer, head])) for table in tables],
                    **describe_removal(report, part, layer, head),
                }
            )
        grid.append(row)
    return grid


def render_heads_page(report: HeadReport) -> str:
    """Return an HTML page that needs no other file: the map of heads, the best heads, and all scores of all heads."""
    return load_page_template("heads.html").render(
        title=f"Attention heads of {report.run}",
        report=report,
        maps=[(ATTENTION_TITLES[part], map_functions(report, part)) for part in report.sizes],
        functions=[(number, score.title) for number, score in enumerate(HEAD_SCORES.values())],
        best=list_best_heads(report),
        part_titles=ATTENTION_TITLES,
    )
