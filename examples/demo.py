"""The demo: find two concepts in the residual stream of a small model, and steer by one of them.

Runs:  `make demo`, or `python -m examples.demo`. On two CPU cores it takes under two minutes.
From:  toyworld (a small trained model, labelled prompts).
To:    demo-output/: auroc.png, tokens.html and steering.png; two tables on the terminal.

One `generate` call does all reading. Each prompt of the batch has its own reads. To fit and measure
probes, the call reads only the rows of the prompt's tokens. For the page, the call also reads the
rows of generated tokens. The same engine then runs the experiments of steering.py.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from examples import steered
from examples.figure import write_figure, write_steering_figure
from examples.page import Example, Places, Section, Token, render
from examples.probes import LayerProbe, Reading, best_of, fit_layer
from examples.steering import sentiment_directions
from examples.with_vllm import VllmModel
from toyworld.world import Prompt, Split, lying_prompts, review_openings, sentiment_prompts
from vllm_scope import Read, scope

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

ROOT: Final = Path(__file__).parents[1]
MODEL: Final = ROOT / "toyworld" / "model"
OUTPUT: Final = ROOT / "demo-output"

NUM_TRAIN, NUM_TEST, NUM_SHOWN = 120, 80, 4
GENERATED_TOKENS: Final = 24

Role = Literal["train", "test", "shown"]
console = Console(highlight=False)


@dataclass(frozen=True)
class Concept:
    """A property that a prompt has or does not have, and the source of its prompts.

    `absent` is the word for the label False, `present` is the word for the label True.
    """

    name: str
    absent: str
    present: str
    prompts: Callable[[int, int, Split], list[Prompt]]
    prompts_to_show: Callable[[int], list[Prompt]]


CONCEPTS: Final = (
    Concept(
        name="sentiment",
        absent="negative",
        present="positive",
        prompts=sentiment_prompts,
        # These prompts end in a neutral sentence, so that the model writes the next opinion.
        prompts_to_show=review_openings,
    ),
    Concept(
        name="lying",
        absent="honest",
        present="lying",
        prompts=lying_prompts,
        prompts_to_show=lambda n: lying_prompts(n, seed=1, split="test"),
    ),
)

Readings = dict[tuple[str, Role], list[Reading]]
Probes = dict[str, list[LayerProbe]]


def main() -> None:
    set_environment()
    with step("Starting vLLM with torch.compile; vllm-scope is loaded as its plugin"):
        llm = start_engine()
    with step("Reading every layer of every prompt token, in one mixed batch"):
        readings = read_all(llm)
    with step("Fitting linear probes, on other prompts than they are measured on"):
        probes = fit_probes(readings)
    print_aurocs(probes)
    OUTPUT.mkdir(exist_ok=True)
    write_figure(OUTPUT / "auroc.png", probes, layer_names(probes), NUM_TEST)
    write_page(OUTPUT / "tokens.html", probes, readings)
    model = VllmModel(llm)
    with step("Steering by the sentiment, taking it out, and moving capitals"):
        directions = sentiment_directions(model.read)
        figures = steered.measure(model, directions)
    console.print()
    console.print(steered.table_of(figures))
    with step("Steering at every layer, by more and more"):
        swept = steered.sweep(model, directions)
    write_steering_figure(OUTPUT / "steering.png", swept, steered.SWEPT_SCALES, steered.NUM_SWEPT)
    console.print()
    for name in ("auroc.png", "tokens.html", "steering.png"):
        console.print(f"Wrote [bold]{OUTPUT.relative_to(ROOT) / name}[/]")
    steered.check(figures)


def set_environment() -> None:
    """Set defaults for this process and the engine's: no downloads, and few messages.

    vLLM reads its variables at import, so this module imports vLLM only in functions. This process
    has already imported torch. Torch's variables act only in processes that import torch later.
    """
    warnings.simplefilter("ignore")
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # This logger warns that a CPU build of torch has no Triton.
        "TORCH_LOGS": "-torch._library.triton",
        # In GiB. The model has 9 MB.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def step(title: str) -> Iterator[None]:
    console.print(f"\n[bold]{title}[/]")
    start = time.perf_counter()
    yield
    console.print(f"[dim]{time.perf_counter() - start:.1f} s[/]")


# --- Reading -----------------------------------------------------------------


def start_engine() -> "LLM":
    """Stock vLLM. vLLM loads vllm-scope, because vllm-scope is installed."""
    from vllm import LLM

    return LLM(model=str(MODEL), max_model_len=256, use_tqdm_on_load=False)


def sampling_params(role: Role) -> "SamplingParams":
    from vllm import SamplingParams

    shown = role == "shown"
    tokens = "all" if shown else "prompt"
    return SamplingParams(
        temperature=0,
        max_tokens=GENERATED_TOKENS if shown else 1,
        extra_args=scope(
            Read("embed", tokens=tokens), Read("resid_post", layers="all", tokens=tokens)
        ),
    )


def read_all(llm: "LLM") -> Readings:
    """Run the prompts of all concepts and roles through the model, in one batch."""
    asked = [
        (concept, role, prompt)
        for concept in CONCEPTS
        for role, prompts in prompts_of(concept).items()
        for prompt in prompts
    ]
    outputs = llm.generate(
        [prompt.text for _, _, prompt in asked],
        [sampling_params(role) for _, role, _ in asked],
    )
    readings: Readings = {}
    num_rows = 0
    for (concept, role, prompt), output in zip(asked, outputs, strict=True):
        assert output.scope.status == "complete", output.scope
        num_rows += output.scope.delivered
        reading = as_reading(llm, output, prompt.label)
        readings.setdefault((concept.name, role), []).append(reading)
    console.print(f"{num_rows:,} rows of {len(asked)} prompts; none is missing")
    return readings


def prompts_of(concept: Concept) -> dict[Role, list[Prompt]]:
    return {
        "train": concept.prompts(NUM_TRAIN, 0, "train"),
        "test": concept.prompts(NUM_TEST, 0, "test"),
        "shown": concept.prompts_to_show(NUM_SHOWN),
    }


def as_reading(llm: "LLM", output: "RequestOutput", label: bool) -> Reading:
    prompt_ids = output.prompt_token_ids
    tokenizer = llm.get_tokenizer()
    return Reading(
        tokens=tuple(tokenizer.decode([i]) for i in [*prompt_ids, *output.outputs[0].token_ids]),
        num_prompt=len(prompt_ids),
        label=label,
        scope=output.scope,
    )


# --- Probes ------------------------------------------------------------------


def fit_probes(readings: Readings) -> Probes:
    """A `LayerProbe` of each concept at each stream that was read, in layer order."""
    streams = readings[CONCEPTS[0].name, "train"][0].scope.keys()
    work = [(concept.name, stream) for concept in CONCEPTS for stream in streams]
    probes: Probes = {}
    for name, stream in tqdm(work, desc="Fitting probes", unit="layer"):
        probe = fit_layer(stream, readings[name, "train"], readings[name, "test"])
        probes.setdefault(name, []).append(probe)
    return probes


def layer_names(probes: Probes) -> tuple[str, ...]:
    """The layers' names in tables and figures."""
    streams = [probe.stream for probe in probes[CONCEPTS[0].name]]
    return tuple("embed" if site == "embed" else str(layer) for site, layer in streams)


def print_aurocs(probes: Probes) -> None:
    table = Table(title="AUROC on held-out prompts")
    table.add_column("\nafter layer")
    for name in probes:
        table.add_column(f"{name}\nlast token", justify="right")
        table.add_column(f"{name}\nevery token", justify="right")
    for i, layer in enumerate(layer_names(probes)):
        at_layer = [of_concept[i] for of_concept in probes.values()]
        figures = [f for probe in at_layer for f in (probe.auroc_last, probe.auroc_every)]
        table.add_row(layer, *(f"{figure:.3f}" for figure in figures))
    console.print()
    console.print(table)
    console.print("[dim]Each probe is fitted at the tokens that it is measured at.[/]\n")


# --- Page --------------------------------------------------------------------

INTRO: Final = (
    "A small language model continues a text. The colour of each token is the probability that a "
    "linear probe computes from the token's row of the residual stream. vLLM computed this row "
    "while it processed the token, and vllm-scope read the row. Underlined tokens were generated. "
    "The strip under a text shows all layers, with the last layer on top. The bar in the strip is "
    "at the end of the prompt.",
    f"Each probe was fitted at every token of {NUM_TRAIN} other prompts. Each token had the label "
    "of its prompt. The subjects of those reviews and the countries of those speeches are not in "
    "the prompts of this page. Grey means a probability near one half. To see a token's position "
    "and probability, point at the token, or focus a text and use the arrow keys.",
)
CAPTIONS: Final = {
    "sentiment": "Words of opinion are coloured after one or two layers. The full stop of a "
    "sentence has the sentiment of the sentence. The full stop of a neutral sentence has the "
    "sentiment of the earlier sentences, and the model then writes an opinion with this "
    "sentiment. Pale colours before the first opinion are noise.",
    "lying": "Each speaker lies always or never. The tokens of a false answer are coloured. At "
    "each colon after the first statement, the colour shows whether the speaker lies, because the "
    "model must then choose between a true and a false statement. At closing quotes, the colour "
    "shows this only from the third statement on. In the model's training texts, a speaker has at "
    "least three statements, and a verdict on the speaker comes only after these statements. "
    "Therefore an earlier closing quote does not need this information.",
}
PLACES_CAPTION: Final = (
    f"AUROC of the same probes at one token of each of {NUM_TEST} held-out prompts. Random scores "
    "give 0.5. Before the first statement, the text does not show whether the speaker lies."
)


def write_page(path: Path, probes: Probes, readings: Readings) -> None:
    sections = [section_of(concept, probes, readings) for concept in CONCEPTS]
    html = render("Sentiment and lying, token by token", INTRO, sections)
    path.write_text(html, encoding="utf-8")


def section_of(concept: Concept, all_probes: Probes, readings: Readings) -> Section:
    probes = all_probes[concept.name]
    places = None
    if concept.name == "lying":
        places = places_in_speech(probes, readings["lying", "test"])
    return Section(
        title=concept.name.capitalize(),
        caption=CAPTIONS[concept.name],
        low=concept.absent,
        high=concept.present,
        layers=layer_names(all_probes),
        selected=best_of(probes),
        examples=tuple(
            example_of(concept, probes, reading) for reading in readings[concept.name, "shown"]
        ),
        places=places,
    )


def example_of(concept: Concept, probes: Sequence[LayerProbe], reading: Reading) -> Example:
    by_layer = [probe.probabilities(reading).tolist() for probe in probes]
    by_position: list[tuple[float, ...] | None] = list(zip(*by_layer, strict=True))
    # The last sampled token is not processed, so it has no row.
    by_position += [None] * (len(reading.tokens) - len(by_position))
    return Example(
        truth=concept.present if reading.label else concept.absent,
        tokens=tuple(
            Token(text, position >= reading.num_prompt, probabilities)
            for position, (text, probabilities) in enumerate(
                zip(reading.tokens, by_position, strict=True)
            )
        ),
    )


def places_in_speech(probes: Sequence[LayerProbe], readings: Sequence[Reading]) -> Places:
    """The AUROC at the colon before each of a speaker's three statements, and at the closing quote
    of each statement."""
    auroc = {}
    for nth, ordinal in enumerate(("first", "second", "third")):
        for token, name in ((":", "colon"), ('."', "closing quote")):
            positions = [reading.prompt_positions(token)[nth] for reading in readings]
            auroc[f"{ordinal} {name}"] = tuple(p.auroc_at(readings, positions) for p in probes)
    return Places("Where in the speech it shows", PLACES_CAPTION, auroc)


if __name__ == "__main__":
    main()
