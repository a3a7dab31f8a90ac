"""The engine's options, and the key under which its compiled graphs are kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_scope
from vllm_scope import ConfigError
from vllm_scope.config import ScopeConfig

PACKAGE = Path(vllm_scope.__file__).parent


def test_without_options_the_embedding_and_every_layers_exit_are_tapped():
    config = ScopeConfig.parse({})
    assert config.sites == ("embed", "resid_post")
    assert config.layers == "all"
    assert config.arena_mib is None
    assert config.vectors_mib == 128
    assert config.modules == {}
    assert config.deliver_timeout_s == 60
    assert config.road == "auto"
    assert config.road_host is None
    assert config.boundaries(4) == (0, 2, 4, 6, 8)


@pytest.mark.parametrize(
    ("options", "boundaries"),
    [
        pytest.param({"layers": [3, 1, 3]}, (0, 4, 8), id="two-layers"),
        pytest.param({"sites": ["resid_post"]}, (2, 4, 6, 8), id="exits"),
        pytest.param({"sites": ["resid_pre"]}, (0, 2, 4, 6), id="entries"),
        pytest.param({"sites": ["resid_mid"]}, (1, 3, 5, 7), id="middles"),
        pytest.param({"sites": ["post_block", "resid_post"]}, (2, 4, 6, 8), id="an-alias"),
        pytest.param(
            {"sites": ["resid_pre", "resid_post"], "layers": [1]}, (2, 4), id="around-a-layer"
        ),
        pytest.param({"sites": ["embed"]}, (0,), id="the-embedding"),
        pytest.param({"sites": ["embed"], "layers": [2]}, (0,), id="the-embedding-has-no-layer"),
    ],
)
def test_sites_and_layers_are_boundaries(options, boundaries):
    assert ScopeConfig.parse(options).boundaries(4) == boundaries


@pytest.mark.parametrize(
    ("options", "came", "allowed"),
    [
        pytest.param(
            {"layer": [1]}, "layer is no option", "sites, layers, arena_mib", id="unknown"
        ),
        pytest.param({"sites": []}, "sites is []", "at least one site", id="no-sites"),
        pytest.param({"sites": "embed"}, "sites is 'embed'", "a list", id="sites-is-a-string"),
        pytest.param({"sites": ["attn"]}, "'attn'", "embed, resid_pre", id="unknown-site"),
        pytest.param({"sites": ["logits"]}, "'logits'", "vLLM itself returns logits", id="no-site"),
        pytest.param({"sites": [3]}, "sites[0] is 3", "a string", id="site-is-a-number"),
        pytest.param({"layers": []}, "layers is []", "from 0, or 'all'", id="no-layers"),
        pytest.param({"layers": [-1]}, "layers is [-1]", "from 0, or 'all'", id="layer-minus-one"),
        pytest.param({"layers": "some"}, "layers is 'some'", "'all'", id="layers-is-a-word"),
        pytest.param({"layers": [1.5]}, "layers is [1.5]", "from 0, or 'all'", id="a-float-layer"),
        pytest.param({"layers": [True]}, "layers is [True]", "from 0, or 'all'", id="a-bool-layer"),
        pytest.param({"arena_mib": 0}, "arena_mib is 0", "greater than 0", id="no-arena"),
        pytest.param({"arena_mib": "big"}, "arena_mib is 'big'", "number", id="arena-is-a-word"),
        pytest.param({"arena_mib": True}, "arena_mib is True", "number", id="arena-is-a-bool"),
        pytest.param({"arena_mib": float("inf")}, "arena_mib is inf", "finite", id="endless-arena"),
        pytest.param(
            {"deliver_timeout_s": -1}, "deliver_timeout_s is -1", "greater than 0", id="timeout"
        ),
        pytest.param(
            {"deliver_timeout_s": None}, "deliver_timeout_s is None", "number", id="no-timeout"
        ),
        pytest.param({"vectors_mib": 0}, "vectors_mib is 0", "greater than 0", id="no-vectors"),
        pytest.param({"modules": ["a"]}, "modules is ['a']", "an object", id="modules-is-a-list"),
        pytest.param({"road": "rdma"}, "road is 'rdma'", "'auto', 'shared' or 'tcp'", id="a-road"),
        pytest.param(
            {"road_host": "0.0.0.0"}, "road_host is '0.0.0.0'", "one address", id="everywhere"
        ),
        pytest.param({"road_host": ""}, "road_host is ''", "one address", id="nowhere"),
        pytest.param({7: 1}, "7 is no option", "options are", id="an-option-is-a-number"),
        pytest.param("all", "'all'", "an object", id="a-string"),
        pytest.param(None, "None", "an object", id="none"),
    ],
)
def test_a_wrong_option_names_what_came_and_what_is_allowed(options, came, allowed):
    with pytest.raises(ConfigError) as caught:
        ScopeConfig.parse(options)
    assert "additional_config['scope']" in str(caught.value)
    assert came in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param({"road": 3}, "road is 3; it must be 'auto', 'shared' or 'tcp'.", id="a-word"),
        pytest.param(
            {"modules": {"a": 3}}, "modules.a is 3; it must be a string.", id="inside-an-object"
        ),
        pytest.param(
            {"modules": {7: "a"}}, "modules has the key 7; it must be a string.", id="a-key"
        ),
        pytest.param(
            {"sites": ["resid_post", "ln_last"]}, "sites is 'ln_last'; sites are", id="one-site"
        ),
        pytest.param(
            {"sinks": {"filesystem": {"root": "x", "threads": 0}}},
            "sinks.filesystem.threads is 0; it must be at least 1.",
            id="of-every-sink",
        ),
        pytest.param(
            {"sinks": {"filesystem": {"mode": "600"}}},
            "sinks.filesystem: file option root is missing; it must be given.",
            id="of-a-sink",
        ),
        pytest.param(
            {"global_sinks": 3}, "global_sinks is 3; it must be an object.", id="no-object"
        ),
    ],
)
def test_the_sentence_names_the_path_that_was_typed(options, sentence):
    with pytest.raises(ConfigError) as caught:
        ScopeConfig.parse(options)
    assert str(caught.value).startswith(f"additional_config['scope'].{sentence}")


@pytest.mark.parametrize("sites", [["resid_post"], ["embed"]], ids=["exits", "the-embedding"])
def test_a_layer_that_the_model_lacks_is_refused(sites):
    with pytest.raises(ConfigError, match=r"layers has 4; this model has layers 0 to 3\."):
        ScopeConfig.parse({"sites": sites, "layers": [0, 4]}).boundaries(4)


def test_the_dict_for_vllm_is_plain_and_reads_back_as_the_same_options():
    config = ScopeConfig.parse({"sites": ["resid_pre"], "layers": [2], "arena_mib": 3})
    body = config.with_graph_key()
    assert ScopeConfig.parse(body).with_graph_key() == body
    assert body["graph_key"].startswith(f"{vllm_scope.__version__}+")
    assert ScopeConfig.parse({**body, "graph_key": ""}) == config


@pytest.fixture(scope="module")
def key_of_copy(tmp_path_factory: pytest.TempPathFactory):
    """The graph key of a copy of the package in which a line was added to `edited`."""
    at = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__")

    def key(edited: str | None) -> str:
        shutil.rmtree(at / "vllm_scope", ignore_errors=True)
        shutil.copytree(PACKAGE, at / "vllm_scope", ignore=ignore)
        if edited is not None:
            with (at / "vllm_scope" / edited).open("a") as source:
                source.write("\nADDED = 1\n")
        code = "import vllm_scope.config as c; print(c.__file__); print(c.graph_key())"
        out = subprocess.run(
            [sys.executable, "-c", code], cwd=at, capture_output=True, text=True, check=True
        )
        file, found = out.stdout.split()
        assert Path(file).is_relative_to(at)
        return found

    return key


@pytest.mark.parametrize(
    ("edited", "changes"),
    [
        pytest.param(None, False, id="nothing"),
        pytest.param("results/result.py", False, id="a-file-outside-the-graph"),
        pytest.param("graph/tap/definition.py", True, id="the-tap's-meaning"),
        pytest.param("graph/tap/kernel.py", True, id="the-tap's-kernel"),
        pytest.param("graph/anatomy/tapped.py", True, id="the-code-around-the-tap"),
    ],
)
def test_the_graph_key_follows_the_source_that_is_traced(edited, changes, key_of_copy):
    from vllm_scope.config import graph_key

    assert (key_of_copy(edited) != graph_key()) is changes


@pytest.mark.parametrize(
    ("option", "given", "named"),
    [
        ("modules", "/no/a", "modules['one'] is '/no/a'"),
        ("saes", "/no/b", "saes['one'] is '/no/b'"),
        ("lenses", "/no/c", "lenses['one'] is '/no/c'"),
        ("lenses", {"path": "/no/d"}, "lenses['one'].path is '/no/d'"),
        ("monitors", {"file": "/no/e"}, "monitors['one'].file is '/no/e'"),
    ],
)
def test_a_file_that_is_not_there_is_refused_by_the_options_name(option, given, named, tmp_path):
    there = {"path": str(tmp_path)} if option == "lenses" else str(tmp_path)
    there = {"file": str(tmp_path)} if option == "monitors" else there
    ScopeConfig.parse({option: {"two": there}}).check_files()
    config = ScopeConfig.parse({option: {"two": there, "one": given}})
    with pytest.raises(ConfigError) as error:
        config.check_files()
    assert str(error.value) == (
        f"additional_config['scope'].{named}, which is not there; give the path of a file or "
        "folder of this machine."
    )
