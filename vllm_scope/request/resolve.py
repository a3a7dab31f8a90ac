"""Resolves the actions of a spec for one engine.

Owns:  `resolve`, which makes a Resolved.
Runs:  in the front-end (to check a request) and in EngineCore. numpy, no torch, no vLLM.
From:  spec.   To: resolved.

To resolve a spec is to replace its names by what they mean on one engine: "all" by the tapped
layers, and the names of steering modules by vectors.

Promise: a Resolved fits the engine's layers, row sizes and steering modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import (
    Edit,
    EncoderRows,
    Features,
    HeldSae,
    LensTopK,
    Module,
    Moments,
    Policy,
    Probe,
    Read,
)
from vllm_scope.request.actions.probing import is_monitor
from vllm_scope.request.heads import LENS, Bank, Encoding, Likeliest, Scored, Strongest
from vllm_scope.request.nets import Net, net_of
from vllm_scope.request.resolve_edits import module_rows, resolve_edits
from vllm_scope.request.resolved import (
    Cell,
    Resolved,
    ResolvedFeatures,
    ResolvedMoments,
    ResolvedProbe,
    ResolvedRead,
    Vectors,
    lens_label,
)
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import STREAM, Phase, Place, Sites, kind_of

#: The largest number of scores of one token that a policy can see. Monitors' scores are not
#: counted.
MAX_SEEN = 32
#: A bank is all nets of a request's probes at one place. Taps compute the numbers of a bank if
#: three conditions are met: the place is on the residual stream, all nets are linear, and they make
#: at most this many numbers together. A tap needs about the same time to compute one number as to
#: copy the row. For any other bank, taps copy the rows, and the worker computes the numbers of many
#: rows together.
MOST_SCORED = 4


def resolve(
    reads: tuple[Read, ...],
    probes: tuple[Probe, ...],
    edits: tuple[Edit, ...],
    sites: Sites,
    modules: Mapping[str, Vectors],
    features: tuple[Features, ...] = (),
    policy: Policy | None = None,
    lens: tuple[LensTopK, ...] = (),
    moments: tuple[Moments, ...] = (),
) -> Resolved:
    """Resolve actions for one engine. Raises the same errors as `Spec.resolve`."""
    found = tuple(
        ResolvedRead(
            sites.find(read.site, read.layer_numbers, f"reads[{i}]"),
            read.tokens, read.when, read.to, (read.tag, read.name),
            _encoding(read, sites, f"reads[{i}].codec"),
        )
        for i, read in enumerate(reads)
    )  # fmt: skip
    _check_encodings(found)
    scored, sparse = _resolve_banked(probes, features, sites, modules)
    sparse = (*sparse, *_resolved_lenses(lens, sites))
    edited, told = resolve_edits(edits, sites, modules)
    _check_labels((*scored, *sparse))
    named = {one.name for one in scored} | {one.name for one in sparse}
    twice = named & {one.name for one in told}
    if twice:
        raise SpecError(
            f"two of the probes, features, lenses, gates and doses are called {shown(min(twice))}; "
            "give each its own name."
        )
    summed = tuple(
        ResolvedMoments(
            one.name, sites.find(one.site, one.layer_numbers, f"moments[{i}]"),
            one.tokens, one.by, one.target, one.covariance,
        )
        for i, one in enumerate(moments)
    )  # fmt: skip
    asked = Resolved(found, (*scored, *told), edited, sparse, policy, summed)
    if policy is not None and not asked.watched:
        raise SpecError(
            f"policy is {shown(policy.name)}, and the request has no scores for it; give a probe, "
            "a gate with a name or a dose, of tokens 'all', 'prompt' or 'generated'."
        )
    own = [probe for probe in asked.watched if not is_monitor(probe.name)]
    if policy is not None and len(own) > MAX_SEEN:
        raise SpecError(
            f"policy {shown(policy.name)} would see {len(own)} probes, gates and doses; at most "
            f"{MAX_SEEN}, because the output of each step waits for them."
        )
    return asked


def _resolve_banked(
    probes: tuple[Probe, ...],
    features: tuple[Features, ...],
    sites: Sites,
    modules: Mapping[str, Vectors],
) -> tuple[tuple[ResolvedProbe, ...], tuple[ResolvedFeatures, ...]]:
    """The resolved probes and features. The nets at one `Place` and in one stage of a cascade share
    a bank."""
    nets = [
        *(_nets_of(probe, sites, modules, f"probes[{i}]") for i, probe in enumerate(probes)),
        *(_net_of_features(one, sites, f"features[{i}]") for i, one in enumerate(features)),
    ]
    afters = [*(probe.after for probe in probes), *(None for _ in features)]
    #: The nets of each bank, by (`Place`, name of the earlier stage or None). A later stage of a
    #: cascade has its own banks, which are computed only after the stage has begun.
    at_place: dict[tuple[Place, str | None], list[Net]] = {}
    for after, some in zip(afters, nets, strict=True):
        for place, net in some:
            at_place.setdefault((place, after), []).append(net)
    banks = {(place, after): _bank(place, after, some) for (place, after), some in at_place.items()}
    firsts = dict.fromkeys(banks, 0)
    cells: list[tuple[Cell, ...]] = []
    for after, some in zip(afters, nets, strict=True):
        here = []
        for place, net in some:
            key = place, after
            here.append(Cell(place, net, banks[key], firsts[key]))
            firsts[key] += net.num_values
        cells.append(tuple(here))
    found = tuple(
        ResolvedProbe(
            probe.name, probe.tokens if probe.after is None else Word("generated"), some,
            probe.bias, probe.activation, probe.pools, probe.aggregate, probe.to, probe.threshold,
            probe.action == "stop", probe.after, sites.step_tokens,
        )
        for probe, some in zip(probes, cells, strict=False)
    )  # fmt: skip
    sparse = zip(features, cells[len(probes) :], strict=True)
    return found, tuple(_resolved_features(one, some, sites) for one, some in sparse)


def _bank(place: Place, after: str | None, nets: Sequence[Net]) -> Bank:
    """The bank of the nets at one `Place` and in one stage of a cascade."""
    num_values = sum(net.num_values for net in nets)
    linear = all(len(net.layers) == 1 for net in nets)
    # Taps compute scores only on the residual stream. At other sites, a tensor-parallel rank can
    # have only a part of each row.
    few = linear and num_values <= MOST_SCORED and kind_of(place.boundary) == STREAM
    kind = Scored if few else Bank
    return kind.of((net.digest for net in nets), num_values, place.group, after)


def _place_of(one: Features, sites: Sites, where: str) -> Place:
    (place,) = sites.find(one.site, one.layer_numbers, where)
    width = sites.row_size(one.site)
    takes = one.sae.width if isinstance(one.sae, HeldSae) else one.sae.encoder.shape[1]
    if takes != width:
        raise SpecError(
            f"{where}.sae takes rows of {takes} numbers; rows of {one.site!r} have {width}."
        )
    return place


def _net_of_features(one: Features, sites: Sites, where: str) -> list[tuple[Place, Net]]:
    """The `Place` and the net of features whose encoder rows the request contains. The net computes
    the pre-activations of the features. For an SAE that the workers hold, the list is empty."""
    place = _place_of(one, sites, where)
    if not isinstance(one.sae, EncoderRows):
        return []
    return [(place, Net(((one.sae.encoder, one.sae.bias),)))]


def _resolved_features(one: Features, cells: tuple[Cell, ...], sites: Sites) -> ResolvedFeatures:
    if isinstance(one.sae, EncoderRows):
        return ResolvedFeatures(
            one.name, one.tokens, cells, None, one.indices, one.sae.threshold, one.threshold, one.to
        )
    place = _place_of(one, sites, "features")
    # A TopK SAE has k active features for each row. If the action has `indices`, all k features are
    # computed, and then the features in `indices` are selected.
    count = min(one.top_k or one.sae.num_features, one.sae.k or one.sae.num_features)
    bank = Strongest.of_sae(one.sae.name, count, place.group)
    return ResolvedFeatures(
        one.name, one.tokens, (Cell(place, None, bank, 0),), one.sae.num_features, one.indices,
        threshold=one.threshold, to=one.to,
    )  # fmt: skip


def _resolved_lenses(lens: tuple[LensTopK, ...], sites: Sites) -> Iterator[ResolvedFeatures]:
    """One ResolvedFeatures for each layer of each LensTopK. Several LensTopK of the same lens and
    `Place` share a head, which computes as many tokens as the largest of their `top_k`."""
    places = [
        sites.find(x.site, x.layer_numbers, f"lens[{i}]", x.embedding) for i, x in enumerate(lens)
    ]
    most: dict[tuple[str | None, Place], int] = {}
    for one, some in zip(lens, places, strict=True):
        most |= {(one.lens, p): max(one.top_k, most.get((one.lens, p), 0)) for p in some}
    for i, (one, some) in enumerate(zip(lens, places, strict=True)):
        for place in some:
            key = LENS if one.lens is None else (one.lens, place.boundary)
            head = Likeliest.of_lens(most[one.lens, place], place.group, key)
            cell = Cell(place, None, head, 0)
            yield ResolvedFeatures(
                lens_label(one.name, place.layer), one.tokens, (cell,), to=one.to,
                lens=(one.name, i), top_k=one.top_k,
            )  # fmt: skip


def _check_labels(named: tuple[ResolvedProbe | ResolvedFeatures, ...]) -> None:
    """Raises SpecError if the label of a lens at a layer (`lens_label`) is also the name of a probe
    or of features."""
    labels: dict[str, bool] = {}
    for one in named:
        of_lens = isinstance(one, ResolvedFeatures) and one.lens is not None
        if labels.setdefault(one.name, of_lens) != of_lens:
            raise SpecError(
                f"a probe or features are called {shown(one.name)}, which stands for a lens at a "
                "layer; take another name."
            )


def _nets_of(
    probe: Probe, sites: Sites, modules: Mapping[str, Vectors], where: str
) -> list[tuple[Place, Net]]:
    """The net that a probe computes at each `Place`."""
    places = sites.find(probe.site, probe.layer_numbers, where)
    if isinstance(probe.weight, Module):
        named = {p: row for p, row, _ in module_rows(probe, probe.weight, sites, modules, where)}
        nets = [net_of(named[place]) for place in places]
    else:
        nets = [net_of(weight) for weight in probe.weights()]
    width = sites.row_size(probe.site)
    for net in nets:
        if net.width != width:
            raise SpecError(
                f"{where}.weight has {net.width} numbers; rows of {probe.site!r} have {width}."
            )
    return list(zip(places, nets, strict=True))


def _encoding(read: Read, sites: Sites, where: str) -> Encoding | None:
    if read.codec is None:
        return None
    from vllm_scope.codecs.packed import encoding_of  # `codecs` imports torch

    return encoding_of(read.codec, sites.row_size(read.site), sites.dtype, where)


def _check_encodings(reads: tuple[ResolvedRead, ...]) -> None:
    known: dict[tuple[str, Place, Phase], Encoding | None] = {}
    for i, read in enumerate(reads):
        for stream in read.streams:
            one = known.setdefault((read.to, stream, read.when), read.encoding)
            if one != read.encoding:
                names = [e.metadata["codec"] if e else "none" for e in (one, read.encoding)]
                raise SpecError(
                    f"reads[{i}].codec would send {stream[0]!r} {stream[1]} to {shown(read.to)} "
                    f"as {names[0]} and as {names[1]}; rows of one stream must have one codec, "
                    "with the same options, at one destination."
                )
