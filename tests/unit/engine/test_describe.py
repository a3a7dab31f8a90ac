"""Why vLLM cannot import a model's code, which vLLM itself says in its log alone."""

from __future__ import annotations

import pytest

from vllm_scope.engine.describe import _say_import
from vllm_scope.errors import ConfigError

MISSING = (
    "vLLM's code of SeesForCausalLM needs the package seeing, which is not installed; install it."
)


class Broken:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def load_model_cls(self) -> type:
        raise self.error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        pytest.param(
            ModuleNotFoundError("No module named 'seeing'", name="seeing"),
            MISSING,
            id="a-package",
        ),
        pytest.param(
            ModuleNotFoundError("No module named 'seeing.eyes'", name="seeing.eyes"),
            MISSING,
            id="a-module-of-a-package",
        ),
        pytest.param(
            ModuleNotFoundError("No module named 'torch.eyes'", name="torch.eyes"),
            "vLLM's code of SeesForCausalLM cannot be imported (No module named 'torch.eyes'); "
            "look for a package whose version this vLLM does not support.",
            id="a-module-that-an-installed-package-lacks",
        ),
        pytest.param(
            ImportError("cannot import name 'Eye' from 'torch'"),
            "vLLM's code of SeesForCausalLM cannot be imported (cannot import name 'Eye' from "
            "'torch'); look for a package whose version this vLLM does not support.",
            id="a-name",
        ),
    ],
)
def test_the_cause_is_what_the_import_raised(error, sentence, monkeypatch):
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setitem(ModelRegistry.models, "SeesForCausalLM", Broken(error))
    vague = ValueError("Model architectures ['SeesForCausalLM'] failed to be inspected. Please")
    with pytest.raises(ConfigError) as caught:
        _say_import(vague)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Model architectures ['NobodysForCausalLM'] are not supported", id="unknown"),
        pytest.param("Can't load image processor for 'somewhere'", id="no-architecture"),
    ],
)
def test_another_error_is_left_alone(text):
    _say_import(ValueError(text))
