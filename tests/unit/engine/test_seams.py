"""A seam of vLLM that moved is refused at start, with a sentence that names it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_scope.engine.seams import check_version, wrap_function, wrap_method
from vllm_scope.errors import CompatError


@pytest.mark.parametrize(
    "version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0", "0.33.1.dev4+gabc", "0.33.0rc1"]
)
def test_supported_versions_start(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0", "dev", "0.1.dev1+g123"])
def test_another_version_is_refused_with_a_sentence(version):
    with pytest.raises(CompatError) as caught:
        check_version(version)
    assert "0.30 to 0.33" in str(caught.value)
    assert version in str(caught.value)
    assert "VLLM_SCOPE=0" in str(caught.value)


class Owner:
    def method(self, request, most=None):
        return request, most

    def keyword_only(self, request, *, flag=False):
        return request, flag


def test_a_wrapper_gets_the_original_and_passes_on_what_came():
    class Mine(Owner):
        pass

    wrap_method(Mine, "method", ["request"], lambda original, self, *args: original(self, *args))
    assert Mine().method("r", 3) == ("r", 3)


@pytest.mark.parametrize(
    ("name", "wrapper", "parameter"),
    [
        pytest.param("method", lambda original, self, request: 0, "most", id="a-new-parameter"),
        pytest.param("keyword_only", lambda original, self, request: 0, "flag", id="a-new-keyword"),
        pytest.param("method", lambda original, self: 0, "request", id="any"),
    ],
)
def test_a_parameter_that_the_wrapper_cannot_pass_on_is_refused(name, wrapper, parameter):
    with pytest.raises(CompatError, match=rf"Owner\.{name} .*{parameter}"):
        wrap_method(Owner, name, ["request"], wrapper)


def test_a_parameter_that_is_gone_is_refused():
    with pytest.raises(CompatError, match="has no parameter scheduler_output"):
        wrap_method(Owner, "method", ["scheduler_output"], lambda original, *args: 0)


def test_a_method_or_function_that_is_gone_is_refused():
    with pytest.raises(CompatError, match=r"no Owner\.gone"):
        wrap_method(Owner, "gone", [], lambda original: 0)
    module = SimpleNamespace(__name__="module")
    with pytest.raises(CompatError, match=r"no module\.gone"):
        wrap_function([module], "gone", [], lambda original: 0)


def test_every_seam_of_the_installed_vllm_agrees_with_its_wrapper():
    from vllm_scope.engine import plugin

    plugin.register()
