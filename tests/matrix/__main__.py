"""`python -m tests.matrix`: compare every architecture that has no line yet, and write the page.

Each architecture runs in a process of its own, with a time limit. A line of results.jsonl is of one
architecture and one version of vLLM; an architecture whose line is removed runs again. What most
people run goes first, then what another version verified.

    python -m tests.matrix                   all that are left
    python -m tests.matrix GPT2LMHeadModel   these, again
    python -m tests.matrix --pending         print what is left
    python -m tests.matrix --page            write docs/models.md
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.matrix.architectures import FIRST, architectures, by_transformers, reference_of
from tests.matrix.vision import import_torchvision

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
RESULTS = Path(__file__).with_name("results.jsonl")
LIMIT_S = 600  # of a busy machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--pending", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no other after these")
    given = parser.parse_args()
    import_torchvision()
    if given.pending:
        print("\n".join(_pending()))
        return
    if not given.page:
        begun = time.monotonic()
        for architecture in given.architectures or _pending():
            if time.monotonic() - begun > 60 * given.minutes:
                break
            line = _run(architecture)
            print(architecture, line["status"], line.get("reason", ""), flush=True)
            _keep(line)
    from tests.matrix.page import write_page

    write_page(read_lines())


def read_lines() -> list[dict[str, Any]]:
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def installed() -> str:
    """The version of vLLM, whose CPU build has a name of its own."""
    try:
        return version("vllm")
    except ModuleNotFoundError:
        return version("vllm-cpu")


def _pending() -> list[str]:
    lines = read_lines()
    done = {line["architecture"] for line in lines if line["vllm"] == installed()}
    verified = {line["architecture"] for line in lines if line["status"] == "verified"}
    first = [name for name in FIRST if name in verified]
    names = dict.fromkeys([*first, *sorted(verified, key=str.lower), *architectures()])
    return [name for name in names if name not in done]


def _keep(line: dict[str, Any]) -> None:
    """Replace the architecture's line of this version."""
    key = line["architecture"], line["vllm"]
    kept = [one for one in read_lines() if (one["architecture"], one["vllm"]) != key]
    lines = sorted([*kept, line], key=lambda one: (one["architecture"].lower(), one["vllm"]))
    # A run that is killed here leaves the old lines.
    new = RESULTS.with_suffix(".new")
    new.write_text("".join(json.dumps(one) + "\n" for one in lines))
    new.replace(RESULTS)


def _run(architecture: str) -> dict[str, Any]:
    """The architecture's line: in chunks, or, if vLLM cannot, with whole prompts."""
    import transformers

    head = {"architecture": architecture, "vllm": installed()}
    if architecture in by_transformers():
        head["backend"] = "transformers"
    line: dict[str, Any] = {"status": "no reference"}
    name = reference_of(architecture)
    if not hasattr(transformers, name):  # without a process
        reason = f"transformers {transformers.__version__} has no {architecture}"
        return head | line | {"reason": reason}
    for chunked in (True, False):
        line = _attempt(architecture, chunked)
        if line["status"] != "cannot run" or not re.search("block|chunk|page", line["reason"]):
            break
    return head | line


def _attempt(architecture: str, chunked: bool) -> dict[str, Any]:
    # A copy of this process, which has imported vLLM and transformers and computed nothing.
    from tests.matrix import one

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_compare, args=(one, architecture, chunked, folder))
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            return {"status": "cannot run", "reason": f"no answer in {LIMIT_S} s"}
        file = folder / "line.json"
        if not file.exists():
            return {"status": "cannot run", "reason": f"the process ended ({process.exitcode})"}
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def _compare(one: Any, architecture: str, chunked: bool, folder: Path) -> None:
    with (folder / "log").open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            line = one.compare(architecture, chunked)
        except Exception as error:
            line = {"status": "cannot run", "reason": one.sentence(error)}
        (folder / "line.json").write_text(json.dumps(line))
        os._exit(0)  # vLLM's engine is not taken down: the process ends


if __name__ == "__main__":
    main()
