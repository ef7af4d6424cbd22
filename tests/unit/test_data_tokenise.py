"""Tokenised once, whole or not at all, by one process; and the tokenizers themselves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.corpus import ReadOptions
from meshwright.data.tokenise import content_digest, tokenise
from meshwright.data.tokenizer import ByteTokenizer, FileTokenizer, Ids, check_vocabulary, open_tokenizer
from meshwright.data.tokens import TokenStore, join, unigram_entropy
from meshwright.errors import DataError, InputError

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text("one\n\f\ntwo é\n\f\n\n", "utf-8")
    return path


def test_bytes_and_end_tokens_lie_in_the_store(text: Path, tmp_path: Path) -> None:
    store = tokenise([text], ByteTokenizer(), tmp_path / "cache")
    assert store.tokens[0 : len(store.tokens)].tolist() == [*b"one", 256, *"two é".encode(), 256]
    assert store.spans.tolist() == [[0, 4], [4, 11]]
    assert (store.size, store.end, store.empty_documents, store.counted) == (257, 256, 1, None)
    assert isinstance(store.tokens, np.memmap) and store.tokens.dtype == np.uint16


def test_the_second_time_nothing_is_tokenised(text: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = tokenise([text], ByteTokenizer(), tmp_path / "cache", progress=lambda *at: calls.append(at))
    assert first.seconds > 0 and calls[-1] == (text.stat().st_size, text.stat().st_size)
    calls.clear()
    again = tokenise([text], ByteTokenizer(), tmp_path / "cache", progress=lambda *at: calls.append(at))
    assert again.seconds == 0.0 and not calls
    assert again.tokens[0:11].tolist() == first.tokens[0:11].tolist()


def test_all_that_shapes_the_tokens_changes_the_digest(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("x")
    same = tmp_path / "moved.txt"
    same.write_bytes(text.read_bytes())
    plain, byte = ReadOptions(), ByteTokenizer()
    digests = [
        content_digest([text], byte, plain, "auto"),
        content_digest([text, other], byte, plain, "auto"),
        content_digest([other, text], byte, plain, "auto"),
        content_digest([text], byte, ReadOptions(separator="\n\n"), "auto"),
        content_digest([text], byte, ReadOptions(prompt_field="p"), "auto"),
        content_digest([text], byte, plain, "jsonl"),
    ]
    assert len(set(digests)) == len(digests)
    assert content_digest([same], byte, plain, "auto") == digests[0]
    text.write_text("one\n\f\ntwo e\n\f\n\n")
    assert content_digest([text], byte, plain, "auto") != digests[0]


def test_prompts_are_tokenised_apart_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"q": "ab", "text": "c"}\n{"q": "", "text": "de"}\n')
    store = tokenise([path], ByteTokenizer(), tmp_path / "cache", ReadOptions(prompt_field="q"))
    assert store.tokens[0:7].tolist() == [*b"abc", 256, *b"de", 256]
    assert store.counted is not None and store.counted[0:7].tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_a_bad_file_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"text": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        tokenise([path], ByteTokenizer(), tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no document with any text"):
        tokenise([path], ByteTokenizer(), tmp_path / "cache")


class SlowTokenizer(ByteTokenizer):
    """Says on disk that it tokenises, then takes its time."""

    def __init__(self, log: Path, seconds: float) -> None:
        self.log, self.seconds = log, seconds

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return super().encode(texts)


def tokenise_slowly(text: Path, cache: Path, log: Path, seconds: float) -> None:
    store = tokenise([text], SlowTokenizer(log, seconds), cache)
    assert len(store.tokens) == 11


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_several_processes_one_tokenises(text: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (text, tmp_path / "cache", tmp_path / "log", 0.5)
    processes = [context.Process(target=tokenise_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_killed_tokenisation_is_never_taken(text: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    process = multiprocessing.get_context("spawn").Process(target=tokenise_slowly, args=(text, cache, log, 60.0))
    process.start()
    wait_for(log)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    left = [entry.name for entry in cache.iterdir() if ".partial-" in entry.name]
    assert len(left) == 1
    assert tokenise([text], ByteTokenizer(), cache).seconds > 0  # the lock went with its holder
    assert not [entry for entry in cache.iterdir() if ".partial-" in entry.name]


def test_a_damaged_cache_is_named(text: Path, tmp_path: Path) -> None:
    tokenise([text], ByteTokenizer(), tmp_path / "cache")
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"is damaged \(tokens.bin has 21 bytes instead of 22\); delete it"):
        tokenise([text], ByteTokenizer(), tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(text: Path) -> None:
    with pytest.raises(InputError, match=r"token cache '/proc/none' cannot be written .* set data.cache"):
        tokenise([text], ByteTokenizer(), Path("/proc/none"))


@given(st.text())
def test_bytes_round_trip(original: str) -> None:
    if original.encode("utf-8", "ignore").decode() == original:
        tokenizer = ByteTokenizer()
        (ids,) = tokenizer.encode([original])
        assert tokenizer.decode([*ids.tolist(), 256]) == original


def test_a_tokenizer_file_round_trips_and_has_its_end_token() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = open_tokenizer(str(EXAMPLES / "tokenizer.json"))
    sentence = "To be, or not to be: that is the question:\n\tcafé"
    (ids,) = tokenizer.encode([sentence])
    assert tokenizer.end == 0 and 0 not in ids.tolist()
    assert int(ids.max()) < tokenizer.size == 1024
    assert len(ids) < len(sentence)
    assert tokenizer.decode([*ids.tolist(), 0]) == sentence
    assert open_tokenizer(str(EXAMPLES)).digest == tokenizer.digest


def test_wrong_tokenizers_are_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"none.json' does not exist"):
        open_tokenizer(str(tmp_path / "none.json"))
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"model": 3')
    with pytest.raises(DataError, match=r"is not a tokenizer.json"):
        FileTokenizer(broken)
    with pytest.raises(InputError, match=r"end_token='<none>' is not a token of"):
        FileTokenizer(EXAMPLES / "tokenizer.json", "<none>")
    with pytest.raises(InputError, match="'bytes' always ends documents with 256"):
        open_tokenizer("bytes", "</s>")


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    check_vocabulary(257, 257, "data.tokenizer='bytes'")
    with pytest.raises(InputError, match=r"ids up to 256 but model.vocabulary=256; use a vocabulary of at least 257"):
        check_vocabulary(257, 256, "data.tokenizer='bytes'")


def test_unigram_entropy_is_shannons() -> None:
    assert unigram_entropy(np.array([], np.int64)) == 0.0
    assert unigram_entropy(np.array([7, 7, 7])) == 0.0
    assert unigram_entropy(np.arange(256)) == pytest.approx(np.log(256))
    assert unigram_entropy(np.array([0, 0, 1, 2])) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(4))


def test_joined_stores_read_as_one() -> None:
    first = TokenStore(np.array([1, 2, 3], np.uint16), np.array([[0, 1], [1, 3]]), None, 4, None, "a")
    mask = np.array([0, 1], np.uint8)
    second = TokenStore(np.array([70000, 5], np.uint32), np.array([[0, 2]]), mask, 70001, 5, "b")
    both = join([first, second])
    assert len(both.tokens) == 5 and both.size == 70001 and both.end == 5
    assert [both.tokens[begin:end].tolist() for begin, end in both.spans.tolist()] == [[1], [2, 3], [70000, 5]]
    assert both.counted is not None
    assert [both.counted[begin:end].tolist() for begin, end in both.spans.tolist()] == [[1], [1, 1], [0, 1]]
    assert both.tokens[3:3].tolist() == [] and both.tokens[5:5].tolist() == []
    with pytest.raises(IndexError, match="more than one file"):
        both.tokens[2:4]
