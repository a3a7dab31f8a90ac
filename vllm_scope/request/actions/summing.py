"""The action that adds rows to sums on the device.

Owns:  Moments.
To:    resolve.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from vllm_scope.errors import checked_flag
from vllm_scope.request.actions.base import Action, checked_name, number


@dataclass(frozen=True)
class Moments(Action):
    """Add the rows of the request's tokens to sums on the device. The rows do not leave the device.

    The worker has one set of sums for each name, site, layer and label. Each set contains the
    number of rows, and the sum of the rows x. With `covariance`, each set also contains the sum of
    x x^T. With a target y, each set also contains the sums of x y, of y and of y^2. Each accepted
    token counts one time. `vllm_scope.moments(llm, name)` returns the sums, and `drop_moments`
    drops the sums. From its first selected token on, the request computes all tokens, and uses no
    prefix cache.

    Args:
        site: the name of a site, such as "resid_post".
        layer, layers: two names of one argument, which is a number, a list of numbers, or "all"
            (the default).
        tokens: a selector (`vllm_scope.request.selectors`). "all" by default.
        by: the label of the sums to which the request's rows are added.
        target: a number y, the same for all rows of the request. Without a target, there are no
            sums with y.
        covariance: if True, each set also contains the sum of x x^T, which takes 8 * width^2 bytes.
        name: the name of the sums. All requests with one name must have the same `covariance`. All
            requests with one name must have a target, or all must have no target.

    Raises:
        SpecError: a wrong type, an unknown site, no layer, a negative layer, or a number that is
            not finite.
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
        checked_flag(self.covariance, "Moments.covariance")
