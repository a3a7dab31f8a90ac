"""The commands `read` and `steer`, and their errors."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from tests.lenses import random_lens
from tests.unit.saes.published import D_IN, standard
from vllm_scope import SpecError
from vllm_scope.analysis.probes import load_probe
from vllm_scope.cli import app, doctor, watch
from vllm_scope.cli import read as command
from vllm_scope.cli import steer as steering
from vllm_scope.cli.doctor import sentence_of
from vllm_scope.cli.remote import Server, asking
from vllm_scope.cli.steer import _additions
from vllm_scope.client import ScopeClient
from vllm_scope.errors import FileError
from vllm_scope.vectors import SteeringModule, load_vectors, save_vectors

TIERS = {"vectors": {"post_block": {"1": [1, 2]}}, "decode_vectors": {"pre_attn": {"0": [3, 4]}}}


@pytest.mark.parametrize("name", ["v.json", "v.safetensors"])
def test_a_files_vectors_go_to_the_tokens_of_their_tiers(name, tmp_path):
    (tmp_path / "v.json").write_text(json.dumps(TIERS))
    save_vectors(tmp_path / "v.safetensors", load_vectors(tmp_path / "v.json"))
    found = _additions(str(tmp_path / name), 2.0)
    assert [(a.site, a.layers, a.tokens.to_json(), a.scale) for a in found] == [
        ("resid_post", (1,), "all", 2.0), ("resid_pre", (0,), "generated", 2.0)
    ]  # fmt: skip
    save_vectors(tmp_path / "e.safetensors", SteeringModule({("embed", 0): [1.0, 2.0]}))
    (embed,) = _additions(str(tmp_path / "e.safetensors"), 1.0)
    assert embed.to_json()["site"] == "embed"
    (named,) = _additions("formal", 1.0)
    assert named.vector.name == "formal"


def test_a_models_text_is_not_markup_and_rows_are_saved_first(tmp_path, monkeypatch, capsys):
    rows = np.ones((2, 4), np.float32)

    class Scope(dict):
        status, delivered, expected = "complete", 2, 2

        def positions(self, site, layer):
            return np.arange(2)

    class Client:
        def complete(self, *args, **options):
            return SimpleNamespace(text="see [/i] and [red]\\", scope=Scope({("embed", 0): rows}))

    monkeypatch.setattr(command, "asking", lambda *args: nullcontext(Client()))
    path = tmp_path / "[bold].safetensors"
    command.read(Server("x", None, 1, 0.0), "a [/b] ", "embed", "all", "all", path)
    assert capsys.readouterr().out.startswith("a [/b] see [/i] and [red]\\\n")
    assert np.array_equal(load_file(path)["embed.0"], rows)
    (tmp_path / "other").touch()  # has the mode that the umask gives
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode

    def broken(scope):
        raise RuntimeError("no table")

    monkeypatch.setattr(command, "_table", broken)
    other = tmp_path / "other.safetensors"
    with pytest.raises(RuntimeError, match="no table"):
        command.read(Server("x", None, 1, 0.0), "a", "embed", "all", "all", other)
    assert other.exists()


def test_the_error_names_a_server_that_cannot_be_reached(capsys):
    with (
        pytest.raises(SystemExit),
        asking(Server("http://127.0.0.1:9", None, 1, 0.0), Console(width=200)) as client,
    ):
        client.complete("text")
    said = capsys.readouterr().out
    assert "no answer from http://127.0.0.1:9: " in said
    assert said.endswith(". Start a server there (vllm serve), or name another with --url.\n")


def test_a_probe_is_watched_at_the_place_of_its_files(tmp_path):
    """As `load_probe` has it: folded, at its own site and layer."""
    save_file(
        {"weight": np.float32([2, 4]), "bias": np.float32([1]), "mean": np.float32([10, 20]),
         "scale": np.float32([2, 8])}, tmp_path / "mood.safetensors",
    )  # fmt: skip
    path = tmp_path / "mood.safetensors"
    with pytest.raises(SpecError, match="give --layer"):
        watch.load(path, None, None, "none")
    alone = watch.load(path, 3, None, "none").action
    assert (alone.site, alone.layers) == ("resid_post", (3,))
    (tmp_path / "mood.json").write_text('{"site": "resid_mid", "layer": 1}')
    for layer in (None, 1):
        probe, same = watch.load(path, layer, None, "none").action, load_probe(path)
        assert (probe.site, probe.layers) == (same.site, (same.layer,)) == ("resid_mid", (1,))
        assert probe.weight.numpy.tolist() == same.weight.tolist() == [1.0, 0.5]
        assert probe.bias == same.bias == -19.0
    with pytest.raises(SpecError, match="has layer 1, and --layer is 3; leave --layer out"):
        watch.load(path, 3, None, "none")


def answering(monkeypatch, **more):
    """Every request gets this one choice."""
    body = {"choices": [{"index": 0, "text": ":x: [b]\x1b[2J", "finish_reason": "stop", **more}]}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=body))
    monkeypatch.setattr(
        "vllm_scope.client.ScopeClient", lambda *_: ScopeClient(model="m", transport=transport)
    )


@pytest.mark.parametrize("run", ["read", "steer"])
def test_a_scope_that_failed_ends_with_status_1(run, tmp_path, monkeypatch, capsys):
    scope = {"status": "failed", "error": "no room for it", "expected": 5, "rows": [], "scores": {}}
    answering(monkeypatch, scope=scope)
    server = Server("http://x", None, 4, 0.0)
    runs = {
        "read": lambda: command.read(server, "a", "embed", "all", "all", None),
        "steer": lambda: steering.steer(server, "a", "happy", [1.0]),
    }
    with pytest.raises(SystemExit) as ended:
        runs[run]()
    assert ended.value.code == 1
    assert "the request is failed: no room for it" in capsys.readouterr().out


def test_a_wrong_key_is_told_with_the_option_that_has_it(monkeypatch, capsys):
    transport = httpx.MockTransport(lambda request: httpx.Response(401, json={"error": "Unauth"}))
    client = ScopeClient(model="m", transport=transport)
    monkeypatch.setattr("vllm_scope.client.ScopeClient", lambda *_: client)
    with pytest.raises(SystemExit):
        steering.steer(Server("http://x", None, 4, 0.0), "a", "happy", [0.0])
    said = " ".join(capsys.readouterr().out.split())
    assert said == "HTTP 401: Unauth; give the server's key with --api-key, or as VLLM_API_KEY."


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            lambda server: command.read(server, "a", "embed", "all", "all", None), id="read"
        ),
        pytest.param(lambda server: steering.steer(server, "a", "happy", [1.0]), id="steer"),
    ],
)
def test_a_server_without_vllm_scope_ends_with_a_sentence(run, monkeypatch, capsys):
    answering(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        run(Server("http://x", None, 4, 0.0))
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert said.startswith("http://x ignored the actions of the request; it is a server without")
    assert "b]" not in said  # the text is not shown, because it is not steered


def test_a_models_text_is_printed_as_it_is(monkeypatch, capsys):
    answering(monkeypatch)
    steering.steer(Server("http://x", None, 4, 0.0), "a", "happy", [0.0])
    assert capsys.readouterr().out == "+0 :x: [b]\\x1b[2J\n"


def test_a_text_that_the_terminals_encoding_does_not_have_is_escaped(monkeypatch):
    answering(monkeypatch, text="wörld 日本")
    done = CliRunner(charset="latin-1").invoke(
        app, ["steer", "a", "--module", "happy", "--scale", "0"]
    )
    assert done.exit_code == 0, done.exception
    assert done.stdout == "+0 wörld \\u65e5\\u672c\n" * 2


@pytest.mark.parametrize("run", ["read", "steer"])
def test_a_pipe_gets_a_long_text_on_one_line(run, monkeypatch, capsys):
    scope = {"status": "complete", "error": None, "expected": 0, "rows": [], "scores": {}}
    answering(monkeypatch, text="word " * 40 + "end", scope=scope | {"delivered": 0, "dropped": 0})
    server = Server("http://x", None, 4, 0.0)
    runs = {
        "read": lambda: command.read(server, "a ", "embed", "all", "all", None),
        "steer": lambda: steering.steer(server, "a ", "happy", [0.0]),
    }
    runs[run]()
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(" word" * 39 + " end")


def test_a_folder_to_save_in_is_looked_for_before_anything_is_asked(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.read(
            Server("http://x", None, 1, 0.0), "a", "embed", "all", "all", tmp_path / "no" / "x"
        )
    assert "there is no folder" in capsys.readouterr().out.replace("\n", " ")


def test_rows_that_cannot_be_saved_end_with_a_sentence():
    rows = SimpleNamespace(keys=list)
    with pytest.raises(FileError, match=r"/proc/x\.safetensors cannot be written: No such file"):
        command._write(Path("/proc/x.safetensors"), rows)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        pytest.param(
            lambda server: watch.watch(server, "a", [Path("no.safetensors")], 1, False, None, None),
            "there is no file no.safetensors; give the path of one that is there.", id="no-probe",
        ),
        pytest.param(
            lambda server: steering.steer(server, "a", "no.safetensors", [0.0, 1.0]),
            "there is no file no.safetensors; give the path of one that is there.", id="no-vectors",
        ),
        pytest.param(
            lambda server: steering.steer(server, "a", __file__, [1.0]),
            ".py is no file of vectors; its name must end in .safetensors, .gguf, .npz or .json. "
            "Give such a file, or the name of a module that the server holds.", id="another-file",
        ),
        pytest.param(
            lambda server: command.read(server, "a", "resid_post", "3-1", "all", None),
            "layers have '3-1'; the first number of a range must be the smaller.", id="no-range",
        ),
        pytest.param(
            lambda server: command.read(server, "a", "resid_post", "²", "all", None),
            "layers are 'all', or numbers such as 2,5 or 0-3, not '²'.", id="no-digit",
        ),
        pytest.param(
            lambda server: command.read(server, "a", "resid_post", "5-", "all", None),
            "layers are 'all', or numbers such as 2,5 or 0-3, not '5-'.", id="half-a-range",
        ),
        pytest.param(
            lambda server: command.read(server, "a", "resid_post", "0-99999999", "all", None),
            "layers have '0-99999999', 100,000,000 layers; at most 4,096.", id="a-long-range",
        ),
        pytest.param(
            lambda server: command.read(server, "a", "embed", "all", "all", Path("/")),
            "--save is /, which is a folder; name a file in it.", id="a-folder",
        ),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_told_before_anything_is_asked(run, said, capsys):
    with pytest.raises(SystemExit):
        run(Server("http://127.0.0.1:9", None, 1, 0.0))
    assert " ".join(capsys.readouterr().out.split()).endswith(said)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "", None])
def test_an_address_without_http_is_refused_with_one_that_is_right(url):
    with pytest.raises(
        SpecError, match=r"it must be a URL with http:// or https://, such as http://loc"
    ):
        ScopeClient(url)


def test_an_address_that_is_no_url_ends_with_a_sentence(capsys):
    with (
        pytest.raises(SystemExit),
        asking(Server("http://a b:1x", None, 1, 0.0), Console(width=200)) as client,
    ):
        client.complete("text")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        pytest.param(ValueError("Too large. Use less.\nMore."), "Too large", id="the-first-one"),
        pytest.param(OSError("see vllm.ai. or not"), "see vllm.ai. or not", id="no-end-of-one"),
        pytest.param(ValueError(), "ValueError", id="nothing-is-said"),
        pytest.param(
            OSError("Cannot find an appropriate cached snapshot folder for the revision"),
            "it is in no folder and not in Hugging Face's cache, and nothing may be downloaded "
            "(HF_HUB_OFFLINE); give a folder, or a name that is in the cache", id="offline",
        ),
        pytest.param(
            KeyError("rope"), "vLLM cannot build it (KeyError: 'rope')", id="a-fault-of-vllm"
        ),
        pytest.param(
            RuntimeError("CUDA error: out of memory\nSet CUDA_LAUNCH_BLOCKING"),
            "vLLM cannot build it (RuntimeError: CUDA error: out of memory)", id="beside-a-server",
        ),
        pytest.param(
            OSError("Can't load image processor for '/m'. If you were trying to load it from"),
            "Can't load image processor for '/m'; put the files of the model's processor beside "
            "its config.json", id="a-configuration-alone",
        ),
    ],
)  # fmt: skip
def test_an_error_of_the_engine_becomes_a_sentence(error, sentence):
    assert sentence_of(error) == sentence


def _report(width: int | None = D_IN, num_layers: int = 26, *configured: str) -> SimpleNamespace:
    return SimpleNamespace(
        sites={"resid_post": SimpleNamespace(width=width)}, dtype="float32", hidden_size=D_IN,
        configured=configured or ("embed", "resid_post"), num_layers=num_layers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("report", "status", "said"),
    [
        pytest.param(_report(), 0, "SAE a: 11 features of resid_post 12", id="of-this-model"),
        pytest.param(
            _report(8),
            2,
            "is of rows of 6 numbers; this model's rows of resid_post have 8.",
            id="of-another",
        ),
        pytest.param(
            _report(D_IN, 12),
            2,
            "is of resid_post 12, where an engine with these sites has no tap.",
            id="of-a-model-with-more-layers",
        ),
        pytest.param(
            _report(D_IN, 26, "resid_mid"),
            2,
            "is of resid_post 12, where an engine with these sites has no tap.",
            id="of-another-site",
        ),
        pytest.param(
            _report(D_IN, 26, "resid_pre"), 0, "SAE a: 11 features", id="of-the-same-boundary"
        ),
    ],
)
def test_doctor_says_whether_an_sae_fits_the_taps_of_an_engine(
    report, status, said, tmp_path, capsys
):
    path = str(standard(tmp_path).path)
    assert doctor._say_saes(Console(width=200), report, {"a": path}) == status
    assert said in capsys.readouterr().out.replace("\n", " ")


def test_doctor_counts_only_the_maps_of_a_lens_that_have_a_tap(tmp_path, capsys):
    random_lens("wide", [0, 1, 7], D_IN).save(tmp_path / "wide")
    lenses = {"wide": str(tmp_path / "wide")}
    assert doctor._say_lenses(Console(width=200), _report(D_IN, 6), lenses) == 0
    assert "lens wide: resid_post 0-1, 0.0 MiB" in capsys.readouterr().out
    assert doctor._say_lenses(Console(width=200), _report(D_IN, 6, "embed"), lenses) == 2
    assert "has no map of a place where an engine with these sites has a tap." in (
        capsys.readouterr().out
    )
