"""The demo's second half: the effects of edits of the stream, measured and checked.

From:  demo.py, which has started an engine.
To:    a table on the terminal, and the curves of figure.write_steering_figure.

Promise: if a figure is worse than its bound in this module, the demo ends with an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.table import Table
from tqdm import tqdm

from examples.steering import (
    ABLATED_STREAM,
    PROBED_STREAM,
    SCALE,
    STEERED_STREAM,
    AblationFigures,
    SteeringFigures,
    Stream,
    ablate_sentiment,
    flip_reviews,
    move_capitals,
)
from examples.with_vllm import VllmModel
from vllm_scope.vectors import SteeringModule

#: At this stream, the row of a country's name determines the country.
PATCHED_STREAM: Final[Stream] = ("embed", 0)

SWEPT_SCALES: Final = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
NUM_SWEPT: Final = 30

LEAST_SHARE: Final = 0.9
#: With NUM_PROBED prompts, the AUROC of a probe on random labels is at most this far from 0.5.
CHANCE: Final = 0.1


@dataclass(frozen=True)
class Figures:
    """The measured results of the three experiments.

    Attributes:
        plain: figures of reviews without an edit.
        steered: figures of reviews that are steered against their opening.
        ablated: figures of reviews whose sentiment is removed.
        moved: in each prompt, another country's row replaces the row of the named country. This is
            the share of prompts whose answer is the capital of the other country.
    """

    plain: SteeringFigures
    steered: SteeringFigures
    ablated: AblationFigures
    moved: float


#: Layer -> figures at each of SWEPT_SCALES.
Sweep = dict[int, list[SteeringFigures]]


def measure(model: VllmModel, directions: SteeringModule) -> Figures:
    moved = move_capitals(model.generate, model.read, model.token_ids, [PATCHED_STREAM])
    return Figures(
        plain=flip_reviews(model.generate, directions, scale=0),
        steered=flip_reviews(model.generate, directions),
        ablated=ablate_sentiment(model.generate, model.read, directions),
        moved=moved[PATCHED_STREAM],
    )


def sweep(model: VllmModel, directions: SteeringModule) -> Sweep:
    """Steer reviews at each layer, with each scale of the layer's direction."""
    layers = [layer for site, layer in directions if site == "resid_post"]
    work = [(layer, scale) for layer in layers for scale in SWEPT_SCALES]
    found: Sweep = {layer: [] for layer in layers}
    for layer, scale in tqdm(work, desc="Steering", unit="batch"):
        stream = ("resid_post", layer)
        found[layer].append(flip_reviews(model.generate, directions, stream, scale, NUM_SWEPT))
    return found


def table_of(figures: Figures) -> Table:
    steered, ablated = figures.steered, figures.ablated
    table = Table(title="Sentiment added and ablated; a country's embedding replaced")
    table.add_column("edit")
    table.add_column("what is measured")
    table.add_column("plain", justify="right")
    table.add_column("edited", justify="right")
    rows = (
        (
            f"add {SCALE} after layer {STEERED_STREAM[1]}",
            "reviews turned, in whole sentences",
            _percent(figures.plain.both),
            _percent(steered.both),
        ),
        (
            f"ablate after layer {ABLATED_STREAM[1]}",
            f"AUROC of a probe after layer {PROBED_STREAM[1]}",
            f"{ablated.auroc:.3f}",
            f"{ablated.auroc_ablated:.3f}",
        ),
        ("", "the same, fitted to edited rows", "", f"{ablated.auroc_refitted:.3f}"),
        ("", "reviews not turned", _percent(ablated.kept), _percent(ablated.kept_ablated)),
        ("replace a country", "capitals that move with it", "", _percent(figures.moved)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def check(figures: Figures) -> None:
    """Raises AssertionError with a message if a figure is out of its bounds."""
    steered, ablated = figures.steered, figures.ablated
    assert steered.both >= LEAST_SHARE, (
        f"adding the sentiment turned {_percent(steered.both)} of the reviews into whole "
        f"sentences of the other sentiment; {_percent(LEAST_SHARE)} are promised."
    )
    assert ablated.auroc >= LEAST_SHARE, (
        f"the probe of the sentiment has an AUROC of {ablated.auroc:.3f} on rows that nothing "
        f"edits; {LEAST_SHARE} is promised."
    )
    for auroc in (ablated.auroc_ablated, ablated.auroc_refitted):
        assert abs(auroc - 0.5) <= CHANCE, (
            f"after the sentiment is ablated, a probe has an AUROC of {auroc:.3f}; an AUROC of 0.5 "
            f"(chance), at most {CHANCE} higher or lower, is promised."
        )
    assert figures.moved >= LEAST_SHARE, (
        f"{_percent(figures.moved)} of the countries got the capital of the country patched in; "
        f"{_percent(LEAST_SHARE)} are promised."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
