"""docs/models.md from the lines of results.jsonl.

Owns:  `write_page`, `page`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.matrix.architectures import by_transformers
from tests.matrix.one import TOLERANCE
from vllm_scope.request.sites import SITES

Line = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = f"""# Models

`make matrix` writes this page. For each decoder architecture of vLLM's registry, and for others
that vLLM runs by its Transformers backend, it makes a tiny random checkpoint from the configuration
class of transformers, and compares vLLM's rows with what Hugging Face's modules get and give: every
position of three prompts and their answers, in float32 on a CPU. The prompts are computed in chunks
of 32 tokens, and again behind a warm prefix cache. Models with states take whole prompts. Where no
token came from the cache, the page does not say "warm cache".

An architecture is verified if the worst row of `embed` and `resid_post` differs by at most
{TOLERANCE:g} of its length. Another site is verified if its rows equal, to the same bound, what one
module of each Hugging Face layer gets or gives. [Sites](sites.md) are defined there;
`vllm-scope doctor MODEL` says why a site cannot be tapped on a model. Multimodal architectures are
not on this page: vLLM needs torchvision for them, which has no build for PyTorch on a CPU.
"""
_SECTIONS: list[tuple[str, str, str]] = [
    ("verified", "Verified", ""),
    (
        "differs",
        "Rows differ from Hugging Face's",
        "The first gap is how far vLLM's log-probabilities are from Hugging Face's. The second is "
        "how far they are from those of Hugging Face's norm and head on vLLM's last rows. Where "
        "the second is small, the rows are vLLM's, and vLLM computes something else.\n\n",
    ),
    ("refused", "Served plainly, reads refused", ""),
    (
        "cannot run",
        "Not run: vLLM cannot run the tiny model here",
        "These need a GPU, another checkpoint, or a vLLM that takes the configuration.\n\n",
    ),
    (
        "no reference",
        "Not compared: no reference",
        "The installed transformers has no class of this name, or cannot run the tiny model.\n\n",
    ),
]


def write_page(lines: list[Line]) -> None:
    PAGE.write_text(page(lines))


def page(lines: list[Line]) -> str:
    counts = [(title, _of(lines, status)) for status, title, _ in _SECTIONS]
    found = _HEAD + "\n" + _table(("", "architectures"), [(t, len(some)) for t, some in counts])
    for status, title, words in _SECTIONS:
        if some := _of(lines, status):
            heading, row = _SHAPES.get(status, _REASONS)
            found += f"\n## {title}\n\n{words}{_table(heading, map(row, some))}"
    return found


def _of(lines: list[Line], status: str) -> list[Line]:
    return [line for line in lines if line["status"] == status]


def _verified(line: Line) -> tuple[object, ...]:
    sites = line["sites"]
    good = [s for s in SITES if s in sites and sites[s]["error"] <= TOLERANCE]
    open_ = [s for s in SITES if s in sites and s not in good]
    # A site that is newer than the line is in neither.
    refused = [s for s in SITES if s in line["why_not"]]
    worst = max([sites[s]["error"] for s in good] + [line.get("warm", 0.0)])
    how = "chunks" if line["chunked"] else "whole prompts"
    how += ", warm cache" if line.get("cached_tokens", 0) > 0 else ""
    return _name(line), _codes(good), f"{worst:.1e}", _codes(open_), _codes(refused), how


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
    "differs": (("architecture", "worst error", "gap", "gap of the rows"), _differs),
}


def _name(line: Line) -> str:
    """With a note, if the architecture has no class of its own in vLLM or in transformers."""
    name, reference = line["architecture"], line.get("reference", line["architecture"])
    if name in by_transformers():
        return f"`{name}` (Transformers backend)"
    return f"`{name}`" + (f" (as `{reference}`)" if reference != name else "")


def _codes(sites: Iterable[str]) -> str:
    return " ".join(f"`{site}`" for site in sites)


def _plain(reason: str) -> str:
    """One table cell; vLLM's messages name processes and folders."""
    reason = re.sub(r"^[\[(].*?[\])] ", "", reason)
    reason = re.sub(r"/\S+/", "", reason)
    return " ".join(reason.replace("|", "\\|").replace("<", "&lt;").split())


def _table(heading: Iterable[str], rows: Iterable[tuple[object, ...]]) -> str:
    names = tuple(heading)
    lines = [names, ("---",) * len(names), *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)
