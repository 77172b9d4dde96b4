"""Tags are input only, never split and never generated; reversed corpora equal corpora with swapped files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dragoman.augmentation.distillation import DistilSettings, distil
from dragoman.config.settings import parse_settings
from dragoman.data.corpus import CorpusSettings, fingerprint_corpus, read_pairs
from dragoman.data.stream import StreamPosition
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.inference.engines.ctranslate2 import CTranslate2Engine
from dragoman.inference.loading import load, open_run
from dragoman.inference.translator import Translator
from dragoman.models.base import AutoregressiveModel, collect_weights
from dragoman.models.registry import build_model
from dragoman.progress import Report
from dragoman.recipe import Recipe, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training.prepare import open_stream, prepare_data
from dragoman.types import BOS, Line, Pair
from toy_run import (
    WORDS,
    Call,
    assert_user_error,
    read_tensor_files,
    train_quietly,
    write_corpus,
    write_lines,
    write_recipe,
)
from toy_text import ALL, TEXT

QUIET = Report(quiet=True)
TAGS = ("de", "bt", "zh")


@given(st.sampled_from(sorted(ALL)), TEXT | st.sampled_from(["<de>", "de", " de bt", "<2de> ba"]))
def test_no_text_is_encoded_as_a_tag(kind: str, text: str) -> None:
    """Every line is tokenized as without tags; each word of a tag has one id, which nothing else has."""
    plain = Tokenizers(ALL[kind], ALL[kind])
    tagged = plain.with_tags(TAGS)
    assert tagged.source.encode(text) == plain.source.encode(text)
    assert all(i < plain.source.size for i in tagged.source.encode(text))
    ids = [tagged.tag_ids(tag) for tag in TAGS]
    assert ids == [[plain.source.size], [plain.source.size + 1], [plain.source.size + 2]]
    assert tagged.tag_ids("zh de") == ids[2] + ids[0]
    assert tagged.tag_ids("") == []
    assert tagged.sizes == {"source_size": plain.source.size + 3, "target_size": plain.target.size}


@pytest.mark.parametrize("kind", sorted(ALL))
def test_tags_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    plain = Tokenizers(ALL[kind], ALL[kind])
    tagged = plain.with_tags(TAGS)
    tagged.save(tmp_path)
    found = Tokenizers.load(tmp_path)
    assert (found.tags, found.joint, found.fingerprint()) == (TAGS, True, tagged.fingerprint())
    assert len({each.fingerprint() for each in (plain, tagged, plain.with_tags(TAGS[:2]))}) == 3
    assert tagged.with_tags(["zh", "fr"]).tags == (*TAGS, "fr")
    assert tagged.with_tags(TAGS) == tagged


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["transformer", "rnn", "hybrid"])
def test_a_tag_is_never_generated(kind: str, tied: bool, joint: bool) -> None:
    """This holds even for a model whose output favours it."""
    values = {"model": {"kind": kind, "width": 16, "tied": tied}, "tokenizer": {"joint": joint}}
    model = build_model(parse_settings(Recipe, values).neural_model, source_size=23, target_size=20, joint=joint)
    assert isinstance(model, AutoregressiveModel)
    with torch.no_grad():
        model.project.weight[20:] += 100
    source_BS = torch.tensor([[22, 5, 6]])
    state = model.eval().start(source_BS, source_BS > 0)
    logp_NV, _ = model.step(torch.tensor([BOS]), state)
    assert logp_NV.shape == (1, 20)


# corpora that are turned round


@pytest.fixture
def corpora(tmp_path: Path) -> list[CorpusSettings]:
    """Return the same three pairs in every kind of file."""
    pairs = [("ba", "ak"), ("del fo", "ol ebi"), ("ra", "zu")]
    rows = [{"source": s, "target": t} for s, t in pairs]
    return [
        CorpusSettings(
            source=str(write_lines(tmp_path / "s", [s for s, _ in pairs])),
            target=str(write_lines(tmp_path / "t", [t for _, t in pairs])),
        ),
        CorpusSettings(tsv=str(write_lines(tmp_path / "tsv", [f"{s}\t{t}" for s, t in pairs]))),
        CorpusSettings(jsonl=str(write_lines(tmp_path / "jsonl", map(json.dumps, rows)))),
        CorpusSettings(phrasebook=3),
    ]


def test_reverse_swaps_source_and_target(corpora: list[CorpusSettings]) -> None:
    for corpus in corpora:
        turned = corpus.model_copy(update={"reverse": True, "tag": "en"})
        swapped = [Pair(pair.target, pair.source, tag="en") for pair in read_pairs(corpus)]
        assert list(read_pairs(turned)) == swapped
        marks = [
            fingerprint_corpus(corpus.model_copy(update=u))
            for u in ({}, {"reverse": True}, {"tag": "en"}, {"tag": "e"})
        ]
        assert len(set(marks)) == 4


def test_both_ways_equals_training_with_swapped_files(small: Path, tmp_path: Path) -> None:
    """The same pairs in the same order give bit-identical runs."""
    there, back = ({"source": f"train.{a}", "target": f"train.{b}"} for a, b in (("src", "trg"), ("trg", "src")))
    short = ["train.steps=4", "train.validate_every=0", "train.validate_lines=0"]
    one = train_quietly(small, tmp_path / "one", "data.both_ways=true", *short)
    listed = write_recipe(tmp_path / "listed.yaml", **{**yaml.safe_load(small.read_text()), "data": {}})
    whole = yaml.safe_load(small.read_text())
    whole["data"]["train"] = [there, back]
    listed.write_text(yaml.safe_dump(whole))
    two = train_quietly(listed, tmp_path / "two", *short)
    whole["data"]["train"] = [there, {**there, "reverse": True}]
    listed.write_text(yaml.safe_dump(whole))
    three = train_quietly(listed, tmp_path / "three", *short)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert read_tensor_files(one) == read_tensor_files(two) == read_tensor_files(three)
    tuned = train_quietly(small, tmp_path / "tuned", "train.steps=2", "train.validate_lines=0", init_from=one)
    assert load(tuned, device="cpu").translate(["ba."])[0].text is not None


# a model with tags, from the recipe to the answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tag `there` a word becomes another one of the same words, with `back` it becomes what it came from, and
    without a tag it stays as it is: only the tag can tell."""
    folder = tmp_path_factory.mktemp("tags")
    words = list(WORDS)
    turned = [*words[4:], *words[:4]]
    write_lines(folder / "words", words)
    write_lines(folder / "turned", turned)
    recipe = {
        "data": {
            "train": [
                {"source": "words", "target": "turned", "tag": "there"},
                {"source": "words", "target": "turned", "tag": "back", "reverse": True, "weight": 2.0},
                {"source": "words", "target": "words"},
            ],
            "dev": [{"source": "words", "target": "turned", "tag": "back", "reverse": True}],
            "test": [{"source": "words", "target": "turned", "tag": "there"}, {"source": "words", "target": "words"}],
            "cache": str(folder / "cache"),
        },
        "tokenizer": {"kind": "word"},
        "model": {"layers": 1, "width": 32, "heads": 2, "dropout": 0.0},
        "train": {
            "device": "cpu", "precision": "float32", "tokens": 128, "steps": 120, "lr": 1e-2, "warmup": 20,
            "label_smoothing": 0.0, "validate_every": 60, "log_every": 50,
        },
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train_quietly(folder / "recipe.yaml", folder / "run")
    return folder


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    found = load(folder / "run", device="cpu")
    assert isinstance(found, Translator)
    return found


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_tag_selects_the_output(folder: Path, translator: Translator) -> None:
    words, turned = lines_of(folder / "words"), lines_of(folder / "turned")
    assert [one.text for one in translator.translate(words, tag="there")] == turned
    assert [one.text for one in translator.translate(turned, tag="back")] == words
    assert [one.text for one in translator.translate(words)] == words
    mixed: list[str | Line] = [Line("ba", tag="there"), Line("ba", tag="back"), "ba"]
    assert [one.text for one in translator.translate(mixed)] == [turned[0], words[turned.index("ba")], "ba"]
    sampled = translator.nbest(words, count=4, tag="there", search={"method": "sample", "temperature": 5.0})
    known = set(translator.tokenizers.target.ids_to_tokens(range(translator.tokenizers.target.size)))
    assert all(known.issuperset(one.tokens) for some in sampled for one in some)
    answer = translator.translate(["ba del"], tag="there")[0]
    assert answer.source_tokens == ["▁ba", "▁del"]
    assert all(len(row) == 2 and sum(row) == pytest.approx(1, abs=1e-4) for row in answer.alignment)
    better, worse = (translator.score(["ba"], [turned[0]], tag=tag)[0].logp for tag in ("there", ""))
    assert better > -0.5 > worse


def test_tags_on_the_command_line(folder: Path, tmp_path: Path, call: Call) -> None:
    run, words, turned = folder / "run", folder / "words", folder / "turned"
    way = ("translate", run, "--input", words, "--engine", "torch")
    assert call(*way, "--tag", "there").out == turned.read_text()
    assert call(*way).out == words.read_text()
    assert_user_error(call(*way, "--tag", "ther"), "'ther'", "did you mean 'there'", "back")
    terms = write_lines(tmp_path / "terms.tsv", ["zebra\tZebra"])  # of none of the lines
    assert call(*way, "--tag", "there", "--glossary", terms).out == turned.read_text()
    assert call(*way, "--tag", "there", "--glossary", terms, "--stream").out == turned.read_text()
    kept = call(*way, "--tag", "there", "--resume", "--output", tmp_path / "out")
    assert kept.code == 0, kept.err
    assert (tmp_path / "out").read_text() == turned.read_text()
    tests = [json.loads(line) for line in call("evaluate", run, "--json", "--metric", "exact").out.splitlines()]
    assert [test["exact"]["value"] for test in tests] == [100, 100]
    files = ("--source", words, "--reference", turned, "--metric", "exact", "--json")
    assert json.loads(call("evaluate", run, *files, "--tag", "there").out)["exact"]["value"] == 100
    assert json.loads(call("evaluate", run, *files).out)["exact"]["value"] == 0
    scored = call("score", run, "--source", words, "--target", turned, "--tag", "there").out.splitlines()
    assert all(float(line) > -0.5 for line in scored)
    assert json.loads(call("info", run, "--json").out)["tags"] == ["there", "back"]


def test_a_glossary_where_every_corpus_has_a_tag(folder: Path, tmp_path: Path, call: Call) -> None:
    """The command then needs a tag, which is given."""
    whole = yaml.safe_load((folder / "recipe.yaml").read_text())
    corpus = {"source": str(folder / "words"), "target": str(folder / "turned")}
    whole["data"] |= {"train": [{**corpus, "tag": tag} for tag in ("there", "back")], "dev": [], "test": []}
    whole["train"] |= {"steps": 1, "lr": 1e-9, "warmup": 0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    run = train_quietly(tmp_path / "recipe.yaml", tmp_path / "run", init_from=folder / "run")
    terms = write_lines(tmp_path / "terms.tsv", ["zebra\tZebra"])
    answer = call("translate", run, "--tag", "there", "--glossary", terms, "--input", folder / "words")
    assert (answer.code, answer.out) == (0, (folder / "turned").read_text())


def test_other_engines_read_tags(folder: Path, translator: Translator, tmp_path: Path) -> None:
    engine = CTranslate2Engine.convert(translator, tmp_path)
    words = lines_of(folder / "words")
    assert [one.text for one in replace(translator, engine=engine).translate(words, tag="there")] == lines_of(
        folder / "turned"
    )


def test_a_missing_or_unknown_tag_is_refused(folder: Path, translator: Translator) -> None:
    def knowing(*tags: str) -> Translator:
        corpora = tuple(CorpusSettings(phrasebook=1, tag=tag) for tag in tags)
        data = translator.recipe.data.model_copy(update={"train": corpora})
        return replace(translator, recipe=translator.recipe.model_copy(update={"data": data}))

    with pytest.raises(UserError, match="choose one of: there, back"):
        knowing("there", "back").translate(["ba"])
    with pytest.raises(UserError, match="has no tag 'there'; it was trained without"):
        knowing("").translate(["ba"], tag="there")
    assert knowing("there").translate(["ba"])[0].text == lines_of(folder / "turned")[0]


@pytest.mark.parametrize("tags", [(), ("there",), ("there", "new")], ids=["none", "fewer", "another"])
def test_fine_tuning_a_run_with_other_tags(folder: Path, tmp_path: Path, tags: tuple[str, ...]) -> None:
    """The weights of the parent are kept; a new tag gets a new embedding."""
    whole = yaml.safe_load((folder / "recipe.yaml").read_text())
    corpus = {"source": str(folder / "words"), "target": str(folder / "turned")}
    whole["data"] |= {"train": [{**corpus, "tag": tag} for tag in tags or [""]], "dev": [], "test": []}
    whole["train"] |= {"steps": 1, "lr": 1e-9, "warmup": 0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    run = train_quietly(tmp_path / "recipe.yaml", tmp_path / "run", init_from=folder / "run")
    parent, child = (open_run(each, device="cpu") for each in (folder / "run", run))
    assert child.tokenizers.tags == ("there", "back", *(["new"] if "new" in tags else []))
    before, after = collect_weights(parent.model), collect_weights(child.model)
    for name, tensor in before.items():
        assert torch.allclose(after[name][: len(tensor)], tensor, atol=1e-6), name
    rows = len(after["decoder.embedding.weight"]) - len(before["decoder.embedding.weight"])
    assert rows == ("new" in tags)
    resumed = train_quietly(tmp_path / "recipe.yaml", run, "train.steps=2", resume=True)
    assert load(resumed, device="cpu").translate(["ba"], tag=tags[0] if tags else "")[0].text


def test_a_parent_of_another_width_is_refused_with_any_tags(folder: Path, tmp_path: Path, call: Call) -> None:
    corpus = f"data.train={{source: {folder / 'words'}, target: {folder / 'turned'}, tag: new}}"
    way = ("--out", tmp_path / "run", "--init-from", folder / "run", corpus, "data.dev=[]", "data.test=[]")
    answer = call("train", folder / "recipe.yaml", *way, "model.width=16")
    assert_user_error(answer, "--init-from does not fit", "model", working=True)


def test_sampled_sources_keep_their_tag(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = write_recipe(tmp_path / "recipe.yaml", tokenizer={"kind": "bpe", "size": 310, "sampling": 0.3})
    recipe = read_recipe(path)
    tagged = recipe.data.train[0].model_copy(update={"tag": "there"})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": (tagged,), "dev": ()})})
    (tmp_path / "run").mkdir()
    prepared = prepare_data(recipe, RunFolder(tmp_path / "run"), QUIET)
    [tag] = prepared.tokenizers.tag_ids("there")
    stream = open_stream(recipe, prepared)
    drawn = []
    for epoch in range(20):
        window, examples = next(stream.read_windows(StreamPosition(epoch)))
        drawn.append(examples[window.indices.tolist().index(3)].source.tolist())
    assert len(set(map(tuple, drawn))) > 1
    assert all(ids[0] == tag and tag not in ids[1:] for ids in drawn)
    whole = prepared.train[0].store.read_example(3).source
    assert whole[0] == tag
    assert np.array_equal(whole[1:], prepared.tokenizers.source.encode(lines_of(tmp_path / "train.src")[3]))


def test_distillation_uses_tags(folder: Path, tmp_path: Path) -> None:
    whole = yaml.safe_load((folder / "recipe.yaml").read_text())
    for name in ("train", "dev", "test"):
        for corpus in whole["data"][name]:
            corpus |= {side: str(folder / corpus[side]) for side in ("source", "target")}
    del whole["tokenizer"]
    whole["train"] |= {"steps": 1}
    (tmp_path / "student.yaml").write_text(yaml.safe_dump(whole))
    run = distil(folder / "run", tmp_path / "student.yaml", out=tmp_path / "run", report=QUIET)
    said = [json.loads(line) for line in (run / "distilled" / "2.jsonl").read_text().splitlines()]
    assert [pair["source"] for pair in said] == lines_of(folder / "turned")
    assert [pair["target"] for pair in said] == lines_of(folder / "words")
    assert RunFolder(run).load_recipe().data.tags == ("there", "back", "")
    more = DistilSettings(sources=(str(folder / "turned"),), tag="back")
    run = distil(folder / "run", tmp_path / "student.yaml", out=tmp_path / "more", settings=more, report=QUIET)
    assert [json.loads(line) for line in (run / "distilled" / "4.jsonl").read_text().splitlines()] == said
    other = more.model_copy(update={"tag": "other"})
    with pytest.raises(UserError, match="has no tag 'other'"):
        distil(folder / "run", tmp_path / "student.yaml", out=tmp_path / "no", settings=other, report=QUIET)
    assert not (tmp_path / "no").exists()


CORPUS = "{source: words, target: turned"
REFUSED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "tagged dev": ([f"data.dev={CORPUS}, tag: other}}"], ("data.dev", "'other'", "there, back, no tag")),
    "untagged dev": ([f"data.train={CORPUS}, tag: a}}", "data.test=[]", f"data.dev={CORPUS}}}"], ("no tag", "only: a")),
    "two vocabularies": (["tokenizer.joint=false"], ("tokenizer.joint",)),
    "both with tags": (["data.both_ways=true"], ("data.both_ways", "reverse: true")),
    "spaces": ([f"data.train={CORPUS}, tag: ' a'}}"], ("tag", "' a'")),
    "a tag of a text": (["data.train={text: words, tag: a}"], ("tag", "text")),
    "a text turned round": (["data.train={text: words, reverse: true}"], ("reverse", "text")),
    "a language model": (["model={kind: lm}", "data.dev=[]"], ("tag", "model.kind=lm")),
    "trees": (["model.position=tree"], ("tag", "trees")),
}


@pytest.mark.parametrize("said", REFUSED.values(), ids=REFUSED)
def test_unsupported_combinations_with_tags_are_refused(
    folder: Path, tmp_path: Path, call: Call, said: tuple[list[str], tuple[str, ...]]
) -> None:
    overrides, culprits = said
    assert_user_error(call("train", folder / "recipe.yaml", "--out", tmp_path / "run", *overrides), *culprits)
    assert not (tmp_path / "run").exists()
