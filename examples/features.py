"""The features of the toy world's SAE: their strongest tokens, and the countries they stand for.

Runs:  `make features`, or `python -m examples.features`; half a minute.
From:  toyworld: documents of facts that the SAE was not trained on; the SAE and its features.json,
       which has the feature of each country.
To:    demo-output/features.html, features.json (Neuronpedia's form) and features.png; figures on
       the terminal.

The engine processes each document one time. The SAE's encoder runs on the engine's device. The sink
`max_activating` keeps the strongest tokens of each feature. No row leaves the worker.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from examples.demo import MODEL, OUTPUT, console, set_environment, step
from examples.feature_figure import write_features_figure
from toyworld.world import documents
from vllm_scope import Except, Features, scope
from vllm_scope.saes.max_activating import MaxActivating
from vllm_scope.saes.max_activating_files import load_max_activating
from vllm_scope.saes.neuronpedia import neuronpedia_features
from vllm_scope.views import feature_page

if TYPE_CHECKING:
    from vllm import LLM

NUM_DOCUMENTS: Final = 4_000
#: No token of these documents has more than this number of active features.
TOP_K: Final = 64
#: The number of strongest tokens that are compared with the country's name.
MOST: Final = 5
INTRO: Final = (
    "Features of the toy world's sparse autoencoder, after layer 0. A feature with a name is the "
    "one that features.json lists for this country.",
    "Each box is one of a feature's strongest tokens (with a flag) in its context; the colour is "
    "the feature's value at each token. Hover over a token for its value, or move to it with the "
    "tab key; open a feature with a click or the enter key.",
)


def start_engine(folder: Path) -> "LLM":
    """An engine with the SAE, whose sink writes the table of the SAE's features to `folder`."""
    from vllm import LLM

    options = {
        "saes": {"toy": str(MODEL / "sae")},
        "sinks": {"max_activating": {"root": str(folder)}},
    }
    return LLM(
        str(MODEL), max_model_len=512, dtype="float32", use_tqdm_on_load=False,
        additional_config={"scope": options},
    )  # fmt: skip


def texts_of_facts(count: int) -> list[str]:
    """The documents of facts among the first `count` documents. No training used them."""
    return [one.text for one in documents(2, "held-out", 0, count) if one.kind == "facts"]


def strongest_tokens(llm: "LLM", folder: Path, texts: Sequence[str]) -> MaxActivating:
    """The table of the SAE's features at all tokens of these texts except the first, <|bos|>."""
    from vllm import SamplingParams

    asked = scope(Features("toy", top_k=TOP_K, tokens=Except("all", [0]), to="max_activating"))
    llm.generate(list(texts), SamplingParams(max_tokens=1, extra_args=asked), use_tqdm=False)
    llm.collective_rpc("scope_flush")
    return load_max_activating(folder, "toy")


def named_features() -> dict[int, str]:
    """The countries' features: number -> name."""
    listed = json.loads((MODEL / "sae" / "features.json").read_text())
    return {one["index"]: name for name, one in listed.items()}


def shares(
    table: MaxActivating, names: Mapping[int, str], decode: Callable[[int], str]
) -> dict[str, float]:
    """Country -> the share of its feature's strongest tokens (`MOST` of them) that are its name."""
    found = {}
    for index, name in names.items():
        tokens = [decode(int(one.tokens[one.at])).strip() for one in table.top(index)[:MOST]]
        found[name] = tokens.count(name) / MOST
    return found


def main() -> None:
    set_environment()
    folder = OUTPUT / "strongest"
    shutil.rmtree(folder, ignore_errors=True)
    with step("Starting vLLM; the features of all tokens of 800 documents"):
        llm = start_engine(folder)
        table = strongest_tokens(llm, folder, texts_of_facts(NUM_DOCUMENTS))
    tokenizer, names = llm.get_tokenizer(), named_features()

    def decode(token: int) -> str:
        text: str = tokenizer.decode([token])
        return text

    print(table)
    found = shares(table, names, decode)
    whole = sum(share == 1 for share in found.values())
    print(f"{whole} of {len(found)} countries: the {MOST} strongest tokens are the name")
    print(f"tokens at which more than {TOP_K} features may be active: {table.num_full}")
    page = feature_page(table, decode, labels=names, title="Features of toy world", intro=INTRO)
    page.save(OUTPUT / "features.html")
    bodies = list(neuronpedia_features(table, decode, model="toyworld", source="0-res-384",
                                       labels=names))  # fmt: skip
    (OUTPUT / "features.json").write_text(json.dumps(bodies))
    write_features_figure(OUTPUT / "features.png", table, names, decode)
    for name in ("features.html", "features.json", "features.png"):
        console.print(f"Wrote [bold]{OUTPUT.name}/{name}[/]")


if __name__ == "__main__":
    main()
