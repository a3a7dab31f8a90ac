"""pyarrow, which only exports need."""

from __future__ import annotations

from types import ModuleType

from vllm_scope.errors import ConfigError


def arrow() -> ModuleType:
    """pyarrow. Raises ConfigError if it is missing."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            "Parquet and Arrow files need the package pyarrow; pip install 'vllm-scope[files]'."
        ) from None
    library: ModuleType = pyarrow
    return library
