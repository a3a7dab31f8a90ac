"""The public names: what `__all__` of a public module lists, and what the docs import.

A name that appears or goes is a change for callers: change this table in the same commit, and say
why. The modules are parsed, not imported, so that no engine and no optional package is needed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Module -> the names of its `__all__`.
LISTED = {
    "vllm_scope": """
        Ablate Add AttentionPool CapacityError Cell Clamp CompatError ConfigError Ema Except
        FileError Features Gate Hysteresis KL Latch LensTopK LogitDifference Logprob Metric Mlp
        Moments Pid
        Policy Positions Probe Read Replace RollingMean ScaleFeature
        ScopeError SetFeature Spec SpecError Sweep SweepTable TokenIds Union __version__
        drop_moments harvest moments scope
        set_monitors spec_schema stream sweep sweep_async
    """,
    "vllm_scope.cli": "app",
    "vllm_scope.client": """
        AsyncScopeClient Choice Chunk Completion ScopeClient ScopeData ScoredToken Scores
        ServerError SparseFeatures TopTokens UnreachableError Verdict
    """,
    "vllm_scope.codecs": "CODECS Codec codec_from make_codec",
    "vllm_scope.compat.probe_hook": "AsyncLLM HiddenStates LLM SamplingParams",
    "vllm_scope.compat.steering_http": """
        CaptureEntry CaptureResult FilesystemCaptureRequest LLM SamplingParams load_modules
        read_request translate
    """,
    "vllm_scope.compat.vllm_lens": """
        Activations GenerateOutput HTTP Hook HookContext SteeringVector VLLMLensClient
        attention_patterns compute_attention_weights decode_activations deserialize_tensor
        serialize_activations serialize_tensor translate
    """,
    "vllm_scope.files": """
        Capture CapturedRequest FileOptions IndexedRequest RequestRecord RequestWriter RowDataset
        Writer export_dataset export_features export_saelens export_speculators open open_writer
    """,
    "vllm_scope.sweeps": "Cell KL LogitDifference Logprob Metric Sweep SweepTable",
    "vllm_scope.control": """
        Change Controller Decided Decision Observation PolicyPlugin RunningPolicy ServerEdits Start
    """,
    "vllm_scope.vectors": """
        Provenance SteeringModule from_bytes load_vectors save_vectors to_bytes
    """,
    "vllm_scope.views": """
        FeaturePage Picture TokenPage TokenStrip attention_map feature_list feature_page lens_grid
        monitor_page side_by_side token_page token_strip
    """,
}
#: Module -> the names that the docs and the examples import from it, beside those above.
DOCUMENTED = {
    "vllm_scope.analysis.attention": "attention_pattern",
    "vllm_scope.analysis.contrast": "mean_difference pairs_digest",
    "vllm_scope.analysis.lens": "Lens top_tokens",
    "vllm_scope.analysis.moments": """
        difference_of_means lda_probe principal_components ridge_probe sums_at whitening
    """,
    "vllm_scope.analysis.patching": "get_act_patch_resid_pre",
    "vllm_scope.analysis.probes": "LinearProbe load_probe save_probe train_probe",
    "vllm_scope.analysis.rows": "Result pooled_rows token_rows",
    "vllm_scope.compat.act_capture": "load_manifest",
    "vllm_scope.compat.inspect": "probe_scorer reading",
    "vllm_scope.compat.vllm_lens.client": "VLLMLensClient",
    "vllm_scope.request.actions": "Action",
    "vllm_scope.results.result": "ScopeResult",
    "vllm_scope.lenses.linear": "Affine LinearLens",
    "vllm_scope.saes.cross_layer": "load_clt",
    "vllm_scope.saes.load": "load_sae",
    "vllm_scope.saes.max_activating": "MaxActivating Strong",
    "vllm_scope.saes.max_activating_files": "load_max_activating",
    "vllm_scope.saes.neuronpedia": "neuronpedia_features",
    "vllm_scope.sinks": "Block Ending Report",
    "vllm_scope.vectors.probe_weights": "from_safetensors from_sklearn from_state_dict",
}
#: Modules whose `__all__` is for the package itself.
PRIVATE = {"vllm_scope.request.actions", "vllm_scope.transport.senders"}


def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _all(module: str) -> list[str] | None:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def _defined(module: str) -> set[str]:
    found = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _imports() -> dict[str, set[str]]:
    """Module -> names that the docs and the examples import from it."""
    texts = [p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
    texts += [p.read_text() for p in (ROOT / "examples").rglob("*.py")]
    found: dict[str, set[str]] = {}
    pattern = r"from (vllm_scope[\w.]*) import (\([\w\s,]+\)|[\w, ]+)"
    for text in texts:
        for module, names in re.findall(pattern, text):
            found.setdefault(module, set()).update(re.findall(r"\w+", names))
    return found


@pytest.mark.parametrize("module", LISTED)
def test_a_public_module_lists_these_names(module):
    names = _all(module)
    assert names is not None
    assert set(names) == set(LISTED[module].split())
    assert len(names) == len(set(names))
    assert set(names) <= _defined(module)


def test_every_public_module_is_in_the_table():
    found = set()
    for path in (ROOT / "vllm_scope").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "__all__" in path.read_text() and _all(name) and name not in PRIVATE:
            found.add(name)
    assert found == set(LISTED)


def test_the_docs_and_examples_import_these_names_and_they_are_there():
    found = {
        module: names - set(LISTED.get(module, "").split()) for module, names in _imports().items()
    }
    assert {module: names for module, names in found.items() if names} == {
        module: set(names.split()) for module, names in DOCUMENTED.items()
    }
    for module, names in found.items():
        assert names <= _defined(module), module
