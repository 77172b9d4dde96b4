"""Tests of reading settings: valid values are used, and invalid recipes raise a UserError with a clear message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dragoman.config.settings import (
    Settings,
    TrainSettings,
    apply_override,
    format_settings,
    get_entry,
    parse_settings,
    parse_yaml,
    suggest_name,
)
from dragoman.data.corpus import SPLITS, CorpusSettings, DataSettings
from dragoman.data.tokenizers import TokenizerSettings
from dragoman.decoding.methods import SearchSettings
from dragoman.errors import UserError
from dragoman.models.registry import NeuralModelSettings
from dragoman.models.single_sequence import RnnClassifierSettings
from dragoman.models.transformer import TransformerSettings
from dragoman.recipe import Recipe, check_model, read_recipe
from toy_sections import settings_of

SECTIONS: dict[str, type[Settings]] = {
    "": Recipe,
    "data": DataSettings,
    "data.train.0": CorpusSettings,
    "tokenizer": TokenizerSettings,
    "train": TrainSettings,
    "search": SearchSettings,
    "model": TransformerSettings,
}
EVERY = [(section, name) for section, record in SECTIONS.items() for name in record.model_fields]


def recipe_of(text: str, *overrides: str) -> Recipe:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return read_recipe(path, overrides)


def error_message(text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        recipe_of(text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def nest(path: str, value: Any) -> Any:
    for name in reversed(path.split(".") if path else []):
        value = [value] if name == "0" else {name: value}
    return value


def misspell(name: str) -> str:
    return name[:-1] + ("x" if name[-1] != "x" else "y") if len(name) > 5 else name + "_"


def record_of(section: str, values: dict[str, Any]) -> Any:
    return settings_of(values) if section == "model" else parse_settings(Recipe, nest(section, values))


def test_all_settings_are_covered() -> None:
    def inside(record: type[Settings]) -> Iterator[type[Settings]]:
        yield record
        for field in record.model_fields.values():
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(kind, type) and issubclass(kind, Settings):
                    yield from inside(kind)

    assert {*inside(Recipe), *(type(section) for _, section in Recipe())} == set(SECTIONS.values())


@pytest.mark.parametrize(("section", "name"), EVERY)
def test_for_an_unknown_name_the_nearest_is_suggested(section: str, name: str) -> None:
    wrong = misspell(name)
    with pytest.raises(UserError) as caught:
        record_of(section, {wrong: 1})
    message = str(caught.value)
    assert f"there is no setting {'.'.join(filter(None, [section, wrong]))!r}" in message
    assert f"did you mean {name!r}?" in message
    assert ", ".join(SECTIONS[section].model_fields) in message


@pytest.mark.parametrize("name", ["bool", "boolean", "literal[x", "function-a", "tuple[a", "0", "", "a.b"])
@pytest.mark.parametrize("section", SECTIONS)
def test_names_that_are_numbers_or_symbols_are_refused(section: str, name: str) -> None:
    with pytest.raises(UserError, match="there is no setting"):
        record_of(section, {name: 1})


@pytest.mark.parametrize(("section", "name"), [(s, n) for s, n in EVERY if s])
def test_a_value_of_the_wrong_type_is_refused_by_name(section: str, name: str) -> None:
    wrong = ["such"] if name in ("where", "optimizer_options") else {"no": "such"}  # those two are dictionaries
    with pytest.raises(UserError) as caught:
        record_of(section, {name: wrong})
    message = str(caught.value)
    assert f"{section}.{name}" in message
    if name in ("train", "dev", "test"):
        assert "there is no setting" in message  # that would be a corpus
    elif name != "kind":
        assert message.startswith(f"{section}.{name}: should be ")
        assert message.endswith(f"got {wrong}")
        assert "dictionary" not in message


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ("train.steps=-1", "greater than or equal to 0"),
        ("train.steps=1.5", "a valid integer"),
        ("train.steps=true", "a valid integer"),
        ("train.steps=many", "a valid integer"),
        ("train.steps=", "a valid integer, got None"),
        ("train.lr=0", "greater than 0"),
        ("train.lr=fast", "a valid number"),
        ("train.lr=true", "a valid number"),
        ("train.lr=.inf", "a finite number"),
        ("train.lr=1e999", "a finite number"),
        ("train.lr=.nan", "a finite number"),
        ("train.label_smoothing=1", "less than 1"),
        ("train.label_smoothing=-0.1", "greater than or equal to 0"),
        ("train.tokens=63", "greater than or equal to 64"),
        ("train.accumulate=0", "greater than or equal to 1"),
        ("train.precision=fp8", "'auto', 'float32' or 'bf16', got 'fp8'"),
        ("train.compile=maybe", "'auto' or a valid boolean, got 'maybe'"),
        ("train.optimizer=1", "a valid string, got 1"),
        ("train.freeze=encoder", "a list, got 'encoder'"),
        ("train.seed=-1", "greater than or equal to 0"),
        ("train.seed=4294967296", "less than 4294967296"),
        ("train=3", "settings written as name: value, got 3"),
        ("data=[1]", "settings written as name: value, got [1]"),
        ("data.train=[[1]]", "settings written as name: value, got [1]"),
        ("data.train={tsv: a, columns: [0]}", "columns.1: should be set, got (0,)"),
        ("data.train={tsv: a, columns: [0, -1]}", "greater than or equal to 0, got -1"),
        ("data.train={tsv: a, weight: 0}", "greater than 0"),
        ("tokenizer.size=7", "greater than or equal to 8"),
        ("tokenizer.joint=2", "a valid boolean"),
        ("search.beam=0", "greater than or equal to 1"),
        ("search.length_penalty=-1", "greater than or equal to 0"),
        ("model=3", "settings written as name: value, got 3"),
    ],
)
def test_an_invalid_value_is_refused_with_what_was_expected(item: str, wanted: str) -> None:
    message = error_message("train: {steps: 5}", item)
    assert item.partition("=")[0] in message
    assert wanted in message


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("train.lr=1e-3", 1e-3),
        ("train.lr=1E-3", 1e-3),
        ("train.lr=1.5e-3", 1.5e-3),
        ("train.lr=.5e-3", 5e-4),
        ("train.lr=1.e-3", 1e-3),
        ("train.lr=1e+1", 10.0),
        ("train.lr=1", 1.0),
        ("train.lr=0.25", 0.25),
        ("train.steps=1_000", 1000),
        ("train.compile=true", True),
        ("train.compile=auto", "auto"),
        ("train.freeze=[encoder.*, 1e5x]", ("encoder.*", "1e5x")),
        ("train.optimizer='1e-3'", "1e-3"),
        ("train.device=cuda:1", "cuda:1"),
    ],
)
def test_overrides_take_precedence(item: str, value: object) -> None:
    name = item.partition("=")[0].removeprefix("train.")
    found = getattr(recipe_of("train: {lr: 0.125, steps: 7}", item).train, name)
    assert found == value
    assert type(found) is type(value)


def test_overrides_change_nothing_else() -> None:
    text = "train: {steps: 7, lr: 0.5}\nmodel: {layers: 2}\n"
    recipe = recipe_of(text, "train.lr=0.25", "model.width=64", "search.beam=2", "train.lr=0.125")
    assert recipe.train == TrainSettings(steps=7, lr=0.125)
    assert recipe.model == TransformerSettings(layers=2, width=64)
    assert recipe.search == SearchSettings(beam=2)
    assert recipe.tokenizer == TokenizerSettings()


def test_an_override_fills_an_empty_section() -> None:
    assert recipe_of("train:\nmodel: {}\n", "train.steps=3").train.steps == 3


@pytest.mark.parametrize("item", ["train.steps", "=3", "", "steps 3"])
def test_an_item_without_name_or_equals_sign_is_refused(item: str) -> None:
    assert repr(item) in error_message("train: {steps: 5}", item)


def test_an_error_in_an_override_names_the_override() -> None:
    good, bad = "train: {steps: 5}\n", "train: {stepz: 5}\n"
    assert "recipe.yaml with train.lr=abc: train.lr: " in error_message(good, "train.lr=abc")
    assert "recipe.yaml with data.train=[{source: a}]: data.train " in error_message(good, "data.train=[{source: a}]")
    assert "recipe.yaml: there is no setting 'train.stepz'" in error_message(bad, "train.lr=1e-3")
    assert "recipe.yaml: 'train' is set twice" in error_message(good + good, "train.lr=1e-3")


def test_an_override_inside_a_plain_value_is_refused() -> None:
    assert "'steps' is not a section; the recipe" in error_message("train: {steps: 5}", "train.steps.more=1")
    with pytest.raises(UserError, match=r"a=\[ line 1 is not valid YAML"):
        apply_override({}, "a=[")


def test_an_error_names_the_line() -> None:
    text = "data:\n  train:\n    - tsv: a\n      colums: [0, 1]\ntrain:\n  steps: 5\n  lr: slow\n"
    assert "recipe.yaml: there is no setting 'data.train.0.colums' (line 4)" in error_message(text)
    assert "train.lr (line 7): should be a valid number, got 'slow'" in error_message(text.replace("colums", "columns"))
    message = error_message(text.replace("colums", "columns"), "train.lr=slower")
    assert "train.lr: should" in message  # the line in the file is not to blame


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train:\n  steps: [1, 2\n", 3),
        ("train:\n\tsteps: 1\n", 2),
        ("a: 1\nb: 'x\n", 3),
        ("a: 1\n b: 2\n", 2),
        ("a: &x 1\nb: *y\n", 2),
        ("a: 1\n? [b]\n: 2\n", 2),
        ("a: 1\nb: !!python/object:os.system {}\n", 2),
        ("a: 1\nb: \x00\n", 2),
        ("a: 1\nb: 2\nc: \x07\n", 3),
        ("---\na: 1\n---\nb: 2\n", 3),
    ],
)
def test_invalid_yaml_is_refused_with_its_line(text: str, line: int) -> None:
    assert f"recipe.yaml line {line} is not valid YAML" in error_message(text)


@pytest.mark.parametrize(
    "text",
    [
        "!!int x",
        "!!bool x",
        "!!timestamp x",
        "!!float x",
        "!!binary é",
        "[" * 5000,
        "9" * 5000,
    ],
)
def test_values_that_cannot_be_read_are_refused(text: str) -> None:
    assert "is not valid YAML" in error_message(f"model: {text}\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "just words", "- a\n- list\n", "3", "null", "2024-01-01"])
def test_yaml_without_sections_is_refused(text: str) -> None:
    assert "is not a recipe" in error_message(text)


def test_a_repeated_key_is_refused() -> None:
    message = error_message("train:\n  steps: 5\nmodel: {}\ntrain:\n  lr: 0.5\n")
    assert "'train' is set twice, on lines 1 and 4" in message
    assert "'train.steps' is set twice, on lines 1 and 1" in error_message("train: {steps: 5, steps: 6}")


def test_aliases_may_be_repeated_and_recursive() -> None:
    assert recipe_of("train: &a {seed: 5}\nsearch: *a\n").search == SearchSettings(seed=5)
    assert "train.steps (line 1): should be a valid integer" in error_message("train: &a {steps: *a}")
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    assert "there is no setting 'a0'" in error_message(laughs)
    assert len(error_message(laughs.replace("a11:", "train:").replace("a0:", "seed:"))) < 10_000


TEXT = st.text(max_size=12)
SCALAR = (
    TEXT
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.none()
    | st.sampled_from(["1e-3", "auto", "0x1F", "1:30", "~", "2024-01-01", ".inf", "=", "<<", "!!int 3", "*a", "&a b"])
)
NAME = st.sampled_from([name for _, name in EVERY]) | TEXT | st.integers(0, 3)
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=4), max_leaves=12
)
SPELT = st.dictionaries(st.sampled_from(list(Recipe.model_fields)) | NAME, VALUE, max_size=4).map(
    lambda values: "".join(f"{key}: {value}\n" for key, value in values.items())
)
BROKEN = st.lists(
    st.sampled_from(["train", "data", "model", ":", " ", "\n", "\n  ", "- ", "{", "}", "[", "]", "'", '"', "&a ", "*a"])
    | st.sampled_from(["?", "|", ">", "!!", "#", ",", "\t", "\x85", "\ufeff", "\0", "%", "---", "<<", "steps", "1e5"])
    | TEXT,
    max_size=20,
).map("".join)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(SPELT | BROKEN)
def test_any_text_is_a_recipe_or_raises_a_user_error(text: str) -> None:
    """A recipe that is written and read again is the same; an error message is one line."""
    try:
        recipe = check_model(recipe_of(text.encode("utf-8", "replace").decode()))
    except UserError as error:
        assert_one_line(error)
        return
    written = format_settings(recipe)
    assert format_settings(check_model(parse_settings(Recipe, parse_yaml(written, "config.yaml")))) == written


def assert_one_line(error: UserError, culprit: str = "") -> None:
    assert culprit in str(error).strip()
    assert len(str(error).splitlines()) == 1


@settings(max_examples=200)
@given(VALUE, st.sampled_from(EVERY))
@example("corpus\x1e.tsv", ("data", "train"))  # a file name with a control character that ends a line
def test_any_value_is_accepted_or_raises_a_user_error(value: Any, where: tuple[str, str]) -> None:
    """An accepted value is also accepted after it was written and read; the message about another one names it."""
    section, name = where
    try:
        record = record_of(section, {name: value})
    except UserError as error:
        assert_one_line(error, culprit=section.split(".")[0] or name)
        return
    assert type(record).model_validate(record.model_dump()) == record


WORD = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["1e5", "1E-3", ".5e1", "yes", "null", "~", "1:30", "0x10", "2024-01-01", "\u2028", "\x85", "# digest: ", "a: b"]
)
NUMBER = st.floats(1e-300, 1e300)


@given(
    corpora=st.lists(
        st.builds(
            CorpusSettings,
            source=WORD,
            keys=st.tuples(WORD, WORD),
            weight=st.floats(1e-3, 1000),
            seed=st.integers(0, 2**32 - 1),
        ),
        max_size=3,
    ),
    freeze=st.lists(WORD, max_size=3),
    optimizer=WORD,
    lr=NUMBER,
    model=st.builds(TransformerSettings, norm=WORD, dropout=st.floats(0, 0.9))
    | st.builds(RnnClassifierSettings, pool=WORD, tied=st.booleans()),
)
def test_written_values_are_read_back(
    corpora: list[CorpusSettings], freeze: list[str], optimizer: str, lr: float, model: NeuralModelSettings
) -> None:
    recipe = Recipe(
        data=DataSettings(train=tuple(corpora)),
        train=TrainSettings(freeze=tuple(freeze), optimizer=optimizer, lr=lr),
        model=model,
    )
    assert parse_settings(Recipe, parse_yaml(format_settings(recipe), "config.yaml")) == recipe


def test_an_empty_name_is_not_suggested() -> None:
    assert suggest_name("zzzz", ["", "abc"]) == ""


@pytest.mark.parametrize("text", ["1:30", "010", "0o17", "08", "0_1", "no", "Yes", "on", "2026-01-01", "=", "12e"])
def test_text_that_yaml_1_1_does_not_read_as_text(text: str) -> None:
    assert recipe_of(f"data: {{train: {{phrasebook: 5, tag: '{text}'}}}}").data.train[0].tag == text
    assert recipe_of(f"data: {{train: {{phrasebook: 5, tag: {text}}}}}").data.train[0].tag == text
    assert f"got {text!r}" in error_message(f"train: {{steps: {text}}}")


def test_values_of_where_are_compared_as_text() -> None:
    text = "data: {train: {tsv: f, where: {0: no, on: off, 2: true, 3: 7}}}"
    assert recipe_of(text).data.train[0].where == {"0": "no", "on": "off", "2": "true", "3": "7"}


@pytest.mark.parametrize("word", ["no", "off", "No", "OFF", "false", "False"])
def test_yes_and_no_are_read_as_booleans(word: str) -> None:
    recipe = recipe_of(f"train: {{compile: {word}}}\ndata: {{both_ways: {word}}}\nmodel: {{residual: {word}}}")
    assert recipe.train.compile is recipe.data.both_ways is False
    assert check_model(recipe).model.residual is False
    assert recipe_of("train: {}", "train.compile=yes", "data.both_ways=on").train.compile is True


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2E5", 2e5), (".5", 0.5), ("1_0.5", 10.5), ("3", 3.0)])
def test_numbers(text: str, value: float) -> None:
    assert recipe_of(f"train: {{lr: {text}}}").train.lr == value


@pytest.mark.parametrize(("text", "value"), [("1_000", 1000), ("0x10", 16), ("+7", 7), ("0b11", 3)])
def test_whole_numbers(text: str, value: int) -> None:
    assert recipe_of(f"train: {{steps: {text}}}").train.steps == value


def test_every_setting_is_written() -> None:
    recipe = check_model(recipe_of("data: {train: {phrasebook: 5}}\nmodel: {kind: transformer}\n"))
    values = parse_yaml(format_settings(recipe), "config.yaml")
    for section, record in SECTIONS.items():
        spot = values
        for name in section.split(".") if section else []:
            spot = spot[int(name)] if name == "0" else spot[name]
        assert set(spot) == set(record.model_fields)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainSettings().steps = 5


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize(
    ("given", "count"), [("{tsv: a}", 1), ("[{tsv: a}]", 1), ("[{tsv: a}, {tsv: a}]", 2), ("[]", 0)]
)
def test_one_corpus_or_several(split: str, given: str, count: int) -> None:
    corpora = getattr(recipe_of(f"data: {{{split}: {given}}}").data, split)
    assert [Path(corpus.tsv).name for corpus in corpora] == ["a"] * count


@pytest.mark.parametrize(
    "corpus",
    [
        "{}",
        "{source: a}",
        "{target: a}",
        "{source: a, target: b, tsv: c}",
        "{tsv: a, jsonl: b}",
        "{tsv: a, target: b}",
        "{phrasebook: 0}",
        "{phrasebook: 5, tsv: a}",
        "{weight: 2.0}",
    ],
)
@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_corpus_must_be_of_exactly_one_kind(corpus: str, split: str) -> None:
    assert f"data.{split} needs one of" in error_message(f"data: {{{split}: {corpus}}}")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("my.tsv", "{tsv: my.tsv}"),
        ("[my.tsv, other.tsv]", "{tsv: my.tsv}"),
        ("my.jsonl.gz", "{jsonl: my.jsonl.gz}"),
    ],
)
@pytest.mark.parametrize("split", SPLITS)
def test_a_plain_file_name_is_refused_as_a_corpus(given: str, wanted: str, split: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_settings(Recipe, parse_yaml(f"data: {{{split}: {given}}}", "recipe"))
    assert f"data.{split}: should be a corpus, such as {wanted} or {{source: FILE, target: FILE}}, got" in str(
        caught.value
    )


def test_paths_are_resolved_in_the_working_directory_or_next_to_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    for name in ("here/both.en", "there/both.en", "there/beside.de", "home.tsv"):
        (tmp_path / name).write_text("a\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = tmp_path / "there" / "recipe.yaml"
    recipe.write_text(
        "data:\n  train: [{source: both.en, target: beside.de}, {tsv: ~/home.tsv}]\n  dev:\n"
        f"  - {{jsonl: nowhere.jsonl}}\n  - {{tsv: {tmp_path}/home.tsv}}\n"
        "  - {tsv: ~nobody-at-all/x}\n  - {phrasebook: 3}\n"
    )
    data = read_recipe(recipe).data
    assert data.train[0].source == str(tmp_path / "here/both.en")
    assert data.train[0].target == str(tmp_path / "there/beside.de")
    assert data.train[1].tsv == data.dev[1].tsv == str(tmp_path / "home.tsv")
    assert data.dev[0].jsonl == str(tmp_path / "here/nowhere.jsonl")  # to be complained about when it is read
    assert data.dev[2].tsv == str(tmp_path / "here/~nobody-at-all/x")
    assert data.dev[3] == CorpusSettings(phrasebook=3)


@pytest.mark.parametrize("name", ["x" * 5000, '"a\\0b"', "'/dev/null/x'"])
def test_invalid_paths_are_kept_for_the_reader_to_report(name: str) -> None:
    assert recipe_of(f"data: {{train: {{tsv: {name}}}}}").data.train[0].tsv


def test_a_recipe_file_that_cannot_be_read(tmp_path: Path) -> None:
    def fault(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_recipe(path)
        assert repr(str(path)) in str(caught.value)
        return str(caught.value)

    assert "there is no recipe file" in fault(tmp_path / "none.yaml")
    assert "is a folder" in fault(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a: 1\nb: 2\nc: ü\n".encode("latin-1"))
    assert "not UTF-8 text (line 3)" in fault(tmp_path / "latin.yaml")
    assert "cannot be read" in fault(tmp_path / "latin.yaml" / "inside.yaml")
    assert "cannot be read" in fault(tmp_path / ("x" * 5000))


@given(st.dictionaries(TEXT, st.integers(), max_size=5), TEXT)
def test_pick_returns_the_entry_or_lists_all_names(registry: dict[str, int], name: str) -> None:
    if name in registry:
        assert get_entry(registry, name, "dish") == registry[name]
        return
    with pytest.raises(UserError) as caught:
        get_entry(registry, name, "dish")
    message = f"there is no dish called {name!r}{suggest_name(name, registry)} (there are: {', '.join(registry)})"
    assert str(caught.value) == str(UserError(message))  # which escapes control characters


@given(st.lists(TEXT, max_size=5), TEXT)
def test_suggest_name_returns_a_name_or_nothing(registry: list[str], name: str) -> None:
    assert suggest_name(name, registry) in {"", *(f"; did you mean {entry!r}?" for entry in registry)}
    if name and name in registry:
        assert suggest_name(name, registry) == f"; did you mean {name!r}?"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"steps": 1}, "1 step"),
        ({"steps": 0, "minutes": 1.0}, "1 minute"),
        ({"steps": 2, "epochs": 1}, "2 steps or 1 epoch"),
        ({"steps": 0, "minutes": 0.5}, "0.5 minutes"),
    ],
)
def test_limits_in_words(given: dict[str, Any], text: str) -> None:
    assert TrainSettings(**given).limits_text == text
