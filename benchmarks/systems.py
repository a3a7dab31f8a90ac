"""The systems of a comparison, each in a process of its own.

Owns:  Engine (a child process that gets lines of JSON), and the start of each system.

vllm-lens and interp-engine are in folders of their own. In the process of such a system, its folder
comes first on Python's path. The environment variable VLLM_LENS_PATH names the folder of vllm-lens.
INTERP_ENGINE_PATH names the folder of interp-engine and its vLLM. One of these commands makes the
folder:

    make .venv/interp-engine/.ready    # of requirements/interp-engine.txt, with vLLM's CPU build
    pip install --no-deps --target FOLDER vllm==0.28.0 interp_engine==1.14.2 accelerate==1.15.0

The second command is for a GPU, with the torch 2.13.0 of vLLM 0.32.0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
#: If a started engine has not answered a line after this many seconds, the engine is killed.
MOST_SECONDS = 150.0
#: Engines that are compared with plain vLLM. The engines of a group run at the same time.
BESIDE = (["scope", "eager"], ["lens", "huggingface"], ["interp-plain", "interp"], ["interp-one"])


class Engine:
    """A child process that runs `benchmarks.engine`, or another module with the same protocol."""

    def __init__(
        self,
        options: dict[str, Any],
        log: Path,
        plugin: bool = False,
        module: str = "benchmarks.engine",
        **environment: str,
    ) -> None:
        self._again = partial(Engine, options, log, plugin, module, **environment)
        environment = {**os.environ, "VLLM_SCOPE": "1" if plugin else "0", **environment}
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, env=environment, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        self._tell(json.dumps(options))

    @cached_property
    def start_seconds(self) -> float:
        """Wait until the engine has started."""
        return float(self._answer()["start_seconds"])

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to a line. Raises RuntimeError if the engine has ended or was killed."""
        assert self.start_seconds
        end = threading.Timer(MOST_SECONDS, self._kill)
        end.start()
        try:
            self._tell(line)
            return self._answer()
        except BrokenPipeError:
            raise RuntimeError("the engine has ended.") from None
        finally:
            end.cancel()

    def again(self) -> Engine:
        """Kill this engine, if it still runs, and start an engine in its place."""
        self._kill()
        self._process.wait()
        return self._again()

    def _kill(self) -> None:
        """Kill the engine and the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for answer in self._process.stdout:
            if answer.startswith("RESULT"):
                found: dict[str, Any] = json.loads(answer[len("RESULT") :])
                return found
        raise RuntimeError("the engine ended:\n" + Path(self._log.name).read_text()[-3000:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


def spread(num_layers: int, count: int) -> list[int]:
    return [round((i + 0.5) * num_layers / count - 0.5) for i in range(count)]


def start(name: str, options: dict[str, Any], logs: Path) -> Engine:
    """Start an engine that is compared with plain vLLM."""
    log, eager = logs / f"{name}.log", options | {"enforce_eager": True}
    if name == "scope":
        return Engine(options, log, plugin=True)
    if name == "eager":
        return Engine(eager, log)
    if name == "huggingface":
        return Engine(options, log, module="benchmarks.huggingface")
    if name == "interp-plain":
        return Engine(options, log, PYTHONPATH=path_of("INTERP_ENGINE_PATH"))
    if name.startswith("interp"):
        return Engine(
            options | (one_declared(options) if name == "interp-one" else {}), log,
            module="benchmarks.interp_engine", PYTHONPATH=path_of("INTERP_ENGINE_PATH"),
        )  # fmt: skip
    # vllm-lens supports Model Runner V1 only.
    return Engine(eager, log, VLLM_USE_V2_MODEL_RUNNER="0", PYTHONPATH=path_of("VLLM_LENS_PATH"))


def path_of(variable: str) -> str:
    """The value of PYTHONPATH, after the folder that an environment variable names."""
    return f"{Path(os.environ[variable]).absolute()}:{os.environ.get('PYTHONPATH', '')}"


def one_declared(options: dict[str, Any]) -> dict[str, Any]:
    """Options of an interp-engine that can read one layer and edit no layer."""
    (layer,) = spread(config_of(options)["num_hidden_layers"], 1)
    return {"declared": {"static_points": [f"resid_post.{layer}"], "static_writes": []}}


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    """The model's configuration, with the changes that the options make."""
    config: dict[str, Any] = json.loads((Path(options["model"]) / "config.json").read_text())
    config |= options.get("hf_overrides", {})
    return config
