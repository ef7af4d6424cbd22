"""The order of computations of one pipeline rank, for each schedule, as arrays.

Two ways of writing an order suffice.

*Slots* (GPipe, 1F1B, interleaved, looped breadth-first, zero bubble, 2BW): the rank's forwards and backwards each have
an order; the i-th backward runs in slot i, the forward that leads it by ``lead`` in the same slot just before it, and
the weight part of a backward ``delay`` slots later, after that slot's backward:

    slot   -2  -1   0       1       2       3              lead 2: 1F1B on rank pp - 3
            F0  F1  F2 B0   F3 B1      B2      B3

*Phrases* (ZBV, DualPipeV): words such as ``F0 I1 W1`` (kind and which of the rank's two stages), each repeated some
number of times; the n-th word of a kind and stage is micro-batch n.

2BW is 1F1B over the micro-batches of many steps, one behind the other.

Sources: GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B and interleaved (Narayanan et al. 2021, arXiv:2104.04473),
breadth-first (Lamy-Poirier 2023, arXiv:2211.05953), zero bubble and ZBV (Qi et al. 2023, arXiv:2401.10241), DualPipeV
(DeepSeek 2024, arXiv:2412.19437), 2BW (Narayanan et al. 2021, arXiv:2006.09503).
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.job.layout import Schedule

Integers = NDArray[np.int64]

KINDS = "FBIW"
"""Forward; whole backward; its input part; its weight part. Arrays hold the position in this string."""
FORWARD, WHOLE, INPUT, WEIGHT = range(4)

SCHEDULES: tuple[str, ...] = get_args(Schedule)
"""Names; arrays of layouts hold the position in this tuple."""
GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS, ZERO_BUBBLE, ZBV, DUALPIPEV, TWO_BW = (
    SCHEDULES.index(name)
    for name in ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev", "2bw")
)


class Order(NamedTuple):
    """What one rank computes, in running order; arrays ``[actions]``."""

    kind: Integers
    """Position in ``KINDS``."""
    local: Integers
    """Which of the rank's stages, in increasing stage order."""
    micro_batch: Integers
    held: NDArray[np.bool_]
    """The output is sent only after the rank's next action (the forward of a forward-and-backward pair)."""


def rank_order(schedule: str, pp: int, virtual: int, micro_batches: int, rank: int) -> Order:
    """What pipeline rank ``rank`` computes; the sizes are legal (``micro_batch_rule``) and ``pp > 1``."""
    if schedule == "zbv":
        return _zbv(pp, micro_batches, rank)
    if schedule == "dualpipev":
        return _dualpipev(pp, micro_batches, rank)
    form = slot_form(SCHEDULES.index(schedule), pp, virtual, micro_batches, rank)
    return _slots(virtual, micro_batches, *(int(number) for number in form), split=schedule == "zero-bubble")


class SlotForm(NamedTuple):
    """The numbers of a slot schedule."""

    in_turn: Integers
    """Micro-batches through one stage before the rank turns to its next."""
    lead: Integers
    """Forwards before the first backward's slot; may be more than there are."""
    delay: Integers
    """Slots between a backward's input part and its weight part."""


def slot_form(
    schedule: ArrayLike, pp: ArrayLike, virtual: ArrayLike, micro_batches: ArrayLike, rank: ArrayLike
) -> SlotForm:
    """The numbers of slot schedules, for arrays of any one shape; ``schedule`` is the position in ``SCHEDULES``.

    Round schedules (interleaved, zero bubble) send about ``pp`` micro-batches through a stage in turn: the largest
    equal rounds. V schedules get no meaningful numbers.
    """
    schedule, pp, virtual, micro_batches, rank = np.broadcast_arrays(schedule, pp, virtual, micro_batches, rank)
    in_rounds = (schedule == INTERLEAVED) | (schedule == ZERO_BUBBLE)
    round_size = micro_batches // np.maximum(1, micro_batches // pp)
    behind = pp - 1 - rank
    before = (virtual - 1) * round_size  # forwards until a micro-batch is in the rank's last stage
    lead = np.select(
        [(schedule == ONE_F_ONE_B) | (schedule == TWO_BW), schedule == INTERLEAVED, schedule == ZERO_BUBBLE],
        [behind, before + 2 * behind, before + behind],
        virtual * micro_batches,
    )
    delay = np.where(schedule == ZERO_BUBBLE, rank, 0)
    return SlotForm(np.where(in_rounds, round_size, micro_batches), lead, delay)


def _slots(virtual: int, micro_batches: int, in_turn: int, lead: int, delay: int, *, split: bool) -> Order:
    """See the module's words.

    Args:
        virtual: stages of the rank.
        micro_batches: of the step.
        in_turn: micro-batches through one stage before the next stage's turn.
        lead: forwards before the first slot; more than there are means all.
        delay: slots between a backward's input part and its weight part.
        split: whether the two parts run apart.
    """
    total = virtual * micro_batches
    lead = min(lead, total)
    step = np.arange(total)
    turn, place = np.divmod(step, in_turn)
    micro_batch = turn // virtual * in_turn + place
    local = turn % virtual
    # Columns: kind, stage, micro-batch, slot, place within the slot.
    forwards = (np.full(total, FORWARD), local, micro_batch, step - lead, np.zeros(total, int))
    backward = INPUT if split else WHOLE
    backwards = (np.full(total, backward), virtual - 1 - local, micro_batch, step, np.ones(total, int))
    parts = [forwards, backwards]
    if split:
        parts.append((np.full(total, WEIGHT), virtual - 1 - local, micro_batch, step + delay, np.full(total, 2)))
    kind, local, micro_batch, slot, within = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((within, slot))
    return Order(kind[order], local[order], micro_batch[order], np.zeros(len(order), bool))


def _zbv(pp: int, micro_batches: int, rank: int) -> Order:
    """ZBV: written for at least ``2 pp - 1`` micro-batches; with fewer, the others' actions fall out."""
    written = max(2 * pp - 1, micro_batches)
    up = pp - rank  # ranks from here to the fold, this one included
    words = _words(
        ("F0", 2 * up - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", up),
        ("F0 I0 W0 F1 I1 W1", written - 2 * pp + rank + 1),
        ("I0 W0 F1 I1 W1", up - 1),
        ("I0 I1", rank),
        ("I0 W0", up),
        ("W1", rank),
        ("W0", rank),
    )
    kind, local = words[:, 0], words[:, 1]
    micro_batch = _occurrence(kind * 2 + local)
    kept = micro_batch < micro_batches
    return Order(kind[kept], local[kept], micro_batch[kept], np.zeros(int(kept.sum()), bool))


def _dualpipev(pp: int, micro_batches: int, rank: int) -> Order:
    """DualPipeV: forwards and whole backwards in pairs; the weight parts of the last backwards fill the drain.

    ``W`` without a stage is the weight part of the oldest input part not yet followed by its own.
    ``+`` joins a pair: what the forward sends leaves after the backward.
    """
    behind = pp - 1 - rank
    half, odd = divmod(rank + 1, 2)
    pairs = micro_batches - 2 * pp + rank + 1
    last = rank == pp - 1  # its first forward and backward are not a pair
    words = _words(
        ("F0", 2 * behind),
        ("F0 F1", rank + 1),
        ("I1 W F1", behind),
        ("F0 B1 F1+ B0", 1 if last else 0),
        ("F0+ B1 F1+ B0", pairs - 1 if last else pairs),
        ("B1 F1+ B0", behind),
        ("B1 B0", half),
        ("B1 I0", odd),
        ("I1 I0", half),
        ("W I0", behind),
        ("W", rank + 1),
    )
    kind, local, held = words[:, 0], words[:, 1], words[:, 2].astype(bool)
    weights, inputs = kind == WEIGHT, kind == INPUT
    backwards = inputs | (kind == WHOLE)
    micro_batch = _occurrence(np.where(backwards, INPUT, kind) * 2 + local)
    local[weights], micro_batch[weights] = local[inputs], micro_batch[inputs]
    return Order(kind, local, micro_batch, held)


def _words(*phrases: tuple[str, int]) -> Integers:
    """Every phrase as often as it says: ``[actions, (kind, stage, held)]``."""
    parts = [np.tile(np.array([_word(word) for word in text.split()]), (times, 1)) for text, times in phrases if times]
    return np.concatenate(parts)


def _word(word: str) -> tuple[int, int, int]:
    return KINDS.index(word[0]), int(word[1]) if word[1:] else 0, int(word.endswith("+"))


def _occurrence(codes: Integers) -> Integers:
    """How often each code has come before: ``a b a a`` gives ``0 0 1 2``."""
    found = np.zeros_like(codes)
    for code in np.unique(codes):
        same = codes == code
        found[same] = np.arange(int(same.sum()))
    return found
