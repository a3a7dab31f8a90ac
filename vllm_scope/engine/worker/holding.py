"""Loads the encoders of SAEs and the maps of lenses that a worker holds on its device.

Owns:  `held_saes`, `held_maps`.
Runs:  in workers that deliver rows, at the model's load, so that vLLM later counts this memory as
       used.
From:  the configuration, saes.load, lenses.linear.   To: worker.held_saes, worker.lens.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from vllm_scope.config import ScopeConfig
from vllm_scope.errors import ConfigError
from vllm_scope.request.heads import LensKey
from vllm_scope.request.sites import Sites
from vllm_scope.worker.held_saes import PairMaker, hold_saes
from vllm_scope.worker.lens import DeviceMap, hold_lenses


def held_saes(
    config: ScopeConfig, here: Collection[int], dtype: torch.dtype, device: torch.device
) -> dict[str | LensKey, PairMaker]:
    """The configured SAEs whose places have a tap on this worker.

    Args:
        here: boundaries with a tap on this worker.

    Raises:
        ScopeError: the SAEs cannot be read, or need more than saes_mib.
    """
    if not config.saes:
        return {}
    from vllm_scope.saes.load import load_saes  # imported late: most engines hold no SAE

    some = [sae for sae in load_saes(config.saes).values() if sae.place.boundary in here]
    found: dict[str | LensKey, PairMaker] = {}
    fp8 = config.saes_dtype == "fp8"
    found.update(hold_saes(some, config.saes_mib, dtype, device, fp8).items())
    return found


def held_maps(
    config: ScopeConfig, sites: Sites, here: Collection[int], dtype: torch.dtype,
    device: torch.device,
) -> dict[LensKey, DeviceMap]:  # fmt: skip
    """The maps of the configured lenses, for the boundaries with a tap on this worker.

    Args:
        here: boundaries with a tap on this worker.

    Raises:
        ScopeError: the lenses cannot be read, or are of another model, or need more than
            lenses_mib.
    """
    if not config.lenses:
        return {}
    from vllm_scope.lenses.linear import load_lenses

    lenses = load_lenses(config.lenses)
    for name, lens in lenses.items():
        if lens.d_model != sites.hidden_size:
            raise ConfigError(
                f"additional_config['scope'].lenses.{name} is of rows of {lens.d_model:,} numbers; "
                f"this model's have {sites.hidden_size:,}. Name a lens of this model."
            )
    some = sites.readable & set(here)
    return hold_lenses(lenses.values(), config.lenses_mib, some, sites.moved, dtype, device)
