"""Imports pyarrow, which only exports of rows and features need."""

from __future__ import annotations

from types import ModuleType

from vllm_scope.errors import ConfigError


def arrow() -> ModuleType:
    """The module pyarrow. Raises ConfigError if pyarrow is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            "Parquet and Arrow files need the package pyarrow; pip install 'vllm-scope[files]'."
        ) from None
    library: ModuleType = pyarrow
    return library
