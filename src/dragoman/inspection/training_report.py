"""Training made visible: the probes of a run, when it was trained and now, and its neurons, as a page or as a table.

report = inspect_training(dragoman.load("runs/demo"), pairs, history=read_probes(Path("runs/demo/probes.jsonl")))
report.save("training.html")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.errors import UserError
from dragoman.evaluation.figures import Chart, Point, Series, render_chart
from dragoman.evaluation.report import align_columns
from dragoman.inference.loading import EnsembleModel
from dragoman.inference.model_card import read_records
from dragoman.inference.predictor import Predictor
from dragoman.inference.single_sequence import ClassifierEnsemble
from dragoman.inspection.neurons import Neuron, encode_pairs, find_top_activations
from dragoman.inspection.page import load_page_template
from dragoman.inspection.probes import (
    SIDES,
    AttentionProbe,
    LayerProbe,
    Probes,
    RecurrentProbe,
    make_probe_batch,
    measure_probes,
    round_numbers,
)
from dragoman.inspection.records import to_plain
from dragoman.io import format_json, write_text
from dragoman.types import Pair

CORPUS_LINES = 500  # lines of the corpus that are read
PARTS = {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
DISTANCES = (1, 2, 4, 8, 16, 32)  # shown over time
ENTROPY = "Entropy of attention in bits, mean of the heads"
Figure = tuple[str, str]  # caption and SVG


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What can be seen of the training of a run."""

    run: str
    kind: str  # of the model, as in the recipe
    data: str  # what was measured, in words
    probes: Probes  # of the finished run
    history: dict[int, Probes]  # step -> probes that were recorded during training
    neurons: list[Neuron]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the report as dictionaries, lists, numbers and texts."""
        plain: dict[str, Any] = to_plain(self)
        plain["probes"] = self.probes.to_json()
        plain["history"] = [{"step": step, **probes.to_json()} for step, probes in self.history.items()]
        plain["neurons"] = round_numbers(plain["neurons"])
        return plain

    def to_html(self) -> str:
        """Return the page as one HTML file that needs no other file."""
        template = load_page_template("training.html")
        neurons: dict[str, list[Neuron]] = {}
        for neuron in self.neurons:
            neurons.setdefault(neuron.layer, []).append(neuron)
        charts = {"figures": draw_finished(self.probes), "history": draw_history(self.history)}
        return template.render(title=f"Training of {self.run}", report=self, parts=PARTS, neurons=neurons, **charts)

    def save(self, path: str | Path) -> None:
        """Write the page, or the data if the file name ends in .json."""
        is_json = Path(path).suffix == ".json"
        write_text(Path(path), format_json(self.to_json()) if is_json else self.to_html())

    def format_tables(self) -> str:
        """Return the most important numbers as tables for a terminal."""
        layers = [("layer", "variance", "gradient"), *map(format_layer, self.probes.layers)]
        tables = [align_columns(layers, numbers=True)]
        if self.probes.attention:
            rows = [(f"{PARTS[p.part]}, layer {p.layer}", *format_entropy(p)) for p in self.probes.attention]
            tables.append(align_columns([("attention", "bits", "lowest", "highest", "uniform"), *rows], numbers=True))
        if self.probes.recurrent:
            spectra = [(f"{p.cell}, {p.gate}", *format_spectrum(p)) for p in self.probes.recurrent]
            tables.append(
                align_columns([("recurrent matrix", "largest", "smallest", "radius"), *spectra], numbers=True)
            )
        if self.neurons:
            rows = [(f"{n.layer}, neuron {n.number}", f"{n.selectivity:.1f}", list_tokens(n)) for n in self.neurons]
            tables.append(align_columns([("neuron", "selectivity", "top tokens"), *rows]))
        return "\n\n".join(tables)


def format_layer(probe: LayerProbe) -> tuple[str, str, str]:
    """Return a row about a layer."""
    name = f"{probe.side} layer {probe.layer}" if probe.layer else f"{probe.side} embeddings"
    return name, f"{probe.variance:.4g}", f"{probe.gradient:.3e}"


def format_entropy(probe: AttentionProbe) -> tuple[str, ...]:
    """Return the mean, lowest, highest and maximum entropy of the heads."""
    mean = sum(probe.entropy) / len(probe.entropy)
    return tuple(f"{value:.2f}" for value in (mean, min(probe.entropy), max(probe.entropy), probe.maximum))


def format_spectrum(probe: RecurrentProbe) -> tuple[str, ...]:
    """Return the largest and smallest singular value, and the spectral radius."""
    return tuple(f"{v:.3g}" for v in (probe.singular_values[0], probe.singular_values[-1], probe.spectral_radius))


def list_tokens(neuron: Neuron) -> str:
    """Return the tokens that activate a neuron most, each once, with the number of their occurrences."""
    tokens = [activation.token for activation in neuron.top]
    return "  ".join(f"{token} ×{tokens.count(token)}" for token in dict.fromkeys(tokens))


def inspect_training(
    predictor: Predictor[Any], pairs: Sequence[Pair], *, history: Mapping[int, Probes] | None = None, data: str = ""
) -> TrainingReport:
    """Return the probes and neurons of a trained model on a corpus. `data` is the corpus in words."""
    kind = predictor.recipe.model.kind
    if kind == "smt":
        raise UserError("a phrase-based system (model.kind=smt) has no gradients; --training is for neural models")
    if isinstance(predictor.model, EnsembleModel | ClassifierEnsemble):
        raise UserError("an ensemble cannot be inspected; inspect its runs one by one")
    examples, notes = encode_pairs(predictor, pairs)
    batch = make_probe_batch(examples, predictor.recipe.example_format)
    neurons = find_top_activations(predictor, examples)
    if not neurons:
        notes.append("the model has no feed-forward layers, so there are no neurons to show")
    return TrainingReport(
        run=predictor.run,
        kind=kind,
        data=f"{data or 'the given data'}; {len(examples)} examples for neurons, {batch.pairs} for everything else",
        probes=measure_probes(predictor.model, batch.to(predictor.device)),
        history=dict(history or {}),
        neurons=neurons,
        notes=notes,
    )


def read_probes(path: Path) -> dict[int, Probes]:
    """Return the probes in a file probes.jsonl by step; there are none if the file does not exist."""
    return {int(record["step"]): Probes.from_json(record) for record in read_records(path) if "layers" in record}


# Charts of the finished run


def draw_finished(probes: Probes) -> list[dict[str, Any]]:
    """Return the sections of the page about the finished run: a title, a text and figures."""
    sections = [
        {
            "title": "Gradient against distance",
            "text": "Size of the loss's gradient at earlier input tokens, relative to its size at the latest one "
            "(of the target: the token before the prediction; of the source: its end). A model in which it vanishes "
            "cannot learn dependencies of that length.",
            "figures": [("", render_chart(chart_distance(probes)))],
        },
        {
            "title": "Gradient against depth",
            "text": "Norm of the loss's gradient with respect to the output of each layer, and with respect to its "
            "parameters. Parameters that several layers share, such as one table for all embeddings, are shown in each "
            "of them.",
            "figures": draw_depth(probes),
        },
        {
            "title": "Variance of activations",
            "text": "Over all components of the output of a layer, at all tokens.",
            "figures": [("", render_chart(chart_layers(probes, lambda probe: probe.variance, "variance")))],
        },
        {
            "title": "Entropy of attention",
            "text": "In bits, averaged over all queries: 0 if a head attends to one token. The line is the mean of the "
            "heads, and the band reaches from the lowest head to the highest. Grey: uniform attention.",
            "figures": draw_entropy(probes),
        },
        {
            "title": "Singular values of recurrent matrices",
            "text": "Of the matrix by which a cell multiplies its state, largest first. If all are near 1, the matrix "
            "preserves the norm of the state and of its gradient.",
            "figures": draw_spectra(probes),
        },
    ]
    return [{**section, "figures": shown} for section in sections if (shown := keep_drawn(section["figures"]))]


def keep_drawn(figures: Any) -> list[Figure]:
    """Return the figures that have points."""
    return [(caption, svg) for caption, svg in figures if svg]


def make_curve(name: str, points: Iterable[tuple[float, str, Sequence[float]]]) -> Series:
    """Return a line, without values that are not finite."""
    finite = [(x, label, tuple(v for v in values if math.isfinite(v))) for x, label, values in points]
    return Series(name, [Point(x, label, values) for x, label, values in finite if values])


def name_layers(count: int) -> tuple[str, ...]:
    """Return the labels of the axis of layers: the embeddings are layer 0."""
    return ("embeddings", *(f"layer {number}" for number in range(1, count + 1)))


def chart_distance(probes: Probes) -> Chart:
    """Return the chart of gradients by distance."""
    series = [
        make_curve(side, ((d, f"distance {d}", [size]) for d, size in enumerate(sizes)))
        for side, sizes in probes.gradient_flow.items()
    ]
    return Chart(series, "distance in tokens", "relative gradient", "", logarithmic=True)


def chart_layers(probes: Probes, value: Callable[[LayerProbe], float], title: str) -> Chart:
    """Return a chart of one number for each layer of both sides."""
    ticks = name_layers(max(probe.layer for probe in probes.layers))
    series = [
        make_curve(side, ((p.layer, ticks[p.layer], [value(p)]) for p in probes.layers if p.side == side))
        for side in SIDES
        if any(probe.side == side for probe in probes.layers)
    ]
    return Chart(series, "layer", title, "", ticks=ticks, logarithmic=True)


def draw_depth(probes: Probes) -> list[Figure]:
    """Return the charts of gradients by depth: of activations and of parameters."""
    activations = chart_layers(probes, lambda probe: probe.gradient, "gradient norm")
    ticks, embeddings = activations.ticks, {"encoder": "source embedding", "decoder": "target embedding"}
    norms = {
        use: norm for group, norm in probes.parameter_gradients.items() for use in list_uses(group, len(ticks) - 1)
    }
    series = [
        make_curve(
            one.name,
            (
                (x, ticks[x], [norms.get(f"{one.name} layer {x}" if x else embeddings[one.name], math.nan)])
                for x in range(len(one.points))
            ),
        )
        for one in activations.series
    ]
    parameters = Chart(series, "layer", "gradient norm", "", ticks=ticks, logarithmic=True)
    return [
        ("Outputs of layers", render_chart(activations, width=600)),
        ("Parameters", render_chart(parameters, width=600)),
    ]


def list_uses(group: str, layers: int) -> list[str]:
    """Return the names that a group of parameters stands for (`group_parameters`), such as all layers that share it."""
    first, is_shared, _ = group.partition(" 1 to ")
    return [f"{first} {number}" for number in range(1, layers + 1)] if is_shared else group.split(" = ")


def draw_entropy(probes: Probes) -> list[Figure]:
    """Return the chart of attention entropy by layer; none for a single layer, whose numbers are in the table."""
    ticks = name_layers(max((probe.layer for probe in probes.attention), default=0))[1:]
    if len(ticks) < 2:
        return []
    series, maxima = [], []
    for part, title in PARTS.items():
        some = [probe for probe in probes.attention if probe.part == part]
        if some:
            series.append(make_curve(title, ((p.layer - 1, f"layer {p.layer}", p.entropy) for p in some)))
            uniform = ((p.layer - 1, f"layer {p.layer}", [p.maximum]) for p in some)
            maxima.append(make_curve(f"{title}, uniform", uniform))
    chart = Chart(series, "layer", "entropy (bits)", "bits", ticks=ticks)
    return [("", render_chart(chart, behind=maxima))]


def draw_spectra(probes: Probes) -> list[Figure]:
    """Return a chart of singular values for each recurrent cell, with a line for each gate."""
    figures = []
    for cell in dict.fromkeys(probe.cell for probe in probes.recurrent):
        series = [
            make_curve(p.gate, ((i, f"number {i}", [value]) for i, value in enumerate(p.singular_values, 1)))
            for p in probes.recurrent
            if p.cell == cell
        ]
        chart = Chart(series, "number of the singular value", "singular value", "")
        figures.append((cell, render_chart(chart, width=600, height=260)))
    return figures


# Charts over time


def draw_history(history: Mapping[int, Probes]) -> list[Figure]:
    """Return charts of the numbers that were recorded during training, by step; none if there is only one record."""
    if len(history) < 2:
        return []
    numbers = {step: list_numbers(probes) for step, probes in history.items()}
    figures = []
    for title, last in numbers[max(numbers)].items():
        series = [
            make_curve(
                name, ((step, f"step {step}", [row[title].get(name, math.nan)]) for step, row in numbers.items())
            )
            for name in last
        ]
        quantity = title.partition(" of ")[0].partition(",")[0].lower()
        chart = Chart(series, "step", quantity, "", logarithmic=title != ENTROPY)
        figures.append((title, render_chart(chart, width=920, height=330)))
    return keep_drawn(figures)


def list_numbers(probes: Probes) -> dict[str, dict[str, float]]:
    """Return the numbers of one record that are shown over time: title of a chart -> name of a line -> number."""
    layers = {format_layer(probe)[0]: probe for probe in probes.layers}
    matrices = {f"{probe.cell}, {probe.gate}": probe for probe in probes.recurrent}
    return {
        "Gradient at a distance, relative to distance 0": {
            f"{side}, distance {distance}": sizes[distance]
            for side, sizes in probes.gradient_flow.items()
            for distance in DISTANCES
            if distance < len(sizes)
        },
        "Gradient norm of the outputs of layers": {name: probe.gradient for name, probe in layers.items()},
        "Gradient norm of parameters": probes.parameter_gradients,
        "Variance of activations": {name: probe.variance for name, probe in layers.items()},
        ENTROPY: {
            f"{PARTS[probe.part]}, layer {probe.layer}": sum(probe.entropy) / len(probe.entropy)
            for probe in probes.attention
        },
        "Largest singular value of recurrent matrices": {n: p.singular_values[0] for n, p in matrices.items()},
        "Spectral radius of recurrent matrices": {name: probe.spectral_radius for name, probe in matrices.items()},
    }
