"""`transformers` as an engine: not a fast one, but what people who load an exported model will run.

It is asked when a model is exported, so that what it answers is known to be what we answer.

Shapes   B sentences   S source width   N answers   T answer length   R rows of a step: N, or the beams of all
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dragoman.config import SearchSettings
from dragoman.engines.base import Engine, Job
from dragoman.search.step import Found
from dragoman.types import EOS, PAD, UserError


class HuggingFaceEngine(Engine):
    """The engine of a folder that `transformers` opens."""

    def __init__(self, folder: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise UserError(
                "transformers is not installed, and without it nothing can be compared with it; "
                "pip install 'dragoman[huggingface]' brings it"
            ) from None
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        """One call for all jobs of one limit, since a call has one."""
        found: list[list[Found]] = [[] for _ in jobs]
        for limit in sorted({job.limit for job in jobs}):
            some = [i for i, job in enumerate(jobs) if job.limit == limit]
            for i, answers in zip(some, self.generate([jobs[i].ids for i in some], limit, search), strict=True):
                found[i] = answers
        return found

    @torch.inference_mode()
    def generate(self, sources: list[list[int]], limit: int, search: SearchSettings) -> list[list[Found]]:
        source_BS = pad_sequence([torch.tensor([*ids, EOS]) for ids in sources], batch_first=True, padding_value=PAD)
        answer = self.model.generate(
            source_BS,
            attention_mask=(source_BS != PAD).long(),
            num_beams=search.beam,
            num_return_sequences=search.nbest,
            length_penalty=search.length_penalty,
            early_stopping=search.beam > 1,
            max_new_tokens=limit,
            max_length=None,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_NT, logp_TRV = answer.sequences[:, 1:], torch.stack(answer.logits).float().log_softmax(-1)
        step_T = torch.arange(token_NT.size(1))  # the search may have gone on for longer answers
        alone_NT = torch.arange(len(token_NT))[:, None].expand_as(token_NT)
        row_NT = alone_NT if search.beam == 1 else answer.beam_indices[:, : len(step_T)].clamp(min=0)
        logps = logp_TRV[step_T, row_NT, token_NT].tolist()  # the ready scores of cut answers are those of others
        rows = [found(*row, search) for row in zip(token_NT.tolist(), logps, strict=True)]
        return [rows[start : start + search.nbest] for start in range(0, len(rows), search.nbest)]


def found(tokens: list[int], logps: list[float], search: SearchSettings) -> Found:
    """What stands behind the end mark is no answer."""
    finished = EOS in tokens
    length = tokens.index(EOS) + 1 if finished else len(tokens)
    logp = sum(logps[:length])
    return Found(tokens[: length - finished], logp, logp / length**search.length_penalty, finished)
