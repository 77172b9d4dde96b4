"""`transformers` says what we say, token by token and id by id, and what it has saved comes back as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dragoman.data.tokenizers import SubwordTokenizer, Tokenizers, TokenizerSettings, train_tokenizer
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import SearchJob, SearchResult
from dragoman.errors import UserError
from dragoman.inference.engines import huggingface
from dragoman.inference.engines.base import SUPPORTED_BY_LIBRARY
from dragoman.inference.engines.huggingface import HuggingFaceEngine, describe_tokenizer, import_huggingface
from dragoman.inference.loading import open_run
from dragoman.models.base import collect_weights
from dragoman.models.transformer import Transformer
from dragoman.modules.positions import make_sinusoids
from dragoman.phrasebook.generate import generate_pairs
from dragoman.types import BOS, EOS, PAD
from toy_exchange import (
    assert_same,
    combinations,
    list_unsupported,
    loaded_run,
    make_jobs,
    make_letter_tokenizers,
    model_of,
    run_beam_search,
)
from toy_models import describe_differences

HELD = [
    {**section, "scaled": True, "tied": section["tied"] or section["norm_place"] == "pre"}
    for section in combinations(activation=SUPPORTED_BY_LIBRARY["Hugging Face"]["activation"], dropout=[0.0, 0.1])
]
REFUSED = list_unsupported(SUPPORTED_BY_LIBRARY["Hugging Face"])


def written(model: Transformer, folder: Path, tokenizers: Tokenizers | None = None) -> Path:
    folder.mkdir()
    tokenizers = tokenizers or make_letter_tokenizers()
    huggingface.save_huggingface(loaded_run(model, tokenizers), folder)
    tokenizers.save(folder / "tokenizer")
    return folder


@pytest.mark.parametrize("section", HELD, ids=lambda section: describe_differences(section, {}))
def test_every_model_that_it_holds_answers_as_ours_and_comes_back(section: dict[str, Any], tmp_path: Path) -> None:
    model, jobs = model_of(section), make_jobs(8)
    folder = written(model, tmp_path / "there")
    other = HuggingFaceEngine(folder)
    for search in (SearchSettings(beam=1), SearchSettings(beam=3), SearchSettings(beam=2, length_penalty=0.5)):
        assert_same(*whole(run_beam_search(model, jobs, search), other.search(jobs, search)))
    cast(Any, other.model).save_pretrained(tmp_path / "again")
    make_letter_tokenizers().save(tmp_path / "again" / "tokenizer")
    for name in ("there", "again"):
        import_huggingface(tmp_path / name, tmp_path / f"run {name}")
        back = open_run(tmp_path / f"run {name}", device="cpu")
        assert back.longest_source == 9
        for one, other_tensor in zip(every(model), every(back.model), strict=True):
            assert torch.equal(one, other_tensor)


def test_marks_are_not_answered(tmp_path: Path) -> None:
    model, jobs = model_of({"norm_place": "post", "tied": False}), make_jobs(8)
    with torch.no_grad():
        model.project.weight[[PAD, BOS]] *= 20  # half of the time the likeliest
    other = HuggingFaceEngine(written(model, tmp_path / "there"))
    for beam in (1, 3):
        search = SearchSettings(beam=beam)
        assert_same(*whole(run_beam_search(model, jobs, search), other.search(jobs, search)), tolerance=1e-3)


def whole(
    ours: list[list[SearchResult]], theirs: list[list[SearchResult]]
) -> tuple[list[list[SearchResult]], list[list[SearchResult]]]:
    """Without those where only theirs was cut: they put a cut answer before a whole one if its score is higher."""
    kept = [i for i in range(len(ours)) if ours[i][0].finished == theirs[i][0].finished]
    assert kept
    return [ours[i] for i in kept], [theirs[i] for i in kept]


def every(model: Any) -> list[torch.Tensor]:
    """The weights of all layers, also where several layers share theirs."""
    return [weight.tensor for weight in huggingface.list_weights(model)]


def test_options_of_published_models_are_refused_for_an_exported_run(tmp_path: Path) -> None:
    folder = written(model_of({"norm_place": "post"}), tmp_path / "there")
    with pytest.raises(
        UserError, match=r"--from is for published models, and .*there' was exported .* leave --from out"
    ):
        import_huggingface(folder, tmp_path / "run", source_language="de", target_language="en")
    changed(folder, model_type="t5")  # not ours: the language is not what is wrong
    with pytest.raises(UserError, match="has model_type=t5, which Dragoman does not support"):
        import_huggingface(folder, tmp_path / "run", source_language="de")


def test_two_vocabularies(tmp_path: Path) -> None:
    one, two = make_letter_tokenizers("abcdef"), make_letter_tokenizers("uvwxyz12")
    torch.manual_seed(0)
    sizes = {"source_size": one.source.size, "target_size": two.target.size}
    model = Transformer(model_of({"norm_place": "post"}).settings, **sizes, joint=False).eval()
    folder = written(model, tmp_path / "there", Tokenizers(one.source, two.target))
    jobs, search = [SearchJob([4, 5, 9], 9), SearchJob([6], 9)], SearchSettings(beam=2)
    assert_same(*whole(run_beam_search(model, jobs, search), HuggingFaceEngine(folder).search(jobs, search)))
    import_huggingface(folder, tmp_path / "back")
    back = open_run(tmp_path / "back", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(every(model), every(back.model), strict=True))


@pytest.mark.parametrize("width", [2, 8, 14])
def test_halves_are_the_waves_in_their_order(width: int) -> None:
    """What the order does to our sinusoids is what they have; and there is a way back."""
    order_C = huggingface.compute_feature_order(width)
    waves_TC = make_sinusoids(torch.arange(50), width)
    angle_TC = torch.arange(50.0)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
    assert torch.allclose(waves_TC[:, order_C], torch.cat([angle_TC.sin(), angle_TC.cos()], 1), atol=1e-5)
    assert order_C[order_C.argsort()].tolist() == list(range(width))


def test_every_weight_has_one_name() -> None:
    model = model_of({})
    names = [weight.name for weight in huggingface.list_weights(model)]
    assert len(names) == len(set(names))
    assert sum(weight.tensor.numel() for weight in huggingface.list_weights(model)) == sum(
        tensor.numel() for tensor in collect_weights(model).values()
    )


@pytest.mark.parametrize("setting", REFUSED)
def test_a_model_that_it_cannot_hold_is_refused_by_name(setting: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.{setting} cannot be exported to Hugging Face, which supports "):
        huggingface.save_huggingface(loaded_run(model_of(REFUSED[setting])), tmp_path)


def test_two_tables_before_the_norm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="norm_place=pre with two tables"):
        huggingface.save_huggingface(loaded_run(model_of({"tied": False, "norm_place": "pre"})), tmp_path)


CORPUS = [side for pair in generate_pairs("train", 400) for side in (pair.source, pair.target)]
KINDS = [(kind, fallback) for kind in ("bpe", "unigram") for fallback in (True, False)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda each: f"{each[0]} {each[1]}")
def both(request: pytest.FixtureRequest) -> tuple[SubwordTokenizer, Any]:
    kind, fallback = request.param
    size = 600 if fallback else 300
    ours = train_tokenizer(CORPUS, TokenizerSettings(kind=kind, size=size, byte_fallback=fallback))
    assert isinstance(ours, SubwordTokenizer)
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_str(json.dumps(describe_tokenizer(ours)))
    theirs.encode_special_tokens = True  # what split_special_tokens of tokenizer_config.json does
    return ours, theirs


NAMES = re.compile("<(pad|unk|s|/s|0x[0-9A-F]{2})>")


@settings(max_examples=150, deadline=None)
@given(text=st.text() | st.sampled_from(CORPUS) | st.text(alphabet="▁ \u2585\ue581abe\n\t<s>/"))
@example(text="</s> <s> a  b   ")
@example(text="▁a\ue5810\ue581")
def test_their_tokenizer_gives_our_ids(both: tuple[SubwordTokenizer, Any], text: str) -> None:
    ours, theirs = both
    *ids, end = theirs.encode(text).ids
    assert end == EOS
    assert theirs.decode(ids) == ours.decode(ids)
    if NAMES.search(text):  # of pieces that stand for no text: it is enough that they are not taken for them
        assert not {PAD, BOS, EOS} & {*ids}
        assert ours.decode(ids) == text or not ours.lossless
    else:
        assert ids == ours.encode(text)


def test_auto_tokenizer_reads_the_folder(tmp_path: Path) -> None:
    one = train_tokenizer(CORPUS, TokenizerSettings(kind="bpe", size=600))
    folder = tmp_path / "there"
    model = model_of({})
    torch.manual_seed(0)
    model = Transformer(model.settings, source_size=one.size, target_size=one.size, joint=True)
    written(model, folder, Tokenizers(one, one))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("A man walks his dog.", "x </s> y"):
        assert theirs(text)["input_ids"] == [*one.encode(text), 3]
        assert theirs.decode(one.encode(text), skip_special_tokens=True) == text


def test_a_tokenizer_that_it_cannot_hold_is_said(tmp_path: Path) -> None:
    model = model_of({})
    assert huggingface.save_huggingface(loaded_run(model), tmp_path)[0].startswith("the tokenizer is not bpe")
    assert not (tmp_path / "tokenizer.json").exists()


def changed(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "bart"}, "has model_type=bart, .* it takes marian or pegasus"),
        ({"activation_function": "tanh"}, "has activation_function=tanh"),
        ({"scale_embedding": False}, "has scale_embedding=False"),
        ({"decoder_start_token_id": 0}, "has decoder_start_token_id=0, .* it takes 2"),
        ({"decoder_attention_heads": 4}, "has decoder_attention_heads=4, .* it takes 2"),
        ({"vocab_size": 41}, "has 40 and 40 tokens, but the model was made for 41 and 41"),
        ({"decoder_layers": 3}, "the weight 'model.decoder.layers.2.* is missing"),
        ({"decoder_layers": 1}, "models do not have the weight 'model.decoder.layers.1."),
        ({"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}, "fc1.weight' is 32 x 8, and config.json requires 16 x 8"),
    ],
)
def test_a_folder_that_we_cannot_hold_is_refused_by_name(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    folder = written(model_of({}), tmp_path / "there")
    changed(folder, **change)
    with pytest.raises(UserError, match=complaint):
        import_huggingface(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("model.encoder.embed_positions.weight", "does not contain sinusoids"),
        ("model.encoder.extra.weight", "models do not have the weight 'model.encoder.extra.weight'"),
    ],
)
def test_weights_that_we_cannot_hold_are_refused_by_name(name: str, complaint: str, tmp_path: Path) -> None:
    folder = written(model_of({}), tmp_path / "there")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors.get(name, torch.zeros(2)) + 1
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(UserError, match=complaint):
        import_huggingface(folder, tmp_path / "run")


def test_pickled_weights_are_read_as_weights_alone(tmp_path: Path) -> None:
    folder = written(model_of({}), tmp_path / "there")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    import_huggingface(folder, tmp_path / "run")
    assert open_run(tmp_path / "run", device="cpu").longest_source == 9
    torch.save({"x": Path("code")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin' is damaged or contains more than weights"):
        import_huggingface(folder, tmp_path / "other")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_folder_that_is_not_whole_is_refused(name: str, damage: str, tmp_path: Path) -> None:
    folder = written(model_of({}), tmp_path / "there")
    path = folder / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    with pytest.raises(UserError):
        import_huggingface(folder, tmp_path / "run")
