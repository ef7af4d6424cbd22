"""Batches for one rank, made ahead by a background thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.data.batch import Batch, ceil_div, micro_batches
from meshwright.data.corpora import Corpora, open_corpora
from meshwright.data.order import Order
from meshwright.data.progress import terminal_progress
from meshwright.data.samples import Samples
from meshwright.data.tokens import unigram_entropy
from meshwright.data.unequal import unequal_micro_batches
from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.split import Split, first_split


class Loader:
    """The data of one data-parallel rank.

    The global batch of a step is a function of the seed and of the cursor, the number of samples consumed before
    it. The cursor is the only state, the same on every rank, and means the same on any layout. ``corpora`` takes the
    place of the job's.

    Attributes:
        split: How many sequences of a global batch each dp rank takes; None: as many as the others. It may be
            changed between steps, at the same step on all ranks; no sample is skipped or repeated by it.
        seconds_waited: Time the training spent in `batches` and `validation`.
        preprocessing_seconds: Time spent tokenising at the start; not part of ``seconds_waited``.
    """

    def __init__(
        self, job: Job, dp_rank: int, dp: int, device: torch.device | str = "cpu", corpora: Corpora | None = None
    ) -> None:
        with terminal_progress("tokenising", sys.stderr) as progress:
            self.corpora = corpora or open_corpora(job.data, job.model.vocabulary, progress)
        self.preprocessing_seconds = self.corpora.preprocessing_seconds
        self.tokenizer = self.corpora.tokenizer
        self.seconds_waited = 0.0
        self._order = Order(len(self.corpora.training), job.train.seed)
        self._global_size = job.batch.global_size
        if job.layout.micro_batch is None:
            raise InputError("layout.micro_batch is not set; resolve the job first or give at least 1")
        self._micro_batch = job.layout.micro_batch
        self._dp_rank, self._dp, self._device = dp_rank, dp, torch.device(device)
        self._base_step, self._base_cursor = 0, 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self.split = first_split(job) if dp == job.layout.dp else None
        self._ahead: tuple[int, Split | None, Future[list[Batch]]] | None = None

    def cursor(self, step: int) -> int:
        """Samples consumed before ``step`` (steps count from 0): what a checkpoint stores."""
        return self._base_cursor + (step - self._base_step) * self._global_size

    def resume(self, step: int, cursor: int) -> None:
        """Say that ``cursor`` samples were consumed before ``step``, maybe with another global batch size."""
        self._base_step, self._base_cursor = step, cursor

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of ``step`` (from 0); those of the next step are begun in the background."""
        started = time.perf_counter()
        cursor = self.cursor(step)
        if self._ahead is not None and self._ahead[:2] == (cursor, self.split):
            ready = self._ahead[2].result()
        else:
            ready = self._thread.submit(self._training, cursor, self.split).result()
        following = self.cursor(step + 1)
        self._ahead = (following, self.split, self._thread.submit(self._training, following, self.split))
        self.seconds_waited += time.perf_counter() - started
        return ready

    def _training(self, cursor: int, split: Split | None) -> list[Batch]:
        return self._make(self.corpora.training, self._order.samples(cursor, self._global_size), split)

    def _make(self, samples: Samples, indices: NDArray[np.int64], split: Split | None) -> list[Batch]:
        if split is not None:
            made = unequal_micro_batches(samples, indices, split, self._dp_rank)
        else:
            made = micro_batches(samples, indices, self._global_size, self._micro_batch, self._dp_rank, self._dp)
        return [batch.to(self._device, non_blocking=True) for batch in made]

    def validation(self) -> Iterator[list[Batch]]:
        """Global batches over the validation part: each sample once over all ranks, the last ones padded.

        Every rank gets the same number of lists, each of as many micro-batches as a training step.
        """
        samples, split = self.corpora.validation, self.split
        count = 0 if samples is None else len(samples)
        steps = range(ceil_div(count, self._global_size))

        def make(step: int) -> list[Batch]:
            assert samples is not None  # there are no steps without
            first = step * self._global_size
            return self._make(samples, np.arange(first, min(first + self._global_size, count), dtype=np.int64), split)

        ahead = self._thread.submit(make, 0) if steps else None
        for step in steps:
            started = time.perf_counter()
            assert ahead is not None
            ready = ahead.result()
            if step + 1 < len(steps):
                ahead = self._thread.submit(make, step + 1)
            self.seconds_waited += time.perf_counter() - started
            yield ready

    def unigram_entropy(self) -> float | None:
        """Entropy in nats of the validation targets' frequencies: what a model without context can reach."""
        samples = self.corpora.validation
        return None if samples is None else unigram_entropy(samples.targets())

    def close(self) -> None:
        """End the background thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
