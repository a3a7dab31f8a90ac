"""All actions of one request, and their JSON.

Owns:  Spec, `scope`, Meanings (a cache of resolved specs).
Runs:  in the caller's process, in the front-end (which parses the JSON) and in EngineCore
       (which unpacks specs). numpy, no torch, no vLLM.
From:  actions.   To: resolve (resolves a spec for one engine), packed (makes bytes of a spec).

Promise: every `Spec` is well formed. `Spec.resolve` makes the checks that need the engine's layers,
hidden size and steering modules.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, TypeVar

from vllm_scope.errors import SpecError, checked_word, shown
from vllm_scope.request.actions import (
    EDITS,
    Action,
    Edit,
    Features,
    LensTopK,
    Module,
    Moments,
    Policy,
    Probe,
    Read,
    action_from_json,
)
from vllm_scope.request.actions.probing import is_monitor
from vllm_scope.request.actions.sparse import MAX_INDICES
from vllm_scope.request.arrays import Array
from vllm_scope.request.bounded_json import decode_counted
from vllm_scope.request.cascade import check_cascades
from vllm_scope.request.outline import Outline
from vllm_scope.request.packed import Packed, have_one_body, pack, unpack
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolve import resolve
from vllm_scope.request.resolved import Resolved, Vectors
from vllm_scope.request.selectors import ITEM_BYTES, check_sizes
from vllm_scope.request.sites import Place, Sites

#: The longest JSON of a spec, in characters. This is enough for 383 replaced rows of 4,096 numbers
#: in base64. (80 vectors of 8,192 numbers take 3.5 MB.) A front-end parses 1 MiB of JSON in 5 ms.
MAX_SPEC_BYTES = 8 << 20
MAX_READS = 32
MAX_PROBES = 1024
MAX_EDITS = 256
MAX_FEATURES = 128
#: This limit is small, because a lens costs one product with the unembedding for each token and
#: layer.
MAX_LENSES = 4
MAX_MOMENTS = 32
MAX_STOPPING = 8
#: All edits of a spec together can name at most this many features of SAEs that the engine has
#: loaded. A named feature takes a few bytes in the spec, but two rows of the SAE in memory.
MAX_NAMED = 256
MOST = {
    "reads": MAX_READS, "probes": MAX_PROBES, "edits": MAX_EDITS, "features": MAX_FEATURES,
    "lens": MAX_LENSES, "moments": MAX_MOMENTS,
}  # fmt: skip
#: For each field of a Spec, the class of the actions in the field.
ACTIONS: dict[str, type[Action]] = {
    "reads": Read, "probes": Probe, "edits": Edit, "features": Features, "lens": LensTopK,
    "moments": Moments,
}  # fmt: skip
#: The limit in bytes of each of three caches: parsed specs, results of `of_engine`, and Meanings.
#: Texts longer than LONGEST_REMEMBERED are not in the cache of parsed specs, because each lookup
#: hashes the text.
REMEMBERED_BYTES, LONGEST_REMEMBERED = 64 << 20, 1 << 20
#: The largest resolved spec that is cached, in bytes.
LARGEST_REMEMBERED = 32 << 20
#: Limit of the cache of outlines, in bytes.
OUTLINE_BYTES = 16 << 20
#: The estimated memory of a parsed spec in bytes, without the spec's text.
_SPEC_BYTES = 4096
#: Actions that can name an SAE or a lens.
Named = TypeVar("Named", Edit, Features, LensTopK)


@dataclass(frozen=True)
class Spec:
    """All actions of one request. At one site and layer, edits apply in the order of `edits`."""

    reads: tuple[Read, ...] = ()
    probes: tuple[Probe, ...] = ()
    edits: tuple[Edit, ...] = ()
    features: tuple[Features, ...] = ()
    policy: Policy | None = None
    lens: tuple[LensTopK, ...] = ()
    moments: tuple[Moments, ...] = ()

    def __post_init__(self) -> None:
        if not self.actions:
            raise SpecError(
                "the spec asks for nothing; give at least one Read, Probe, Features, LensTopK, "
                "Moments or edit."
            )
        for name in MOST:
            _check_count(name, len(getattr(self, name)))
        check_sizes(one.tokens for one in self.actions)
        num_named = sum(edit.num_named for edit in self.edits)
        if num_named > MAX_NAMED:
            raise SpecError(
                f"the edits name {num_named:,} features of SAEs together; at most {MAX_NAMED}, "
                "because each becomes two rows of the SAE. Name fewer features, or send several "
                "requests."
            )
        num_indices = sum(len(one.indices or ()) for one in self.features)
        if num_indices > MAX_INDICES:
            raise SpecError(
                f"the features have {num_indices:,} indices together; at most {MAX_INDICES}, "
                "because their rows travel with the request. Take top_k."
            )
        check_stopping([p for p in self.probes if not is_monitor(p.name)])
        names = [probe.name for probe in self.probes]
        _check_names(names, "two probes are called {}; give each its own name.")
        names += [one.name for one in self.features]
        _check_names(names, "two of the probes and features are called {}; give each its own name.")
        _check_names([one.name for one in self.lens], "two lenses are called {}; give each a name.")
        check_cascades(self.probes, "probes[{}]".format, "probe")
        called: dict[str, tuple[str | None, str | None]] = {}
        for read in self.reads:
            if called.setdefault(read.to, (read.tag, read.name)) != (read.tag, read.name):
                raise SpecError(
                    f"the reads to {shown(read.to)} differ in tag or name; all reads of a request "
                    "to one sink must have one tag and one name."
                )

    def with_edits(self, edits: tuple[Edit, ...]) -> Spec:
        """A Spec with only the given edits. This method is faster if this Spec has only one edit
        without a gate, and the only given edit differs from it only in the layer and the vector."""
        single = len(self.actions) == len(self.edits) == len(edits) == 1 and self.policy is None
        layers = edits[0].layer_numbers if single else None
        if layers is None or not have_one_body(self.edits[0], edits[0]):
            return Spec(edits=edits)
        vector = getattr(edits[0], edits[0].fields[0])
        packed = Packed.of(self.packed.body, [vector.digest], [layers], self.packed.numbers)
        found = object.__new__(Spec)
        found.__dict__.update({name: getattr(self, name) for name in _names()}, edits=edits)
        found.__dict__.update(modules=(), packed=packed, _packed=(packed, {vector.digest: vector}))
        return found

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(action for name in ACTIONS for action in getattr(self, name))

    @cached_property
    def _names_held(self) -> bool:
        """True if the spec names SAEs or lenses that an engine has loaded."""
        saes = (getattr(one, "sae", None) for one in self.actions)
        return any(isinstance(sae, str) for sae in saes) or any(one.lens for one in self.lens)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of the steering modules that the spec uses."""
        found = [getattr(edit, edit.fields[0]) for edit in self.edits]
        found += [probe.weight for probe in self.probes]
        return tuple(dict.fromkeys(x.name for x in found if isinstance(x, Module)))

    def to_json(self) -> str:
        body: dict[str, object] = {
            name: [one.to_json() for one in some]
            for name in ACTIONS
            if (some := getattr(self, name))
        }
        if self.edits:
            body["edits"] = [{"kind": edit.kind, **edit.to_json()} for edit in self.edits]
        if self.policy is not None:
            body["policy"] = self.policy.to_json()
        return json.dumps(body)

    @staticmethod
    def from_json(text: object) -> Spec:
        """Parse a spec from the text in `extra_args["scope"]`.

        The result is cached, because many requests have the same text.

        Raises:
            SpecError: `text` is not a string, is too long, is not JSON, or is not a spec.
        """
        if not isinstance(text, str):
            raise SpecError(
                f"extra_args['scope'] is a {type(text).__name__}; it must be a JSON string, "
                "which vllm_scope.scope(...) makes."
            )
        if len(text) > MAX_SPEC_BYTES:
            raise SpecError(
                f"extra_args['scope'] is {len(text):,} characters; at most {MAX_SPEC_BYTES:,}. "
                "Register large vectors as a steering module and name it, or replace fewer rows."
            )
        if len(text) > LONGEST_REMEMBERED:
            return Spec._parse(text)[0]
        found = _parsed.get(text)
        if found is None:
            found, num_items = Spec._parse(text)
            # The estimate counts the size of the text three times: for the text, for the vectors,
            # and for the packed form without vectors.
            size = _SPEC_BYTES + 3 * len(text) + ITEM_BYTES * num_items
            _parsed.put(text, found, size)
        return found

    @staticmethod
    def remembered(text: object) -> Spec | None:
        """The spec that `from_json` has cached for this text, or None."""
        if not isinstance(text, str) or len(text) > LONGEST_REMEMBERED:
            return None
        return _parsed.get(text)

    def of_engine(
        self, saes: Mapping[str, Any], lenses: Mapping[str, Collection[Place]] | None = None
    ) -> Spec:
        """This spec with the rows or sizes of SAEs in place of the SAEs' names, and with layers in
        each LensTopK that names a lens but no layers. If the spec does not name an SAE or a lens,
        returns the spec itself.

        Args:
            saes: the SAEs that the engine has loaded, by name.
            lenses: the same argument as in LensTopK.of_engine.

        Raises:
            SpecError: the same errors as in `of_engine` of SetFeature, Features and LensTopK.
        """
        if not self._names_held:
            return self
        # The result is cached, because many requests have the same text.
        known = _expanded.get(self.packed.digest)
        if known is not None and known[0] is saes and known[1] is lenses:
            return known[2]

        def made(actions: Sequence[Named], held: Mapping[str, Any], where: str) -> Iterator[Named]:
            for i, action in enumerate(actions):
                try:
                    yield action.of_engine(held)
                except SpecError as error:
                    name = f"{type(action).__name__}."
                    raise SpecError(str(error).replace(name, f"{where}[{i}].", 1)) from None

        found = replace(
            self, edits=tuple(made(self.edits, saes, "edits")),
            features=tuple(made(self.features, saes, "features")),
            lens=tuple(made(self.lens, lenses or {}, "lens")),
        )  # fmt: skip
        size = _SPEC_BYTES + sum(len(one.data) for one in found.arrays.values())
        _expanded.put(self.packed.digest, (saes, lenses, found), size)
        return found

    @cached_property
    def packed(self) -> Packed:
        """The spec in the form that processes send to each other. The vectors are left out, and are
        in `arrays`."""
        return self._packed[0]

    @property
    def arrays(self) -> dict[bytes, Array]:
        """The Arrays with the spec's vectors and rows, by digest."""
        return self._packed[1]

    @cached_property
    def _packed(self) -> tuple[Packed, dict[bytes, Array]]:
        return pack(tuple(getattr(self, name) for name in _names()))

    @staticmethod
    def unpack(packed: Packed, arrays: Mapping[bytes, Array]) -> Spec:
        """Unpack a spec that a front-end has packed. The spec is not checked again, because the
        front-end has checked it."""
        found = object.__new__(Spec)
        found.__dict__.update(zip(_names(), unpack(packed, arrays), strict=True))
        return found

    @staticmethod
    def _parse(text: str) -> tuple[Spec, int]:
        """The spec of a text, and about how many items the text has."""
        body, num_items = decode_counted(text, "the spec")
        known = [*MOST, "policy"]
        if not isinstance(body, dict):
            raise SpecError(
                f"the spec is {shown(body)}; it must be an object with the fields "
                f"{', '.join(known)}."
            )
        unknown = [name for name in body if name not in known]
        if unknown:
            raise SpecError(f"the spec has {shown(unknown[0])}; the fields are {', '.join(known)}.")
        actions: dict[str, Any] = {
            name: tuple(_parse_list(cls, body, name)) for name, cls in ACTIONS.items()
        }
        policy = Policy.from_json(body["policy"]) if "policy" in body else None
        return Spec(policy=policy, **actions), num_items

    def resolve(self, sites: Sites, modules: Mapping[str, Vectors] | None = None) -> Resolved:
        """Resolve this spec for one engine.

        Args:
            sites: the taps of the engine.
            modules: the vectors of each steering module of the engine, by the module's name.

        Raises:
            SpecError: the model does not have one of the layers, the engine does not tap one of the
                sites or layers, a vector has a wrong size, a module is unknown, or two actions do
                not fit together (such as two codecs for one stream).
        """
        return resolve(
            self.reads, self.probes, self.edits, sites, modules or {}, self.features, self.policy,
            self.lens, self.moments,
        )  # fmt: skip


@cache
def _names() -> tuple[str, ...]:
    """The fields of a Spec, in the order in which `pack` packs the fields."""
    return tuple(each.name for each in fields(Spec))


_parsed: Remembered[str, Spec] = Remembered(REMEMBERED_BYTES)
#: (The engine's SAEs, its lenses, the spec that `of_engine` made with them.)
_Expanded = tuple[Mapping[str, Any], Mapping[str, Collection[Place]] | None, Spec]
#: The results of `of_engine` for specs that name SAEs or lenses, by the digest of the spec.
_expanded: Remembered[bytes, _Expanded] = Remembered(REMEMBERED_BYTES)


class Meanings:
    """A cache of resolved specs for one engine, with a limit in bytes.

    If the engine gets another steering module under a known name, the registry and the front-ends
    call `forget`. If vectors are dropped, the registry calls `forget_arrays`. Each of these calls
    drops cached specs, and so frees the vectors of these specs.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        #: By (digest of a Packed, version): the resolved spec, and the digests of its vectors.
        self._known: Remembered[
            tuple[bytes, tuple[Hashable, ...]], tuple[Resolved, Sequence[bytes]]
        ]
        self._known = Remembered(REMEMBERED_BYTES)
        #: The outlines, by the body of a Packed. A spec that names a module has no outline.
        self._outlines: Remembered[bytes, Outline] = Remembered(OUTLINE_BYTES)

    @property
    def num_bytes(self) -> int:
        return self._known.num_bytes + self._outlines.num_bytes

    def forget(self) -> None:
        """Drop the specs that name modules."""
        self._known.drop(lambda key, _: bool(key[1]))

    def forget_arrays(self, digests: Set[bytes]) -> None:
        """Drop the specs that have at least one of these vectors, and so free the vectors."""
        self._known.drop(lambda _, known: not digests.isdisjoint(known[1]))
        self._outlines.drop(lambda _, outline: not digests.isdisjoint(outline.packed.arrays))

    def of(
        self, packed: Packed, arrays: Mapping[bytes, Array], modules: Mapping[str, Vectors],
        version: tuple[Hashable, ...] = (), spec: Spec | None = None,
    ) -> Resolved:  # fmt: skip
        """The resolved spec of `packed`. It comes from the cache, from an outline, or from
        Spec.resolve.

        Args:
            arrays: the spec's vectors, by digest.
            version: a tuple that differs whenever the modules differ. It is empty if the spec names
                no module.
            spec: the Spec of `packed`. If None, `packed` is unpacked when a Spec is needed.

        Raises:
            KeyError: an Array is not among `arrays`. SpecError: the same errors as Spec.resolve.
        """
        key = (packed.digest, version)
        known = self._known.get(key)
        if known is not None:
            return known[0]
        outline = self._outlines.get(packed.body)
        found = None if outline is None else outline.fitted(packed, arrays)
        if found is None:
            found = (spec or Spec.unpack(packed, arrays)).resolve(self._sites, modules)
            outline = None if version else Outline.of(packed, found, self._sites)
            if outline is not None:
                self._outlines.put(packed.body, outline, outline.num_bytes)
        if found.num_bytes <= LARGEST_REMEMBERED:
            self._known.put(key, (found, packed.arrays), found.num_bytes)
        return found


def check_stopping(probes: Sequence[Probe]) -> None:
    """Raises SpecError if too many probes have the action 'stop' or are first stages of cascades.
    The output of each step waits for the verdicts of these probes."""
    firsts = {probe.after for probe in probes}
    count = sum(probe.action == "stop" or probe.name in firsts for probe in probes)
    if count > MAX_STOPPING:
        others = " or are first stages of others" if firsts - {None} else ""
        raise SpecError(
            f"{count} probes have action 'stop'{others}; at most {MAX_STOPPING}, because the "
            "output of each step waits for them."
        )


def _check_count(name: str, count: int) -> None:
    if count > MOST[name]:
        raise SpecError(f"the spec has {count:,} {name}; at most {MOST[name]}.")


def _check_names(names: Sequence[str], sentence: str) -> None:
    if len(set(names)) < len(names):
        raise SpecError(sentence.format(shown(next(n for n in names if names.count(n) > 1))))


def _parse_list(cls: type[Any], body: dict[str, object], name: str) -> list[Any]:
    items = body.get(name, [])
    if not isinstance(items, list):
        raise SpecError(f"{name} is {shown(items)}; it must be a list.")
    _check_count(name, len(items))
    found = []
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        if cls is not Edit:
            found.append(action_from_json(cls, item, where))
            continue
        kind = item.get("kind") if isinstance(item, dict) else None
        edit = EDITS[checked_word(kind, EDITS, f"{where}.kind")]
        fields = {key: value for key, value in item.items() if key != "kind"}
        found.append(action_from_json(edit, fields, where))
    return found


def scope(*actions: Action | Policy) -> dict[str, str]:
    """Make a dict for `SamplingParams(extra_args=...)` that requests these actions.

    Args:
        actions: one or more of Read, Probe, Features, LensTopK, Moments, Add, Ablate, Clamp,
            Replace, SetFeature and ScaleFeature, and at most one Policy. Edits of one site apply in
            the order of the arguments.

    Returns:
        A dict with one key, "scope". The value of this key is the spec as a JSON string. Over HTTP,
        clients send the same string in `vllm_xargs`. The caller can merge this dict with other
        extra_args.

    Raises:
        SpecError: there is no action, an argument is not an action, there are too many actions, or
            two actions do not fit together.
    """
    for i, action in enumerate(actions):
        if not isinstance(action, Action | Policy):
            raise SpecError(
                f"scope() argument {i} is {shown(action)}; it takes Read, Probe, Add, Ablate, "
                "Clamp, Replace, SetFeature, ScaleFeature, Features, LensTopK, Moments or Policy."
            )
    policies = [action for action in actions if isinstance(action, Policy)]
    if len(policies) > 1:
        raise SpecError(f"scope() has {len(policies)} policies; a request has at most one.")
    named: dict[str, Any] = {
        name: tuple(a for a in actions if isinstance(a, cls)) for name, cls in ACTIONS.items()
    }
    return {"scope": Spec(policy=policies[0] if policies else None, **named).to_json()}
