"""`vllm-scope doctor`: finds which sites of a model can be read on this machine with this vLLM.

vLLM's own worker builds the model without weights, and the command taps each site. If vLLM's
sources differ from the release with which vllm-scope was checked, a second table lists the
differences.

Exit statuses: READABLE, UNREADABLE and UNKNOWN.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_scope import __version__
from vllm_scope.config import ScopeConfig
from vllm_scope.errors import CompatError, ConfigError, ScopeError, reason_of
from vllm_scope.request.sites import MODEL_SITES, SITES, canonical_site

if TYPE_CHECKING:
    from vllm_scope.engine.describe import ModelReport
    from vllm_scope.engine.digests import Comparison

#: Exit statuses. READABLE: the configured sites can be read. UNREADABLE: the configured sites
#: cannot be read. UNKNOWN: the command found no answer (an unknown model, wrong options, or not
#: enough memory), or an SAE or a lens cannot be used.
READABLE, UNREADABLE, UNKNOWN = 0, 1, 2


def examine(
    model: str,
    engine_args: dict[str, object],
    sites: Sequence[str] | None,
    saes: Mapping[str, str] | None = None,
    lenses: Mapping[str, str] | None = None,
) -> int:
    """Print which sites can be read, and return the exit status.

    Args:
        engine_args: arguments of vLLM's EngineArgs.
        sites: the sites to configure; None for the default sites.
        saes, lenses: as in ScopeConfig.
    """
    console = Console(highlight=False)
    try:
        for site in sites or ():
            canonical_site(site, "--sites")
        check_path(model)
        with _quiet():
            from vllm_scope.engine.describe import describe_model

            report = describe_model(model, engine_args, sites)
    except CompatError as error:
        _say_changes(console, _installed())
        _say(console, f"{model} cannot be read", str(error))
        return UNREADABLE
    except Exception as error:  # vLLM raises errors of many types
        _say(console, model, sentence_of(error))
        return UNKNOWN
    console.print(
        f"vllm-scope {__version__}, vLLM {report.vllm_version}, model runner {report.runner}"
    )
    _say_changes(console, _installed())
    if report.sites:
        console.print(_table(report))
    if report.reason is not None:
        reason = report.reason.replace("'vllm-scope doctor MODEL' says", "The table says")
        _say(console, f"{model} cannot be read", reason)
        if not report.sites:
            console.print("vLLM serves the model, but refuses requests with reads for this reason.")
        if report.unread:
            console.print(
                "But an engine that compiles the model can serve embed, resid_pre and resid_post, "
                "if numbers prove at the engine's start where the stream is."
            )
        return UNREADABLE
    console.print(f"{report.num_taps} taps, arena {report.arena_mib:.1f} MiB.")
    statuses = [READABLE]
    if saes:
        statuses.append(_say_saes(console, report, saes))
    if lenses:
        statuses.append(_say_lenses(console, report, lenses))
    return max(statuses)


def check_path(model: str) -> None:
    """Raises ConfigError if `model` looks like a path that does not exist. vLLM would take such a
    path as the name of a model on Hugging Face."""
    path = Path(model).expanduser()
    looks_so = path.is_absolute() or model.startswith((".", "~"))
    if looks_so and not path.exists():
        raise ConfigError(
            "there is no such folder; give one with a config.json, or a name on Hugging Face"
        )


def _say_saes(console: Console, report: ModelReport, paths: Mapping[str, str]) -> int:
    """Print how much device memory the SAEs take. Returns UNKNOWN if an SAE cannot be read, is for
    rows of another width, or is for a place where an engine with the configured sites has no
    tap."""
    import torch

    from vllm_scope.saes.load import load_saes
    from vllm_scope.worker.held_saes import num_bytes

    tapped = _tapped(report)
    try:
        found = load_saes(paths)
        for name, sae in found.items():
            site = sae.place.site
            width = report.sites[site].width
            if width not in (None, sae.d_model):
                raise ConfigError(
                    f"{paths[name]} is of rows of {sae.d_model:,} numbers; this model's rows of "
                    f"{site} have {width:,}."
                )
            if sae.place.boundary not in tapped:
                raise ConfigError(
                    f"{paths[name]} is of {site} {sae.place.layer}, where an engine with these "
                    "sites has no tap. Add the site to --sites, or name an SAE of another place."
                )
    except (ScopeError, OSError) as error:
        _say(console, "the SAEs", str(error))
        return UNKNOWN
    dtype = getattr(torch, report.dtype)
    sizes = {name: num_bytes(sae, dtype) / 2**20 for name, sae in found.items()}
    for name, sae in found.items():
        text = f"SAE {name}: {sae.d_sae:,} features of {sae.place.site} {sae.place.layer}, "
        console.print(f"{text}{sizes[name]:.1f} MiB.", soft_wrap=True, markup=False)
    _say_total(console, "Encoders", sum(sizes.values()), "saes_mib")
    return READABLE


def _say_lenses(console: Console, report: ModelReport, paths: Mapping[str, str]) -> int:
    """Print how much device memory the maps of lenses take, and the digests of the lenses' files.
    The memory includes only the maps for places with a tap. Returns UNKNOWN if a lens cannot be
    read, is for rows of another width, or has no map for a place with a tap."""
    import torch

    from vllm_scope.lenses.linear import load_lens
    from vllm_scope.worker.lens import num_bytes

    tapped = _tapped(report)
    total = 0.0
    for name, path in paths.items():
        try:
            lens = load_lens(path, name=name)
            if lens.d_model != report.hidden_size:
                raise ConfigError(
                    f"{path} is of rows of {lens.d_model:,} numbers; this model's rows "
                    f"have {report.hidden_size:,}."
                )
            places = [one for one in lens.places if one.boundary in tapped]
            if not places:
                raise ConfigError(
                    f"{path} has no map of a place where an engine with these sites has a tap. Add "
                    "the lens's site to --sites, or name a lens of this model."
                )
        except (ScopeError, OSError) as error:
            _say(console, f"the lens {name}", str(error))
            return UNKNOWN
        size = num_bytes(lens, len(places), getattr(torch, report.dtype)) / 2**20
        total += size
        layers = _ranges(sorted(place.layer for place in places))
        text = f"lens {name}: {places[0].site} {layers}, {size:.1f} MiB, "
        console.print(f"{text}sha256 {lens.sha256}.", soft_wrap=True, markup=False)
    _say_total(console, "Lenses", total, "lenses_mib")
    return READABLE


def _tapped(report: ModelReport) -> tuple[int, ...]:
    """The boundaries with a tap in an engine with the configured sites."""
    return ScopeConfig(sites=report.configured).boundaries(report.num_layers)


def _say_total(console: Console, what: str, mib: float, option: str) -> None:
    text = f"{what}: {mib:.1f} MiB of each device; {option} must be at least this much."
    console.print(text, soft_wrap=True)


def _say(console: Console, what: str, why: str) -> None:
    text = Text(f"{what}: ", "red").append(why.rstrip(".") + ".", "default")
    console.print(text, soft_wrap=True)


def _installed() -> Comparison:
    import vllm

    from vllm_scope.engine.digests import compare

    return compare(Path(vllm.__file__).parent, vllm.__version__)


def _say_changes(console: Console, found: Comparison) -> None:
    """Print the parts of the installed vLLM that differ from the release with which vllm-scope was
    checked."""
    version, release = found.version, found.release
    if found.is_new and not found.changes:
        text = f"vLLM {version} is a new release. What vllm-scope uses of it is as in {release}."
        console.print(text, soft_wrap=True)
    if not found.changes:
        return
    if found.is_new:
        title, state = f"Changed in vLLM {version} since {release}", "new release"
        why = f"the source changed after {release}, which vllm-scope was checked with"
    else:
        title, state = f"Not as in the published vLLM {release}", "differs"
        why = "this source was changed after it was published"
    table = Table(title=title)
    for heading in ("part of vLLM", "vllm-scope", "state"):
        table.add_column(heading, overflow="fold")
    for change in found.changes:
        use = "replaces it" if change.wrapped else "uses it"
        table.add_row(change.symbol.removeprefix("vllm."), use, state if change.exists else "gone")
    console.print(table)
    console.print(
        f"{state}: {why}. This is no error: vllm-scope does not start if a part that it replaces "
        "no longer fits. Compare some rows with Hugging Face before you rely on them.",
        soft_wrap=True,
    )


def sentence_of(error: Exception) -> str:
    """The first sentence of an error of vLLM, Transformers or torch. Some errors get advice."""
    reason = reason_of(error)
    if reason == type(error).__name__:
        return reason
    first = re.split(r"(?<=[a-z)'\"])\. (?=[A-Z])", reason)[0]
    if "memory utilization" in first:
        first += "; leave --gpu-memory-utilization out: the model is built without weights"
    if re.match(r"Can't load ((image |video )?processor|feature extractor) for", first):
        first += "; put the files of the model's processor beside its config.json"
    known = isinstance(error, ScopeError | OSError | ValueError | ImportError)
    return first if known else f"vLLM cannot build it ({type(error).__name__}: {first})"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress all output of Python and of its libraries in the `with` block."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # vLLM reads this variable when it is imported
    kept, level = [os.dup(number) for number in (1, 2)], logging.root.manager.disable
    with tempfile.TemporaryFile() as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            logging.disable(level)


def _table(report: ModelReport) -> Table:
    title = f"{report.num_layers} layers of {report.hidden_size}, {report.dtype}"
    table = Table("site", "layers", "configured", "why not", title=title)
    # The exit of a layer is the entry of the next layer. Therefore `embed` and `resid_post`
    # together contain the rows of `resid_pre`.
    free = {"resid_pre"} if {"embed", "resid_post"} <= {*report.configured} else set()
    for site in SITES:
        found = report.sites[site]
        configured = "yes" if site in {*report.configured, *free} else "no"
        why = "" if found.reason is None else _bare(site, found.reason)
        layers = "yes" if site in MODEL_SITES and found.layers else _ranges(found.layers)
        table.add_row(site, layers, configured, Text(why))
    return table


def _bare(site: str, reason: str) -> str:
    """The text `reason`, without the words about the option `sites` at its beginning, and without
    the advice at its end."""
    prefix = rf"additional_config\['scope'\]\.sites has '{site}', "
    prefix += "(which cannot be tapped on this model: |and )?"
    return re.sub(r"\. (Leave|Start|Set) .*$", "", re.sub(prefix, "", reason)).rstrip(".")


def _ranges(numbers: Sequence[int]) -> str:
    """The numbers as ranges: "0-3, 7" for [0, 1, 2, 3, 7]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "-"
