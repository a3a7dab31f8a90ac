"""Plans the requests of a sweep, and puts the answers into the sweep's table.

Owns:  Job (one request), Cell, and Plan.
From:  sweep, source.   To: engine.frontend.sweeping (makes requests of the jobs), table.

Order: for each prompt, the plan yields the jobs that read the prompt and its source, and then the
jobs of the prompt's cells. The first job of a prompt has no edit, and fills the prefix cache. All
cells of the prompt use the KV blocks in the cache that are before the edited position. The jobs
that read the next prompt come before the cells of this prompt, so that the engine can run these
jobs together with the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.actions import Ablate, Action, Add, Read, Replace
from vllm_scope.request.actions.base import Module
from vllm_scope.request.arrays import Array
from vllm_scope.request.selectors import MAX_ITEMS
from vllm_scope.request.sites import MODEL_SITES, Place, Sites, parse_layers
from vllm_scope.request.spec import MAX_EDITS, MAX_SPEC_BYTES
from vllm_scope.sweeps.metrics import Logprobs, token_ids_of, value_of
from vllm_scope.sweeps.paths import Paths, Step, parse_receivers
from vllm_scope.sweeps.source import Floats, ReadRows, given_rows, of_head
from vllm_scope.sweeps.sweep import Sweep, as_prompts, is_prompts
from vllm_scope.sweeps.table import SweepTable


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that a sweep uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int], /) -> str: ...


class Cell(NamedTuple):
    """One value of a sweep, which the caller gets when the value arrives.

    Attributes:
        prompt: index of the prompt.
        layer, position, head: the cell's names along the dimensions of the table. A name is None if
            the table does not have the dimension.
        value: the metric's value, or NaN if the cell failed (with a reason in `SweepTable.errors`).
    """

    prompt: int
    layer: int
    position: int | None
    head: int | None
    value: float


@dataclass(frozen=True)
class Job:
    """One request of a sweep. The request generates one token.

    Attributes:
        prompt: index of the prompt.
        ids: token ids of the prompt, or of the prompt's source.
        place: index of the cell in `table.values[prompt]`, or None if the job reads a prompt.
        actions: the request's edits and reads. The tuple can be empty.
        of_source: whether `ids` are the token ids of the prompt's source.
        error: why the request cannot be made, or None. The engine never receives a job with an
            error. The runner of the plan passes such a job to `Plan.take` at once.
        then: in path patching, the Step that makes the cell's next request, or None if this job is
            the cell's last request.
    """

    prompt: int
    ids: list[int]
    place: tuple[int, ...] | None
    actions: tuple[Action, ...]
    of_source: bool = False
    error: str | None = None
    then: Step | None = None

    @property
    def name(self) -> str:
        """The name of the prompt or source in error texts."""
        return f"{'Sweep.source' if self.of_source else 'prompts'}[{self.prompt}]"

    @property
    def reads(self) -> bool:
        return any(isinstance(action, Read) for action in self.actions)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the rows and vectors in the job's edits."""
        vectors = (getattr(one, one.fields[0]) for one in self.actions)
        return sum(len(one.data) for one in vectors if isinstance(one, Array))


def _checked(
    each: list[list[int]], where: str, check: Callable[[list[int], str], None] | None
) -> list[list[int]]:
    """Call `check` for each prompt, and return the prompts unchanged."""
    if check is not None:
        for i, ids in enumerate(each):
            check(ids, f"{where}[{i}]")
    return each


def _num_prompts(value: object) -> int:
    """The number of prompts in a value that `as_prompts` accepts."""
    return len(value) if isinstance(value, list | tuple) else 1


class _Of:
    """The rows and log-probabilities of one prompt and its source.

    The plan keeps the rows until all requests of the prompt's cells are sent, and the
    log-probabilities until all cells of the prompt have arrived.

    Attributes:
        source: rows of the prompt's source.
        plain: rows of the prompt itself.
        clean: log-probabilities of the prompt without an edit.
        of_source: log-probabilities of the source without an edit.
    """

    source: ReadRows | None = None
    plain: ReadRows | None = None
    clean: Logprobs | None = None
    of_source: Logprobs | None = None


class Plan:
    """The requests of one sweep, and the sweep's table.

    Args:
        tokenizer: encodes prompts and tokens that are texts, and decodes the table's tokens.
        most_cells: the largest number of cells that is allowed, or None if any number is allowed.
            A cell counts one time for each of its positions. The plan checks the number before it
            allocates the table.
        check: a function that raises SpecError for tokens that the engine refuses. The plan calls
            this function with the tokens and the name of each prompt and source.

    Raises:
        SpecError: the sweep is not possible on this engine or with these prompts.
    """

    def __init__(
        self, sweep: Sweep, prompts: object, sites: Sites, tokenizer: Tokenizer,
        most_cells: int | None = None, check: Callable[[list[int], str], None] | None = None,
    ) -> None:  # fmt: skip
        self.sweep, self.sites, encode = sweep, sites, tokenizer.encode
        layers = parse_layers(sweep.layers, sweep.site, "Sweep.layers")
        self.places: tuple[Place, ...] = sites.find(sweep.site, layers, "Sweep")
        self._paths: Paths | None = None
        if sweep.receivers is not None:
            self._paths = Paths(parse_receivers(sweep.receivers), sites)
            self.places = self._paths.senders(self.places, layers is not None)
        row_shape = sites.row_shape(sweep.site)
        self.heads = sweep.heads_of(row_shape[0])
        if most_cells is not None:
            # Check before the prompts are encoded, because to encode many prompts takes far longer
            # than to receive them.
            self._check_size(_num_prompts(prompts), 1, most_cells)
        self.ids = _checked(as_prompts(prompts, encode, "prompts"), "prompts", check)
        lengths = [len(ids) for ids in self.ids]
        if most_cells is not None:
            self._check_size(len(lengths), max(lengths), most_cells)
        positions, self.at = sweep.columns(lengths)
        alone = partial(encode, add_special_tokens=False)
        self.token_ids = token_ids_of(sweep.metric, alone, len(self.ids))
        self.sources: list[list[int]] | None = None
        self._given: Floats | None = None
        if is_prompts(sweep.source):
            self._check_sources(_num_prompts(sweep.source))
            sources = as_prompts(sweep.source, encode, "Sweep.source")
            self.sources = self._sources(_checked(sources, "Sweep.source", check))
        elif sweep.module is None:
            shape = len(self.ids), len(self.places), len(positions)
            self._given = given_rows(sweep.source, shape, row_shape)
            if sweep.mode == "ablate" and not self._given.any():
                raise SpecError("Sweep.source is zero, and has no direction; give another vector.")
        self._check_cells()
        self._of = [_Of() for _ in self.ids]
        self.table = SweepTable.empty(
            [[tokenizer.decode([i]) for i in ids] for ids in self.ids],
            [place.layer for place in self.places], None if sweep.together else positions,
            self.heads, sweep.metric.name, sweep.site, sweep.told_mode,
        )  # fmt: skip
        #: For each prompt, the number of cells that have not arrived yet.
        self._left = [len(self._cells_of(i)) for i in range(len(self.ids))]
        #: The next requests of cells that consist of several requests.
        self._next: list[Job] = []
        self.num_cells = sum(self._left)

    def _check_size(self, num_prompts: int, longest: int, most: int) -> None:
        """Raise SpecError if the number of prompts times layers, positions and heads is above
        `most`. A cell that edits several positions counts one time for each position.

        Args:
            longest: the number of tokens of the longest prompt, or a smaller number.
        """
        named = self.sweep.chosen_positions
        num_positions = longest if named is None else len(named)
        num_heads = 1 if self.heads is None else len(self.heads)
        num = num_prompts * len(self.places) * num_positions * num_heads
        if num > most:
            raise SpecError(
                f"the sweep has at least {num:,} cells ({num_prompts} prompts x "
                f"{len(self.places)} layers x {num_positions} positions x {num_heads} heads); at "
                f"most {most:,} are allowed here. Name fewer prompts, layers, positions or heads, "
                "or send several sweeps."
            )

    def _check_cells(self) -> None:
        """Raise SpecError if a cell's request would exceed the limits of a request."""
        for i, ids in enumerate(self.ids):
            every = sorted(p for p in self.at[i] if p is not None)
            # If each cell edits one position, the cell of the earliest position is the largest. In
            # path patching, this cell has the most positions after the edit, and so the most rows.
            at = every if self.sweep.together else every[:1]
            self._check_positions(i, every, at)
            num_edits = self._num_edits(i, len(at))
            if num_edits > MAX_EDITS:
                each = "position" if self._given is None else "different row"
                raise SpecError(
                    f"a cell of the sweep has {num_edits:,} edits of prompts[{i}], one for each "
                    f"{each}; at most {MAX_EDITS} are allowed, so name fewer positions, or give "
                    f"rows of which at most {MAX_EDITS} differ (equal rows are one edit)."
                )
            num_rows = len(at) if self.sweep.mode == "patch" else num_edits
            if self._paths is None:
                self._check_numbers(i, num_rows)
                continue
            for sender in self.places:
                self._paths.check_size(sender, at, len(ids), num_rows, f"prompts[{i}]")

    def _check_positions(self, i: int, every: list[int], at: list[int]) -> None:
        """Raise SpecError if a request of a prompt would name too many positions.

        Args:
            every: the positions of all cells of the prompt, in ascending order.
            at: the positions of one cell.
        """
        length = len(self.ids[i])
        reads = self.sources is not None or self._keeps_heads
        num_read = len(every) if reads and len(every) < length else 0
        num_named = max(len(at), num_read)
        if self._paths is not None:
            num_named = length - every[0]  # the Reads of the prompt's own run name these positions
        if num_named > MAX_ITEMS:
            raise SpecError(
                f"a request of the sweep names {num_named:,} positions of prompts[{i}]; at most "
                f"{MAX_ITEMS:,} are allowed, so name later or fewer positions, or give a shorter "
                "prompt."
            )

    @property
    def _keeps_heads(self) -> bool:
        """Whether a cell replaces a head of the prompt's own row. The plan then reads this row."""
        return self.heads is not None and self.sweep.mode == "patch"

    def _num_edits(self, i: int, num_positions: int) -> int:
        """The largest number of edits in a cell of prompt `i`. With the mode "patch" or a steering
        module, a cell has one edit. Otherwise a cell has one edit for each different row. Rows that
        have not been read yet count as different."""
        if num_positions == 1 or self.sweep.mode == "patch" or self.sweep.module is not None:
            return 1
        if self._given is None:
            return num_positions
        rows = self._given[i if len(self._given) > 1 else 0]
        if rows.shape[1] > 1:
            rows = rows[:, [c for c, p in enumerate(self.at[i]) if p is not None]]
        if self.heads is not None:
            shape = self.sites.row_shape(self.sweep.site)
            rows = rows.reshape(*rows.shape[:2], *shape)[:, :, self.heads]
        if not (rows != rows[:, :1]).any():
            return 1
        of_cells = rows[:, :, None] if self.heads is None else rows
        return max(
            len({row.tobytes() for row in of_cells[layer, :, head]})
            for layer in range(len(of_cells)) for head in range(of_cells.shape[2])
        )  # fmt: skip

    def _check_numbers(self, i: int, num_rows: int) -> None:
        """Raise SpecError if the rows in a cell's edits are too large for a request."""
        numbers, most = num_rows * self.sites.row_size(self.sweep.site), MAX_SPEC_BYTES * 3 // 16
        if numbers >= most:  # as base64, the rows alone would take all bytes of the request
            raise SpecError(
                f"a cell of the sweep has {numbers:,} numbers in its edits of prompts[{i}]; fewer "
                f"than {most:,} are allowed, so name fewer positions, or leave out `together`."
            )

    def _check_sources(self, num_sources: int) -> None:
        if num_sources not in (0, 1, len(self.ids)):
            raise SpecError(
                f"Sweep.source has {num_sources} prompts for {len(self.ids)} prompts; give one "
                "source for each prompt, or one for all prompts."
            )

    def _sources(self, found: list[list[int]]) -> list[list[int]]:
        name = "Sweep.source" if len(found) == 1 else "Sweep.source[{}]"
        if len(found) == 1:
            found = found * len(self.ids)
        for i, (one, other) in enumerate(zip(found, self.ids, strict=True)):
            if len(one) != len(other):
                raise SpecError(
                    f"{name.format(i)} has {len(one)} tokens and prompts[{i}] has {len(other)}; "
                    "rows go to the same position, so give prompts of the same number of tokens."
                )
        return found

    def jobs(self) -> Iterator[Job | None]:
        """Yield the jobs in order. Yields None if the next job needs an answer that has not
        arrived."""
        yield from self._reads(0)
        for i in range(len(self.ids)):
            if i + 1 < len(self.ids):
                yield from self._reads(i + 1)
            while not self._is_ready(i):
                yield None
            for place in self._cells_of(i):
                while self._next:
                    yield self._next.pop(0)
                yield self._cell_job(i, place)
            while self._paths is not None and self._left[i]:
                yield self._next.pop(0) if self._next else None
            self._of[i].source = self._of[i].plain = None

    def _cell_job(self, i: int, place: tuple[int, ...]) -> Job:
        try:
            job = Job(i, self.ids[i], place, self._edits(i, place))
        except SpecError as error:  # a row of the source can be zero, or have a NaN or infinity
            return Job(i, self.ids[i], place, (), error=str(error))
        if self._paths is None:
            return job
        at, sender = self._positions_of(i, self._columns_of(i, place)), self.places[place[0]]
        actions, then = self._paths.begin(sender, job.actions, sorted(at), len(job.ids))
        return replace(job, actions=actions, then=then)

    def _reads(self, i: int) -> Iterator[Job]:
        layers = [place.layer for place in self.places]
        at = sorted(p for p in self.at[i] if p is not None)
        tokens = "prompt" if len(at) == len(self.ids[i]) else at
        read = Read(self.sweep.site, layers=layers, tokens=tokens)
        of_plain: tuple[Read, ...] = (read,) if self._keeps_heads else ()
        if self._paths is not None:
            of_plain += self._paths.reads(self.places, at[0], len(self.ids[i]))
        yield Job(i, self.ids[i], None, of_plain)
        if self.sources is not None:
            yield Job(i, self.sources[i], None, (read,), of_source=True)

    def _is_ready(self, i: int) -> bool:
        found = self._of[i]
        return found.clean is not None and (self.sources is None or found.source is not None)

    def _cells_of(self, i: int) -> list[tuple[int, ...]]:
        """The index in `table.values[i]` of each cell of prompt `i`, position by position."""
        columns = [c for c, p in enumerate(self.at[i]) if p is not None]
        heads = [()] if self.heads is None else [(h,) for h in range(len(self.heads))]
        layers = range(len(self.places))
        if self.sweep.together:
            return [(layer, *head) for layer in layers for head in heads]
        return [(layer, c, *head) for c in columns for layer in layers for head in heads]

    def _columns_of(self, i: int, place: tuple[int, ...]) -> list[int]:
        """The columns of the table whose positions a cell edits."""
        if not self.sweep.together:
            return [place[1]]
        return [c for c, p in enumerate(self.at[i]) if p is not None]

    def _positions_of(self, i: int, columns: list[int]) -> list[int]:
        return [p for p in (self.at[i][c] for c in columns) if p is not None]

    def _edits(self, i: int, place: tuple[int, ...]) -> tuple[Action, ...]:
        """The edits of one cell."""
        layer, sweep = place[0], self.sweep
        columns = self._columns_of(i, place)
        at = self._positions_of(i, columns)
        where: dict[str, Any] = {"site": sweep.site}
        where |= {} if sweep.site in MODEL_SITES else {"layer": self.places[layer].layer}
        if sweep.module is not None:
            return self._along([(sweep.module, at)], where)
        rows = self._rows(i, layer, columns, at)
        if self.heads is not None:
            plain = self._of[i].plain if self._keeps_heads else None
            other = None if plain is None else plain.at(self.places[layer], at)
            rows = of_head(rows, self.heads[place[-1]], self.sites, sweep.site, other)
        if sweep.mode == "patch":
            return (Replace(rows, positions=at, **where),)
        if (rows == rows[0]).all():
            return self._along([(rows[0], at)], where)
        groups: dict[bytes, tuple[Floats, list[int]]] = {}
        for row, p in zip(rows, at, strict=True):
            groups.setdefault(row.tobytes(), (row, []))[1].append(p)
        return self._along([*groups.values()], where)

    def _along(
        self, groups: Sequence[tuple[Floats | Module, list[int]]], where: dict[str, Any]
    ) -> tuple[Action, ...]:
        """Make one edit for each vector, at the positions that belong to the vector."""
        scale = self.sweep.scale
        if self.sweep.mode == "add":
            return tuple(Add(vector, scale=scale, tokens=p, **where) for vector, p in groups)
        return tuple(Ablate(vector, tokens=p, **where) for vector, p in groups)

    def _rows(self, i: int, layer: int, columns: list[int], at: list[int]) -> Floats:
        """The source's rows for the positions of a cell, [number of positions, width]."""
        if self._given is None:
            source = self._of[i].source
            assert source is not None
            return source.at(self.places[layer], at)
        prompts, layers, positions, width = self._given.shape
        of_layer = self._given[i if prompts > 1 else 0, layer if layers > 1 else 0]
        chosen = of_layer[columns] if positions > 1 else of_layer
        return np.broadcast_to(chosen, (len(at), width))

    def take(
        self, job: Job, found: Logprobs | None, rows: ReadRows | None, error: str | None
    ) -> Cell | None:
        """Process the answer to a job. Returns the cell that the answer completes, or None.

        Args:
            found: log-probabilities of the next token, or None if the request failed.
            rows: the rows that the job read, or None if the job has no reads or has failed.
            error: why the request failed, or None.

        Raises:
            ScopeError: a job that reads a prompt failed, or some of its rows are missing. The cells
                of the prompt need these rows. Or the metric's `value` failed.
        """
        i, metric = job.prompt, self.sweep.metric
        known = self._of[i]
        if job.place is not None:
            value = np.nan
            if found is not None and job.then is not None:
                self._next.append(self._after(job, job.then, rows))
                return None
            if found is None:
                self.table.errors[i, *job.place] = error or "the request failed"
            else:
                assert known.clean is not None
                value = value_of(metric, found, known.clean, job.name)
                self.table.values[i, *job.place] = value
            self._left[i] -= 1
            if not self._left[i]:
                self._of[i] = _Of()  # frees the log-probabilities, which can be large
            return self._cell(i, job.place, value)
        if found is None:
            raise ScopeError(f"{job.name} could not be read: {error}")
        if rows is not None:
            rows.check(job.name)
        if job.of_source:
            known.source, known.of_source = rows, found
        else:
            known.plain, known.clean = rows, found
            self.table.plain[i] = value_of(metric, found, found, job.name)
        if known.clean is not None and known.of_source is not None:
            self.table.source[i] = value_of(metric, known.of_source, known.clean, job.name)
        return None

    def _after(self, job: Job, then: Step, rows: ReadRows | None) -> Job:
        """Make the next job of the cell of `job`."""
        plain = self._of[job.prompt].plain
        assert rows is not None
        assert plain is not None
        try:
            rows.check("a cell")
            actions, after = then(rows, plain)
        except ScopeError as error:  # rows are missing, or have numbers that are not finite
            return replace(job, actions=(), then=None, error=str(error))
        return replace(job, actions=actions, then=after)

    def _cell(self, i: int, place: tuple[int, ...], value: float) -> Cell:
        table = self.table
        return Cell(
            i, table.layers[place[0]],
            None if table.positions is None else table.positions[place[1]],
            None if table.heads is None else table.heads[place[-1]], float(value),
        )  # fmt: skip
