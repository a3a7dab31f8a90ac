"""`vllm-scope watch`: its requests, and its output on a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from typer.testing import CliRunner

from vllm_scope.cli import app, watch
from vllm_scope.cli.display import Coloured, Lines, Scale
from vllm_scope.client import Chunk, ScopeClient, ScoredToken

WILD = "a\x1b[2J\u202eb\n"


def token(text: str, position: int, **scores: float) -> ScoredToken:
    return ScoredToken(7, text, position, scores)


def event(text: str, scope: dict | None, **more) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, "scope": scope} | more]}


ALIGNED = [
    event(" one", {"scores": {"mood": {"spans": [[0, 2]], "values": [9.0, 9.0]}}, "tokens": [
        {"id": 1, "text": " one", "position": 2, "scores": {"mood": 3.0}}]}),
    event(WILD, {"scores": {}, "tokens": [
        {"id": 2, "text": WILD, "position": 3, "scores": {"mood": -3.0}}]}),
    event(" end", {"status": "complete", "scores": {}, "tokens": [
        {"id": 3, "text": " end", "position": 4, "scores": {"mood": None}}]},
        finish_reason="length"),
]  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """Makes a server of some events; what it was asked comes back."""

    def serve(*events):
        requests = []

        def answer(request):
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            requests.append((request.url.path, json.loads(request.content)))
            text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
            return httpx.Response(200, content=text.encode())

        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(
            "vllm_scope.client.ScopeClient", lambda *_: ScopeClient(transport=transport)
        )
        return requests

    return serve


def probe(folder, name="mood", **place) -> str:
    path = folder / f"{name}.safetensors"
    save_file({"weight": np.float32([1, 2]), "bias": np.float32([0])}, path)
    body = {"site": "resid_post", "layer": 1} | place
    path.with_suffix(".json").write_text(json.dumps(body))
    return str(path)


def run(*arguments: str, ok: bool = True):
    done = CliRunner().invoke(app, ["watch", *arguments])
    assert (done.exit_code == 0) == ok, done.output
    return done


def test_a_pipe_gets_a_line_for_each_token(asked, tmp_path):
    asked(*ALIGNED)
    other = probe(tmp_path, "other")
    done = run("Once", "--probe", probe(tmp_path), "--probe", other)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[0] == ["position", "mood", "other", "token"]
    assert [line[:3] for line in lines[1:]] == [["2", "+3.000", ""], ["3", "-3.000", ""],
                                                ["4", "", ""]]  # fmt: skip
    assert [json.loads(line[3]) for line in lines[1:]] == [" one", WILD, " end"]
    assert all(c.isprintable() or c in "\t\n" for c in done.stdout)


@pytest.mark.parametrize(
    ("options", "path", "messages"),
    [
        ((), "/v1/completions", None),
        (("--chat",), "/v1/chat/completions", [("user", "Once")]),
        (("--system", "Be kind."), "/v1/chat/completions", [("system", "Be kind."),
                                                            ("user", "Once")]),
    ],
)  # fmt: skip
def test_a_prompt_may_be_a_message(options, path, messages, asked, tmp_path):
    requests = asked(*ALIGNED)
    run("Once", "--probe", probe(tmp_path), *options)
    ((where, body),) = requests
    assert where == path
    if messages is None:
        assert body["prompt"] == "Once"
    else:
        assert [(m["role"], m["content"]) for m in body["messages"]] == messages


def test_a_prompt_may_be_a_whole_chat(asked, tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"},
            {"role": "user", "content": "Once"}]  # fmt: skip
    requests = asked(*ALIGNED)
    run(json.dumps(chat), "--chat", "--system", "Be kind.", "--probe", probe(tmp_path))
    assert requests[0][1]["messages"] == [{"role": "system", "content": "Be kind."}, *chat]
    assert watch.messages_of("[1, 2]", True, None) == [{"role": "user", "content": "[1, 2]"}]
    assert watch.messages_of("[Once", True, None) == [{"role": "user", "content": "[Once"}]


def sent(requests) -> dict:
    return json.loads(requests[-1][1]["vllm_xargs"]["scope"])["probes"][0]


@pytest.mark.parametrize(
    ("place", "options", "tokens", "words"),
    [
        ({}, (), "all", None),
        ({"pooling": "last_prompt"}, (), "all", "'mood' was fitted to rows of 'last_prompt'"),
        ({"pooling": "generated"}, (), "generated", None),
        ({"pooling": "generated"}, ("--tokens", "all"), "all", "fitted to rows of 'generated'"),
        ({"pooling": "all", "template": "none"}, (), "all", None),
        ({"pooling": "all", "template": "none"}, ("--chat",), "all", "without a chat template"),
        ({"pooling": "all", "template": "chat"}, (), "all", "was fitted to a chat"),
        ({"pooling": "all", "template": "chat"}, ("--chat",), "all", None),
    ],
)
def test_a_probe_on_other_tokens_prints_a_warning(place, options, tokens, words, asked, tmp_path):
    requests = asked(*ALIGNED)
    done = run("Once", "--probe", probe(tmp_path, **place), *options)
    assert sent(requests).get("tokens", "all") == tokens
    assert len(done.stderr.splitlines()) == (words is not None)
    if words is not None:
        assert words in done.stderr
        assert "was fitted" not in done.stdout


def test_a_server_without_vllm_scope_ends_with_status_1(asked, tmp_path):
    asked(event(" one", None), event(" end", None, finish_reason="length"))
    done = run("Once", "--probe", probe(tmp_path), ok=False)
    assert "ignored the actions of the request; it is a server without vllm-scope" in done.output


def test_a_scope_that_failed_ends_with_status_1(asked, tmp_path):
    asked(event("x", {"status": "failed", "error": "no room for it", "scores": {}}))
    done = run("Once", "--probe", probe(tmp_path), ok=False)
    assert "the request is failed: no room for it" in done.output


def terminal(**options) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="256", width=20, **options
    )  # fmt: skip


SCALE = Scale("mood", 1.0, 0.0, False)


def test_a_terminal_shows_tokens_in_the_colour_of_their_score():
    console = terminal()
    view = Coloured(console, [SCALE], "Once ")
    high, low, bare = token("up" * 20, 2, mood=3.0), token(WILD, 3, mood=-3.0), token("!", 4)
    for each in (high, low, bare):
        view.add(Chunk(0, each.text, None, None, (each,)))
    view.end()
    out = console.file.getvalue()
    styles = {text: code for code, text in re.findall(r"\x1b\[([0-9;]*)m([^\x1b]+)\x1b\[0m", out)}
    # In the legend's first and last colour; not wrapped here, as terminals wrap by themselves.
    assert styles["up" * 20] == styles[" > +2.9 "]
    assert styles["a\\x1b[2J\\u202eb"] == styles[" < -2.9 "]
    assert styles["up" * 20] != styles["a\\x1b[2J\\u202eb"]
    assert "!" not in styles
    assert re.search(r"mood +\+0\.00 +\+3\.00", out)


def test_a_scale_is_of_scores_or_of_calibrated_probabilities():
    assert [SCALE.level(s) for s in (-9.0, -2.0, -1.0, 0.0, 1.0, 2.0, 9.0)] == list(range(7))
    assert SCALE.level(float("nan")) is None
    assert SCALE.labels()[3] == "-0.4 to +0.4"
    shifted = Scale("mood", 1.0, -5.0, False)  # a threshold of 5
    assert (shifted.level(5.0), shifted.labels()[3]) == (3, "+4.6 to +5.4")
    calibrated = Scale("mood", 0.5, -1.0, True)
    assert (calibrated.level(2.0), calibrated.level(9.0)) == (3, 6)
    assert calibrated.labels()[0] == "< 5 %"
    assert calibrated.labels()[3] == "40 to 60 %"


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, Coloured), ({"no_color": True}, Lines), ({"force_terminal": False}, Lines)],
)
def test_colours_are_for_terminals_that_want_them(options, kind):
    console = Console(**({"file": io.StringIO(), "force_terminal": True} | options))
    assert type(watch.view_of(console, [SCALE], "")) is kind


def test_no_color_is_respected(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    asked(*ALIGNED)
    assert "\x1b" not in run("Once", "--probe", probe(tmp_path)).stdout


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"calibration": {"slope": 1}}, "it must have slope and offset"),
        ({"calibration": {"slope": None, "offset": 0}}, "slope is None; it must be a number"),
        ({"threshold": float("nan")}, "threshold is nan; it must be finite"),
    ],
)
def test_a_probes_file_that_is_wrong_is_one_sentence(place, words, asked, tmp_path):
    asked(*ALIGNED)
    done = run("Once", "--probe", probe(tmp_path, **place), ok=False)
    assert words in done.output
    assert "Traceback" not in done.output


def test_without_httpx_the_command_names_the_extra(tmp_path):
    code = (
        "import sys; sys.modules['httpx'] = None; from vllm_scope.cli import app; "
        f"app(['watch', 'Once', '--probe', {probe(tmp_path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.strip() == "the client needs httpx: pip install 'vllm-scope[client]'."
    assert done.stderr == ""
