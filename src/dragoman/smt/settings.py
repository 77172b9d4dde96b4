"""The settings of word alignment and of phrase-based translation, readable without Numba."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from dragoman.config.settings import AsTuple, Registries, Settings, check_names, setting
from dragoman.data.corpus import resolve_path
from dragoman.errors import UserError

PHRASE_FEATURES = ("p(target|source)", "p(source|target)", "lex(target|source)", "lex(source|target)")
ORIENTATIONS = ("monotone", "swap", "discontinuous")
FEATURE_NAMES = (
    *PHRASE_FEATURES,
    *(f"{orientation} {side}" for side in ("before", "after") for orientation in ORIENTATIONS),
    "language model",
    "distortion",
    "words",
    "phrases",
    "unknown words",
)
REORDERING_NAMES = FEATURE_NAMES[len(PHRASE_FEATURES) : len(PHRASE_FEATURES) + 2 * len(ORIENTATIONS)]
LM_NAME, DISTORTION_NAME, WORDS_NAME, PHRASES_NAME, UNKNOWN_NAME = FEATURE_NAMES[-5:]
# Weights before tuning, by preset; features that are not listed have weight 0.
PRESETS: dict[str, dict[str, float]] = {
    "log-linear": {
        **dict(zip(PHRASE_FEATURES, (0.2, 0.15, 0.2, 0.15), strict=True)),
        **dict.fromkeys(REORDERING_NAMES, 0.1),
        LM_NAME: 0.45,
        DISTORTION_NAME: 0.15,
        WORDS_NAME: 0.8,
        PHRASES_NAME: -0.1,
        UNKNOWN_NAME: -10.0,
    },
    # P(source | target) P(target), both with weight 1. Without the small weight of distortion, the translation model
    # would have the same score for all orders of the same phrases.
    "noisy-channel": {PHRASE_FEATURES[1]: 1.0, LM_NAME: 1.0, DISTORTION_NAME: 0.1, UNKNOWN_NAME: -100.0},
}
AGREEMENT = "agreement"  # links by the posteriors of both directions, instead of a heuristic over two alignments
THRESHOLD = "threshold"  # links by attention weights alone, instead of a heuristic over two alignments
HEURISTICS = ("intersection", "union", "grow", "grow-diag", "grow-diag-and", "grow-diag-final", "grow-diag-final-and")
ALIGNER_FILE = "aligner.json"  # identifies the folder of a saved alignment model
MAX_LENGTH = 1000  # longer sentences are aligned in parts, because memory grows with the product of the lengths


class AlignerSettings(Settings):
    """How word alignment is learned and decided."""

    ibm1: int = setting(5, "iterations of IBM Model 1", ge=0)
    ibm2: int = setting(0, "iterations of IBM Model 2", ge=0)
    diagonal: int = setting(0, "iterations of IBM Model 2 with the diagonal parametrisation of fast_align", ge=0)
    hmm: int = setting(5, "iterations of the HMM", ge=0)
    agree: bool = setting(True, "train both directions jointly to agree")
    null: float = setting(0.02, "probability that a word is aligned to NULL: it has no translation", gt=0, lt=1)
    estimate_null: bool = setting(True, "let the HMM estimate the probability of NULL, starting from `null`")
    lowercase: bool = setting(True, "ignore case")
    max_length: int = setting(
        100, "maximum sentence length in words for training; longer pairs are only aligned", ge=1, le=MAX_LENGTH
    )
    symmetrize: str = setting(AGREEMENT, f"{AGREEMENT}, or one of {', '.join(HEURISTICS)}")
    threshold: float = setting(0.5, "agreement: minimum geometric mean of the two posteriors of a link", ge=0, le=1)

    def check(self, section: str = "align") -> None:
        """Raise a UserError if the symmetrization does not exist, or if nothing is learned."""
        if not (self.ibm1 or self.ibm2 or self.diagonal or self.hmm):
            raise UserError(f"{section} has no iterations to learn from; raise {section}.ibm1 or {section}.hmm")
        check_names({"symmetrize": dict.fromkeys((AGREEMENT, *HEURISTICS))}, self, section)


_TEXTBOOK: dict[str, Any] = {
    "hmm": 0,
    "agree": False,
    "null": 0.05,
    "estimate_null": False,  # without agreement, more and more rare words would be aligned to NULL
    "symmetrize": "grow-diag-final-and",
}
# Methods of `dragoman align`: settings that differ from the defaults of AlignerSettings.
ALIGNMENT_METHODS: dict[str, dict[str, Any]] = {
    "ibm1": _TEXTBOOK,
    "ibm2": {**_TEXTBOOK, "ibm2": 5},
    "diagonal": {**_TEXTBOOK, "diagonal": 5},
    "hmm": {**_TEXTBOOK, "hmm": 5, "null": 0.1},
    "joint-hmm": {},
}


class LinkSettings(Settings):
    """How links are derived from attention weights, or from the stored alignments of two directions."""

    symmetrize: str = setting("grow-diag-final-and", f"one of {', '.join(HEURISTICS)}; for attention, {THRESHOLD}")
    threshold: float = setting(0.3, f"{THRESHOLD}: minimum attention weight of a link", gt=0, le=1)

    def check(self, *, attention: bool) -> None:
        """Raise a UserError if the symmetrization does not exist; THRESHOLD is only for attention."""
        names = (*HEURISTICS, THRESHOLD) if attention else HEURISTICS
        check_names({"symmetrize": dict.fromkeys(names)}, self, "align")


class DecoderSettings(Settings):
    stack: int = setting(100, "maximum number of hypotheses per stack (one stack per number of covered words)", ge=1)
    beam: float = setting(8.0, "drop hypotheses whose score is below the best of their stack by more than this", gt=0)
    distortion_limit: int = setting(6, "maximum jump between two phrases in source words; -1: no limit", ge=-1)
    options: int = setting(20, "number of translations tried per source phrase", ge=1)


class SmtSettings(Settings):
    """A phrase-based system, whose score is a weighted sum of features.

    The class variables and properties are those of all kinds of models (models/base.py).
    """

    kind: Literal["smt"] = "smt"
    align: AlignerSettings = setting(
        AlignerSettings(null=0.1, estimate_null=False, threshold=0.3),
        "word alignment, from which phrases are extracted",
    )
    max_phrase: int = setting(7, "maximum length of a phrase in words", ge=1, le=20)
    phrase_options: int = setting(30, "number of translations kept per source phrase, the likeliest", ge=1)
    order: int = setting(5, "order of the n-gram language model", ge=1, le=10)
    prune: Annotated[tuple[int, ...], AsTuple] = setting(
        (), "highest count of n-grams to drop, per order; the last applies to all higher orders"
    )
    lm_text: str | None = setting(None, "file with additional target-language text, one sentence per line")
    reordering: bool = setting(True, "lexicalized reordering: score the orientation of neighbouring phrases")
    decoder: DecoderSettings = setting(DecoderSettings(), "limits of the decoder's search")
    preset: str = setting("log-linear", "weights before tuning: of all features, or p(source | target) p(target)")
    weights: dict[str, float] = setting({}, "weights of single features, which replace those of the preset")
    tuning_rounds: int = setting(4, "rounds of batch MIRA on the dev set; 0: no tuning", ge=0)
    n_best: int = setting(100, "number of translations per sentence that tuning learns from", ge=2)

    task: ClassVar[Literal["translate", "generate", "classify"]] = "translate"
    compiles: ClassVar[bool] = False
    layout: ClassVar[str] = "padded"
    length_limit: ClassVar[int | None] = None
    aligns: ClassVar[bool] = True
    source_features: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def registries(cls) -> Registries:
        """Return, for each setting whose value is the name of a registry entry, the registry."""
        return {"preset": PRESETS}

    def check(self) -> None:
        """Raise a UserError for names that do not exist."""
        check_names(self.registries(), self, "model")
        self.align.check("model.align")
        if any(count < 0 for count in self.prune):
            raise UserError(f"model.prune={list(self.prune)} has a negative count; 0 keeps all n-grams of an order")
        for name in self.weights:
            if name not in FEATURE_NAMES:
                raise UserError(f"model.weights: there is no feature {name!r}; there are {', '.join(FEATURE_NAMES)}")

    def resolve_paths(self, folder: Path) -> SmtSettings:
        """Return the settings with an absolute `lm_text`, looked up in the working directory, then in `folder`."""
        return self.model_copy(update={"lm_text": resolve_path(self.lm_text, folder)}) if self.lm_text else self

    def find_unused(self) -> set[str]:
        return set() if self.tuning_rounds else {"n_best"}

    def get_effective_settings(self) -> dict[str, Any]:
        """Return the settings that have an effect, for a model card; those of `align` and `decoder` one by one."""
        values: dict[str, Any] = self.model_dump(mode="json", exclude=self.find_unused())
        for section in ("align", "decoder"):
            values |= {f"{section}.{name}": value for name, value in values.pop(section).items()}
        return {name: value for name, value in values.items() if value not in (None, [], {})}

    def initial_weights(self) -> list[float]:
        """Return the weights before tuning, in the order of FEATURE_NAMES."""
        weights = {**dict.fromkeys(FEATURE_NAMES, 0.0), **PRESETS[self.preset]}
        if not self.reordering:
            weights |= dict.fromkeys(REORDERING_NAMES, 0.0)
        return list((weights | self.weights).values())
