"""One feature for each country: finds them in an SAE, and moves capitals by them.

Owns:  features.json and the card of the SAE's folder, and the measurement in it.
Runs:  `python -m toyworld.countries` measures the SAE in `toyworld/model/sae` again: one minute.
From:  sae.py.   To: a table.

Promise: hooks of Hugging Face's model only; no engine.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Final, TypedDict

import torch
from torch import Tensor

from toyworld import phrases, world
from toyworld.evaluate import LoadedModel
from toyworld.phrases import Phrasing
from vllm_scope.saes.load import load_sae
from vllm_scope.saes.sae import Feature, Sae

MODEL: Final = Path(__file__).parent / "model"
FOLDER: Final = MODEL / "sae"
FEATURES: Final = "features.json"
PAIRS_AT_ONCE: Final = 400


class CountryFeature(TypedDict):
    """The index of a country's feature, and the feature's usual value at the country's name."""

    index: int
    usual: float


Features = dict[str, CountryFeature]
Pairs = Sequence[tuple[int, int]]


def asks_capital(phrasing: Phrasing) -> bool:
    """Whether the phrasing names a country inside the sentence, and then asks for its capital."""
    country, answer = (phrasing.template.find(slot) for slot in ("{country}", "{answer}"))
    return phrasing.relation == "capital" and 0 < country < answer


def prompts(loaded: LoadedModel, phrasing: Phrasing) -> tuple[Tensor, int]:
    """Token ids [num_countries, num_tokens] of a question about each country's capital, and the
    position of the country's name, which is one token."""
    texts = [world.completion_of(phrasing, country)[0] for country in world.world().countries]
    ids = torch.tensor(loaded.tokenizer(texts).input_ids)
    (position,) = (ids != ids[0]).any(dim=0).nonzero().flatten().tolist()
    return ids, position


def first_tokens(loaded: LoadedModel) -> Tensor:
    """The first token of each capital, as it is written after a space."""
    capitals = [f" {country.capital}" for country in world.world().countries]
    ids = loaded.tokenizer(capitals, add_special_tokens=False).input_ids
    return torch.tensor([each[0] for each in ids])


@torch.inference_mode()
def forward(
    loaded: LoadedModel, ids: Tensor, layer: int, edit: Callable[[Tensor], Tensor]
) -> Tensor:
    """The logits of each text's last token, with the stream after a layer edited.

    `edit` takes the stream, [num_texts, num_tokens, hidden_size], and returns another one.
    """
    handle = loaded.model.model.layers[layer].register_forward_hook(
        lambda _module, _inputs, output: edit(output)
    )
    logits: Tensor = loaded.model(ids, use_cache=False).logits[:, -1]
    handle.remove()
    return logits


def stream_of(loaded: LoadedModel, ids: Tensor, layer: int) -> Tensor:
    """The stream after a layer, [num_texts, num_tokens, hidden_size]."""
    found: list[Tensor] = []

    def keep(stream: Tensor) -> Tensor:
        found.append(stream)
        return stream

    forward(loaded, ids, layer, keep)
    return found[0]


def find_features(loaded: LoadedModel, sae: Sae) -> Features:
    """For each country the feature that is its own, and its usual value at the country's name.

    It is the feature whose mean at this country's name exceeds its mean at the other names most,
    in the phrasings of training.
    """
    at_names: list[Tensor] = []
    for phrasing in phrases.PHRASINGS:
        if asks_capital(phrasing) and not phrasing.held_out:
            ids, position = prompts(loaded, phrasing)
            at_names.append(sae.encode(stream_of(loaded, ids, sae.place.layer)[:, position]))
    mean = torch.stack(at_names).mean(dim=0)
    others = (mean.sum(dim=0) - mean) / (len(mean) - 1)
    index = (mean - others).argmax(dim=1).tolist()
    return {
        country.name: {"index": index[i], "usual": round(mean[i, index[i]].item(), 3)}
        for i, country in enumerate(world.world().countries)
    }


def set_feature(rows: Tensor, feature: Feature, value: float) -> Tensor:
    """The rows [..., hidden_size] with one feature set; what the SAE does not explain is kept."""
    s = rows @ feature.encoder + feature.encoder_bias
    assert feature.threshold is not None
    old = s * (s > feature.threshold)
    return rows + (value - old)[..., None] * feature.decoder


def pairs(loaded: LoadedModel) -> list[tuple[int, int]]:
    """All ordered pairs of countries whose capitals differ in their first token."""
    first = first_tokens(loaded).tolist()
    return [(a, b) for a, b in permutations(range(len(first)), 2) if first[a] != first[b]]


def moved(
    loaded: LoadedModel,
    sae: Sae,
    features: Features,
    phrasing: Phrasing,
    asked: Pairs,
) -> list[bool]:
    """For each pair (a, b), whether the question about a is answered with b's capital.

    At the name of a, a's feature is set to zero and b's to its usual value. The answer is the
    likeliest next token: the first token of the capital.
    """
    names = [country.name for country in world.world().countries]
    own = [sae.feature(features[name]["index"]) for name in names]
    ids, position = prompts(loaded, phrasing)
    first = first_tokens(loaded)
    found: list[bool] = []
    for start in range(0, len(asked), PAIRS_AT_ONCE):
        from_, to = zip(*asked[start : start + PAIRS_AT_ONCE], strict=True)

        def edit(stream: Tensor, from_: Any = from_, to: Any = to) -> Tensor:
            for row, a, b in zip(stream[:, position], from_, to, strict=True):
                without = set_feature(row, own[a], 0.0)
                row[:] = set_feature(without, own[b], features[names[b]]["usual"])
            return stream

        logits = forward(loaded, ids[list(from_)], sae.place.layer, edit)
        found += (logits.argmax(dim=1) == first[list(to)]).tolist()
    return found


# --- The card --------------------------------------------------------------------


CARD: Final = """\
# A sparse autoencoder of the toy model

A JumpReLU SAE of `resid_post` of layer {layer}, in SAELens's format: {d_sae} features, float16. It
was trained on {num_rows:,} rows of documents of facts (see `toyworld/sae.py`). {num_own} of the
{num_countries} countries have a feature of their own. `features.json` has its index and its usual
value at the country's name.

The feature of a country A is set to zero and that of a country B to its usual value, at the name of
A. The table has the share of pairs for which the likeliest next token is then the first one of B's
capital, of {num_pairs:,} pairs whose capitals differ in it:

{table}

To train and measure again: `python -m toyworld.sae --out toyworld/model/sae`.
"""


def load(folder: Path = FOLDER) -> tuple[Sae, Features]:
    return load_sae(folder), json.loads((folder / FEATURES).read_text())


def measure(loaded: LoadedModel, folder: Path) -> str:
    """The table of the card. Prints its lines."""
    sae, features = load(folder)
    asked = pairs(loaded)
    lines = ["| question | pairs moved |", "|---|---|"]
    for phrasing in phrases.PHRASINGS:
        if asks_capital(phrasing):
            done = moved(loaded, sae, features, phrasing, asked)
            held_out = " (not in training)" if phrasing.held_out else ""
            question = phrasing.template.partition(" {answer}")[0]
            lines.append(f"| {question}{held_out} | {100 * sum(done) / len(done):.0f} % |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def describe(loaded: LoadedModel, folder: Path, num_rows: int) -> None:
    """Write features.json and the card of an SAE.

    Args:
        num_rows: that it was trained on.
    """
    sae = load_sae(folder)
    features = find_features(loaded, sae)
    (folder / FEATURES).write_text(json.dumps(features, indent=2) + "\n")
    card = CARD.format(
        layer=sae.place.layer,
        d_sae=sae.d_sae,
        num_rows=num_rows,
        num_own=len({each["index"] for each in features.values()}),
        num_countries=len(features),
        num_pairs=len(pairs(loaded)),
        table=measure(loaded, folder),
    )
    (folder / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m toyworld.countries", description=__doc__)
    parser.add_argument("--sae", type=Path, default=FOLDER, help="the folder of the SAE")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    measure(LoadedModel(MODEL), parser.parse_args().sae)


if __name__ == "__main__":
    main()
