"""Trees from file to translation: training, validation, translation and evaluation with and without trees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dragoman.data.corpus import read_pairs
from dragoman.data.features import FEATURES
from dragoman.data.preparation import write_phrasebook
from dragoman.data.stream import BatchStream, StreamPosition, WeightedStore
from dragoman.data.token_store import open_store
from dragoman.data.tokenizers import Tokenizers
from dragoman.data.trees import read_conllu
from dragoman.errors import UserError
from dragoman.evaluation.systems import EvaluationOptions, predict_tests
from dragoman.inference.loading import load_as
from dragoman.inference.translator import NO_TREE_WARNING, Translator
from dragoman.io import read_lines
from dragoman.phrasebook.generate import generate_phrases
from dragoman.types import Pair, Tree
from toy_run import Call, assert_user_error, read_run_events, read_tensor_files, train_quietly, write_lines

FEW = 150
GOLDEN = Path(__file__).parents[1] / "golden" / "run-1"  # a run that reads no trees


def recipe_in(folder: Path, train: object, dev: object, **tokenizer: object) -> Path:
    path = folder / "recipe.yaml"
    whole = {
        "data": {"train": train, "dev": dev, "test": dev, "cache": str(folder / "cache")},
        "tokenizer": {"kind": "bpe", "size": 330, **tokenizer},
        "model": {"layers": 1, "width": 16, "heads": 2, "dropout": 0.1, "position": "tree", "reach": 4},
        "train": {
            "device": "cpu", "threads": 1, "precision": "float32", "tokens": 512, "steps": 12, "lr": 1e-2, "warmup": 2,
            "validate_every": 6, "validate_lines": 4, "save_every": 4, "log_every": 1,
        },
        "search": {"max_ratio": 0.5},  # an untrained model rarely predicts EOS
    }  # fmt: skip
    path.write_text(yaml.safe_dump(whole))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the phrasebook in files and a run that was trained on it."""
    folder = tmp_path_factory.mktemp("trees")
    for split, count in (("train", FEW), ("dev", 10)):
        write_phrasebook(folder / split, count=count, split=split, seed=1, gold=False, conllu=True)
    recipe = recipe_in(folder, files(folder, "train"), files(folder, "dev"))
    train_quietly(recipe, folder / "run")
    return folder


def files(folder: Path, split: str) -> dict[str, object]:
    return {
        key: str(folder / f"{split}.{end}")
        for key, end in zip(("source", "target", "conllu"), ("en", "de", "en.conllu"))
    }


@pytest.fixture
def translator(corpus: Path) -> Translator:
    return load_as(Translator, corpus / "run", device="cpu")


def dev(corpus: Path) -> tuple[list[str], list[Tree]]:
    return list(read_lines(corpus / "dev.en")), list(read_conllu(corpus / "dev.en.conllu"))


def test_files_and_the_phrasebook_itself_train_the_same_model(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, {"phrasebook": FEW}, {"phrasebook": 10})
    train_quietly(recipe, tmp_path / "run")
    assert read_tensor_files(tmp_path / "run") == read_tensor_files(corpus / "run")
    assert read_run_events(tmp_path / "run") == read_run_events(corpus / "run")


def test_trees_matter_to_training(corpus: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat.conllu"
    text = (corpus / "train.en.conllu").read_text().split("\n")
    flat.write_text(
        "\n".join(line.replace(f"\t{line.split(chr(9))[6]}\t", "\t0\t") if "\t" in line else line for line in text)
    )
    train_quietly(
        recipe_in(tmp_path, {**files(corpus, "train"), "conllu": str(flat)}, files(corpus, "dev")), tmp_path / "run"
    )
    assert read_tensor_files(tmp_path / "run") != read_tensor_files(corpus / "run")


@pytest.mark.parametrize("sampling", [0.0, 0.2])
def test_a_run_with_trees_resumes_bit_exactly(corpus: Path, tmp_path: Path, sampling: float) -> None:
    recipe = recipe_in(tmp_path, files(corpus, "train"), files(corpus, "dev"), sampling=sampling)
    train_quietly(recipe, tmp_path / "whole")
    train_quietly(recipe, tmp_path / "run", "train.steps=5")
    train_quietly(recipe, tmp_path / "run", resume=True)
    assert (
        read_tensor_files(tmp_path / "run")["model.safetensors"]
        == read_tensor_files(tmp_path / "whole")["model.safetensors"]
    )


@pytest.mark.parametrize("sampling", [0.0, 0.3])
def test_sampled_tokens_have_the_right_words(corpus: Path, tmp_path: Path, sampling: float) -> None:
    tokenizers = Tokenizers.load(corpus / "run" / "tokenizer")
    some = [Pair(p.source, p.target, p.tree) for p in generate_phrases("train", 50)]
    store = open_store(
        lambda: iter(some), tokenizers, key="", cache=tmp_path, max_length=999, text=sampling > 0, features=["tree"]
    )
    stream = BatchStream(
        [WeightedStore(store, 1.0)], tokenizers, layout="packed", tokens=512, seed=1, sampling=sampling
    )
    assert store.missing_counts == {"tree": 0}
    window, examples = next(stream.read_windows(StreamPosition(1)))
    assert bool(examples) == bool(sampling)
    for slot, line in enumerate(window.indices.tolist()):
        pair, example = some[line], examples[slot] if sampling else store.read_example(line)
        annotation, source = FEATURES["tree"].make_annotation(pair), example.source.tolist()
        words = FEATURES["tree"].align_tokens(annotation, pair.source, source, tokenizers.source).values
        values, stored = example.features["tree"]
        assert values.tolist() == words.tolist()
        assert stored[1::2].tolist() == list(pair.tree.heads if pair.tree else ())
        assert words.all()


def test_a_store_with_trees_is_another_store(corpus: Path, tmp_path: Path) -> None:
    tokenizers = Tokenizers.load(corpus / "run" / "tokenizer")
    some = [Pair(p.source, p.target, p.tree) for p in generate_phrases("train", 5)]
    plain, grown = (
        open_store(
            lambda: iter(some), tokenizers, key="", cache=tmp_path, max_length=999, text=False, features=features
        )
        for features in ((), ("tree",))
    )
    assert (plain.missing_counts, plain.read_example(0).features) == ({}, {})
    assert grown.missing_counts == {"tree": 0}
    assert plain.digest != grown.digest


def test_validation_reads_trees(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    translate = Translator.translate

    def watched(self: Translator, lines: Any, **given: Any) -> Any:
        seen.append(given["trees"])
        return translate(self, lines, **given)

    monkeypatch.setattr(Translator, "translate", watched)
    recipe = recipe_in(tmp_path, files(corpus, "train"), files(corpus, "dev"))
    train_quietly(recipe, tmp_path / "run", "train.steps=1")
    assert seen == [dev(corpus)[1][:4]]


def test_sentences_without_a_tree_are_counted_and_reported(corpus: Path, tmp_path: Path, call: Call) -> None:
    lines = list(read_lines(corpus / "train.en"))
    other = write_lines(tmp_path / "other.en", ["Another text.", *lines[1:-1], "One more!"])
    recipe = recipe_in(tmp_path, {**files(corpus, "train"), "source": str(other)}, {"phrasebook": 10})
    said = call("train", recipe, "--out", tmp_path / "run", "train.steps=1")
    assert "train: 2 sentences have no usable tree" in said.err
    assert "dev: " in said.err
    assert said.err.count("no usable tree") == 1
    bare = {key: path for key, path in files(corpus, "train").items() if key != "conllu"}
    said = call("train", recipe_in(tmp_path, bare, []), "--out", tmp_path / "bare", "train.steps=1")
    assert f"train: {FEW} sentences have no usable tree" in said.err


def test_translations_depend_on_trees_but_not_on_the_batch(corpus: Path, translator: Translator) -> None:
    lines, trees = dev(corpus)
    lines, trees = lines[:4], trees[:4]
    together = translator.translate(lines, trees=trees)
    assert not any(NO_TREE_WARNING in " ".join(one.warnings) for one in together)
    for line, tree, answer in zip(lines, trees, together, strict=True):
        assert translator.translate([line], trees=[tree]) == [answer]
    without = translator.translate(lines)
    assert all(NO_TREE_WARNING in one.warnings for one in without)
    assert translator.translate(lines, trees=[None] * len(lines)) == without
    assert translator.translate(lines, trees=[None, *trees[1:]]) == [without[0], *together[1:]]
    for one, other in zip(together, without, strict=True):
        assert one.logp != other.logp
        assert one.alignment != other.alignment


def test_lines_that_do_not_match_their_tree_get_a_warning(corpus: Path, translator: Translator) -> None:
    lines, trees = dev(corpus)
    [answer] = translator.translate(["Something else."], trees=trees[:1])
    assert f"{NO_TREE_WARNING}: its words do not spell the line" in answer.warnings
    words = tuple(word for tree in trees for word in tree.words)
    [answer] = translator.translate([" ".join(lines)], trees=[Tree(words, (0,) * len(words))], beam=1)
    assert f"{NO_TREE_WARNING}: the line was split" in answer.warnings


def test_bad_trees_are_refused(corpus: Path, translator: Translator) -> None:
    lines, trees = dev(corpus)
    with pytest.raises(UserError, match="there are 10 lines but 9 trees"):
        translator.translate(lines, trees=trees[1:])
    with pytest.raises(UserError, match="the tree of line 1 is not a tree: the heads of word 1 lead back to it"):
        translator.translate(["a"], trees=[Tree(("a",), (1,))])


def test_translation_on_the_command_line(corpus: Path, translator: Translator, call: Call, tmp_path: Path) -> None:
    lines, trees = dev(corpus)
    some = write_lines(tmp_path / "some.en", ["", *lines[:5], " ", *lines[5:], ""])
    common = ["translate", corpus / "run", "--input", some, "--device", "cpu", "--json", "--beam", 1]
    plain, grown = call(*common), call(*common, "--conllu", corpus / "dev.en.conllu", "--batch", 3)
    assert plain.code == grown.code == 0
    assert plain.err.count("no --conllu was given") == 1
    assert NO_TREE_WARNING not in plain.err
    assert "tree" not in grown.err
    for answer, given in ((plain, None), (grown, trees)):
        found = [record["logp"] for record in map(json.loads, answer.out.splitlines()) if record["source"].strip()]
        assert found == [one.logp for one in translator.translate(lines, trees=given, beam=1)]


def test_different_numbers_of_trees_and_lines_are_refused(corpus: Path, call: Call, tmp_path: Path) -> None:
    lines, _ = dev(corpus)
    conllu = corpus / "dev.en.conllu"
    for number, sentence in ((9, "has 10 sentences, but"), (11, "has 10 sentences, but")):
        some = write_lines(tmp_path / "some.en", [*lines, "More."][:number])
        answer = call("translate", corpus / "run", "--input", some, "--conllu", conllu, "--device", "cpu", "--beam", 1)
        assert answer.code == 2
        assert sentence in answer.err.splitlines()[-1]
        answer = call("evaluate", corpus / "run", "--source", some, "--reference", some, "--conllu", conllu)
        assert_user_error(answer, sentence, conllu)
    recipe = recipe_in(tmp_path, {**files(corpus, "train"), "conllu": str(conllu)}, [])
    assert_user_error(call("train", recipe, "--out", tmp_path / "run"), "has 10 sentences", working=True)


def test_models_without_tree_support_do_not_get_trees(call: Call, corpus: Path, tmp_path: Path) -> None:
    run = shutil.copytree(GOLDEN, tmp_path / "run")  # evaluate adds scores to a run
    trees = ["--conllu", corpus / "dev.en.conllu"]
    answer = call("translate", run, "--input", corpus / "dev.en", *trees)
    assert_user_error(answer, "this model does not use trees", "model.position=tree")
    files = ["--source", corpus / "dev.en", "--reference", corpus / "dev.de"]
    answer = call("evaluate", run, corpus / "run", *files, *trees, "--beam", 1)
    assert answer.code == 0
    assert answer.err.count("does not use trees") == 1
    assert NO_TREE_WARNING not in answer.err


def test_evaluation_uses_trees(corpus: Path, translator: Translator, call: Call) -> None:
    [own] = (found.result() for found in predict_tests(translator, EvaluationOptions(beam=1)))
    assert NO_TREE_WARNING not in own["warnings"]
    options = EvaluationOptions(phrasebook="dev", count=10, beam=1)
    [book] = (found.result() for found in predict_tests(translator, options))
    assert book["bleu"] == own["bleu"]
    assert NO_TREE_WARNING not in book["warnings"]
    common = ["evaluate", corpus / "run", "--source", corpus / "dev.en", "--reference", corpus / "dev.de", "--beam", 1]
    given = call(*common, "--conllu", corpus / "dev.en.conllu", "--json")
    assert f"{own['chrf']['value']}" in given.out
    assert f"10 lines {NO_TREE_WARNING}" in call(*common).err


def test_conllu_is_refused_for_the_phrasebook(call: Call, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, {"phrasebook": 10, "conllu": "a.conllu"}, [])
    assert_user_error(
        call("train", recipe, "--out", tmp_path / "run"), "data.train", "conllu works with", "not with phrasebook"
    )


def test_trees_of_files_are_read_only_if_requested(corpus: Path) -> None:
    from dragoman.data.corpus import CorpusSettings

    settings = CorpusSettings(**files(corpus, "dev"))  # type: ignore[arg-type]
    assert [pair.tree for pair in read_pairs(settings)] == [None] * 10
    assert [pair.tree for pair in read_pairs(settings, trees=True)] == dev(corpus)[1]
