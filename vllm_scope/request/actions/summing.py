"""The action that adds rows to sums which the worker keeps: Moments.

Owns:  Moments.
To:    resolve.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import Action, checked_name, number


@dataclass(frozen=True)
class Moments(Action):
    """Add the rows of the request's tokens to sums on the device; no row leaves it.

    The worker keeps one set of sums for each name, site, layer and label: the number of rows and
    the sum of x; with `covariance` also the sum of x x^T; with a target y also the sum of x y. Each
    accepted token counts once. `vllm_scope.moments(llm, name)` returns the sums, and
    `vllm_scope.drop_moments(llm, name)` drops them. The tokens are computed anew, not taken from
    the prefix cache.

    Args:
        site: such as "resid_post".
        layer, layers: a number, several, or "all" (the default).
        tokens: which tokens, see `vllm_scope.request.selectors`. "all" by default.
        by: the label under which the request's rows are added.
        target: a number y for all of the request's rows. None: no sum of x y.
        covariance: True if the sums of x x^T are kept too, each 8 bytes * width^2.
        name: the name of the sums. Either all requests of one name have a target, or none of them
            has; all have the same `covariance`.

    Raises:
        SpecError: a wrong type, an unknown site, an empty or negative layer list.
    """

    kind: ClassVar[str] = "moments"
    fields: ClassVar[tuple[str, ...]] = ("by", "target", "covariance", "name")

    site: str = field(default="resid_post", kw_only=False)
    _: KW_ONLY
    by: str = "all"
    target: float | None = None
    covariance: bool = True
    name: str = "moments"

    def __post_init__(self) -> None:
        self._place()
        checked_name(self.by, "Moments.by")
        checked_name(self.name, "Moments.name")
        if self.target is not None:
            self._set(target=number(self.target, "Moments.target"))
        if not isinstance(self.covariance, bool):
            raise SpecError(
                f"Moments.covariance is {shown(self.covariance)}; it must be true or false."
            )
