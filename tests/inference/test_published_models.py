"""Imported MarianMT, M2M100 and NLLB models are what transformers runs: the same tokens, logits and translations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import dragoman
from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.errors import UserError
from dragoman.inference.directions import Direction, choose_direction
from dragoman.inference.engines.huggingface import (
    HuggingFaceEngine,
    compute_feature_order,
    import_huggingface,
    make_sinusoid_table,
    read_weights,
)
from dragoman.inference.engines.published import FORBIDDEN_LOGIT, IdMap, guess_model_languages, read_published
from dragoman.inference.export import export
from dragoman.inference.loading import load_as
from dragoman.inference.model_card import read_card
from dragoman.inference.translator import Translator
from dragoman.run_dir import RunFolder
from dragoman.types import BOS, EOS, SPECIALS, Line
from published_models import phrasebook_sides, write_m2m, write_marian
from toy_run import Call, assert_user_error, read_run_events, train_quietly, write_lines

README = "---\nlicense: cc-by-4.0\nlanguage: [en, de]\n---\n# A model\n"


class Imported(NamedTuple):
    """A published model and the run that it was imported as."""

    folder: Path
    model: Any
    run: Path
    translator: Translator
    id_map: IdMap
    direction: Direction

    def theirs(self, ids: list[int]) -> list[int]:
        return [self.id_map.source[i] for i in ids]


MODELS: dict[str, Callable[[Path], Any]] = {
    "marian": write_marian,
    "marian-multilingual": lambda folder: write_marian(folder, languages=("fra", "deu", "zho_Hans")),
    "marian-separate": lambda folder: write_marian(folder, separate=True, activation_function="relu"),
    "marian-untied": lambda folder: write_marian(folder, tied=False, activation_function="gelu"),
    "m2m100": write_m2m,
    "nllb": lambda folder: write_m2m(folder, nllb=True),
}


@pytest.fixture(scope="module", params=MODELS)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    home = tmp_path_factory.mktemp(request.param)
    folder, run = home / "there", home / "run"
    model = MODELS[request.param](folder)
    (folder / "README.md").write_text(README)
    id_map = import_huggingface(folder, run)
    assert id_map
    translator = load_as(Translator, run)
    wanted = {"m2m100": ("de", "fr"), "nllb": ("en", "zh-Hant")}.get(request.param, ("en", "de"))
    direction = choose_direction(translator, *wanted)
    return Imported(folder, model, run, translator, id_map, direction)


def test_every_token_of_theirs_has_one_of_ours(imported: Imported) -> None:
    for side, order, rows in (
        ("source", imported.id_map.source, imported.model.config.vocab_size),
        ("target", imported.id_map.target, imported.model.get_output_embeddings().weight.size(0)),
    ):
        tokenizer = getattr(imported.translator.tokenizers, side)
        assert len(order) == tokenizer.size == rows + 1
        assert sorted(i for ours, i in enumerate(order) if ours != BOS) == list(range(rows))
        assert tokenizer.ids_to_tokens(range(4)) == list(SPECIALS)
        assert len(set(tokenizer.ids_to_tokens(range(tokenizer.size)))) == tokenizer.size


@torch.no_grad()
def test_logits_are_theirs(imported: Imported) -> None:
    sources, targets = phrasebook_sides(3)
    examples = imported.translator.make_examples(sources, targets, tag=imported.direction.tag)
    model: Any = imported.translator.model
    for example in examples:
        widths = Widths(len(example.source) + 1, len(example.target) + 1)
        batch = collate_pairs(BatchPlan([[0]], widths), [example])
        ours = model.compute_logits(model(batch))[0][:, : imported.translator.tokenizers.target.size]
        order = list(imported.id_map.target)
        source = imported.theirs([*example.source.tolist(), EOS])
        target = [order[i] for i in (BOS, *example.target.tolist())]
        output = imported.model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]))
        theirs = output.logits[0][:, order]
        is_output = torch.arange(len(order)) != BOS
        assert (ours - theirs)[:, is_output].abs().max() < 1e-4
        assert theirs.std() > 1  # otherwise the comparison shows little
        assert (ours[:, BOS] < FORBIDDEN_LOGIT / 2).all()


LINES = phrasebook_sides(12)[0]


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_are_those_of_generate(imported: Imported, beam: int) -> None:
    """Token for token and with the same scores, for several hypotheses of each line."""
    translator, tag = imported.translator, imported.direction.tag
    theirs = replace(translator, engine=HuggingFaceEngine(imported.folder, imported.id_map))
    options = translator.make_options(beam=beam, count=min(beam, 2), search={"max_tokens": 24}, tag=tag)
    ours, expected = (one.translate_nbest(LINES, options) for one in (translator, theirs))
    assert [[h.tokens for h in some] for some in ours] == [[h.tokens for h in some] for some in expected]
    for some, others in zip(ours, expected, strict=True):
        assert [h.score for h in some] == pytest.approx([h.score for h in others], abs=1e-4)
    assert len({tuple(some[0].tokens) for some in ours}) > 1


def test_the_language_is_no_part_of_the_text(imported: Imported) -> None:
    translator, tag = imported.translator, imported.direction.tag
    [hypothesis] = translator.translate(LINES[:1], tag=tag, search={"max_tokens": 12})
    words = tag.replace("=>", "").split()
    assert not {*hypothesis.tokens} & {*words}
    assert len(hypothesis.alignment) == len(hypothesis.tokens)
    [score] = translator.score(LINES[:1], ["Der Hund"], tag=tag)
    assert score.tokens == [
        *translator.tokenizers.target.ids_to_tokens(translator.tokenizers.target.encode("Der Hund")),
        "</s>",
    ]
    assert sum(score.token_logps) == pytest.approx(score.logp)
    streamed = translator.stream(LINES[0], tag=tag, search={"max_tokens": 12})
    assert "".join(streamed) == hypothesis.text


HOSTILE = [
    "", " ", "A man walks his dog.", "  two  spaces ", "tab\there", "ﬁne ½ Ⅷ ａｂｃ", "e\u0301 é", "🙂 emoji 🙂🙂",
    "▁▁ a▁b",
    "日本語 テキスト", "a" * 300, "...!!!???", "Äpfel & Öl – „Zitat“", "\u200bzero\u00a0width\ufeff", "__en__ token0",
    "A <b>tag</b> {0} %s", "\x01\x07 control", "العربية עברית",
]  # fmt: skip


def test_one_of_several_directions_must_be_given(imported: Imported) -> None:
    if len(imported.translator.directions) == 1:
        assert imported.translator.choose_tag("") == ""
        return
    with pytest.raises(UserError, match=r"give the tag of one \(Translator\.directions lists them"):
        imported.translator.translate(LINES[:1])


def test_tokens_are_theirs(imported: Imported) -> None:
    from transformers import AutoTokenizer

    codes = imported.direction.tag.replace("=>", "").split()
    names = [code.strip("_") for code in codes]
    languages = {"src_lang": names[0], "tgt_lang": names[1]} if len(names) == 2 else {}
    theirs: Any = AutoTokenizer.from_pretrained(imported.folder, **languages)
    prefix = f"{codes[0]}" if len(codes) == 1 else ""
    tokenizers = imported.translator.tokenizers
    tag_ids = tokenizers.tag_ids(imported.direction.tag)
    # NLLB's is a conversion, which does not know the languages, nor SentencePiece's treatment of spaces.
    is_fast = theirs.is_fast
    first = 1 if is_fast else 0
    for text in [line for line in HOSTILE if not is_fast or (line and line.isprintable() and "  " not in line)]:
        if "__" in text and len(codes) == 2:
            continue  # they read the name of a token in a text as the token; for us a text is a text
        if is_fast and text.startswith((" ", "▁")):
            continue
        ours = [*tag_ids, *tokenizers.source.encode(text), EOS]
        assert imported.theirs(ours)[first:] == theirs(prefix + text)["input_ids"][first:], text
        target = [*tokenizers.target_tag_ids(imported.direction.tag), *tokenizers.target.encode(text), EOS]
        expected = theirs(text_target=text)["input_ids"]
        assert [imported.id_map.target[i] for i in target][first:] == expected[first:], text
        begin = len(tokenizers.target_tag_ids(imported.direction.tag))  # which their decoder of M2M100 writes as text
        decoded = theirs.decode(expected[begin:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizers.target.decode(target) == decoded.strip()


def test_languages_of_nllb_have_the_published_ids(tmp_path: Path) -> None:
    """With 256,000 pieces, eng_Latn is 256047 and zho_Hant 256201: they follow the pieces in the order of fairseq."""
    write_m2m(tmp_path / "nllb", nllb=True, size=200)
    published = read_published(tmp_path / "nllb")
    source = published.tokenizers.source
    ids = [published.id_map.source[i] for i in published.tokenizers.tag_ids("eng_Latn zho_Hant")]
    assert ids == [200 + 47, 200 + 201]
    assert source.size == 200 + 1 + 202 + 1 + 1  # <s> of fairseq, the languages, <mask>, and our own begin


def test_texts_never_become_special_tokens(imported: Imported) -> None:
    for text in ("</s>", "<pad>", "<s>", "__de__", ">>fra<<", "eng_Latn"):
        ids = imported.translator.tokenizers.source.encode(text)
        specials = set(imported.direction.tag.replace("=>", "").split())
        assert not {EOS, 0, BOS} & {*ids}
        assert not specials & {*imported.translator.tokenizers.source.ids_to_tokens(ids)}
    imported.translator.tokenizers.source.encode("\ud800 half")


def test_the_card_has_origin_and_licence(imported: Imported, call: Call) -> None:
    card = read_card(imported.run)
    assert card["origin"]["licence"] == "cc-by-4.0"
    assert card["origin"]["architecture"] == imported.model.config.model_type
    answer = call("info", imported.run)
    assert answer.code == 0
    assert "cc-by-4.0" in answer.out
    assert ("100 languages" in answer.out) == (len(imported.translator.directions) == 9900)


def test_training_goes_on(imported: Imported, tmp_path: Path) -> None:
    """Fine-tuning lowers the loss, and the run keeps licence and tokenizer."""
    sources, targets = phrasebook_sides(60)
    write_lines(tmp_path / "a.tsv", [f"{one}\t{other}" for one, other in zip(sources, targets, strict=True)])
    direction = imported.direction
    languages = {"source_language": direction.source, "target_language": direction.target}
    sections: dict[str, Any] = {
        "data": {"train": {"tsv": str(tmp_path / "a.tsv"), "tag": direction.tag}, "dev": [], **languages},
        "train": {"steps": 12, "tokens": 400, "lr": 0.003, "warmup": 1, "log_every": 1, "label_smoothing": 0.1},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(sections))  # JSON is YAML
    run = train_quietly(recipe, tmp_path / "run", init_from=imported.run)
    losses = [event["loss"] for event in read_run_events(run) if event["event"] == "train"]
    assert sum(losses[-3:]) < 0.99 * sum(losses[:3])
    tuned = load_as(Translator, run)
    assert tuned.tokenizers.fingerprint() == imported.translator.tokenizers.fingerprint()
    assert choose_direction(tuned, imported.direction.source, imported.direction.target) == imported.direction
    assert read_card(run)["origin"]["licence"] == "cc-by-4.0"
    assert tuned.translate(LINES[:1], search={"max_tokens": 9})[0].tokens  # its only tag is the default


@pytest.mark.parametrize("beam", [1, 4])
def test_ctranslate2_translates_alike(imported: Imported, beam: int) -> None:
    """Token for token, also after a forced language. Its scores lack the masked tokens (docs/exchange.md)."""
    translator, other = imported.translator, load_as(Translator, imported.run, engine="ctranslate2")
    changes = {"max_tokens": 24, "stop": "enough"}
    options = translator.make_options(beam=beam, count=1, search=changes, tag=imported.direction.tag)
    ours, theirs = (one.translate_nbest(LINES, options) for one in (translator, other))
    for [a], [b] in zip(ours, theirs, strict=True):
        assert a.tokens == b.tokens or abs(a.score - b.score) < 1e-3
        assert a.score == pytest.approx(b.score, abs=5e-3)
    assert sum(a.tokens == b.tokens for [a], [b] in zip(ours, theirs, strict=True)) > len(LINES) // 2


def test_ctranslate2_refuses_other_prefixes(imported: Imported) -> None:
    translator = load_as(Translator, imported.run, engine="ctranslate2")
    with pytest.raises(UserError, match="CTranslate2 does not support forced prefixes"):
        translator.translate([Line(LINES[0], prefix="Der")], tag=imported.direction.tag, search={"stop": "enough"})


def test_languages_of_a_name() -> None:
    assert guess_model_languages(("", ""), ["Helsinki-NLP/opus-mt-en-de", "x"], {}) == ("en", "de")
    assert guess_model_languages(("", ""), ["x", "opus-mt-tc-big-en-pt"], {}) == ("en", "pt")
    assert guess_model_languages(("", ""), ["x"], {"source_lang": "eng", "target_lang": "ron"}) == ("en", "ro")
    assert guess_model_languages(("fr", ""), ["opus-mt-en-de"], {}) == ("fr", "de")
    assert guess_model_languages(("", ""), ["opus-mt-en-roa", "x"], {})[0] == "en"


def test_a_group_of_languages_is_no_language() -> None:
    for group in ("gem", "zle", "itc", "mul", "roa"):
        assert guess_model_languages(("", ""), [f"opus-mt-tc-big-{group}-en"], {}) == ("", "en")
        assert guess_model_languages(("", ""), ["x"], {"source_lang": "eng", "target_lang": group}) == ("en", "")
    assert guess_model_languages(("", "be"), ["opus-mt-en-zle"], {}) == ("en", "be")


@pytest.mark.parametrize(
    ("written", "name"),
    [("owner/opus-mt-en-de", "owner/opus-mt-en-de"), ("/home/someone/model", "there"), ("./a", "there"), ("", "there")],
)
def test_the_name_is_no_path_of_another_machine(written: str, name: str, tmp_path: Path) -> None:
    write_marian(tmp_path / "there")
    damage("config.json", _name_or_path=written)(tmp_path / "there")
    assert read_published(tmp_path / "there").origin["name"] == name


@pytest.mark.parametrize(
    ("write", "files"),
    [
        (write_marian, "source.spm, target.spm, vocab.json"),
        (lambda folder: write_m2m(folder, nllb=True), "sentencepiece.bpe.model"),
    ],
)
def test_missing_tokenizer_files_are_named(write: Callable[[Path], Any], files: str, tmp_path: Path) -> None:
    """transformers 5 saves tokenizer.json only."""
    folder = tmp_path / "there"
    write(folder)
    for path in (*folder.glob("*.spm"), *folder.glob("*.model")):
        path.unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=f"copy {files}.* from the original model"):
        import_huggingface(folder, tmp_path / "run")


def damage(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (damage("config.json", model_type="bart"), "has model_type=bart, .* it takes marian or m2m_100"),
        (damage("config.json", activation_function="tanh"), "has activation_function=tanh"),
        (damage("config.json", normalize_embedding=True), "has normalize_embedding=True"),
        (damage("config.json", vocab_size=9), "has ids above the model's vocab_size 9"),
        (damage("config.json", d_model=None), "config.json' has d_model=None, which is no number"),
        (damage("config.json", d_model=32.5), "config.json' has d_model=32.5, which is no number"),
        (damage("config.json", encoder_ffn_dim=None, decoder_ffn_dim=None), "has encoder_ffn_dim=None"),
        (damage("config.json", encoder_attention_heads=0, decoder_attention_heads=0), "has encoder_attention_heads=0"),
        (damage("config.json", dropout="a"), "has dropout=a, which is no number"),
        (damage("config.json", max_position_embeddings=0), "has max_position_embeddings=0"),
        (damage("config.json", eos_token_id=-1), "has eos_token_id=-1"),
        (damage("config.json", pad_token_id=10**6), "has the id of pad 1000000, above its vocab_size"),
        (damage("config.json", decoder_start_token_id=[1]), r"has decoder_start_token_id=\[1\]"),
        (damage("config.json", add_final_layer_norm=True), "has add_final_layer_norm=True"),
        (damage("tokenizer_config.json", model_max_length="a"), "tokenizer_config.json' has model_max_length=a"),
        (damage("generation_config.json", length_penalty="a"), "generation_config.json' has length_penalty=a"),
        (damage("generation_config.json", max_length="a"), "generation_config.json' has max_length=a"),
        (damage("vocab.json", a="1"), "vocab.json' gives 'a' the id '1', which is no id"),
        (damage("vocab.json", a=0), "vocab.json' gives 'a' the id 0, which is that of '</s>' too"),
        (lambda folder: (folder / "vocab.json").write_text('{"a": 0}'), "vocab.json' has no <unk>"),
        (lambda folder: (folder / "vocab.json").write_text('["ab"]'), "vocab.json' is missing or damaged"),
        (damage("vocab.json", a=10**6), "ids above the model's vocab_size"),
        (lambda folder: (folder / "target.spm").write_bytes(b"x"), "is not a SentencePiece model"),
        (lambda folder: (folder / "vocab.json").unlink(), "vocab.json' is missing or damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    ],
)
def test_a_damaged_folder_is_refused(change: Callable[[Path], Any], complaint: str, tmp_path: Path) -> None:
    write_marian(tmp_path / "there")
    change(tmp_path / "there")
    with pytest.raises(UserError, match=complaint):
        import_huggingface(tmp_path / "there", tmp_path / "run")


def test_a_damaged_folder_of_m2m_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    write_m2m(folder)
    damage("tokenizer_config.json", language_codes="foo")(folder)
    with pytest.raises(UserError, match="has language_codes=foo; Dragoman knows m2m100 and wmt21"):
        read_published(folder)
    (folder / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(UserError, match="has no <unk>"):
        read_published(folder)


def test_numbers_that_are_null_have_a_default(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    write_marian(folder)
    damage("config.json", dropout=None, max_position_embeddings=None)(folder)
    damage("tokenizer_config.json", model_max_length=None)(folder)
    assert read_published(folder).longest_source == 510


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its table of sinusoids is rounded, and transformers would compute in it."""
    folder = tmp_path / "there"
    write_marian(folder).to(dtype).save_pretrained(folder)
    weights = read_weights(folder)
    waves = make_sinusoid_table("sinusoidal", 512, 32)[:, compute_feature_order(32)].to(dtype)
    save_file(
        {**weights, "model.encoder.embed_positions.weight": waves}, folder / "model.safetensors", {"format": "pt"}
    )
    import_huggingface(folder, tmp_path / "run")
    translator = load_as(Translator, tmp_path / "run")
    engine = HuggingFaceEngine(folder, read_published(folder).id_map)
    assert engine.model.dtype == torch.float32
    options = translator.make_options(beam=1, search={"max_tokens": 24})
    ours, theirs = (t.translate_nbest(LINES, options) for t in (translator, replace(translator, engine=engine)))
    assert [h.tokens for [h] in ours] == [h.tokens for [h] in theirs]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_several_files_are_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "there"
    write_marian(folder)
    weights = read_weights(folder)
    (folder / "model.safetensors").unlink()
    stem, _, suffix = name.partition(".")
    parts = {f"{stem}-0000{i + 1}-of-00002.{suffix}": dict([*weights.items()][i::2]) for i in range(2)}
    for file, part in parts.items():
        if suffix == "bin":
            torch.save(part, folder / file)
        else:
            save_file({key: tensor.contiguous() for key, tensor in part.items()}, folder / file)
    index = folder / f"{name}.index.json"
    index.write_text(json.dumps({"weight_map": {key: file for file, part in parts.items() for key in part}}))
    again = read_weights(folder)
    assert {*again} == {*weights}
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(UserError, match="does not name the files of the weights"):
        read_weights(folder)
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(UserError, match=r"b\.safetensors' is incomplete or damaged"):
        read_weights(folder)


def test_the_command(tmp_path: Path, call: Call) -> None:
    """It compares translations with transformers before it says done."""
    write_marian(tmp_path / "opus-mt-en-de", max_position_embeddings=64)
    damage("generation_config.json", max_length=20)(tmp_path / "opus-mt-en-de")
    answer = call(
        "import", tmp_path / "opus-mt-en-de", "--out", tmp_path / "run", "--licence", "mit", "--from", "en-GB"
    )
    assert answer.code == 0, answer.err
    assert "beam 4: 20 of 20 translations are the same" in answer.out
    recipe = RunFolder(tmp_path / "run").load_recipe()
    assert (recipe.data.source_language, recipe.data.target_language) == ("en-GB", "de")
    assert (recipe.search.stop, recipe.search.max_tokens, recipe.data.max_length) == ("ahead", 19, 62)
    card = dragoman.load(tmp_path / "run")
    assert isinstance(card, Translator)
    assert card.directions == (Direction("en-GB", "de"),)
    assert read_card(tmp_path / "run")["origin"]["licence"] == "mit"
    assert_user_error(call("import", tmp_path / "run", "--out", tmp_path / "other"), "config.json")


def test_an_import_is_exported_and_comes_back(tmp_path: Path) -> None:
    write_marian(tmp_path / "there")
    import_huggingface(tmp_path / "there", tmp_path / "run")
    export(tmp_path / "run", to="huggingface", out=tmp_path / "exported")
    import_huggingface(tmp_path / "exported", tmp_path / "back")
    first, second = (load_as(Translator, tmp_path / name) for name in ("run", "back"))
    for (name, one), (_, other) in zip(
        sorted(first.model.state_dict().items()), sorted(second.model.state_dict().items()), strict=True
    ):
        assert torch.equal(one, other), name
