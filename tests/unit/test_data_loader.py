"""A job's data from its files to the batches of every rank."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.corpora import open_corpora
from meshwright.data.loader import Loader
from meshwright.data.megatron import write_megatron
from meshwright.data.packing import IGNORE
from meshwright.data.progress import terminal_progress
from meshwright.errors import DataError, InputError
from meshwright.job.job import Job, job_from_values

CORPUS = Path(__file__).parents[2] / "examples" / "data" / "shakespeare.txt"


def job(cache: Path, micro_batch: int = 2, vocabulary: int = 300, global_size: int = 6, **data: Any) -> Job:
    defaults = {"train": str(CORPUS), "validation": 0.05, "sequence_length": 64, "cache": str(cache)}
    return job_from_values(
        {
            "model": {"vocabulary": vocabulary, "hidden": 8, "layers": 1, "heads": 1, "ffn_hidden": 8},
            "data": defaults | data,
            "batch": {"global_size": global_size},
            "layout": {"micro_batch": micro_batch},
        }
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def rows_of(loader: Loader, step: int) -> list[tuple[int, list[int]]]:
    return [
        (int(example), tokens)
        for batch in loader.batches(step)
        for example, tokens in zip(batch.examples, batch.tokens.tolist(), strict=True)
        if example >= 0
    ]


def test_the_ranks_of_a_step_hold_the_global_batch_whatever_their_number(cache: Path) -> None:
    alone = Loader(job(cache), 0, 1)
    three = [Loader(job(cache), rank, 3) for rank in range(3)]
    for step in (0, 1, 5):
        together = sorted(row for loader in three for row in rows_of(loader, step))
        assert together == sorted(rows_of(alone, step))
        assert [example for example, _ in together] == list(range(6))
    for loader in (alone, *three):
        loader.close()


def test_a_new_loader_at_a_later_step_equals_one_that_came_there(cache: Path) -> None:
    came, new = Loader(job(cache), 0, 1), Loader(job(cache), 0, 1)
    came_rows = [rows_of(came, step) for step in range(5)]
    assert rows_of(new, 4) == came_rows[4]
    assert rows_of(new, 2) == came_rows[2]  # not the step that was made ahead
    assert came.cursor(5) == 30
    came.close()
    new.close()


def test_another_global_batch_goes_on_at_the_same_sample(cache: Path) -> None:
    small, large = Loader(job(cache), 0, 1), Loader(job(cache, global_size=12), 0, 1)
    wanted = [tokens for step in (2, 3) for _, tokens in rows_of(small, step)]
    large.resume(step=2, cursor=small.cursor(2))
    assert [tokens for _, tokens in rows_of(large, 2)] == wanted
    assert large.cursor(3) == 24
    small.close()
    large.close()


def test_each_validation_sample_is_seen_once(cache: Path) -> None:
    loaders = [Loader(job(cache, global_size=10), rank, 4) for rank in range(4)]
    samples = loaders[0].corpora.validation
    assert samples is not None
    targets: list[int] = []
    lists = [list(loader.validation()) for loader in loaders]
    assert {len(steps) for steps in lists} == {-(-len(samples) // 10)}
    assert {len(batches) for steps in lists for batches in steps} == {2}
    for steps in lists:
        for batches in steps:
            for batch in batches:
                targets += batch.labels[batch.labels != IGNORE].tolist()
    assert sorted(targets) == sorted(samples.targets().tolist())
    for loader in loaders:
        loader.close()


def test_no_training_sample_of_the_corpus_overlaps_the_validation_part(cache: Path) -> None:
    corpora = open_corpora(job(cache).data, 300)
    assert corpora.validation is not None
    used = np.zeros(len(corpora.training.store.tokens), np.int8)
    for part, samples in ((1, corpora.training), (2, corpora.validation)):
        pieces = samples.pieces
        for begin, size, end in zip(pieces.begin, pieces.size, pieces.end, strict=True):
            used[begin : min(begin + size + 1, end)] |= part  # with the target of its last token
    assert set(used.tolist()) == {1, 2}
    assert (used == 2).sum() == (corpora.validation.spans[:, 1] - corpora.validation.spans[:, 0]).sum()


def test_entropy_is_of_the_validation_targets(cache: Path) -> None:
    loader = Loader(job(cache), 0, 1)
    entropy = loader.unigram_entropy()
    assert entropy is not None and 3.0 < entropy < 3.6  # English bytes
    loader.close()
    without = Loader(job(cache, validation=None), 0, 1)
    assert without.unigram_entropy() is None
    assert list(without.validation()) == []
    without.close()


def test_waiting_and_preprocessing_are_measured_apart(tmp_path: Path) -> None:
    first = Loader(job(tmp_path), 0, 1)
    assert first.preprocessing_seconds > 0 and first.seconds_waited == 0
    first.batches(0)
    assert first.seconds_waited > 0
    first.close()
    again = Loader(job(tmp_path), 0, 1)
    assert again.preprocessing_seconds == 0
    again.close()


def test_closing_ends_the_thread(cache: Path) -> None:
    loader = Loader(job(cache), 0, 1)
    loader.batches(0)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data") and thread.is_alive()]


def test_text_and_token_files_make_one_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.jsonl").write_text('{"text": "de"}\n')
    write_megatron(tmp_path / "c.bin", [np.array([1, 2, 299])])
    files = [str(tmp_path / name) for name in ("a.txt", "c.bin", "b.jsonl")]
    settings = job(tmp_path / "cache", train=files, validation=None, sequence_length=4).data
    corpora = open_corpora(settings, 300)
    assert corpora.training.targets().tolist() == [*b"bc", 256, 2, 299, *b"e", 256]
    with pytest.raises(InputError, match=r"c.bin' has token ids up to 299 but model.vocabulary=299"):
        open_corpora(settings, 299)
    with pytest.raises(InputError, match=r"data.tokenizer='bytes' has token ids up to 256 but model.vocabulary=200"):
        open_corpora(settings, 200)


def test_both_halves_of_a_token_corpus_are_one(tmp_path: Path) -> None:
    write_megatron(tmp_path / "set.bin", [np.array([1, 2, 3])])
    settings = job(tmp_path / "cache", train=str(tmp_path / "set.*"), validation=None).data
    assert open_corpora(settings, 300).training.targets().tolist() == [2, 3]
    halves: dict[str, Any] = {"train": str(tmp_path / "set.bin"), "validation": str(tmp_path / "set.idx")}
    with pytest.raises(InputError, match=r"is in data.train and data.validation"):
        open_corpora(job(tmp_path / "cache", **halves).data, 300)


def test_a_validation_file_that_is_trained_on_is_refused(cache: Path) -> None:
    with pytest.raises(InputError, match=r"is in data.train and data.validation"):
        open_corpora(job(cache, validation=[str(CORPUS)]).data, 300)


def test_validation_files_stand_apart(tmp_path: Path) -> None:
    for name in ("train.txt", "held.txt"):
        (tmp_path / name).write_text(name * 40)
    corpora = open_corpora(
        job(tmp_path / "c", train=str(tmp_path / "train.txt"), validation=str(tmp_path / "held.txt")).data, 300
    )
    assert corpora.validation is not None
    assert corpora.validation.targets()[:7].tolist() == [*b"eld.txt"]
    assert corpora.training.targets()[:8].tolist() == [*b"rain.txt"]


def test_bad_data_is_found_before_any_rank_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_corpora(job(tmp_path, train=str(tmp_path / "none.txt")).data, 300)
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(InputError, match=r"leaves the training part no token to predict"):
        open_corpora(job(tmp_path, train=str(tmp_path / "one.txt")).data, 300)


def test_the_bar_is_drawn_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb one gets no bar

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with terminal_progress("tokenising", io.StringIO()) as nothing:
        assert nothing is None
    screen = Terminal()
    with terminal_progress("tokenising", screen) as callback:
        assert callback is not None and screen.getvalue() == ""
        callback(1 << 20, 2 << 20)
    assert "tokenising" in screen.getvalue()
