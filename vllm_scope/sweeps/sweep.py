"""The sweep that a caller requests.

Owns:  Sweep, and `as_prompts`, which turns a caller's prompts into token ids.
To:    plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Final, Literal

from vllm_scope.errors import SpecError, checked_word, shown
from vllm_scope.request.actions.base import Module, number, vector_or_module
from vllm_scope.request.selectors import as_numbers
from vllm_scope.request.sites import (
    ATTENTION_SITES,
    EDIT_SITES,
    canonical_site,
    parse_layers,
)
from vllm_scope.sweeps.metrics import Encode, Metric, encode_text
from vllm_scope.sweeps.paths import LOGITS, parse_receivers

MODES: Final = ("patch", "ablate", "add")


@dataclass(frozen=True)
class Sweep:
    """Edits at chosen layers and positions of prompts, and a metric of the effect of each edit.

    A cell is the metric after one edit. By default, the edit is at one layer and one position of
    one prompt. With `heads`, the edit is only at one head. With `together`, the edit is at all
    chosen positions. EngineCore computes each cell as one request, or as several requests if there
    are `receivers`.

    Args:
        source: prompts, rows or a steering module, from which the edits take their vectors.
            A source prompt is a text or {"prompt_token_ids": [...]}. Give one source prompt for all
            prompts, or a list with one for each prompt. An edit takes the source prompt's row at
            the same layer and position. A source prompt must have as many tokens as its prompt.
            Rows are a tensor, an array or numbers of the shape [width] (for all cells),
            [num_layers, width], [num_layers, num_positions, width] or [num_prompts, num_layers,
            num_positions, width]. At the sites `z`, `q`, `k` and `v`, two dimensions [num_heads,
            size of a head] can replace `width`.
            {"module": name} is a steering module of the engine, for the modes "ablate" and "add".
        metric: a `LogitDifference`, `Logprob`, `KL` or other `Metric`, which computes a cell's
            value.
        site: the site of the edits.
        layers: one layer, a list of layers, or "all" for the layers that the engine taps.
        positions: one position, a list of positions, or "all" for all tokens of the prompt.
            Negative positions count from the prompt's end.
        mode: the kind of the edits. With "patch", the source's row replaces the row (`Replace`).
            With "ablate", the component along the source's row is removed from the row (`Ablate`).
            With "add", `scale` times the source's row is added to the row (`Add`).
        heads: "all", a head, or a list of heads, at the sites `z`, `q`, `k` and `v`. Each cell then
            edits one head, and the table has a dimension of heads. If None, a cell edits the whole
            row.
        scale: the factor of the source's row in the mode "add". Other modes have no scale.
        together: whether a cell edits all chosen positions at once. The table then has no dimension
            of positions.
        receivers: "logits", or a list of (site, layer) and (site, layer, head), for path patching.
            The edit acts only along the direct paths to these receivers. All other attention and
            MLP outputs are the outputs of the prompt's own run. With receivers, `layers="all"`
            means the layers from which a direct path leads to a receiver. If `receivers` is None,
            the edit acts on everything that the model computes after the edit.

    Raises:
        SpecError: a mode, metric, site, layer, position, head, scale or receiver is not possible.
    """

    source: Any
    _: KW_ONLY
    metric: Metric
    site: str = "resid_pre"
    layers: Any = "all"
    positions: Any = "all"
    mode: Literal["patch", "ablate", "add"] = "patch"
    heads: Any = None
    scale: float = 1.0
    together: bool = False
    receivers: Any = None

    def __post_init__(self) -> None:
        checked_word(self.mode, MODES, "Sweep.mode")
        if not isinstance(self.metric, Metric):
            raise SpecError(
                f"Sweep.metric is {shown(self.metric)}; it must be a LogitDifference, a Logprob, "
                "a KL or another vllm_scope.Metric."
            )
        object.__setattr__(self, "site", canonical_site(self.site, "Sweep.site"))
        if self.site not in EDIT_SITES:
            raise SpecError(
                f"Sweep.site is {shown(self.site)}, which cannot be edited; take one of "
                f"{', '.join(EDIT_SITES)}."
            )
        object.__setattr__(self, "scale", number(self.scale, "Sweep.scale"))
        parse_layers(self.layers, self.site, "Sweep.layers")
        self.chosen_positions  # noqa: B018 - checked now
        if self.receivers is not None:
            parse_receivers(self.receivers)
        if self.module is not None and (self.mode == "patch" or self.heads is not None):
            raise SpecError(
                f"Sweep.source is the module {shown(self.module.name)}, whose vectors are whole "
                'rows to add or ablate; take mode "add" or "ablate" without heads, or give rows.'
            )
        if self.heads is not None and self.site not in ATTENTION_SITES:
            raise SpecError(
                f"Sweep.heads is {shown(self.heads)}, and rows of {self.site!r} have no heads; "
                f"take one of {', '.join(ATTENTION_SITES)}, or leave it out."
            )
        if self.scale != 1.0 and self.mode != "add":
            raise SpecError(
                f"Sweep.scale is {shown(self.scale)}, and mode {self.mode!r} has no scale; take "
                'mode "add", or leave it out.'
            )

    @cached_property
    def module(self) -> Module | None:
        """The steering module that is the source, or None if the source is prompts or rows."""
        source = self.source
        if isinstance(source, Module) or (isinstance(source, Mapping) and "module" in source):
            found = vector_or_module(source, "Sweep.source")
            return found if isinstance(found, Module) else None
        return None

    @property
    def told_mode(self) -> str:
        """The mode's name in the table. The name includes the receivers, if there are any."""
        if self.receivers is None:
            return self.mode
        receivers = parse_receivers(self.receivers) or ((LOGITS,),)
        named = (".".join(str(part) for part in one if part is not None) for one in receivers)
        return f"{self.mode} to {', '.join(named)}"

    @property
    def chosen_positions(self) -> list[int] | None:
        """The positions that the caller gave, or None for all positions."""
        value = as_numbers(self.positions)
        if isinstance(value, str) and value == "all":
            return None
        return _whole_numbers(value, "Sweep.positions", "'all', a position or a list")

    def columns(self, lengths: Sequence[int]) -> tuple[list[int], list[list[int | None]]]:
        """The names along the table's dimension of positions, and their meaning in each prompt.

        The second list has, for each prompt, the absolute position that belongs to each name, or
        None if the prompt has no such token.

        Args:
            lengths: the number of tokens of each prompt.

        Raises:
            SpecError: a prompt does not have a named position, or two named positions are the same
                token of a prompt.
        """
        named = self.chosen_positions
        if named is None:
            every = list(range(max(lengths)))
            return every, [[p if p < length else None for p in every] for length in lengths]
        found: list[list[int | None]] = []
        for i, length in enumerate(lengths):
            for p in named:
                if not -length <= p < length:
                    raise SpecError(
                        f"Sweep.positions has {p}; prompts[{i}] has {length} tokens, so its "
                        f"positions are {-length} to {length - 1}."
                    )
            found.append([p % length for p in named])
            if len(set(found[-1])) < len(named):
                raise SpecError(
                    f"Sweep.positions {named} has a token of prompts[{i}] twice; this prompt has "
                    f"{length} tokens, so name each token once, or give a longer prompt."
                )
        return named, found

    def heads_of(self, num_heads: int) -> list[int] | None:
        """The heads that the caller chose, or None if a cell edits the whole row.

        Raises:
            SpecError: the model does not have a chosen head.
        """
        value = as_numbers(self.heads)
        if value is None:
            return None
        if isinstance(value, str) and value == "all":
            return list(range(num_heads))
        found = _whole_numbers(value, "Sweep.heads", "'all', a head or a list")
        for head in found:
            if not 0 <= head < num_heads:
                raise SpecError(
                    f"Sweep.heads has {head}; {self.site!r} has heads 0 to {num_heads - 1} here."
                )
        return found


def _whole_numbers(value: Any, where: str, allowed: str) -> list[int]:
    found = list(value) if isinstance(value, list | tuple) else [value]
    if not found or any(isinstance(one, bool) or not isinstance(one, int) for one in found):
        raise SpecError(f"{where} is {shown(value)}; it must be {allowed}.")
    if len(set(found)) < len(found):
        raise SpecError(f"{where} names {shown(value)}; name each once.")
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_prompts(value: object) -> bool:
    """Whether a source is prompts, and not rows or a steering module."""
    one = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(one, str) or (isinstance(one, Mapping) and "module" not in one)


def as_prompts(value: object, encode: Encode, where: str) -> list[list[int]]:
    """The token ids of each prompt.

    Args:
        value: a text, {"prompt_token_ids": [...]}, or a list of such prompts.
        encode: a function that returns the token ids of a text, with special tokens.

    Raises:
        SpecError: there is no prompt, or a prompt has no token or has another form.
    """
    each: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if not each:
        raise SpecError(f"{where} are empty; give at least one prompt.")
    return [_as_ids(one, encode, f"{where}[{i}]") for i, one in enumerate(each)]


def _as_ids(value: object, encode: Encode, where: str) -> list[int]:
    if isinstance(value, str):
        ids = encode_text(value, encode, where)
    elif isinstance(value, Mapping) and "prompt_token_ids" in value:
        ids = as_numbers(value["prompt_token_ids"])
        if not isinstance(ids, list | tuple) or not all(map(_is_whole, ids)):
            raise SpecError(
                f"{where}['prompt_token_ids'] is {shown(ids)}; it must be a list of whole numbers."
            )
        ids = list(map(int, ids))
    else:
        raise SpecError(
            f"{where} is {shown(value)}; it must be a text or {{'prompt_token_ids': ...}}."
        )
    if not ids:
        raise SpecError(f"{where} has no token.")
    return ids
