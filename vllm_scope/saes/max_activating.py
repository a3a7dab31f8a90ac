"""The strongest tokens of each feature of an SAE, with their context.

Owns:  MaxActivating (the table), Strong (one token of the table).
Runs:  on a sink's thread, or anywhere with numpy. Does not need torch or an engine.
From:  sinks.max_activating, or a caller. To: max_activating_files, neuronpedia, views.feature_page.

Promise: the order in which tokens are added does not change the table. Entries of equal value are
sorted by label, then by position, then by the bytes of the token ids. The table allocates all its
memory in the constructor. A call of `add` uses additional memory: about four times BLOCK_BYTES, and
20 bytes for each element of `indices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ConfigError, shown
from vllm_scope.saes.strongest import (
    LABEL_BYTES,
    NUM_BARS,
    Entries,
    Floats,
    Found,
    Ints,
    empty,
    entries_at,
    order_of,
    ranks,
    runs,
    widened,
)

#: `add` processes the features of a document in blocks. The entries of one block take about this
#: number of bytes.
BLOCK_BYTES: Final = 1 << 24
#: New entries are written in parts of about this number of bytes.
_PART_BYTES: Final = 1 << 21
SIZES: Final = ("num_features", "k", "before", "after")
COUNTS: Final = ("num_documents", "num_tokens", "num_full")


@dataclass(frozen=True)
class Strong:
    """One of the strongest tokens of a feature.

    Attributes:
        value: the feature's value at this token.
        label: the label of the token's document. In a sink's tables, the label is the request's id.
        position: the token's position in its document.
        at: the token's index in `tokens`.
        tokens: int32 [n], the token ids of this token and its context, within the document.
        values: float32 [n], the feature's value at each of `tokens`. A value that was not computed
            is NaN.
    """

    value: float
    label: str
    position: int
    at: int
    tokens: NDArray[np.int32]
    values: Floats


def table_bytes(num_features: int, k: int, before: int, after: int) -> int:
    """The number of bytes of a table with these sizes."""
    # A table also has the float32 `_least` of each feature.
    return stored_bytes(num_features, k, before, after) + 4 * num_features


def stored_bytes(num_features: int, k: int, before: int, after: int) -> int:
    """For a table with these sizes, the number of bytes of the tensors in its file."""
    entry = 8 + LABEL_BYTES + 8 * (before + 1 + after)
    return num_features * (k * entry + 8 * NUM_BARS + 8 + 2)


class MaxActivating:
    """For each feature of an SAE: the k strongest tokens, a histogram, and the number of tokens at
    which the feature is active.

    Args:
        num_features: number of the SAE's features.
        k: number of tokens to keep for each feature.
        before, after: number of context tokens before and after a strong token.
        sae: the SAE's name, which is stored in the table's file.

    Attributes:
        num_documents, num_tokens: number of added documents, and of added tokens.
        num_full: number of tokens that filled all places of their row of `indices` (see `add`). If
            the SAE is not a TopK SAE, such a token can have active features that are not in
            `indices`.
        num_active: int64 [num_features], the number of tokens at which each feature is active.
        entries: arrays of the strongest tokens of each feature. The tokens of a feature are not
            sorted. The arrays `value` (0 in an empty entry), `position` and `label` are
            [num_features, k]. The arrays `tokens` and `values` are [num_features, k, before + 1 +
            after]. Outside the document, `tokens` has -1 and `values` has NaN.
        bars: int64 [num_features, NUM_BARS], the histogram of each feature's values above 0. The
            bars of a feature divide the range from 0 to 2 ** (the feature's exponent) into equal
            steps.
        exponents: int16 [num_features], the exponent of each feature's histogram.

    Raises:
        ConfigError: a size is not a whole number, or is too small or too large.
    """

    def __init__(
        self, num_features: int, k: int = 20, before: int = 16, after: int = 8, sae: str = ""
    ) -> None:
        for name, value, least in (
            ("num_features", num_features, 1), ("k", k, 1), ("before", before, 0),
            ("after", after, 0),
        ):  # fmt: skip
            if type(value) is not int or not least <= value < 1 << 31:
                raise ConfigError(
                    f"{name} is {shown(value)}; it must be a whole number from {least}."
                )
        self.num_features, self.k, self.before, self.after = num_features, k, before, after
        self.sae = sae
        self.num_documents = self.num_tokens = self.num_full = 0
        self.num_active: Ints = np.zeros(num_features, np.int64)
        self.entries = empty((num_features, k), before + 1 + after)
        self._least: Floats = np.zeros(num_features, np.float32)
        self.set_least()
        self.bars: Ints = np.zeros((num_features, NUM_BARS), np.int64)
        self.exponents = np.zeros(num_features, np.int16)

    def set_least(self) -> None:
        """Compute the least value of each feature's entries. Code outside this class must call this
        method after it has changed `entries`."""
        self._least[:] = self.entries["value"].min(1)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all arrays of the table."""
        return table_bytes(self.num_features, self.k, self.before, self.after)

    @property
    def density(self) -> NDArray[np.float64]:
        """float64 [num_features]: the share of tokens at which each feature is active."""
        return self.num_active / max(self.num_tokens, 1)

    def histogram(self, index: int) -> tuple[NDArray[np.float64], Ints]:
        """A feature's histogram of values above 0: (edges [NUM_BARS + 1], counts [NUM_BARS])."""
        top = float(np.ldexp(1.0, int(self.exponents[index])))
        return np.linspace(0, top, NUM_BARS + 1), self.bars[index]

    def top(self, index: int) -> list[Strong]:
        """The strongest tokens of a feature, sorted by value, strongest first."""
        every = {name: array[index] for name, array in self.entries.items()}
        order = order_of(every, np.zeros(self.k, np.int64))
        return [self._strong(every, i) for i in order if every["value"][i] > 0]

    def _strong(self, every: Entries, i: int) -> Strong:
        inside = np.flatnonzero(every["tokens"][i] >= 0)
        return Strong(
            float(every["value"][i]), bytes(every["label"][i]).decode("utf-8", "replace"),
            int(every["position"][i]), int(np.searchsorted(inside, self.before)),
            every["tokens"][i][inside], every["values"][i][inside],
        )  # fmt: skip

    def add(
        self,
        label: str,
        token_ids: Sequence[int] | Ints,
        positions: Ints,
        indices: NDArray[np.int32],
        values: Floats,
    ) -> None:
        """Add the features of one document. Only finite values above 0 are added.

        Args:
            token_ids: all tokens of the document.
            positions: int64 [n], the positions of the tokens that the SAE encoded, ascending.
            indices: [n, places], the features of each token, each feature one time. A place without
                a feature has the index -1.
            values: [n, places], the values of these features.

        Raises:
            ConfigError: shapes do not fit, positions do not ascend, a position is not in the
                document, or a feature is not in the table. After the error, the table is unchanged.
        """
        positions, document = np.asarray(positions, np.int64), np.asarray(token_ids, np.int64)
        self._check(len(document), positions, indices, values)
        used = indices >= 0
        self.num_documents += 1
        self.num_tokens += len(positions)
        self.num_full += int(used.all(1).sum())
        used &= np.isfinite(values) & (values > 0)
        feature = np.where(used, indices, -1).astype(np.int32).ravel()
        made = partial(self._entries, label, document, positions)
        counts = np.bincount(feature[used.ravel()], minlength=self.num_features)
        for first, last in self._blocks(counts):
            at = np.flatnonzero((feature >= first) & (feature < last))
            # A stable sort keeps the order of positions. numpy sorts 16-bit numbers in linear time.
            at = at[np.argsort((feature[at] - first).astype(np.uint16), kind="stable")]
            found = Found(
                feature[at].astype(np.int64), positions[at // indices.shape[1]],
                values.reshape(-1)[at].astype(np.float32),
            )  # fmt: skip
            self._count(found)
            best = self._candidates(found)
            self._merge(found.feature[best], found.value[best], partial(made, found, best))

    def _check(
        self, num_tokens: int, positions: Ints, indices: NDArray[np.int32], values: Floats
    ) -> None:
        if indices.ndim != 2 or values.shape != indices.shape or len(indices) != len(positions):
            raise ConfigError(
                f"positions, indices and values have the shapes {[*positions.shape]}, "
                f"{[*indices.shape]} and {[*values.shape]}; they must be [n], [n, places] and "
                "[n, places]."
            )
        if len(positions) and not (
            positions[0] >= 0 and positions[-1] < num_tokens and (np.diff(positions) > 0).all()
        ):
            raise ConfigError(
                f"positions are {shown(positions.tolist())}, and the document has {num_tokens} "
                f"tokens; positions must ascend, and must be from 0 to {num_tokens - 1}."
            )
        if indices.size and indices.max() >= self.num_features:
            raise ConfigError(
                f"indices have {indices.max()}; the table has the features 0 to "
                f"{self.num_features - 1}."
            )

    def _blocks(self, counts: Ints) -> Iterator[tuple[int, int]]:
        """Yield (first feature, last feature + 1) for each block of at most 2**16 features.

        Args:
            counts: [num_features], the number of occurrences of each feature.
        """
        size = table_bytes(1, self.k, self.before, self.after)
        ends = np.cumsum(np.where(counts > 0, size + 64 * counts, 0)) // BLOCK_BYTES
        edges = np.union1d(np.flatnonzero(np.diff(ends)) + 1, np.arange(0, len(counts), 1 << 16))
        for first, last in zip(edges, [*edges[1:], len(counts)], strict=True):
            if counts[first:last].any():
                yield int(first), int(last)

    def merge(self, other: MaxActivating) -> None:
        """Add the content of another table.

        Raises:
            ConfigError: the tables differ in num_features, k, before or after.
        """
        for name in SIZES:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ConfigError(
                    f"{name} is {ours} and {theirs}; only tables of equal sizes can be merged."
                )
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_active += other.num_active
        exponents = np.maximum(
            np.where(self.bars.any(1), self.exponents, other.exponents),
            np.where(other.bars.any(1), other.exponents, self.exponents),
        )
        self.bars = widened(self.bars, exponents - self.exponents)
        self.bars += widened(other.bars, exponents - other.exponents)
        self.exponents = exponents
        for first, last in self._blocks((other.entries["value"] > 0).sum(1)):
            value = other.entries["value"][first:last]
            feature, place = np.nonzero(value > 0)
            made = partial(entries_at, other.entries, feature + first, place)
            self._merge(feature + first, value[feature, place], made)

    def _count(self, found: Found) -> None:
        """Add active features to the counts and the histograms."""
        starts, counts = runs(found.feature)
        features = found.feature[starts]
        self.num_active[features] += counts
        needed = np.maximum.reduceat(np.frexp(found.value)[1], starts).astype(np.int16)
        old, bars = self.exponents[features], self.bars[features]
        new = np.where(bars.any(1), np.maximum(old, needed), needed)
        bars = widened(bars, new.astype(np.int64) - old)
        where = np.repeat(np.arange(len(features)), counts)
        # This product is exact, because NUM_BARS is a power of two.
        scaled = np.ldexp(found.value.astype(np.float64), -new[where].astype(np.int32)) * NUM_BARS
        bar = where * NUM_BARS + scaled.astype(np.int64)
        bars += np.bincount(bar, minlength=bars.size).reshape(bars.shape)
        self.bars[features], self.exponents[features] = bars, new

    def _candidates(self, found: Found) -> Ints:
        """The indices in `found` of the items that can be among the k strongest of their feature.
        The indices are sorted by feature."""
        some = np.flatnonzero(found.value >= self._least[found.feature])
        feature = found.feature[some]
        order = np.lexsort((-found.value[some], feature))  # a stable sort keeps position order
        best: Ints = some[order[ranks(feature) < self.k]]
        return best

    def _entries(
        self, label: str, token_ids: Ints, positions: Ints, found: Found, best: Ints, some: Ints
    ) -> Entries:
        """Make the table entries of found[best[some]]."""
        at, context = best[some], np.arange(-self.before, self.after + 1)
        feature, position = found.feature[at][:, None], found.position[at][:, None]
        made = empty((len(at),), len(context))
        made["value"], made["position"] = found.value[at], position[:, 0].astype(np.int32)
        made["label"][:] = label.encode("utf-8", "replace")[:LABEL_BYTES]
        where = position + context
        inside = (where >= 0) & (where < len(token_ids))
        where = np.where(inside, where, 0)
        made["tokens"][:] = np.where(inside, token_ids[where], -1)
        encoded = np.zeros(len(token_ids), bool)
        encoded[positions] = True
        made["values"][:] = np.where(inside & encoded[where], 0, np.nan)
        # `found` is sorted by feature, then by position, without repeats. Therefore the values of
        # an entry's context are near the entry's value in `found`: at most `before` places before
        # it, and at most `after` places after it.
        near = np.clip(at[:, None] + context, 0, len(found.feature) - 1)
        column = found.position[near] - position + self.before
        there = (found.feature[near] == feature) & (column >= 0) & (column < len(context))
        made["values"][np.nonzero(there)[0], column[there]] = found.value[near[there]]
        return made

    def _merge(self, feature: Ints, value: Floats, made: Callable[[Ints], Entries]) -> None:
        """Keep the first k of each feature's old and new entries, in the order of the table's sort
        keys.

        Args:
            feature: the feature of each new entry, ascending.
            value: the value of each new entry.
            made: a function that takes the indices of some new entries and returns these entries.
        """
        starts, counts = runs(feature)
        features = feature[starts]
        held = self.entries["value"][features].reshape(-1)
        every = np.arange(len(features))
        owner = np.concatenate([np.repeat(every, self.k), np.repeat(every, counts)])
        value = np.concatenate([held, value])
        order = np.lexsort((-value, owner))
        by = owner[order]
        rank = ranks(by)
        # The entries are sorted only by value so far. If the last value that is kept equals the
        # first value that is left out, all sort keys decide between the entries with this value.
        last, out = value[order[rank == self.k - 1]], np.zeros(len(features), np.float32)
        out[by[rank == self.k]] = value[order[rank == self.k]]
        tied = np.flatnonzero((value[order] == out[by]) & (last == out)[by] & (out > 0)[by])
        if len(tied):
            order[tied] = self._settled(order[tied], owner, features, made)
        kept = np.zeros(len(owner), bool)
        kept[order[rank < self.k]] = True
        # For each feature, the number of old entries that are left out equals the number of new
        # entries that are kept.
        free, new = np.flatnonzero(~kept[: len(held)]), np.flatnonzero(kept[len(held) :])
        step = max(1, _PART_BYTES // table_bytes(1, 1, self.before, self.after))
        for i in range(0, len(new), step):
            some, to = made(new[i : i + step]), free[i : i + step]
            for name, array in self.entries.items():
                array[features[to // self.k], to % self.k] = some[name]
        self._least[features] = self.entries["value"][features].min(1)

    def _settled(
        self, tied: Ints, owner: Ints, features: Ints, made: Callable[[Ints], Entries]
    ) -> Ints:
        """Sort entries of equal value by the table's other sort keys.

        Args:
            tied: indices of the entries. An index below len(features) * k means an entry of the
                table, and any other index means a new entry.
            owner: for each entry, the index of the entry's feature in `features`.
            made: the function that `_merge` takes.
        """
        num_held = len(features) * self.k
        held, others = tied[tied < num_held], tied[tied >= num_held]
        ours = entries_at(
            self.entries, features[held // self.k], held % self.k, np.arange(len(held))
        )
        theirs = made(others - num_held)
        every = {name: np.concatenate([ours[name], theirs[name]]) for name in ours}
        tied = np.concatenate([held, others])
        settled: Ints = tied[order_of(every, owner[tied])]
        return settled

    def __repr__(self) -> str:
        name = f" of {self.sae!r}" if self.sae else ""
        return (
            f"<MaxActivating{name}: {self.num_features:,} features, {self.k} tokens each, of "
            f"{self.num_tokens:,} tokens in {self.num_documents:,} documents>"
        )
