"""The examples for other systems' users, and what the pages show, run on the toy world."""

from __future__ import annotations

import re
import tomllib

import pytest
import torch

from tests.conftest import MEMORY, TOYWORLD, inside_this_process, local_engine, without_llvmlite
from tests.policies import install

POLICIES = TOYWORLD.parents[1] / "examples" / "policies"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    files = {"root": str(tmp_path_factory.mktemp("captures")), "layout": "per_request"}
    strongest = {"root": str(tmp_path_factory.mktemp("tables") / "strongest")}
    scope = {
        "sinks": {"filesystem": files, "max_activating": strongest},
        "saes": {"toy": str(TOYWORLD / "sae")},
        "policies": {"hold": {"most": 2.0}}, "moments_mib": 64,
        "sites": ["embed", "resid_mid", "resid_post", "z", "q", "mlp_out"],
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        project = tomllib.loads((POLICIES / "pyproject.toml").read_text())["project"]
        ((group, (entry,)),) = (
            (group, some.items()) for group, some in project["entry-points"].items()
        )
        points = f"[{group}]\n{' = '.join(entry)}\n"
        install(tmp_path_factory.mktemp("installed"), patch, points, POLICIES)
        with local_engine(
            TOYWORLD, skip_tokenizer_init=None, max_model_len=256,
            additional_config={"scope": scope},
        ) as llm:  # fmt: skip
            llm.strongest = strongest["root"]
            yield llm


def test_the_page_shows_the_example_policy():
    code = (POLICIES / "scope_example_policies.py").read_text().split("\n\n", 1)[1]
    assert f"```python\n{code}```" in (TOYWORLD.parents[1] / "docs/control.md").read_text()


def test_vllm_lens_turns_reviews(llm):
    from examples.faces.vllm_lens import run

    assert run(llm) > 0.8


def test_hooks_of_vllm_lens_turn_reviews(llm):
    from examples.faces.vllm_lens_hooks import run

    assert run(llm) > 0.8


def test_steering_turns_reviews_however_it_is_asked_for(llm):
    from examples.faces.steering_http import run

    turned = run(llm)
    assert turned.pop("not at all") < 0.2
    assert len(set(turned.values())) == 1
    assert turned["module"] > 0.8


def test_every_layer_adds_to_the_cached_stream(llm):
    from examples.faces.transformer_lens import run

    added = run(llm)
    assert list(added) == [f"blocks.{i}" for i in range(6)]
    assert min(added.values()) > 0


def test_requests_leave_files(llm, monkeypatch, tmp_path):
    from examples.faces.act_capture import VARIABLES, run

    for name, value in (VARIABLES | {"VLLM_ACT_OUTDIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    found = run(llm)
    assert [layer for layer, _ in found] == [*range(6), *range(6)]
    assert all(rows.isfinite().all() and rows.shape[1] == 256 for _, rows in found)
    assert len(list(tmp_path.rglob("*.npz"))) == 12


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/editing.md",
        "docs/control.md",
        "docs/probes.md",
        "docs/monitors.md",
        "docs/features.md",
        pytest.param("docs/harvest.md", marks=pytest.mark.long),
        "docs/analysis.md",
        "docs/sweeps.md",
        "docs/views.md",
    ],
)
def test_what_a_page_shows_runs(page, llm, monkeypatch, tmp_path):
    """All Python of a page, top to bottom, as one script; but blocks that begin with ```py, which
    need a file or a library that is not here."""
    root = TOYWORLD.parents[1]
    (tmp_path / "toyworld").symlink_to(root / "toyworld")
    (tmp_path / "strongest").symlink_to(llm.strongest)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vllm.LLM", lambda *_, **__: llm)
    vector = torch.ones(256)
    # What a page calls the reader's own.
    names = {"model": "", "prompts": ["The capital of Ritova is"] * 2,
             "direction": vector, "weight": vector, "bias": 0.1}  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", (root / page).read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert blocks
    assert names["out"].scope.status == "complete"


def test_hidden_states_are_on_the_outputs():
    """Last, because it cleans up after an engine of its own, and so after the one above."""
    from examples.faces.probe_hook import run

    options = {"enforce_eager": True, "distributed_executor_backend": "uni", **MEMORY}
    with inside_this_process(), without_llvmlite():
        outputs = run(**options)
    for output in outputs:
        assert list(output.hidden_states) == [2, 4]
        assert isinstance(output.prefill_hidden[2], torch.Tensor)
