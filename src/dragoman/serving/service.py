"""What all protocols call: translate, stream, detect languages, and choose models.

Nothing here knows HTTP. Methods block, so handlers call them in threads (workers.py); `cancelled` is set when nobody
waits for the result any more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Annotated, NamedTuple
from weakref import ref

from pydantic import AfterValidator

from dragoman.documents.document import Unit
from dragoman.documents.html import read_fragment
from dragoman.inference.constraints import Glossary
from dragoman.inference.document_translation import TranslatedUnit, translate_units
from dragoman.inference.language_detection import detect_language
from dragoman.serving.errors import RequestCancelled, RequestError
from dragoman.serving.language_index import LanguageIndex, Route, parse_code
from dragoman.serving.model_pool import ModelPool, ServedModel
from dragoman.serving.settings import ServerSettings
from dragoman.serving.text_lines import LineLayout
from dragoman.types import Hypothesis, Line

UNITS_PER_STEP = 64  # of a document: translated together; then progress is reported
AUTO = "auto"  # the source language is to be detected
SourceCode = Annotated[str, AfterValidator(lambda code: code or AUTO)]  # in requests, where "" means the same
MAX_ENTRIES = 1000  # terms and sentences of context in a request: each takes more memory than its characters
CERTAIN = 0.95  # probability with which a text is in the target language, if it is not translated for that reason
ALREADY_TRANSLATED = ("not translated: already in the target language",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRequest:
    """What to translate, with which model, and how."""

    texts: list[str]
    source: str = AUTO  # language of the texts
    target: str = ""  # "": the only target language of the model
    model: str = ""  # "": the first model with these languages
    beam: int | None = None
    nbest: int = 1
    align: bool = False
    prefix: str = ""  # each translation starts with it
    terms: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    glossary: Glossary | None = None
    context: tuple[str, ...] = ()  # sentences before the texts, oldest first
    markup: str = "text"  # text, html or xml: whether the texts have tags
    ignore_tags: tuple[str, ...] = ()  # elements that are not translated
    splitting_tags: tuple[str, ...] = ()  # elements of XML at which a sentence ends
    is_strict: bool = True  # refuse XML that is not well-formed; otherwise only what is a tag is read as one
    optional_context: tuple[str, ...] = ()  # as `context`, for models that read it; others ignore it
    keep_breaks: bool = True  # whether line breaks separate what is translated; otherwise they become spaces
    split_sentences: bool = False  # of texts without tags; with tags, sentences are always split
    copy_wordless: bool = False  # copy what has no words, as with tags, unless the languages of the model are unknown

    @property
    def characters(self) -> int:
        """The number of characters of all texts and of the prefix: what a key is charged for."""
        return sum(map(len, self.texts)) + len(self.prefix)

    @property
    def entries(self) -> tuple[str, ...]:
        """The terms and the context, which are limited but not charged."""
        return (*self.terms, *self.avoid, *self.context, *self.optional_context)


@dataclass(frozen=True, slots=True)
class Detection:
    """The language of a text, with a confidence between 0 and 1."""

    language: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of one text: the n best hypotheses, best first."""

    hypotheses: list[Hypothesis]
    source: str
    target: str
    model: str
    detection: Detection | None = None  # if the request asked for it

    @property
    def text(self) -> str:
        return self.hypotheses[0].text


NbestLists = list[list[Hypothesis]]


class LinesToTranslate(NamedTuple):
    """Lines that a model is to translate, and how."""

    lines: list[Line]
    model: ServedModel
    may_be_refused: bool  # has constraints or context, for which an engine or a model may refuse the whole call
    tag: str
    beam: int | None
    nbest: int
    align: bool

    @property
    def call_key(self) -> Hashable:
        """The key of lines that one call can translate."""
        return self[1:]


# The translation of a request: yields lines, is sent their n-best lists, returns the translations.
Plan = Generator[LinesToTranslate, NbestLists | None, list[Translation]]
RouteChoice = tuple[Route | None, Detection | None]  # what Service.choose_route returns
LeasedModels = tuple[list[RouteChoice], dict[str, ServedModel]]  # the choices for texts, and models by name


class Service:
    """The models, and what can be done with them."""

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        self.pool, self.settings = pool, settings
        self.indexed: tuple[LanguageIndex, list[ref[ServedModel]]] = (LanguageIndex({}), [])

    @property
    def languages(self) -> LanguageIndex:
        """The directions of the models that are loaded now."""
        models = list(self.pool.models.values())
        index, indexed = self.indexed
        if [model() for model in indexed] != models:
            index = LanguageIndex({model.name: model.translator.directions for model in models})
            self.indexed = index, [ref(model) for model in models]
        return index

    @contextmanager
    def lease_models(self, texts: Sequence[str], request: TranslationRequest) -> Iterator[LeasedModels]:
        """Yield what `choose_route` returns for each text, and the models of these routes, which stay usable.

        If a model is removed or replaced between the choice and its use, which may have other directions then, the
        choice is made again.
        """
        while True:
            known = dict(self.pool.models)
            choices = [self.choose_route(text, request) for text in texts]
            names = dict.fromkeys(route.model for route, _ in choices if route)
            with ExitStack() as leases:
                try:
                    models = {name: leases.enter_context(self.pool.lease(name)) for name in names}
                except RequestError:
                    continue
                if all(model is known.get(name) for name, model in models.items()):
                    yield choices, models
                    return

    def translate(self, request: TranslationRequest, cancelled: Event) -> list[Translation]:
        """Return the translation of each text of a request that was checked, in order."""
        [found] = self.translate_together([request], cancelled)
        if isinstance(found, Exception):
            raise found
        return found

    def translate_together(
        self, requests: Sequence[TranslationRequest], cancelled: Event
    ) -> list[list[Translation] | Exception]:
        """Return what `translate` returns for each request, or the exception that it raises.

        The lines of all requests that a model translates in the same way are translated by one call.
        """
        plans = [self.plan(request, cancelled) for request in requests]
        found = [resume(plan, None) for plan in plans]
        while True:
            groups: dict[Hashable, list[int]] = {}
            for number, each in enumerate(found):
                if isinstance(each, LinesToTranslate):
                    groups.setdefault(each.call_key, []).append(number)
            if not groups:
                return found  # type: ignore[return-value]
            for numbers in groups.values():
                nbest_lists = translate_lines([found[number] for number in numbers], cancelled)  # type: ignore[misc]
                for number, nbest in zip(numbers, nbest_lists, strict=True):
                    found[number] = resume(plans[number], nbest)

    def plan(self, request: TranslationRequest, cancelled: Event) -> Plan:
        """Yield the lines of a request, once for each route; return the translations.

        Texts with tags are translated inside, since their parts may be translated more than once.
        """
        translations: dict[int, Translation] = {}
        groups: dict[Route, list[int]] = {}
        with self.lease_models(request.texts, request) as (choices, models):
            for index, (route, detection) in enumerate(choices):
                if route:
                    groups.setdefault(route, []).append(index)
                else:
                    translations[index] = self.copy_text(request.texts[index], request, detection)
            for route, indices in groups.items():
                texts, model = [request.texts[index] for index in indices], models[route.model]
                if request.markup == "text":
                    nbest_lists = yield from self.plan_texts(texts, model, route, request)
                else:
                    nbest_lists = self.translate_marked(texts, model, route, request, cancelled)
                for index, nbest in zip(indices, nbest_lists, strict=True):
                    source, target = route.direction.source, route.direction.target
                    translations[index] = Translation(nbest, source, target, route.model, choices[index][1])
        return [translations[index] for index in range(len(request.texts))]

    def plan_texts(
        self, texts: list[str], model: ServedModel, route: Route, request: TranslationRequest
    ) -> Generator[LinesToTranslate, NbestLists, NbestLists]:
        """Yield the lines of texts without tags; return the n best translations of each text."""
        layouts = [split_text(text, request, route) for text in texts]
        beam = request.beam or (request.nbest if request.nbest > model.translator.recipe.search.beam else None)
        context = model.translator.choose_context(None)
        lines = [line for layout in layouts for line in self.make_lines(layout.lines, request, context)]
        may_be_refused = any(line.terms or line.avoid or line.prefix or line.context for line in lines)
        nbest_lists = iter(
            (
                yield LinesToTranslate(
                    lines, model, may_be_refused, route.direction.tag, beam, request.nbest, request.align
                )
            )
        )
        return [layout.join_nbest([next(nbest_lists) for _ in layout.lines], request.nbest) for layout in layouts]

    def translate_marked(
        self, texts: list[str], model: ServedModel, route: Route, request: TranslationRequest, cancelled: Event
    ) -> list[list[Hypothesis]]:
        """Return the translation of each text with tags, which are placed by the alignment. There are no others."""
        documents = [
            read_fragment(
                text,
                request.markup,
                request.ignore_tags,
                request.splitting_tags,
                keep_breaks=request.keep_breaks,
                is_strict=request.is_strict,
            )
            for text in texts
        ]
        units = [unit for document in documents for unit in document.units]
        translated = iter(self.translate_units(units, model, route, request, cancelled))
        nbest_lists = []
        for document in documents:
            parts = [next(translated) for _ in document.units]
            warnings = tuple(dict.fromkeys(warning for part in parts for warning in part.warnings))
            text = document.write_text([part.content for part in parts])
            nbest_lists.append([Hypothesis(text, warnings=warnings)])
        return nbest_lists

    def translate_units(
        self,
        units: Sequence[Unit],
        model: ServedModel,
        route: Route,
        request: TranslationRequest,
        cancelled: Event,
        report: Callable[[int], None] = lambda _done: None,
    ) -> list[TranslatedUnit]:
        """Return the translations of the units of a document; `report` is called with the number of finished ones."""
        translated: list[TranslatedUnit] = []
        translator = model.bind(cancelled)
        options = translator.make_options(beam=request.beam, tag=route.direction.tag)
        step = len(units) if options.context else UNITS_PER_STEP  # context is that of the units of one call
        for start in range(0, len(units), max(step, 1)):
            if cancelled.is_set():
                raise RequestCancelled

            def report_step(done: int, _total: int, start: int = start) -> None:
                report(start + done)

            part = units[start : start + step]
            translated += translate_units(translator, [part], options, glossary=request.glossary, progress=report_step)
        return translated

    def stream(self, request: TranslationRequest, cancelled: Event) -> Generator[str, None, Translation]:
        """Yield the translation of one text in parts, each as soon as it is final; return the translation."""
        with self.lease_models(request.texts, request) as ([(route, detection)], models):
            [text] = request.texts
            if route is None:
                yield text
                return self.copy_text(text, request, detection)
            model = models[route.model]
            if request.markup == "text":
                nbest = yield from self.stream_text(text, model, route, request, cancelled)
            else:
                [nbest] = self.translate_marked([text], model, route, request, cancelled)
                yield nbest[0].text
            return Translation(nbest, route.direction.source, route.direction.target, route.model, detection)

    def stream_text(
        self, text: str, model: ServedModel, route: Route, request: TranslationRequest, cancelled: Event
    ) -> Generator[str, None, list[Hypothesis]]:
        """Yield the translation of a text without tags in parts; return its only hypothesis."""
        layout, parts = split_text(text, request, route), list[list[Hypothesis]]()
        translator = model.bind(cancelled)
        options = translator.make_options(beam=request.beam, align=request.align, tag=route.direction.tag)
        for gap, line in zip(layout.gaps, self.make_lines(layout.lines, request, options.context), strict=False):
            if gap:
                yield gap
            parts.append([(yield from translator.stream_line(line, options))])
        if layout.gaps[-1]:
            yield layout.gaps[-1]
        return layout.join_nbest(parts, 1)

    def check(self, request: TranslationRequest) -> None:
        """Raise a RequestError for a request that is larger than the settings allow. Handlers call it at first."""
        settings, entries = self.settings, request.entries
        characters = request.characters + sum(map(len, entries))
        problem = ""
        if characters > settings.max_characters:
            problem = f"the request has {characters:,} characters, and {settings.max_characters:,} are allowed"
        elif len(request.texts) > settings.max_texts:
            problem = f"the request has {len(request.texts):,} texts, and {settings.max_texts:,} are allowed"
        if problem:
            raise RequestError(413, "too_long", problem)
        for name, value in (("nbest", request.nbest), ("beam", request.beam or 1)):
            if value > settings.max_nbest:
                raise RequestError(400, "too_many", f"{name}: should be at most {settings.max_nbest}")
        if len(entries) > MAX_ENTRIES:
            message = f"the request has {len(entries):,} terms and sentences of context; give {MAX_ENTRIES:,} at most"
            raise RequestError(400, "too_many", message)

    def select_context(self, text: str) -> tuple[str, ...]:
        """Return the last lines of an optional context: as many as the models read, so that no others are counted."""
        count = max((model.translator.choose_context(None) for model in list(self.pool.models.values())), default=0)
        return tuple(text.split("\n")[-count:]) if count and text.strip() else ()

    def choose_route(self, text: str, request: TranslationRequest) -> RouteChoice:
        """Return the model and direction for a text, and its language if that had to be detected.

        There is no route for a text that is already in the target language, as detected or as the request says, and
        that no model rewrites in it.
        """
        index, model = self.languages, request.model
        if model not in index.tables:
            raise RequestError(404, "unknown_model", f"there is no model {model!r}; GET /api/models lists them")
        source = "" if request.source == AUTO else parse_code(request.source, "source")
        target = parse_code(request.target, "target")
        if request.source != AUTO:
            return index.find_route_unless_same(source, target, model), None
        target = index.match_target(target, model)
        sources = index.list_sources(target, model)
        known = [source for source in sources if source]
        ranked = self.rank_languages(text, tuple(dict.fromkeys([*known, *([target] if target else [])])))
        best = ranked[0] if ranked else None
        if best and best.language not in known and best.confidence >= CERTAIN:
            return None, best
        detection = next((found for found in ranked if found.language in known), None)
        return index.find_route(detection.language if detection else "", target, model), detection

    def detect(self, text: str) -> list[Detection]:
        """Return the languages of the models, best first, with the probability that the text is in each."""
        return self.rank_languages(text, tuple(self.languages.list_codes()))

    def rank_languages(self, text: str, candidates: tuple[str, ...]) -> list[Detection]:
        """Return the candidates as `detect` does; none if there are none."""
        found = detect_language(text, candidates) if candidates else []
        return [Detection(language, probability) for language, probability in found]

    def copy_text(self, text: str, request: TranslationRequest, detection: Detection | None) -> Translation:
        """Return a text that is already in the target language as its own translation."""
        code = detection.language if detection else parse_code(request.source, "source")
        return Translation([Hypothesis(text, warnings=ALREADY_TRANSLATED)], code, code, "", detection)

    def make_lines(self, texts: Sequence[str], request: TranslationRequest, context: int) -> list[Line]:
        """Return the lines of one text. The forced prefix and the unconditional terms belong to its first line.

        `context` is the number of previous lines that the model reads before each line.
        """
        lines = []
        previous = (*request.context, *request.optional_context, *texts)
        first = len(previous) - len(texts)
        for number, text in enumerate(texts):
            end = first + number
            # All lines share one tuple, since copies would take memory. A model without context refuses a full one.
            before = previous[max(end - context, 0) : end] if context else request.context
            terms, prefix = (request.terms, request.prefix) if number == 0 else ((), "")
            line = Line(text, terms=terms, avoid=request.avoid, prefix=prefix, context=before)
            lines.append(request.glossary.add_terms(line) if request.glossary else line)
        return lines


def resume(plan: Plan, nbest_lists: NbestLists | Exception | None) -> LinesToTranslate | list[Translation] | Exception:
    """Resume a plan with the translations of its lines; return its next lines, or what it returns or raises."""
    try:
        return plan.throw(nbest_lists) if isinstance(nbest_lists, Exception) else plan.send(nbest_lists)
    except StopIteration as end:
        result: list[Translation] = end.value
        return result
    except Exception as error:
        return error
    finally:
        del plan, nbest_lists  # the traceback of an exception has this frame, which would refer to the exception


def translate_lines(calls: Sequence[LinesToTranslate], cancelled: Event) -> Sequence[NbestLists | Exception]:
    """Return the n best translations of the lines of each call, all with the same key.

    If that fails, translate those of each call alone, and return the exception where that fails again.
    """
    first = calls[0]
    try:
        translator = first.model.bind(cancelled)
        options = translator.make_options(beam=first.beam, count=first.nbest, align=first.align, tag=first.tag)
        nbest_lists = iter(translator.translate_nbest([line for call in calls for line in call.lines], options))
    except Exception as error:
        return [error] if len(calls) == 1 else [translate_lines([call], cancelled)[0] for call in calls]
    return [[next(nbest_lists) for _ in call.lines] for call in calls]


def split_text(text: str, request: TranslationRequest, route: Route) -> LineLayout:
    """Return the parts of a text without tags that a model translates one by one, and what is between."""
    are_known = bool(route.direction.source and route.direction.target)  # others may well translate numbers
    return LineLayout.split(
        text,
        keep_breaks=request.keep_breaks,
        split_sentences=request.split_sentences,
        copy_wordless=request.copy_wordless and are_known,
    )
