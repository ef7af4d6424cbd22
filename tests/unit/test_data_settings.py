"""What ``[data]`` says of reading files and packing reaches the samples of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.corpora import Corpora, open_corpora
from meshwright.job.sections import DataSection

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"


def opened(file: Path, content: str, **more: Any) -> Corpora:
    file.write_text(content)
    values = {"train": str(file), "sequence_length": 4, "cache": str(file.parent / "cache"), **more}
    return open_corpora(DataSection.model_validate(values), 1024)


def test_fields_of_jsonl_under_another_name(tmp_path: Path) -> None:
    line = json.dumps({"answer": "cd", "question": "ab", "text": "no", "prompt": "no"})
    data = opened(tmp_path / "corpus.unknown", line, format="jsonl", text_field="answer", prompt_field="question")
    store = data.training.store
    assert store.tokens[:5].tolist() == [*b"abcd", 256]
    assert store.counted is not None and store.counted[:5].tolist() == [0, 0, 1, 1, 1]


def test_documents_are_cut_at_the_separator_and_packed_whole(tmp_path: Path) -> None:
    text = "a\fcd|efgh|ijkl|mnop"
    data = opened(tmp_path / "corpus.txt", text, separator="|", packing="best-fit", sequence_length=7)
    assert data.training.spans.tolist() == [[0, 5], [5, 10], [10, 15], [15, 20]]
    assert len(data.training) == 4, "none is cut to fill the row of another"


def test_the_end_of_documents_is_the_token_that_the_job_names(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    data = opened(tmp_path / "corpus.txt", "to be", tokenizer=str(EXAMPLES / "tokenizer.json"), end_token="e")
    assert data.tokenizer.end not in (None, 0)
    assert data.training.store.tokens[-1:].tolist() == [data.tokenizer.end]
