"""The order of an epoch's rows: a pure function of (seed, epoch) that can be entered at any step.

An epoch's stream is the row groups of the data set, permuted by (seed, epoch). The stream is cut into M contiguous
lanes, one for each micro-batch number, whose lengths differ by at most one row. A row group at a cut is split there. In
a lane, `window_row_groups` consecutive row groups form a window, whose rows are permuted by (seed, epoch, lane,
window). Each permuted window is cut into chunks of `chunk_rows` rows, the input of a transform. Nothing depends on the
world size, on the rank, or on the step at which an epoch is entered.

The first window of lane m is shorter by m modulo `window_row_groups` row groups. Lanes then end their windows at
different steps, so that a worker with several lanes reads evenly.

A global batch mixes the rows of about M * `window_row_groups` random row groups. If the data set is sorted by label,
its label counts have about 1 + `micro_batch_size` / `window_row_groups` times the variance of a full shuffle. A row
group is read once per epoch, or twice at one of the M - 1 cuts. Entering a lane at any row costs O(window).

A data set in memory needs no windows: the stream is a permutation of all its rows by (seed, epoch), of which any
element is computed in O(1) time and memory (`scatter`).

Permutations use the raw output of Philox, seeded through `SeedSequence`. NumPy keeps both stable between versions
(NEP 19), unlike `Generator.permutation`, so a run can resume with another NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.columns import Int64Array
from elastic_ddp.data.weights import SampleWeights

_ROW_GROUPS, _ROWS, _TRANSFORM, _ALL_ROWS, _DRAWS_PER_GROUP, _DRAWS = range(6)
"""The purpose of a random stream, which is part of its seed."""
_PHILOX_BLOCK = 4
"""Numbers for each value of Philox's counter."""


@dataclass(frozen=True)
class EpochShape:
    """The number of rows of every micro-batch of every step.

    Steps are counted from 0 over the run. Micro-batches of an epoch's last step may be short or empty, unless
    `drop_last` leaves out a step that is not full.
    """

    num_rows: int
    num_micro_batches: int
    """M: the number of micro-batches of a step, and of lanes of an epoch."""
    micro_batch_size: int
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_last:
            return self.num_rows // self.num_micro_batches // self.micro_batch_size
        return math.ceil(math.ceil(self.num_rows / self.num_micro_batches) / self.micro_batch_size)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def lane_start(self, lane: int) -> int:
        """Returns a lane's first row in the epoch's stream. The first `num_rows % M` lanes have one row more."""
        short, longer = divmod(self.num_rows, self.num_micro_batches)
        return lane * short + min(lane, longer)

    def rows_in_lane(self, lane: int) -> int:
        return self.lane_start(lane + 1) - self.lane_start(lane)

    def rows(self, step: int) -> Int64Array:
        """Returns the number of rows of each micro-batch of a step, shape (M,)."""
        return np.array([self.rows_of(step, number) for number in range(self.num_micro_batches)], dtype=np.int64)

    def rows_of(self, step: int, micro_batch: int) -> int:
        """Returns the number of rows of a micro-batch."""
        start, stop = self.span(step, micro_batch)
        return stop - start

    def span(self, step: int, micro_batch: int) -> tuple[int, int]:
        """Returns the rows of a micro-batch as [start, stop) in the lane of the same number."""
        in_lane = self.rows_in_lane(micro_batch)
        start = min((step % self.steps_per_epoch) * self.micro_batch_size, in_lane)
        return start, min(start + self.micro_batch_size, in_lane)


class EpochOrder:
    """One epoch's stream of row groups and its M lanes."""

    def __init__(self, plan: FeedPlan, epoch: int) -> None:
        self._plan = plan
        self._epoch = epoch
        rows = plan.rows_per_group.astype(np.int64)
        groups = np.arange(len(rows))
        skipped = np.zeros(len(rows), dtype=np.int64)
        if plan.weights is not None:
            offset = uniform((plan.seed, _DRAWS_PER_GROUP, epoch, 0, 0), 0, 1)[0]
            groups, skipped, rows = _parts(plan.weights.draws_per_group(plan.group_starts, offset), rows)
        if plan.options.shuffle:
            order = _permutation(len(groups), (plan.seed, _ROW_GROUPS, epoch, 0, 0))
            groups, skipped, rows = groups[order], skipped[order], rows[order]
        has_rows = rows > 0
        self._groups = groups[has_rows]
        self._skipped = skipped[has_rows]
        self._rows = rows[has_rows]
        self._ends = np.cumsum(self._rows)
        self.lane = cache(self._build_lane)

    def _build_lane(self, number: int) -> Lane:
        """Returns lane `number`, 0 to M-1. It is empty if the data set has too few rows."""
        start = self._plan.shape.lane_start(number)
        stop = self._plan.shape.lane_start(number + 1)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        inside = slice(first, last + 1 if start < stop else first)
        ends = self._ends[inside]
        begins = ends - self._rows[inside]
        skipped = np.maximum(start - begins, 0)
        kept = np.minimum(stop, ends) - begins - skipped
        return Lane(self._plan, self._epoch, number, self._groups[inside], self._skipped[inside] + skipped, kept)


@dataclass(frozen=True, eq=False)
class Lane:
    """The rows of one micro-batch number in one epoch: segments of row groups, grouped into windows."""

    plan: FeedPlan
    epoch: int
    number: int
    groups: Int64Array
    """The row group of each segment, numbered as in the data set."""
    skipped: Int64Array
    """The number of rows of the row group before the segment. Without weights, it is not 0 only if the lane begins
    inside a row group. With weights, rows of a row group are its draws in this epoch."""
    rows: Int64Array
    """The number of rows of each segment, at least 1."""

    @cached_property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    @cached_property
    def window_segments(self) -> Int64Array:
        """The first segment of every window, followed by the number of segments, shape (windows + 1,)."""
        size = self.plan.options.window_row_groups
        first = size - self.number % size
        return np.unique(np.minimum(np.r_[0, np.arange(first, len(self.rows) + size, size)], len(self.rows)))

    @cached_property
    def window_starts(self) -> Int64Array:
        """The first row of every window, followed by the number of rows, shape (windows + 1,)."""
        return np.r_[0, np.cumsum(self.rows)][self.window_segments]

    @cached_property
    def window_chunks(self) -> Int64Array:
        """The first chunk of every window, followed by the number of chunks, shape (windows + 1,)."""
        return np.r_[0, np.cumsum(-(-np.diff(self.window_starts) // self.plan.options.chunk_rows))]

    def chunk_at(self, row: int) -> Chunk:
        """Returns the chunk that contains a row of this lane."""
        window = int(np.searchsorted(self.window_starts, row, side="right")) - 1
        begin = int(self.window_starts[window])
        nth = (row - begin) // self.plan.options.chunk_rows
        start = begin + nth * self.plan.options.chunk_rows
        stop = min(start + self.plan.options.chunk_rows, int(self.window_starts[window + 1]))
        return Chunk(lane=self, number=int(self.window_chunks[window]) + nth, window=window, start=start, stop=stop)

    def segments(self, window: int) -> list[tuple[int, int, int]]:
        """Returns a window's segments as (row group, start, stop), with rows counted in the row group."""
        inside = slice(int(self.window_segments[window]), int(self.window_segments[window + 1]))
        skipped = self.skipped[inside]
        stops = skipped + self.rows[inside]
        return list(zip(self.groups[inside].tolist(), skipped.tolist(), stops.tolist(), strict=True))

    def rows_of_segment(self, group: int, start: int, stop: int) -> Int64Array:
        """Returns the rows of a segment, numbered in their row group."""
        plan = self.plan
        if plan.weights is None:
            return np.arange(start, stop)
        first, last = plan.group_starts[group : group + 2]
        return plan.weights.draw(first, last, uniform((plan.seed, _DRAWS, self.epoch, group, 0), start, stop))

    def permutation(self, window: int) -> Int64Array | None:
        """Returns the index in the concatenated segments of each row of a window, or None for stored order."""
        if not self.plan.options.shuffle:
            return None
        rows = int(self.window_starts[window + 1] - self.window_starts[window])
        return _permutation(rows, (self.plan.seed, _ROWS, self.epoch, self.number, window))


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows [start, stop) of a lane: the input of one call of a transform."""

    lane: Lane
    number: int
    window: int
    start: int
    stop: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.lane.epoch, self.lane.number, self.number

    @property
    def window_stop(self) -> int:
        return int(self.lane.window_starts[self.window + 1])


@dataclass(frozen=True, eq=False, kw_only=True)
class FeedPlan:
    """The rows that one worker reads: steps [first_step, last_step) of its micro-batch numbers."""

    rows_per_group: Int64Array
    """The number of rows of every row group in stored order, shape (row groups,)."""
    shape: EpochShape
    seed: int
    options: DataConfig
    micro_batches: tuple[int, ...]
    """This worker's numbers, in the order in which it computes them in a step."""
    first_step: int
    last_step: int
    weights: SampleWeights | None = None

    def source(self, step: int, micro_batch: int) -> tuple[int, int, int]:
        """Returns the rows to read for a micro-batch, as (lane, start, stop).

        An empty micro-batch gets one row as padding: the last row of its lane, or of lane 0 if its lane is empty.
        """
        start, stop = self.shape.span(step, micro_batch)
        if start < stop:
            return micro_batch, start, stop
        lane = micro_batch if self.shape.rows_in_lane(micro_batch) else 0
        rows = self.shape.rows_in_lane(lane)
        return lane, rows - 1, rows

    def rows_in_memory(self, step: int, micro_batch: int) -> Int64Array:
        """Returns the rows of a micro-batch of a data set in memory, or one row as padding; see `source`."""
        lane, start, stop = self.source(step, micro_batch)
        first = self.shape.lane_start(lane)
        epoch = self.shape.epoch_of(step)
        if self.weights is not None:
            numbers = uniform((self.seed, _DRAWS, epoch, 0, 0), first + start, first + stop)
            return self.weights.draw(0, self.shape.num_rows, numbers)
        positions = first + np.arange(start, stop)
        if not self.options.shuffle:
            return positions
        return scatter(positions, self.shape.num_rows, (self.seed, _ALL_ROWS, epoch, 0, 0))

    def chunks(self) -> Iterator[Chunk]:
        """Yields the chunks of these steps, each once, in the order in which they are first needed."""
        epoch = -1
        for step in range(self.first_step, self.last_step):
            if self.shape.epoch_of(step) != epoch:
                epoch = self.shape.epoch_of(step)
                order = EpochOrder(self, epoch)
                reached: dict[int, int] = {}
            for micro_batch in self.micro_batches:
                number, start, stop = self.source(step, micro_batch)
                position = reached.get(number, start)
                while position < stop:
                    chunk = order.lane(number).chunk_at(position)
                    yield chunk
                    position = chunk.stop
                reached[number] = position

    @cached_property
    def group_starts(self) -> Int64Array:
        """The first row of each row group, followed by the number of rows, shape (row groups + 1,)."""
        return _first_rows(self.rows_per_group)


def _first_rows(rows_per_group: Int64Array) -> Int64Array:
    """Returns the first row of each row group, followed by the number of rows."""
    return np.r_[0, np.cumsum(rows_per_group)]


def _parts(draws: Int64Array, rows_per_group: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cuts the draws of each row group into parts of at most its rows, so that windows do not need more memory.

    Returns the row group of each part, its first draw, and its number of draws.
    """
    size = np.maximum(rows_per_group, 1)
    parts = -(-draws // size)
    groups = np.repeat(np.arange(len(draws)), parts)
    first = (np.arange(len(groups)) - np.repeat(_first_rows(parts)[:-1], parts)) * size[groups]
    return groups, first, np.minimum(draws[groups] - first, size[groups])


def transform_generator(seed: int, chunk: tuple[int, ...]) -> np.random.Generator:
    """Returns a transform's generator for a chunk (epoch, lane, number): the same at every world size."""
    epoch, lane, number = chunk
    return np.random.Generator(_philox((seed, _TRANSFORM, epoch, lane, number)))


def _philox(key: tuple[int, int, int, int, int]) -> np.random.Philox:
    """Returns the random stream of (seed, purpose, epoch, lane, number), each a 64-bit number."""
    words = np.array(key, dtype="<u8").view("<u4")  # of fixed width, so that different keys give different words
    return np.random.Philox(np.random.SeedSequence(words.tolist()))


def uniform(key: tuple[int, int, int, int, int], start: int, stop: int) -> npt.NDArray[np.float64]:
    """Returns the elements from `start` to `stop` of a sequence of random numbers in [0, 1), in O(stop - start)."""
    bits = _philox(key)
    skipped = start % _PHILOX_BLOCK
    bits.advance(start // _PHILOX_BLOCK)
    numbers: npt.NDArray[np.uint64] = bits.random_raw(skipped + stop - start)[skipped:] >> np.uint64(11)
    return numbers.astype(np.float64) * 2.0**-53


def _permutation(length: int, key: tuple[int, int, int, int, int]) -> Int64Array:
    """Returns a nearly uniform permutation of range(length): sorts random high bits with the index in the low bits."""
    bits = np.uint64(max(length - 1, 0).bit_length())
    keys = _philox(key).random_raw(length)
    keys = (keys >> bits << bits) | np.arange(length, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


_ROUNDS = 8


def scatter(positions: Int64Array, length: int, key: tuple[int, int, int, int, int]) -> Int64Array:
    """Returns the elements at these positions of a pseudorandom permutation of range(length).

    A generalized Feistel cipher: a position is two digits, to each of which rounds add a hash of the other. Numbers
    beyond the length are encrypted again. From Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
    """
    high = math.isqrt(length - 1) + 1
    low = -(-length // high)  # high * low exceeds the length by less than `high`
    digits = np.array([high, low], dtype=np.uint64)
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = np.divmod(values[outside], digits[1])
        for number, round_key in enumerate(_round_keys(key)):
            if number % 2:
                right = (right + _hash(left, round_key)) % digits[1]
            else:
                left = (left + _hash(right, round_key)) % digits[0]
        values[outside] = left * digits[1] + right
        outside = outside[values[outside] >= length]
    return values.astype(np.int64)


@lru_cache(maxsize=16)
def _round_keys(key: tuple[int, int, int, int, int]) -> npt.NDArray[np.uint64]:
    return _philox(key).random_raw(_ROUNDS)


def _hash(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64, shifted to leave 32 bits, so that adding a digit cannot overflow."""
    values = values + key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values >> np.uint64(32)
