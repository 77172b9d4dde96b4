"""Folders of published models as `transformers` saves them, with random weights and small vocabularies."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from dragoman.phrasebook.generate import generate_pairs

EOS_BIAS = 1.5  # added to the logit of the end, so that sentences of random models end
EOS_FACTOR = 1.12  # of the embedding of the end
SHARPNESS = 6.0  # factor of the embeddings: distributions are peaked, so that no two hypotheses are equally good


def train_sentencepiece(lines: list[str], path: Path, kind: str, size: int) -> list[str]:
    """Write a SentencePiece model with the usual normalization, and return its pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        minloglevel=2,
        num_threads=1,
    )
    path.write_bytes(model.getvalue())
    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces: list[str] = processor.id_to_piece(list(range(processor.get_piece_size())))
    return pieces


def phrasebook_sides(count: int = 400) -> tuple[list[str], list[str]]:
    pairs = list(generate_pairs("train", count))
    return [pair.source for pair in pairs], [pair.target for pair in pairs]


def sharpen(model: Any, eos: int, sharpness: float) -> None:
    """Make the distributions of a model with random weights peaked, and ends of sentences frequent enough."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name:
                continue
            if name.endswith("layer_norm.weight"):  # random signs: otherwise the last token would be repeated
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif any(part in name for part in ("embed_tokens", "shared", "lm_head")):
                parameter.mul_(sharpness)
                parameter[eos] *= EOS_FACTOR
            else:  # outputs have to depend on the source
                parameter.mul_(8.0 if "encoder_attn" in name else 4.0)
        bias = getattr(model, "final_logits_bias", None)
        if bias is not None:
            bias.copy_(torch.randn(bias.shape, generator=generator))
            bias[0, eos] += EOS_BIAS


def write_marian(
    folder: Path,
    *,
    size: int = 200,
    separate: bool = False,
    languages: tuple[str, ...] = (),
    tied: bool = True,
    vocabulary: int = 0,
    sharpness: float = SHARPNESS,
    **config: Any,
) -> Any:
    """Write a MarianMT folder, as opus-mt models are, and return the model. `vocabulary`: rows of a larger one."""
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    folder.mkdir(parents=True)
    sides = [
        train_sentencepiece(lines, folder / f"{name}.spm", "unigram", size)
        for name, lines in zip(("source", "target"), phrasebook_sides(), strict=True)
    ]
    tables = []
    for pieces in sides if separate else [[*sides[0], *sides[1]]]:
        ordinary = [*(f">>{code}<<" for code in languages), *dict.fromkeys(pieces[3:][:-4])]  # some pieces are missing
        symbols = list(dict.fromkeys(["</s>", "<unk>", *ordinary]))
        symbols += [f"token{i}" for i in range(len(symbols), vocabulary - 1)]
        tables.append({token: i for i, token in enumerate([*symbols, "<pad>"])})
    if separate:  # both need the same id of <pad>, as config.json has one
        shortest = min(map(len, tables))
        tables = [{token: i for i, token in enumerate([*[*table][: shortest - 1], "<pad>"])} for table in tables]
        (folder / "target_vocab.json").write_text(json.dumps(tables[1]))
    (folder / "vocab.json").write_text(json.dumps(tables[0]))
    options = {"source_lang": "en", "target_lang": "de", "separate_vocabs": separate, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer", **options}))
    pad = len(tables[0]) - 1
    values = {
        "vocab_size": len(tables[0]), "decoder_vocab_size": len(tables[-1]), "pad_token_id": pad, "eos_token_id": 0,
        "decoder_start_token_id": pad, "bos_token_id": 0, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "activation_function": "swish", "scale_embedding": True, "max_position_embeddings": 512,
        "share_encoder_decoder_embeddings": not separate, "tie_word_embeddings": tied, "forced_eos_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(3)
    model: Any = MarianMTModel(MarianConfig(**{**values, **config}))
    model.eval()
    sharpen(model, 0, sharpness)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=4, max_length=512, bad_words_ids=[[pad]], pad_token_id=pad, eos_token_id=0,
        decoder_start_token_id=pad, forced_eos_token_id=0,
    )  # fmt: skip
    model.save_pretrained(folder)
    return model


def write_m2m(
    folder: Path,
    *,
    nllb: bool = False,
    size: int = 200,
    vocabulary: int = 0,
    sharpness: float = SHARPNESS,
    **config: Any,
) -> Any:
    """Write an M2M100 or NLLB folder and return the model."""
    from transformers import GenerationConfig, M2M100Config, M2M100ForConditionalGeneration
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES
    from transformers.models.nllb import tokenization_nllb

    folder.mkdir(parents=True)
    source, target = phrasebook_sides()
    pieces = train_sentencepiece([*source, *target], folder / "sentencepiece.bpe.model", "bpe", size)
    if nllb:
        rows = len(pieces) + 1 + len(tokenization_nllb.FAIRSEQ_LANGUAGE_CODES) + 1
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NllbTokenizer"}))
    else:
        symbols = ["<s>", "<pad>", "</s>", "<unk>", *pieces[3:-4]]  # some pieces are missing
        symbols += [f"token{i}" for i in range(len(symbols), vocabulary - 108)]
        (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(symbols)}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "M2M100Tokenizer"}))
        rows = len(symbols) + len(FAIRSEQ_LANGUAGE_CODES["m2m100"]) + 8
    values = {
        "vocab_size": rows, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(4)
    model: Any = M2M100ForConditionalGeneration(M2M100Config(**{**values, **config}))
    model.eval()
    sharpen(model, 2, 1.6 * sharpness)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=5, max_length=200, early_stopping=True, pad_token_id=1, eos_token_id=2, bos_token_id=0,
        decoder_start_token_id=2,
    )  # fmt: skip
    model.save_pretrained(folder)
    return model
