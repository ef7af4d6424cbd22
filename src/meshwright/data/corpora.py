"""From the ``[data]`` section of a job to training and validation samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from meshwright.data.corpus import ReadOptions, format_of
from meshwright.data.files import expand
from meshwright.data.megatron import read_megatron
from meshwright.data.samples import Samples
from meshwright.data.split import Spans, split
from meshwright.data.tokenise import Progress, tokenise
from meshwright.data.tokenizer import Tokenizer, check_vocabulary, open_tokenizer
from meshwright.data.tokens import TokenStore, join
from meshwright.errors import InputError
from meshwright.job.sections import DataSection


@dataclass(frozen=True)
class Corpora:
    """What a job trains and validates on.

    Attributes:
        training: Samples to train on.
        validation: Samples held out; None where the job names none. No token is in both.
        tokenizer: For prompts and for showing text.
        preprocessing_seconds: Spent tokenising now; 0.0 where the cache had everything.
    """

    training: Samples
    validation: Samples | None
    tokenizer: Tokenizer
    preprocessing_seconds: float


def open_corpora(data: DataSection, vocabulary: int, progress: Progress | None = None) -> Corpora:
    """Read, tokenise (once, into ``data.cache``), split and pack the corpora of a job.

    Safe to call on all ranks at once, and before any rank starts, to find what is wrong with the data early.

    Args:
        data: The job's section.
        vocabulary: The model's; ids beyond it are refused.
        progress: Called while tokenising.

    Raises:
        DataError: A file is missing, empty, cut short or malformed.
        InputError: The section contradicts itself, the files or the model.
    """
    files = expand(data.train)
    _refuse_unread_prompts(files, data)
    tokenizer = open_tokenizer(data.tokenizer, data.end_token)
    store = _open(files, data, tokenizer, vocabulary, progress)
    seconds = store.seconds
    training_spans, held_out = store.spans, None
    if isinstance(data.validation, float):
        training_spans, validation_spans = split(store.spans, data.validation)
        held_out = _samples(store, validation_spans, data)
    elif data.validation is not None:
        others = expand(data.validation)
        _refuse_shared(files, others)
        other = _open(others, data, tokenizer, vocabulary, progress)
        seconds += other.seconds
        held_out = _samples(other, other.spans, data)
    return Corpora(_samples(store, training_spans, data), held_out, tokenizer, seconds)


def _samples(store: TokenStore, spans: Spans, data: DataSection) -> Samples:
    return Samples(store, spans, data.sequence_length, data.packing, data.document_mask)


def _open(
    files: Sequence[Path], data: DataSection, tokenizer: Tokenizer, vocabulary: int, progress: Progress | None
) -> TokenStore:
    """All files as one store: token files as they are, runs of text files tokenised together."""
    options = ReadOptions(data.separator, data.text_field, data.prompt_field)
    stores: list[TokenStore] = []
    for is_tokens, run in groupby(files, lambda path: format_of(path, data.format) == "megatron"):
        if is_tokens:
            for path in run:
                if path.suffix == ".idx" and path.with_suffix(".bin") in files:
                    continue  # a pattern such as NAME* names both halves of one corpus
                stores.append(read_megatron(path))
                check_vocabulary(stores[-1].size, vocabulary, stores[-1].origin)
        else:
            check_vocabulary(tokenizer.size, vocabulary, f"data.tokenizer='{data.tokenizer}'")
            stores.append(tokenise(list(run), tokenizer, Path(data.cache), options, data.format, progress))
    return join(stores)


def _refuse_unread_prompts(files: Sequence[Path], data: DataSection) -> None:
    """Prompts would be looked for in no file."""
    if data.prompt_field is not None and all(format_of(path, data.format) != "jsonl" for path in files):
        raise InputError(
            f"data.prompt_field={data.prompt_field!r} is a field of JSONL, but '{files[0]}' is none; leave it out, or "
            "give JSONL files"
        )


def _refuse_shared(training: Sequence[Path], validation: Sequence[Path]) -> None:
    """Validation on text that was trained on measures nothing."""

    def identity(path: Path) -> Path:
        resolved = path.resolve()
        return resolved.with_suffix(".bin") if resolved.suffix == ".idx" else resolved

    seen = {identity(path) for path in training}
    for path in validation:
        if identity(path) in seen:
            raise InputError(
                f"'{path}' is in data.train and data.validation; name different files, or give a fraction to hold out"
            )
