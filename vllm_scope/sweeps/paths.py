"""Path patching, where an edit acts only along the direct paths from its place to chosen receivers.

Owns:  `parse_receivers`, and Paths, which makes the requests of a cell.
From:  sweep (the receivers), plan (the edit, and the rows of the prompt's own run).   To: plan.

The prompt's own run is a run of the prompt without an edit. In path patching, all attention and MLP
outputs outside the direct paths have the values of the prompt's own run. Therefore the stream from
the edited part of a layer (attention or MLP) to a receiver is the prompt's own stream plus a
constant change. The constant change is the change of the stream right after the edited part. Thus
no request has to set attention and MLP outputs layer by layer. A cell consists of up to three kinds
of requests.

1. The first request has the edit, and reads the stream after the edited part.
2. The second request sets the stream before each receiver to the prompt's own stream plus the
   change, and reads the receivers. Receivers on the stream do not need this request.
3. The next request sets the receivers. A receiver on the stream gets the stream of item 2. Every
   other receiver gets the row that the second request has read. If a receiver is a head and comes
   after other receivers, the other heads of its row depend on the earlier receivers. Therefore one
   more request sets the earlier receivers and reads the row. One request reads the rows of all
   heads of the same depth (`_depth`). The answer to the last request is the cell's answer.

Sources: Wang et al. 2022 (arXiv 2211.00593), section 3.1 (there, MLP outputs can change), and
Goldowsky-Dill et al. 2023 (arXiv 2304.05969)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Action, Read, Replace
from vllm_scope.request.selectors import as_numbers
from vllm_scope.request.sites import (
    ATTENTION_SITES,
    EDIT_SITES,
    MODEL_SITES,
    STREAM_SITES,
    Place,
    Sites,
    canonical_site,
)
from vllm_scope.request.spec import MAX_EDITS, MAX_SPEC_BYTES
from vllm_scope.sweeps.source import Floats, ReadRows, of_head

LOGITS: Final = "logits"
#: The rows in one request of a cell have at most this many numbers together. A number takes 16/3
#: characters in base64.
#: The limit is computed with 6 characters, so that positions and names of sites have room too.
MAX_NUMBERS: Final = MAX_SPEC_BYTES // 6
#: The site, the layer and the head of each receiver. The head is None if a receiver is a whole row.
Receivers = tuple[tuple[str, int, int | None], ...]
#: A function that makes one request of a cell. The arguments are the rows that the cell's previous
#: request has read, and the rows of the prompt's own run. The function returns the actions of the
#: request, and the Step that makes the cell's next request. This Step is None if there is no next
#: request.
Step = Callable[[ReadRows, ReadRows], tuple[tuple[Action, ...], "Step | None"]]
#: Sites where an edit at one position changes the layer's attention output at later positions.
_SEEN_LATER: Final = ("attn_in", "k", "v")
#: Sites whose row depends on earlier positions through the attention of the same layer.
_SEES_EARLIER: Final = ("z", "attn_out")


def parse_receivers(value: Any) -> Receivers | None:
    """The receivers that `Sweep.receivers` names, or None for the logits.

    Raises:
        SpecError: `value` is not "logits", and not a list of (site, layer) or (site, layer, head).
    """
    if isinstance(value, str) and value == LOGITS:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise SpecError(
            f"Sweep.receivers is {shown(value)}; it must be 'logits', or a list of (site, layer) "
            "and (site, layer, head)."
        )
    found = (_receiver(one, f"Sweep.receivers[{i}]") for i, one in enumerate(value))
    return tuple(dict.fromkeys(found))


def _receiver(value: Any, where: str) -> tuple[str, int, int | None]:
    numbers = as_numbers(list(value[1:])) if isinstance(value, list | tuple) else []
    if len(numbers) not in (1, 2) or any(type(n) is not int or n < 0 for n in numbers):
        raise SpecError(
            f"{where} is {shown(value)}; it must be (site, layer) or (site, layer, head)."
        )
    site = canonical_site(value[0], f"{where}[0]")
    allowed = [name for name in EDIT_SITES if name not in MODEL_SITES]
    if site not in allowed:
        raise SpecError(
            f"{where} is at {shown(site)}; a receiver must be at one of {', '.join(allowed)}."
        )
    if len(numbers) == 2 and site not in ATTENTION_SITES:
        raise SpecError(
            f"{where} names a head, and rows of {site!r} have no heads; these sites have heads: "
            f"{', '.join(ATTENTION_SITES)}."
        )
    return site, numbers[0], numbers[1] if len(numbers) == 2 else None


class Paths:
    """The direct paths of one sweep.

    Args:
        receivers: the receivers that `parse_receivers` returned.

    Raises:
        SpecError: the engine does not tap a receiver or the stream before a receiver, or the model
            does not have a receiver's head.
    """

    def __init__(self, receivers: Receivers | None, sites: Sites) -> None:
        self._sites = sites
        if receivers is None:
            receivers = (("resid_post", sites.num_layers - 1, None),)
        #: Maps each receiver's place to the receiving heads, or to None for the whole row.
        self._heads: dict[Place, list[int] | None] = {}
        for site, layer, head in receivers:
            (place,) = sites.find(site, (layer,), "Sweep.receivers", embedding=None)
            num_heads = sites.row_shape(site)[0]
            if head is not None and head >= num_heads:
                raise SpecError(
                    f"Sweep.receivers has head {head} of {site!r}, which has heads 0 to "
                    f"{num_heads - 1} here."
                )
            known = self._heads.setdefault(place, [])
            if head is None or known is None:
                self._heads[place] = None
            else:
                known.append(head)
        self._entries = {place: self._tapped(_entry(place)) for place in self._heads}

    def _tapped(self, place: Place) -> Place:
        self._sites.find(place.site, (place.layer,), "Sweep.receivers")
        return place

    def senders(self, places: Sequence[Place], named: bool) -> tuple[Place, ...]:
        """The subset of `places` from which a direct path leads to a receiver.

        Args:
            named: whether the caller named the layers.

        Raises:
            SpecError: no direct path leads from a named layer, or from any place, to a receiver, or
                the engine does not tap the stream after a place.
        """
        found = tuple(place for place in places if self._reached(_exit(place)))
        for place in places:
            if place not in found and (named or not found):
                raise SpecError(
                    f"Sweep.layers has {place.layer}; no direct path leads from {place.site} of "
                    "that layer to Sweep.receivers, so name earlier layers or later receivers."
                )
        for place in found:
            self._tapped(_exit(place))
        return found

    def _reached(self, exit_: Place) -> list[Place]:
        return [to for to, entry in self._entries.items() if exit_.boundary <= entry.boundary]

    def reads(self, senders: Iterable[Place], first: int, length: int) -> tuple[Read, ...]:
        """The Reads of the prompt's own run, for position `first` and all later positions."""
        places = [*map(_exit, senders), *self._entries.values()]
        places += [place for place, heads in self._heads.items() if heads is not None]
        return _reads(places, list(range(first, length)))

    def check_size(
        self, sender: Place, at: list[int], length: int, num_edited: int, where: str
    ) -> None:
        """Raise SpecError if a request of a cell would be too large.

        A request can have MAX_EDITS edits, and rows with MAX_NUMBERS numbers.

        Args:
            at, length: the arguments of `begin`.
            num_edited: number of rows in the edits of the cell.
            where: the name of the prompt in error texts.
        """
        reached = self._reached(_exit(sender))
        if len(reached) > MAX_EDITS:
            raise SpecError(
                f"a cell of the sweep sets {len(reached)} receivers in one request; at most "
                f"{MAX_EDITS} are allowed, so name fewer receivers."
            )
        rows = len(self._positions(reached, _changed(sender, at, length), length))
        streams = {self._entries[place] for place in reached if place.site not in STREAM_SITES}
        size = max(
            len(streams) * self._sites.hidden_size,
            sum(self._sites.row_size(place.site) for place in reached),
        )
        numbers = max(rows * size, num_edited * self._sites.row_size(sender.site))
        if numbers > MAX_NUMBERS:
            raise SpecError(
                f"a cell of {where} has {numbers:,} numbers in one request, with {rows:,} "
                f"positions at {len(reached)} receivers; at most {MAX_NUMBERS:,} are allowed, so "
                "name receivers of fewer layers, later positions, or a shorter prompt."
            )

    def begin(
        self, sender: Place, edits: tuple[Action, ...], at: list[int], length: int
    ) -> tuple[tuple[Action, ...], Step]:
        """The actions of a cell's first request, and the Step that makes its second request.

        Args:
            at: the edited positions, in ascending order.
            length: number of the prompt's tokens.
        """
        changed, exit_ = _changed(sender, at, length), _exit(sender)
        return (*edits, *_reads([exit_], changed)), partial(self._enter, exit_, changed, length)

    def _positions(self, reached: list[Place], changed: list[int], length: int) -> list[int]:
        """The positions at which a cell sets its receivers.

        A cell always sets the receivers at the changed positions. In two cases, rows at later
        positions can differ from the prompt's own rows, and the cell also sets all later positions.
        In the first case, a receiver is after its layer's attention (`z`, `attn_out`). In the
        second case, receivers have different entries (`_entry`), for example in different layers.
        """
        alone = len({self._entries[place] for place in reached}) == 1
        if alone and not any(place.site in _SEES_EARLIER for place in reached):
            return changed
        return list(range(changed[0], length))

    def _enter(
        self, exit_: Place, changed: list[int], length: int, rows: ReadRows, plain: ReadRows
    ) -> tuple[tuple[Action, ...], Step | None]:
        reached = self._reached(exit_)
        inner = [place for place in reached if place.site not in STREAM_SITES]
        entries = list(dict.fromkeys(self._entries[place] for place in reached))
        at = self._positions(reached, changed, length)
        change = rows.at(exit_, changed) - plain.at(exit_, changed)
        streams: dict[Place, Floats] = {}
        for entry in entries:
            streams[entry] = plain.at(entry, at)
            streams[entry][np.searchsorted(at, changed)] += change
        if not inner:
            return _sets(streams, at), None
        before = {self._entries[place]: streams[self._entries[place]] for place in inner}
        then = partial(self._take, at, inner, {to: streams[to] for to in reached if to in streams})
        return (*_sets(before, at), *_reads(inner, at)), then

    def _take(
        self, at: list[int], inner: list[Place], found: dict[Place, Floats], rows: ReadRows,
        plain: ReadRows,
    ) -> tuple[tuple[Action, ...], Step | None]:  # fmt: skip
        """The Step after the request that has read the receivers inside the layers."""
        found = {**found, **{place: rows.at(place, at) for place in inner}}
        depths: dict[tuple[int, int], list[Place]] = {}
        for place in found:
            depths.setdefault((self._entries[place].boundary, _depth(place)), []).append(place)
        return self._set(at, [depths[depth] for depth in sorted(depths)], found, {}, plain, plain)

    def _set(
        self, at: list[int], depths: list[list[Place]], found: dict[Place, Floats],
        done: dict[Place, Floats], rows: ReadRows, plain: ReadRows,
    ) -> tuple[tuple[Action, ...], Step | None]:  # fmt: skip
        """The actions that set receivers, and the Step that makes the request after this one.

        If a receiver is a head, the other heads of the same row depend on the receivers at earlier
        depths. Therefore one request sets the earlier receivers and reads the row. The next request
        sets the row.

        Args:
            depths: the receivers that are not set yet. Each list has the receivers of one depth,
                and the smallest depth is first.
            found: maps each receiver to the row that it must get.
            done: maps each receiver that is already set to the row that it got.
            rows: the rows of the first depth's receivers, from a request that set `done`.
        """
        done = dict(done)
        for i, places in enumerate(depths):
            of_heads = [place for place in places if self._heads[place] is not None]
            if i and of_heads:
                then = partial(self._set, at, depths[i:], found, done)
                return (*_sets(done, at), *_reads(of_heads, at)), then
            for place in places:
                done[place] = self._joined(place, found[place], rows, at)
        return _sets(done, at), None

    def _joined(self, place: Place, found: Floats, rows: ReadRows, at: list[int]) -> Floats:
        """A row that has its receiving heads from `found`, and its other heads from `rows`."""
        heads = self._heads[place]
        if heads is None:
            return found
        joined = rows.at(place, at)
        for head in heads:
            joined = of_head(found, head, self._sites, place.site, joined)
        return joined


def _changed(sender: Place, at: list[int], length: int) -> list[int]:
    """The positions at which the stream after an edited part can change."""
    return list(range(at[0], length)) if sender.site in _SEEN_LATER else at


def _exit(sender: Place) -> Place:
    """The place on the stream after the part (attention or MLP) that has the sender's site. The
    exit of a place on the stream is this place itself. The exit of `embed` is written as
    `resid_pre` of layer 0, which has the same values."""
    if sender.site in MODEL_SITES:
        return Place("resid_pre", 0)
    if sender.site in STREAM_SITES:
        return sender
    return Place("resid_mid" if _of_attention(sender) else "resid_post", sender.layer)


def _entry(receiver: Place) -> Place:
    """The place on the stream before the part (attention or MLP) that has the receiver's site. A
    receiver on the stream is its own entry."""
    if receiver.site in STREAM_SITES:
        return receiver
    return Place("resid_pre" if _of_attention(receiver) else "resid_mid", receiver.layer)


def _of_attention(place: Place) -> bool:
    return place.site in ("attn_in", *ATTENTION_SITES, "attn_out")


def _depth(receiver: Place) -> int:
    """The order of the receivers of one layer. `q`, `k` and `v` have 1. `z` and `attn_out` have 2.
    All other sites have 0: those before `q`, `k` and `v`, and those outside the attention."""
    if receiver.site in _SEES_EARLIER:
        return 2
    return 1 if receiver.site in ATTENTION_SITES else 0


def _reads(places: Iterable[Place], at: list[int]) -> tuple[Read, ...]:
    """Make one Read for each site of `places`."""
    layers: dict[str, list[int]] = {}
    for site, layer in dict.fromkeys(places):
        layers.setdefault(site, []).append(layer)
    return tuple(Read(site, layers=each, tokens=at) for site, each in layers.items())


def _sets(values: Mapping[Place, Floats], at: list[int]) -> tuple[Replace, ...]:
    return tuple(
        Replace(rows, positions=at, site=place.site, layer=place.layer)
        for place, rows in values.items()
    )
