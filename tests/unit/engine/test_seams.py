"""A symbol of vLLM that is not as it was read is refused at start, by its name."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from vllm_scope.engine import wrapping
from vllm_scope.engine.digests import FILE
from vllm_scope.engine.seams import CONTRACT, Seam
from vllm_scope.engine.wrapping import check_version, replace_in
from vllm_scope.errors import CompatError

ROOT = Path(__file__).parents[3]


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


def test_the_contract_has_every_attribute_that_is_declared_for_mypy():
    """`scope` and `scope_*` are attributes that vllm-scope adds."""
    in_contract = {
        name
        for seam in CONTRACT
        for name in (*seam.reads, *seam.parameters, seam.name.rpartition(".")[2])
    }
    declared = set()
    for node in ast.walk(ast.parse((ROOT / "vllm_scope/engine/vllm_types.py").read_text())):
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.AnnAssign):
                declared.add(each.target.id)
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                declared.add(each.name)
    assert len(declared) > 100
    ours = {name for name in declared if name == "scope" or name.startswith("scope_")}
    assert declared - in_contract - ours == set()


class Owner:
    def method(self, request, most=None):
        return request, most

    def keyword_only(self, request, *, flag=False):
        return request, flag


def test_a_wrapper_gets_the_original_and_passes_on_what_came():
    class Mine(Owner):
        pass

    replace_in([Mine], "method", ["request"], lambda original, self, *args: original(self, *args))
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
        replace_in([Owner], name, ["request"], wrapper)


def test_a_parameter_that_is_gone_is_refused():
    with pytest.raises(CompatError, match="has no parameter scheduler_output"):
        replace_in([Owner], "method", ["scheduler_output"], lambda original, *args: 0)


def test_a_method_or_function_that_is_gone_is_refused():
    with pytest.raises(CompatError, match=r"no Owner\.gone"):
        replace_in([Owner], "gone", [], lambda original: 0)
    module = SimpleNamespace(__name__="module")
    with pytest.raises(CompatError, match=r"no module\.gone"):
        replace_in([module], "gone", [], lambda original: 0)


@pytest.fixture
def declared(monkeypatch):
    """A module of vLLM's, and its holder, with a contract of their own."""
    here, holder = ModuleType("scope_test_seams"), ModuleType("scope_test_holder")

    def function(request):
        return request

    here.Owner, here.function, holder.function = Owner, function, function
    contract = (
        Seam("scope_test_gone", "function", wrapped=True),
        Seam(here.__name__, "function", ("request",), (), True, (holder.__name__,)),
        Seam(here.__name__, "Owner.gone"),
        Seam(here.__name__, "Gone.method", wrapped=True),
        Seam("scope_test_gone", "Owner.method", wrapped=True),
    )
    for module in (here, holder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(wrapping, "CONTRACT", contract)
    return here, holder


def test_a_function_is_replaced_in_the_first_module_that_exists_and_in_its_holders(declared):
    here, holder = declared
    assert wrapping.exists("function")
    wrapping.wrap("function", lambda original, request: original(request) + 1)
    assert here.function(1) == 2
    assert holder.function is here.function


def test_a_function_that_one_of_its_holders_lacks_is_refused_and_replaced_nowhere(declared):
    here, holder = declared
    before = here.function
    del holder.function
    with pytest.raises(CompatError, match=r"no scope_test_holder\.function"):
        wrapping.wrap("function", lambda original, request: 0)
    assert here.function is before


@pytest.mark.parametrize("name", ["Gone.method", "Owner.method"], ids=["class", "module"])
def test_a_class_or_a_module_that_is_gone_is_refused(declared, name):
    with pytest.raises(CompatError, match=rf"this vLLM has no scope_test_\w+\.{name}; vllm-scope"):
        wrapping.wrap(name, lambda original, *args: 0)


def test_a_symbol_that_is_used_and_not_wrapped_can_be_required(declared):
    wrapping.require("function")
    with pytest.raises(CompatError, match=r"no Owner\.gone"):
        wrapping.require("Owner.gone")


def test_no_symbol_is_declared_twice():
    names = [(seam.module, seam.name) for seam in CONTRACT]
    assert len(names) == len(set(names))
    assert set(json.loads(FILE.read_text())) == {":".join(name) for name in names}


#: Wraps every symbol, and compares the sources; run by the Python of each vLLM.
CHECK = """
import json
from pathlib import Path
import vllm
from vllm_scope.engine import plugin, wrapping
from vllm_scope.engine.digests import compare, missing
from vllm_scope.engine.frontend import requests
from vllm_scope.engine.http import serving
from vllm_scope.engine.seams import CONTRACT
from vllm_scope.engine.worker import sampling

root, names, find = Path(vllm.__file__).parent, set(), wrapping._find
wrapping._find = lambda name: names.add(name) or find(name)
plugin.register()
serving._wrap_serving()
requests.wrap_llm()
sampling.wrap()
found = compare(root, vllm.__version__)
print(json.dumps({
    "is_new": found.is_new,
    "changes": [change.symbol for change in found.changes],
    "missing": sorted({name for seam in CONTRACT for name in missing(root, seam)}),
    "unused": sorted({seam.name for seam in CONTRACT if seam.wrapped} - names),
}))
"""


#: Parameters of LLM's loop, which is in one of two modules.
LOOP = ("prompts", "params")


@pytest.mark.parametrize(
    ("venv", "gone"),
    [
        (".venv", {"environment_variables", "hard_fail", "args", *LOOP}),
        (
            ".venv-0.31.0",
            {"environment_variables", "hard_fail", "args", "call_utility_all_async", *LOOP},
        ),
        (".venv-0.30.0", {"hard_fail", "args", "call_utility_all_async", *LOOP}),
    ],
)
def test_every_symbol_of_an_installed_vllm_is_as_it_was_read(venv, gone, tmp_path):
    python = ROOT / venv / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{venv} is not there: make test VLLM=...")
    done = subprocess.run(
        [python, "-c", CHECK], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["is_new"]
    assert found["changes"] == []
    # In these, by name: what stands in the other one of two alternatives.
    assert set(found["missing"]) <= gone
    assert set(found["unused"]) <= {"validate_environ", "Platform.validate_environ"}
