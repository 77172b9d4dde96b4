"""An inspection as a page, as a frame for notebooks, and as PNG files.

The page is one HTML file that needs no other file: style, scripts (templates/) and data are part of it. The data are
JSON. Matrices are packed as 8-bit integers with a scale for each row, in base64, and unpacked by inspection.js; an
error of half a step is 0.2 % of the largest value of its row, and 0.4 % for values with a sign. Scripts insert all text
as text, never as HTML.

Shapes   L layers   H heads   Q queries   K keys   T predicted tokens   S inputs
"""

from __future__ import annotations

import base64
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dragoman.evaluation.figures import GREY, LINE_COLOURS, STYLE
from dragoman.inspection.attention_maps import join_words, number_words
from dragoman.inspection.records import AttentionMap, Inspection, to_plain
from dragoman.io import write_atomically

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRAME_HEIGHT = 900  # pixels of the page in a notebook
ATTENTION_CONTRAST = 0.6  # exponent of the weights in figures, as in inspection.js: small weights become visible
MAX_LABEL = 18  # characters of a token in a figure
CELL_INCHES = 0.26  # side of a cell of a labelled matrix
MAX_INCHES = 40.0  # of a figure: larger matrices get smaller cells
DPI = 110


# The page


def load_page_template(name: str, package: str = "dragoman.inspection") -> Template:
    """Return a template of a package. Base template and style sheet are those of the evaluation: pages look alike."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(package), PackageLoader("dragoman.evaluation")])
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template(name)


def render_page(inspection: Inspection) -> str:
    """Return the page as one HTML file that needs no other file."""
    title, template = f"{inspection.run}: {inspection.kind} model", load_page_template("inspection.html")
    return template.render(title=title, inspection=inspection, data=collect_page_data(inspection))


def render_frame(inspection: Inspection) -> str:
    """Return an HTML frame with the page, for notebooks. The page cannot access the notebook that shows it."""
    from markupsafe import escape

    style = f"width: 100%; height: {FRAME_HEIGHT}px; border: 0"
    page = escape(render_page(inspection))
    return f'<iframe title="Inspection" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def collect_page_data(inspection: Inspection) -> dict[str, Any]:
    """Return what the scripts of the page show, as values that JSON can hold."""
    attributions = [
        {
            "title": attribution.title,
            "value": None if attribution.value_TS is None else pack_matrix(attribution.value_TS, signed=True),
            "prefix": None if attribution.prefix_TT is None else pack_matrix(attribution.prefix_TT, signed=True),
        }
        for attribution in inspection.attributions
    ]
    records = {
        "predictions": inspection.predictions,
        "searches": inspection.searches,
        "phrases": inspection.phrases,
    }
    return {
        "tokens": {name: describe_tokens(tokens) for name, tokens in inspection.tokens.items()},
        "attentions": [describe_attention(attention, inspection.tokens) for attention in inspection.attentions],
        "attributions": attributions,
        **name_infinities(to_plain(records)),
    }


def describe_tokens(tokens: Sequence[str]) -> dict[str, Any]:
    """Return the tokens, the word index of each token, and the words. Without any ▁, every token is a word."""
    has_subwords = any(token.startswith("▁") for token in tokens)
    numbers = number_words(tokens) if has_subwords else list(range(len(tokens)))
    words = join_words(tokens, numbers) if has_subwords else list(tokens)
    return {"tokens": list(tokens), "numbers": numbers, "words": words}


def describe_attention(attention: AttentionMap, tokens: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return an attention map with packed weights."""
    expected = (len(tokens[attention.queries]), len(tokens[attention.keys]))
    shape = attention.weight_LHQK.shape
    assert shape[2:] == expected, f"{attention.name}: weights {shape} do not fit {expected[0]} by {expected[1]} tokens"
    return {
        "title": attention.title,
        "name": attention.name,
        "queries": attention.queries,
        "keys": attention.keys,
        "best_layer": attention.best_layer,
        "weight": pack_matrix(attention.weight_LHQK, signed=False),
    }


def pack_matrix(values: NDArray[np.floating[Any]], *, signed: bool) -> dict[str, Any]:
    """Return an array as 8-bit integers, each to be multiplied by the scale of its row (along the last axis).

    Values that are not finite become 0, and "invalid" is their number.
    """
    is_finite = np.isfinite(values)
    values = np.where(is_finite, values, 0).astype(np.float32)
    limit, kind = (127, np.int8) if signed else (255, np.uint8)
    scales = np.abs(values).max(axis=-1, keepdims=True, initial=0.0) / limit
    steps = np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)
    return {
        "shape": list(values.shape),
        "signed": signed,
        "invalid": int((~is_finite).sum()),
        "scales": encode_base64(scales.astype("<f4")),
        "steps": encode_base64(np.rint(steps).clip(-limit if signed else 0, limit).astype(kind)),
    }


def encode_base64(array: NDArray[Any]) -> str:
    """Return the bytes of an array in base64."""
    return base64.b64encode(array.tobytes()).decode()


def name_infinities(value: Any) -> Any:
    """Return plain data with texts in place of numbers that JSON cannot hold, such as the logarithm of 0."""
    if isinstance(value, dict):
        return {key: name_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [name_infinities(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return value


# PNG files


def render_png(inspection: Inspection, folder: str | Path) -> list[Path]:
    """Write the figures of an inspection as PNG files into a folder, which is created if needed; return their paths.

    They are: all heads of each attention map, the cross-attention that serves as word alignment, the entropy of each
    prediction, and each attribution.
    """
    import matplotlib

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with matplotlib.rc_context(fname=str(STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # missing in matplotlib's font: drawn as a box
        for name, figure in plot_figures(inspection):
            path = folder / f"{name}.png"
            write_atomically(path, partial(figure.savefig, dpi=DPI, format="png"))
            paths.append(path)
    return paths


def plot_figures(inspection: Inspection) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the figure of each PNG file."""
    source, inputs = inspection.tokens.get("source", []), inspection.tokens.get("input", [])
    targets = [prediction.token for prediction in inspection.predictions] or inspection.tokens.get("target", [])
    for attention in inspection.attentions:
        yield f"attention-{attention.name}", plot_heads(attention)
        if attention.name == "cross":
            layer = -1 if attention.best_layer is None else attention.best_layer
            title = f"{attention.title}, layer {layer % len(attention.weight_LHQK) + 1}, mean of heads"
            rows, columns = inspection.tokens[attention.queries], inspection.tokens[attention.keys]
            yield "alignment", plot_matrix(attention.weight_LHQK[layer].mean(0), rows, columns, title, signed=False)
    if any(math.isfinite(prediction.entropy) for prediction in inspection.predictions):
        yield "entropy", plot_entropy([prediction.entropy for prediction in inspection.predictions], targets)
    for attribution in inspection.attributions:
        if attribution.value_TS is not None:
            figure = plot_matrix(attribution.value_TS, targets, source, attribution.title, signed=True)
            yield f"attribution-{attribution.method.replace(' ', '-')}", figure
        if attribution.prefix_TT is not None:
            title = f"{attribution.title}, decoder input"
            figure = plot_matrix(attribution.prefix_TT, targets, inputs, title, signed=True)
            yield f"attribution-{attribution.method.replace(' ', '-')}-prefix", figure


def plot_heads(attention: AttentionMap) -> Figure:
    """Return a figure with a small matrix for each head: layers are rows, heads are columns."""
    from matplotlib.figure import Figure

    layers, heads = attention.weight_LHQK.shape[:2]
    figure = Figure(figsize=(1.3 * heads + 0.6, 1.3 * layers + 0.7), layout="constrained")
    figure.suptitle(attention.title)
    all_axes = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes: Axes = all_axes[layer, head]
            show_matrix(axes, attention.weight_LHQK[layer, head], limit=1.0, signed=False)
            axes.set_box_aspect(1)
            axes.set(xticks=[], yticks=[])
        all_axes[layer, 0].set_ylabel(f"layer {layer + 1}")
    for head in range(heads):
        all_axes[0, head].set_title(f"head {head + 1}", fontsize="medium")
    return figure


def plot_matrix(
    value_TS: NDArray[np.floating[Any]], rows: Sequence[str], columns: Sequence[str], title: str, *, signed: bool
) -> Figure:
    """Return a figure of a matrix with a token beside each row and above each column."""
    from matplotlib.figure import Figure

    cell = min(CELL_INCHES, MAX_INCHES / max(len(rows), len(columns), 1))
    figure = Figure(figsize=(cell * len(columns) + 2.4, cell * len(rows) + 2.4), layout="constrained")
    axes = figure.subplots()
    show_matrix(axes, value_TS, limit=float(np.nanmax(np.abs(value_TS), initial=0.0)) or 1.0, signed=signed)
    font_size = min(9.0, 60 * cell)
    axes.set_xticks(range(len(columns)), [shorten_token(token) for token in columns], rotation=90, fontsize=font_size)
    axes.set_yticks(range(len(rows)), [shorten_token(token) for token in rows], fontsize=font_size)
    axes.xaxis.tick_top()
    figure.suptitle(title)
    return figure


def show_matrix(axes: Axes, value_TS: NDArray[np.floating[Any]], *, limit: float, signed: bool) -> None:
    """Show values as colours: two from -limit to limit, or one from 0 to limit, where small values stand out."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm

    positive, negative = LINE_COLOURS[0], LINE_COLOURS[1]
    colours = LinearSegmentedColormap.from_list(
        "signed", [negative, "white", positive] if signed else ["white", positive]
    )
    norm = Normalize(-limit, limit) if signed else PowerNorm(ATTENTION_CONTRAST, 0.0, limit)
    axes.imshow(np.nan_to_num(value_TS), cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    for spine in axes.spines.values():
        spine.set(visible=True, color=GREY, linewidth=0.5)


def plot_entropy(entropies: Sequence[float], tokens: Sequence[str]) -> Figure:
    """Return a bar chart of the entropy of each prediction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(MAX_INCHES, CELL_INCHES * len(entropies) + 1.5), 3.2), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(entropies)), entropies, color=LINE_COLOURS[0])
    axes.set_xticks(range(len(tokens)), [shorten_token(token) for token in tokens], rotation=90, fontsize=9)
    axes.set_ylabel("entropy (bits)")
    return figure


def shorten_token(token: str) -> str:
    """Return a token as a label: without control characters and, if it is long, with its first characters and "…"."""
    visible = "".join(character if character.isprintable() else "·" for character in token)
    return visible if len(visible) <= MAX_LABEL else f"{visible[: MAX_LABEL - 1]}…"
