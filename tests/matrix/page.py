"""docs/models.md from the lines of results.jsonl.

Owns:  `write_page`, `page`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.matrix.architectures import is_multimodal
from tests.matrix.one import TOLERANCE
from vllm_scope.request.sites import SITES

Line = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = f"""# Models

`make matrix` writes this page. The command tests the decoders and multimodal architectures of
vLLM's registry, and other architectures that vLLM runs by its Transformers backend. For each
architecture the command makes a tiny random checkpoint from the configuration class of
transformers, and compares vLLM's rows with the inputs and outputs of Hugging Face's modules, in
float32 on a CPU. The comparison covers every position of three prompts and their answers. The
prompts are computed in chunks of 32 tokens, and a second time with a warm prefix cache. If vLLM
cannot compute the prompts of a model in these chunks, the command compares whole prompts without
the cache. In the column `how`, "warm cache" means that some tokens came from the cache. "Without
latent attention" means that vLLM ran with VLLM_MLA_DISABLE=1 and custom_ops "none". The reason is
that, on a CPU, vLLM's kernels for latent attention refuse float32, or return other numbers.
`make matrix VLLM=0.30.0` tests another version of vLLM, and begins with the architectures that
other versions verified. If `make matrix` is stopped, its next run skips the architectures that have
a result.

An architecture is verified if the worst row of `embed` and `resid_post` differs from Hugging Face's
row by at most {TOLERANCE:g} of its length. Any other site is verified if its rows equal, to the
same bound, the input or output of one module of each Hugging Face layer. The column
`no equal module` names the sites for which there is no such module. The column `refused` names the
sites that cannot be tapped. "Canary only" means that the source of the layers is not understood,
but the numbers of a forward prove where the stream is ([design](design.md#anatomy)), and `embed`
and `resid_post` equal Hugging Face's rows. [Sites](sites.md) defines all sites. If a site cannot be
tapped on a model, `vllm-scope doctor MODEL` prints the reason.

For a multimodal architecture, the command compares only the decoder, with prompts of text and
vLLM's `language_model_only`. The tables mark such an architecture with "text" or "text alone". The
modules of multimodal architectures import torchvision, but the package index has only CUDA builds
of torchvision. The command therefore imports torchvision's Python part, and declares torchvision's
compiled operators but never calls these operators (`tests/matrix/vision.py`). In
`tests/engine/test_multimodal.py`, a prompt contains a sound, and the test compares the prompt's
rows with Hugging Face's. In `tests/engine/test_images.py`, a prompt of Qwen2-VL, Qwen2.5-VL and
Qwen3-VL contains two images, and the test compares the rows of texts and images with Hugging
Face's. No test compares the rows of images of other architectures.
`python -m tests.matrix --pending` prints the architectures that were not run and are not on this
page.
"""
_UNSERVED = """vLLM 0.33.0 was not run, because no CPU build of vLLM 0.33.0 or of PyTorch 2.14 could
be installed.
"""
_SECTIONS: list[tuple[str, str, str]] = [
    ("verified", "Verified", ""),
    (
        "canary only",
        "Canary only",
        "Only `embed`, `resid_pre` and `resid_post` are served. The table names the part of the "
        "source that is not understood.\n\n",
    ),
    (
        "differs",
        "Rows differ from Hugging Face's",
        "The column `gap` is the difference of vLLM's log-probabilities from Hugging Face's. The "
        "column `gap of the rows` is the difference of vLLM's log-probabilities from the result "
        "of Hugging Face's norm and head on vLLM's last rows. If the gap of the rows is small, "
        "vLLM itself computes other rows than Hugging Face, and the taps deliver vLLM's rows.\n\n",
    ),
    ("refused", "Served plainly, reads refused", ""),
    (
        "cannot run",
        "Not run: vLLM cannot run the tiny model here",
        "The architectures in this table need a GPU, another checkpoint, or a version of vLLM that "
        "accepts the configuration.\n\n",
    ),
    (
        "no reference",
        "Not compared: no reference",
        "The installed transformers has no class with the architecture's name, or cannot run the "
        "tiny model.\n\n",
    ),
]


def write_page(lines: list[Line]) -> None:
    PAGE.write_text(page(lines))


def page(lines: list[Line]) -> str:
    versions = sorted({line["vllm"] for line in lines}, key=_number)
    by_version = {v: [line for line in lines if line["vllm"] == v] for v in versions}
    names = {line["architecture"] for line in lines}
    counts = [
        (title, *(len(_of(some, status)) for some in by_version.values()))
        for status, title, _ in _SECTIONS
    ]
    counts.append(("Not run yet", *(len(names) - len(some) for some in by_version.values())))
    found = _HEAD + "\n" + _UNSERVED + "\n" + _table(("architectures", *versions), counts)
    found += f"\n## By version\n\n{_BY_VERSION}" + _table(
        ("architecture", *versions), _by_version(lines, versions)
    )
    newest = versions[-1]
    found += f"\nThe sections below show the results of vLLM {newest}.\n"
    for status, title, words in _SECTIONS:
        if some := _of(by_version[newest], status):
            heading, row = _SHAPES.get(status, _REASONS)
            found += f"\n## {title}\n\n{words}{_table(heading, map(row, some))}"
    return found


_BY_VERSION = """The table lists architectures that were verified or refused with some version, or
whose rows differ. The sites after "without" were verified with the newest version, but not with the
version of the column.

"""


def _by_version(lines: list[Line], versions: list[str]) -> list[tuple[object, ...]]:
    found: dict[str, dict[str, Line]] = {}
    for line in lines:
        found.setdefault(line["architecture"], {})[line["vllm"]] = line
    here = {"verified", "canary only", "differs", "refused"}
    return [
        (f"`{name}`", *(_cell(by.get(v), by.get(versions[-1])) for v in versions))
        for name, by in found.items()
        if any(line["status"] in here for line in by.values())
    ]


def _cell(line: Line | None, newest: Line | None) -> str:
    if line is None:
        return "not run"
    status: str = line["status"]
    status += " (text)" if status == "verified" and is_multimodal(line["architecture"]) else ""
    if newest is line:
        return status
    if status in ("refused", "cannot run", "no reference"):
        return f"{status}: {_plain(line['reason'])}"
    missing = [] if newest is None else [s for s in _good(newest) if s not in _good(line)]
    return status + (f", without {_codes(missing)}" if missing else "")


def _good(line: Line) -> list[str]:
    """The sites whose rows equal Hugging Face's."""
    sites = line.get("sites", {})
    return [s for s in SITES if s in sites and sites[s]["error"] <= TOLERANCE]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _of(lines: list[Line], status: str) -> list[Line]:
    return [line for line in lines if line["status"] == status]


def _verified(line: Line) -> tuple[object, ...]:
    sites = line["sites"]
    good = _good(line)
    open_ = [s for s in SITES if s in sites and s not in good]
    # A site that is newer than the line is in neither.
    refused = [s for s in SITES if s in line["why_not"]]
    worst = max([sites[s]["error"] for s in good] + [line.get("warm", 0.0)])
    how = "chunks" if line["chunked"] else "whole prompts"
    how += ", warm cache" if line.get("cached_tokens", 0) > 0 else ""
    how += ", without latent attention" if line.get("latent") == "off" else ""
    how += ", text alone" if is_multimodal(line["architecture"]) else ""
    return _name(line), _codes(good), f"{worst:.1e}", _codes(open_), _codes(refused), how


def _canary_only(line: Line) -> tuple[object, ...]:
    name, sites, worst, *_ = _verified(line)
    return name, sites, worst, _plain(line["reason"])


def _differs(line: Line) -> tuple[object, ...]:
    sites = line["sites"]
    worst = max(sites[s]["error"] for s in ("embed", "resid_post") if s in sites)
    worst = max(worst, line.get("warm", 0.0))
    return (
        _name(line),
        f"{worst:.1e}",
        f"{line['logprob_gap']:.1e}",
        (f"{line.get('self_check', float('nan')):.1e}"),
    )


def _reason(line: Line) -> tuple[object, ...]:
    return _name(line), _plain(line["reason"])


_REASONS = (("architecture", "why"), _reason)
_SHAPES: dict[str, tuple[tuple[str, ...], Callable[[Line], tuple[object, ...]]]] = {
    "verified": (
        ("architecture", "verified sites", "worst error", "no equal module", "refused", "how"),
        _verified,
    ),
    "canary only": (("architecture", "verified sites", "worst error", "why"), _canary_only),
    "differs": (("architecture", "worst error", "gap", "gap of the rows"), _differs),
}


def _name(line: Line) -> str:
    """With a note, if the architecture has no class of its own in vLLM or in transformers."""
    name, reference = line["architecture"], line.get("reference", line["architecture"])
    if line.get("backend") == "transformers":
        return f"`{name}` (Transformers backend)"
    return f"`{name}`" + (f" (as `{reference}`)" if reference != name else "")


def _codes(sites: Iterable[str]) -> str:
    return " ".join(f"`{site}`" for site in sites)


def _plain(reason: str) -> str:
    """One table cell; vLLM's messages name processes and folders."""
    reason = re.sub(r"^[\[(].*?[\])] ", "", reason)
    reason = re.sub(r"https?://[^\s']+", "the hub", reason)
    reason = re.sub(r"'?(/\S+/)?tmp\w{8}'?", "the checkpoint", re.sub(r"/\S+/(?!tmp)", "", reason))
    return " ".join(reason.replace("|", "\\|").replace("<", "&lt;").split())


def _table(heading: Iterable[str], rows: Iterable[tuple[object, ...]]) -> str:
    names = tuple(heading)
    lines = [names, ("---",) * len(names), *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)
