"""The corpus of the repository is what its provenance says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from meshwright.data.corpus import ReadOptions, read_documents

DATA = Path(__file__).parents[2] / "examples" / "data"


def test_the_files_are_those_of_the_provenance() -> None:
    provenance = (DATA / "PROVENANCE.md").read_text()
    for name in ("shakespeare.txt", "tokenizer.json"):
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() in provenance


def test_the_corpus_is_one_to_two_megabytes_of_scenes() -> None:
    content = (DATA / "shakespeare.txt").read_bytes()
    assert 10**6 <= len(content) <= 2 * 10**6 and content.isascii()
    documents = list(read_documents(DATA / "shakespeare.txt", ReadOptions()))
    assert len(documents) == 263
    assert documents[0].text.startswith("Hamlet. ACT I. SCENE I. Elsinore. A platform before the castle.\n\n[FRANCISCO")
    assert len({document.text.partition("\n")[0] for document in documents}) == 263  # each scene once


def test_the_tokenizer_covers_every_byte() -> None:
    model = json.loads((DATA / "tokenizer.json").read_text())["model"]
    assert len(model["vocab"]) == 1024 and len(model["merges"]) == 1024 - 257
