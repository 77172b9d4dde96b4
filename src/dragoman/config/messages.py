"""What is wrong with settings, as a sentence: from the faults that pydantic finds, the key, the value, the remedy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, Tag

from dragoman.errors import UserError

# What settings are called in other toolkits and in papers. A target without a section is looked for where the name
# stands. tests/config/test_setting_synonyms.py checks that every target exists.
SETTING_SYNONYMS = {
    name: target
    for target, names in {
        "source": "src, source_file, input",
        "target": "tgt, trg, target_file, output",
        "data.train": "train_data, training_data, train_file, train_set, trainpref",
        "data.dev": "valid, validation, valid_data, validation_data, dev_data, eval_data, valid_sets, validation_file",
        "data.test": "test_data, test_file, test_set",
        "data.max_length": "max_seq_len, max_seq_length, max_source_length, max_target_length, max_sent_length",
        "data.cache": "cache_dir",
        "tokenizer.kind": "tokenizer_type, subword, subword_type, bpe_type",
        "tokenizer.size": "vocab_size, vocabulary_size, vocab, src_vocab_size, n_vocab, num_merges, "
        "bpe_size, voc_limit",
        "tokenizer.target_size": "tgt_vocab_size, trg_vocab_size, target_vocab_size",
        "tokenizer.joint": "share_vocab, shared_vocab, joined_dictionary, joint_vocab, share_all_embeddings",
        "tokenizer.sampling": "bpe_dropout, subword_sampling, subword_alpha",
        "model.kind": "arch, architecture, model_type, model_name",
        "model.width": "width, hidden_size, d_model, dim, dim_model, model_dim, embed_dim, embedding_dim, "
        "hidden_dim, n_embd, encoder_embed_dim, decoder_embed_dim, rnn_size, word_vec_size, dim_emb",
        "model.layers": "layers, num_layers, n_layers, n_layer, num_hidden_layers, depth",
        "model.encoder_layers": "encoder_layers, enc_layers, enc_depth, num_encoder_layers, n_enc_layers",
        "model.decoder_layers": "decoder_layers, dec_layers, dec_depth, num_decoder_layers, n_dec_layers",
        "model.heads": "heads, num_heads, n_heads, n_head, attention_heads, num_attention_heads, nhead, "
        "encoder_attention_heads, decoder_attention_heads",
        "model.feedforward_width": "feedforward_width, ffn_dim, d_ff, ff_size, ff_dim, dim_feedforward, "
        "intermediate_size, feedforward_dim, transformer_ff, transformer_dim_ffn, encoder_ffn_dim, decoder_ffn_dim, "
        "encoder_ffn_embed_dim, decoder_ffn_embed_dim, n_inner",
        "model.dropout": "dropout, dropout_rate, dropout_p, hidden_dropout, hidden_dropout_prob, resid_pdrop",
        "model.head_dropout": "attention_dropout, attn_dropout, attn_pdrop, attention_probs_dropout_prob",
        "model.activation_dropout": "relu_dropout, ffn_dropout",
        "model.layer_dropout": "layerdrop, encoder_layerdrop, decoder_layerdrop, stochastic_depth",
        "model.activation": "activation, activation_fn, activation_function, hidden_act",
        "model.norm": "norm, norm_type, layer_norm, normalization",
        "model.norm_place": "layer_norm_position, normalize_before, norm_first, prenorm, pre_norm",
        "model.position": "position, pos_encoding, position_encoding, positional_encoding, position_embedding, pos_emb",
        "model.max_length": "max_position_embeddings, max_positions, max_source_positions, max_target_positions",
        "model.tied": "tied, tie_embeddings, tied_embeddings, tie_word_embeddings, tied_softmax, share_embeddings, "
        "share_decoder_input_output_embed",
        "model.cell": "rnn_type, cell_type, rnn_cell",
        "model.context": "block_size, context_length, context_size, seq_len, bptt",
        "train.lr": "learning_rate, max_lr, peak_lr, base_lr",
        "train.tokens": "batch_size, max_tokens, batch_tokens, tokens_per_batch, mini_batch, minibatch_size, "
        "per_device_train_batch_size, train_batch_size",
        "train.accumulate": "gradient_accumulation_steps, grad_accum, accum_count, update_freq, optimizer_delay, "
        "batch_multiplier, accumulate_grad_batches",
        "train.steps": "max_steps, max_updates, max_update, train_steps, num_steps, total_steps, iterations, max_iters",
        "train.epochs": "num_epochs, max_epochs, max_epoch, num_train_epochs, n_epochs",
        "train.minutes": "max_time, max_minutes, time_limit",
        "train.warmup": "warmup_steps, warmup_updates, num_warmup_steps, lr_warmup, learning_rate_warmup, warm_up",
        "train.optimizer": "optim, optimiser",
        "train.schedule": "lr_scheduler, lr_scheduler_type, scheduler, scheduling, lr_schedule, decay_method",
        "train.beta2": "adam_beta2, adam_betas, betas, betas2",
        "train.weight_decay": "l2, weight_decay_rate, wd",
        "train.clip": "grad_clip, clip_norm, max_grad_norm, clip_grad_norm, gradient_clip, gradient_clip_val, "
        "gradient_clipping",
        "train.precision": "fp16, bf16, amp, mixed_precision, dtype, half, model_dtype",
        "train.device": "use_cuda, cuda, gpu, gpu_ranks, use_gpu, no_cuda",
        "train.threads": "num_threads, cpu_threads",
        "train.seed": "random_seed, rng_seed, manual_seed",
        "train.ema": "ema_decay, exponential_smoothing, average_decay",
        "train.average": "avg_checkpoints, average_checkpoints, checkpoint_averaging",
        "train.keep": "keep_last_epochs, keep_checkpoint, keep_best_ckpts, save_total_limit, keep_best_checkpoints",
        "train.patience": "early_stopping_patience, early_stopping, early_stop",
        "train.validate_every": "eval_steps, eval_every, valid_steps, valid_freq, validation_freq, validate_interval, "
        "validate_interval_updates, eval_interval, evaluation_steps, val_check_interval, valid_interval",
        "train.save_every": "save_steps, save_interval, save_freq, save_interval_updates, save_checkpoint_steps, "
        "checkpoint_every",
        "train.log_every": "logging_steps, log_interval, logging_freq, report_every, disp_freq, log_steps",
        "train.metric": "early_stopping_metric, eval_metric, best_checkpoint_metric, metric_for_best_model",
        "search.beam": "beam_size, beam_width, num_beams, beams",
        "search.nbest": "n_best, num_return_sequences",
        "search.length_penalty": "lenpen, alpha, beam_alpha, normalize",
        "search.no_repeat": "no_repeat_ngram, no_repeat_ngram_size, block_ngram_repeat",
        "search.max_ratio": "max_len_a, max_length_factor",
        "search.max_extra": "max_len_b, max_new_tokens",
        "search.method": "do_sample, decoding, decode_method",
        "search.samples": "num_samples, n_samples",
        "search.unknown": "replace_unk, unk_replace",
    }.items()
    for name in names.split(", ")
}
VALUE_SYNONYMS = {
    "ct2": "ctranslate2",
    "pytorch": "torch",
    "hf": "huggingface",
    "transformers": "huggingface",
    "bahdanau": "additive",
    "concat": "additive",
    "luong": "multiplicative",
    "general": "multiplicative",
    "bilinear": "multiplicative",
    "rope": "rotary",
    "sine": "sinusoidal",
    "absolute": "learned",
    "noam": "inverse_sqrt",
    "invsqrt": "inverse_sqrt",
    "seq2seq": "rnn",
    "lstm": "rnn",
    "gru": "rnn",
    "gpt": "lm",
    "language_model": "lm",
    "bert": "classifier",
    "sentencepiece": "unigram",
    "spm": "unigram",
    "wordpiece": "bpe",
    "character": "char",
    "whitespace": "space",
}


def near(name: str, menu: Iterable[str]) -> str:
    """Return '; did you mean ...?' when a name on the menu means the same or is spelt alike, else nothing."""
    entries = [entry for entry in menu if entry]
    synonym = VALUE_SYNONYMS.get(str(name).lower(), "")
    if name not in entries and synonym in entries:
        return f"; did you mean {synonym!r}?"
    found = difflib.get_close_matches(str(name), entries, 1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def suggest_setting(section: str, name: str, menu: Iterable[str], sections: Mapping[str, Iterable[str]]) -> str:
    """Return '; did you mean ...?' for a setting that does not exist, else nothing.

    It goes by what other toolkits call a setting, then by sections that have one of this name, then by spelling.
    `sections` are those of a recipe, with the names of their settings where they are known.
    """
    entries = list(menu)
    synonym = SETTING_SYNONYMS.get(name.lower().replace("-", "_"), "")
    home, _, setting = synonym.rpartition(".")
    if setting and (setting in entries if home in ("", section) else home in sections):
        return f"; did you mean {synonym!r}?"
    homes = [f"{other}.{name}" for other, names in sections.items() if other != section and name in names]
    return f"; did you mean {' or '.join(map(repr, homes))}?" if homes else near(name, entries)


TAG = "kind="  # how tags of the members of a discriminated union begin


def describe_fault(cls: type[BaseModel], faults: Any, where: str, line_of: Mapping[str, int]) -> str:
    """Return a sentence about the first of the faults that pydantic found in the settings of a record."""
    fault = faults[0]
    if isinstance(error := fault.get("ctx", {}).get("error"), UserError):
        return str(error)
    path = _path(fault)
    key = ".".join([*([where] if where else []), *path])
    line = f" (line {line_of[key]})" if key in line_of else ""
    if fault["type"] == "extra_forbidden":
        section = key.rpartition(".")[0]
        menu = _record_at(cls, [str(part) for part in fault["loc"][:-1]]).model_fields
        meant = suggest_setting(section, path[-1], menu, _sections(cls))
        tag = next((str(part) for part in fault["loc"][:-1] if str(part).startswith(TAG)), "")
        of_kind = f"with {section}.{tag.partition('/')[0]} " if tag else ""  # another kind may have the setting
        return f"{of_kind}there is no setting {key!r}{line}{meant} (there are: {', '.join(menu)})"
    wanted = " or ".join(_wanted(other) for other in faults if _path(other) == path)  # a union has a fault per member
    return f"{key}{line}: should be {wanted}, got {short(fault['input'])}"


def _path(fault: Any) -> list[str]:
    """Return the keys that lead to a fault, without what pydantic adds for unions and validators."""
    *parents, last = [str(part) for part in fault["loc"]] or [""]
    marks = ("literal[", "function-", "bool", "tuple[", TAG)
    kept = [part for part in parents if not part.startswith(marks)]
    unknown = fault["type"] == "extra_forbidden"
    return [*kept, last] if unknown or not last.startswith(marks) else kept


WANTED = {  # by the kind of fault, where pydantic's own words would not do
    "model_type": "settings written as name: value",
    "dict_type": "settings written as name: value",
    "union_tag_not_found": "settings written as name: value",
    "missing": "set",
    "tuple_type": "a list",
    "too_long": "a list of {max_length}",
    "value_error": "{error}",
}


def _wanted(fault: Any) -> str:
    if fault["type"] in WANTED:
        return WANTED[fault["type"]].format(**fault.get("ctx", {}))
    message: str = fault["msg"]
    return message.removeprefix("Input should be ")[:1].lower() + message.removeprefix("Input should be ")[1:]


def short(value: Any) -> str:
    """A value as a sentence can hold it."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def _records(kind: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the records in the type of a field, each with its tag if the type is a discriminated union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield "", kind
    elif tags := [note.tag for note in getattr(kind, "__metadata__", ()) if isinstance(note, Tag)]:
        yield tags[0], get_args(kind)[0]
    else:
        for inner in get_args(kind):
            yield from _records(inner)


def _record_at(cls: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """Return the record that a path of keys, indices and tags leads to."""
    members: dict[str, type[BaseModel]] = {}
    for name in path:
        if name.startswith(TAG):
            cls = members[name]
        elif name in cls.model_fields:
            members = dict(_records(cls.model_fields[name].annotation))
            cls = members.get("", cls)
    return cls


def _sections(cls: type[BaseModel]) -> dict[str, list[str]]:
    """Return the sections of a recipe with the names of their settings; those of a model depend on its kind."""
    found = {name: dict(_records(field.annotation)) for name, field in cls.model_fields.items()}
    return {name: list(records[""].model_fields) if "" in records else [] for name, records in found.items() if records}
