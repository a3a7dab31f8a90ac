"""Makes the lens of one worker's model, before the worker's first request.

Owns:  OwnLens.
Runs:  in every worker, on the main thread, when the worker starts and after a change of weights.
From:  worker.   To: unembedding (the model's parts), vocabulary (several ranks), holding.

Promise: all ranks of a tensor-parallel group exchange their messages in the same order, even if the
first rank has an error. If a model's lens cannot be applied, the model is served without a lens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.engine.worker.holding import held_maps
from vllm_scope.engine.worker.proving import agreed
from vllm_scope.engine.worker.unembedding import LogitsCall, check_lens, lens_of, logits_call
from vllm_scope.engine.worker.vocabulary import check_part, gather_parts, renew_parts
from vllm_scope.errors import CompatError
from vllm_scope.request.heads import LENS, LensKey
from vllm_scope.request.sites import Sites
from vllm_scope.worker.held_saes import PairMaker
from vllm_scope.worker.lens import DeviceMap

logger = logging.getLogger("vllm.vllm_scope")


class OwnLens:
    """A model's lens on one worker. Call `load`, then `begin`. After each change of weights, call
    `renew`.

    Args:
        final_norm: `Anatomy.norm_here`.
        delivers: True on the first rank of a tensor-parallel group. Only this rank uses the lens.
        is_last: True on the last pipeline stage.
        here: boundaries with a tap on this worker.

    Attributes:
        reason: why the lens cannot be applied on this worker; None if it can be applied.
        maps: the maps of the configured lenses, for the boundaries with a tap on this worker.
    """

    def __init__(
        self, model: nn.Module, final_norm: nn.Module | None, vllm_config: VllmConfig,
        config: ScopeConfig, sites: Sites, here: Collection[int], delivers: bool, is_last: bool,
    ) -> None:  # fmt: skip
        self._model, self._final_norm = model, final_norm
        self._vllm_config, self._config = vllm_config, config
        self._sites, self._here = sites, here
        self._delivers, self._is_last = delivers, is_last
        self.reason: str | None = "the model is not loaded"
        self.maps: Mapping[LensKey, DeviceMap] = {}
        #: `_head`: this rank's part of the unembedding. `_parts`: the parts of all ranks on the
        #: first rank, and empty on the other ranks. `_refused`: why the parts were not gathered. If
        #: there is only one rank, or if `_refused` is set, `_head` and `_parts` are None.
        self._head: nn.Module | None = None
        self._parts: Sequence[nn.Module] | None = None
        self._refused: str | None = None

    def load(self, group: Any, device: torch.device) -> None:
        """Allocate the memory of the lens. vLLM later counts this memory as used.

        Args:
            group: vLLM's tensor-parallel group. All ranks of the group must call `load`.

        Raises:
            ScopeError: the lens needs more than the configuration allows, or the maps cannot be
                read.
        """
        dtype = self._vllm_config.model_config.dtype
        if group.world_size > 1:
            self._gather(group, device)
        if self._delivers and self._is_last:
            self.maps = held_maps(self._config, self._sites, self._here, dtype, device)

    def _gather(self, group: Any, device: torch.device) -> None:
        head: nn.Module | None = None
        try:
            self._check()
            dtype = self._vllm_config.model_config.dtype
            hidden = torch.ones(1, self._sites.hidden_size, dtype=dtype, device=device)
            head = self._call(hidden).head
            check_part(head, group)
        except Exception as error:  # the model is served without a lens
            self._refused = _said(error)
        self._refused = agreed(self._refused, (group,))
        if self._refused is None:
            assert head is not None
            self._head = head
            self._parts = gather_parts(head, group, self._config.unembedding_mib)

    def renew(self, group: Any, failed: str | None) -> None:
        """Copy the model's current weights into the lens. Do nothing if the change of weights
        failed on any rank. Every rank of the group must call `renew`.

        Args:
            failed: the error, if the change of weights failed on this rank; otherwise None.
        """
        if self._head is None or self._parts is None:
            return
        if agreed(failed, (group,)) is None:
            renew_parts(self._head, self._parts, group)

    def begin(
        self, rows: Callable[[], tuple[Tensor, Tensor]],
        warm: Callable[[Callable[[], None]], None],
    ) -> dict[LensKey | str, PairMaker]:  # fmt: skip
        """The lenses of this worker: the model's own lens and the configured lenses. The result is
        empty on a rank that does not deliver, and if the lens cannot be applied (`reason`).

        Args:
            rows: a function that runs a forward, and returns two rows (loading.last_rows): the row
                after the last layer, and the row that the model returned.
            warm: a function that calls its argument on the drain's stream (Drain.warm).
        """
        try:
            self._check()
            row, hidden = rows()
            call = self._call(hidden[None])
            if not self._delivers:
                return {}
            lens = lens_of(call, self._final_norm, row, self._parts)
            warm(lambda: lens.reserve(row))
        except Exception as error:  # the model is served without a lens
            self.reason = _said(error)
            return {}
        self.reason = None
        return {LENS: lens, **{key: lens.of(one) for key, one in self.maps.items()}}

    def describe(self) -> dict[str, list[int]]:
        """Maps the name of each configured lens to the boundaries for which this worker has a map
        of the lens. The worker reports this result as `Described.lenses`."""
        names = self._config.lenses if self._delivers and self._is_last else ()
        return {name: [b for of, b in self.maps if of == name] for name in names}

    def _check(self) -> None:
        """Raises CompatError if the engine cannot have a lens. All ranks of the
        tensor-parallel group raise the same error."""
        if not self._config.lens_rows:
            raise CompatError("it was started with additional_config['scope'].lens_rows 0")
        check_lens(
            self._vllm_config, self._is_last, self._sites, self._here, self._config.unembedding_mib
        )
        if self._refused is not None:
            raise CompatError(self._refused)

    def _call(self, hidden: Tensor) -> LogitsCall:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._vllm_config):
            return logits_call(self._model, hidden)


def _said(error: Exception) -> str:
    """The text of an error, as the reason why the model has no lens."""
    if isinstance(error, CompatError):
        return str(error)
    logger.error("vllm-scope: the model's lens failed", exc_info=error)
    return f"it failed at the start ({type(error).__name__}); the log says why"
