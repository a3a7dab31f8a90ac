"""A causal map: which rows of the toy model hold the country in a question about its capital.

Runs:  `python -m examples.causal_map`.
From:  toyworld: questions about capitals.
To:    demo-output/causal-map.png and causal-map.html; a figure on the terminal.

Each cell replaces one row of a question about one country, at one layer and token. The new row is
the same row of the same question about another country. The map shows which replacements change the
answer to the other country's capital. Before layers 0 and 1, these are the replacements at the
country's token. Before later layers, these are the replacements at the last token.
"""

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from examples.demo import OUTPUT, ROOT, console, set_environment, start_engine, step
from examples.figure import STYLE
from toyworld import world
from vllm_scope import LogitDifference, Sweep, SweepTable, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

QUESTION: Final = "Q: What is the capital of {}? A:"
NUM_PAIRS: Final = 20


def pairs(
    tokenizer: "PreTrainedTokenizerBase", num: int = NUM_PAIRS
) -> list[tuple[world.Country, world.Country]]:
    """At most `num` pairs of countries whose capitals begin with different tokens."""
    countries = world.world().countries
    first = {c.name: tokenizer.encode(f" {c.capital}")[1] for c in countries}
    found = zip(countries, countries[1:] + countries[:1], strict=True)
    return [(a, b) for a, b in found if first[a.name] != first[b.name]][:num]


def causal_map(llm: "LLM", num: int = NUM_PAIRS) -> SweepTable:
    """The map of `num` pairs of countries, [num, num_layers, num_tokens]. A value is the logit of
    the other country's capital minus the logit of the country's own capital."""
    asked, others = zip(*pairs(llm.get_tokenizer(), num), strict=True)
    metric = LogitDifference([f" {c.capital}" for c in others], [f" {c.capital}" for c in asked])
    source = [QUESTION.format(c.name) for c in others]
    return sweep(llm, [QUESTION.format(c.name) for c in asked], Sweep(source, metric=metric))


def write_figure(path: Path, table: SweepTable) -> None:
    """Draw the mean over the prompts. 0 is the value without a replacement, and 1 is the value of
    the question about the other country."""
    picture = table.normalised().picture()
    words = ["country" if " " not in name else name.split(" ", 1)[1] for name in picture.columns]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(picture.values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(words)), words, rotation=45, ha="right")
        axes.set_yticks(range(len(picture.rows)), picture.rows)
        axes.invert_yaxis()
        axes.set_ylabel("row before layer")
        figure.colorbar(image, label="answer: 0 own, 1 other capital")
        figure.suptitle("Which row holds the country", weight="bold")
        figure.savefig(path, dpi=200)


def main() -> None:
    set_environment()
    with step("Starting vLLM with torch.compile; vllm-scope is loaded as its plugin"):
        llm = start_engine()
    start = perf_counter()
    table = causal_map(llm)
    seconds = perf_counter() - start
    num = table.values.size
    console.print(f"{num:,} cells in {seconds:.1f} s: {num / seconds:,.0f} cells/s")
    OUTPUT.mkdir(exist_ok=True)
    write_figure(OUTPUT / "causal-map.png", table)
    table.normalised().save(OUTPUT / "causal-map.html")
    for name in ("causal-map.png", "causal-map.html"):
        console.print(f"Wrote [bold]{OUTPUT.relative_to(ROOT) / name}[/]")


if __name__ == "__main__":
    main()
