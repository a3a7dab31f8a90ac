"""Checks whether an engine supports the tokens, sinks, lenses and size of a request.

Owns:  `check_tokens`, `check_sinks`, `check_lenses`, `check_room`.
Runs:  in the front-end, for each request with a spec.
To:    connection.

Promise: an error about one action begins with the path of the field that the caller sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.errors import SpecError, shown
from vllm_scope.program.compiler import OVERSHOOT, RequestProgram
from vllm_scope.program.lens_rows import num_lens_rows
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.selectors import Ids, Selector, Tokens
from vllm_scope.request.sites import Sites

#: The fields of a Resolved that contain actions with a sink.
_TAKEN = ("reads", "probes", "features")


def check_sinks(asked: Resolved, sinks: Mapping[str, Collection[str]]) -> None:
    """Raises SpecError if an action names a sink that the operator did not set up, or a sink that
    does not take the results of the action."""
    for name in _TAKEN:
        for where, action in actions_of(asked, name):
            if action.to == MEMORY:
                continue
            if action.to not in sinks:
                there = ", ".join([MEMORY, *sinks])
                raise SpecError(
                    f"{where}.to is {shown(action.to)}; this engine has {there}. Its "
                    "operator sets up others in additional_config['scope'].sinks."
                )
            takes = sinks[action.to]
            # A sink that takes scores also takes the tokens of a lens.
            is_lens = name == "features" and action.lens is not None
            if ("probes" if is_lens else name) not in takes:
                what = "tokens of a lens" if is_lens else name
                kinds = " and ".join(kind for kind in takes if kind in _TAKEN)
                raise SpecError(
                    f"{where}.to is {shown(action.to)}, which takes {kinds}, not "
                    f"{what}; let them go to memory, or to a plugin that takes them."
                )
            some = name == "features" and action.whole_sae is None
            if some and "some features" not in takes:
                raise SpecError(
                    f"{where}.to is {shown(action.to)}, which takes all features of an SAE; leave "
                    "out indices and threshold, or send the features to memory."
                )
            if asked.edits and "edits" not in takes:
                raise SpecError(
                    f"{where}.to is {shown(action.to)}, which takes no results of a request "
                    "with edits, because rows after an edit are not the model's own; leave out the "
                    "edits, or send the results to memory."
                )


def actions_of(asked: Resolved, name: str) -> Iterator[tuple[str, Any]]:
    """Yields a pair for each action in one field of a Resolved: the path of the field that the
    caller sent, and the action."""
    for i, action in enumerate(getattr(asked, name)):
        lens = getattr(action, "lens", None)
        # A Resolved has one action for each layer of an edit or lens. All these actions have the
        # same path.
        i = action.number if name == "edits" else i
        yield (f"{name}[{i}]" if lens is None else f"lens[{lens[1]}]"), action


def check_tokens(asked: Resolved, ids: Ids, last: int, limits: Limits) -> None:
    """Raises SpecError if a selector names tokens that the request cannot have on this engine."""
    for name in ("reads", "probes", "edits", "features", "moments"):
        checked: set[tuple[Selector, tuple[int, ...]]] = set()
        for path, action in actions_of(asked, name):
            # The check of a Replace also depends on its positions, which other edits do not have.
            key = action.tokens, action.positions if name == "edits" else ()
            if key in checked:
                continue
            checked.add(key)
            where = f"{path}.tokens"
            action.tokens.check(len(ids), last, where)
            if name != "edits":
                continue
            action.tokens.check_decided(len(ids), ids, last, where)
            positions = {p + len(ids) if p < 0 else p for p in action.positions}
            if len(positions) < len(action.positions):
                raise SpecError(f"{path}.positions names a position twice.")
            if limits.optimistic and sum(p >= len(ids) for p in positions) > 1:
                raise SpecError(
                    f"{path}.positions has several generated tokens, and this engine decodes "
                    "speculatively: a row's position is not known when the row is replaced. "
                    "Replace tokens of the prompt, or start without speculation."
                )
            if limits.optimistic and not action.tokens.uniform:
                tokens = Tokens.running(np.arange(len(ids), last + 1), len(ids), ids)
                chosen = action.tokens.select(tokens).certain
                if chosen.any() and not chosen.all():
                    raise SpecError(
                        f"{where} picks some of the generated tokens, and this engine decodes "
                        "speculatively: a row's position is not known when the row is edited. "
                        "Take all generated tokens, or start without speculation."
                    )


def check_lenses(asked: Resolved, ids: Ids, max_tokens: int, most: int) -> None:
    """Raises SpecError if the request's lenses are applied to more than `most` rows."""
    rows = num_lens_rows(asked, ids, max_tokens)
    if rows > most:
        raise SpecError(
            f"the request's lenses are applied to {rows:,} rows (tokens x layers, with max_tokens "
            f"{max_tokens:,}); this engine takes at most {most:,} "
            "(additional_config['scope'].lens_rows). Name fewer tokens or layers, or give a "
            "smaller max_tokens."
        )


def check_room(
    asked: Resolved, ids: Ids, max_tokens: int, sites: Sites, limits: Limits, most_changes: int
) -> bool:
    """Raises SpecError if a request needs more room than this engine has in total.

    Args:
        most_changes: the largest number of times that the policy changes scales.

    Returns:
        True if no request with the same outline (request.outline) needs more room than this
        request.
    """
    encodes = any(read.encoding for read in asked.reads)
    if asked.edits or asked.banked or asked.moments or len(asked.reads) > 1 or encodes:
        program = RequestProgram.compile(asked, sites, frozenset(sites.boundaries), len(ids), ids)
        columns = program.columns(len(ids) + max_tokens + OVERSHOOT, drafts=False)
        every = *columns, *program.superset_columns()
        held = program.held(every)
        delivered = held if limits.optimistic else program.held(columns)
        excess = limits.excess(*delivered.layouts)
        if excess is not None:
            raise SpecError(
                f"the request delivers too much at once ({excess}); read fewer layers or "
                "features, or start the engine with a larger additional_config['scope'].arena_mib."
            )
        states = asked.num_states * (max_tokens + OVERSHOOT)
        if states > limits.states:
            raise SpecError(
                f"the states of the request's gates take {states:,} places for {max_tokens:,} "
                f"tokens; this engine has {limits.states:,}. Ask for fewer tokens, or raise "
                "additional_config['scope'].states_mib."
            )
        cost = held.cost
        if most_changes:
            cost += program.cost_of_change(every) * most_changes
        if (program.has_vectors or asked.banked) and not cost.fits(limits.capacity):
            lacks_vectors = cost.vectors > limits.capacity.vectors
            more = ", or raise additional_config['scope'].vectors_mib" if lacks_vectors else ""
            raise SpecError(
                f"the request takes {cost}; this engine has {limits.capacity}. Edit or probe fewer "
                f"places{more}."
            )
        return program.takes_most
    return False
