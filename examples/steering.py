"""Edits of the residual stream, and what they do to the toy world's texts.

Owns:  Edit, and three experiments: turn a review's sentiment, remove the sentiment, move a fact.
From:  functions that generate and read under edits. This module does not depend on an engine.
To:    figures.

The toy world can check the outcome of each experiment. A continued review has a polarity, and its
sentences are grammatical or not. A country has one capital.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from toyworld import world
from toyworld.phrases import PHRASINGS
from toyworld.world import Prompt
from vllm_scope.analysis.contrast import mean_difference, pairs_digest
from vllm_scope.analysis.probes import train_probe
from vllm_scope.analysis.rows import Result, pooled_rows
from vllm_scope.vectors import Provenance, SteeringModule

Stream = tuple[str, int]


@dataclass(frozen=True)
class Edit:
    """One change of the stream while a request runs.

    Attributes:
        kind: the new value of a row x. "add": x + scale * vector. "ablate": x without its component
            along the vector. "set": the vector.
        stream: (site, layer).
        vector: [hidden_size].
        positions: absolute positions. None: all positions, of the prompt and generated.
    """

    kind: Literal["add", "ablate", "set"]
    stream: Stream
    vector: Tensor
    scale: float = 1.0
    positions: tuple[int, ...] | None = None


Edits = Sequence[Edit]
#: (prompts, the edits of each prompt) -> greedy continuations without special tokens.
Generate = Callable[[Sequence[str], Sequence[Edits]], list[str]]
#: (prompts, the edits of each prompt) -> rows of all prompt positions at all streams. The rows have
#: the values that the next layer receives.
Read = Callable[[Sequence[str], Sequence[Edits]], Sequence[Result]]

# At layer 2, any scale from 0.5 to 1.25 turns every review and keeps its sentences complete. At
# layer 1, any scale from 0.75 to 1.25 does so. From the scale 1.5 on, sentences break. Before layer
# 1, the last token's stream does not have the sentiment yet. From layer 3 on, the model has already
# used the sentiment.
STEERED_STREAM: Final = ("resid_post", 2)
SCALE: Final = 0.75
# Ablation at layer 1 removes the sentiment from the texts too. Ablation at layer 2 or later removes
# it from the last token's rows only, and the texts keep the sentiment.
ABLATED_STREAM: Final = ("resid_post", 1)
PROBED_STREAM: Final = ("resid_post", 5)
NUM_TRAIN: Final = 200
NUM_PROBED: Final = 200
NUM_CONTINUED: Final = 100


# --- A review's sentiment ----------------------------------------------------


def sentiment_directions(read: Read, num_prompts: int = NUM_TRAIN) -> SteeringModule:
    """For every stream, the mean of positive reviews minus the mean of negative reviews, over the
    rows of the reviews' last tokens.

    A vector's length is the distance between the two classes, which differs by layer.
    """
    prompts = world.sentiment_prompts(num_prompts, split="train")
    positives = [prompt.text for prompt in prompts if prompt.label]
    negatives = [prompt.text for prompt in prompts if not prompt.label]
    return mean_difference(
        pooled_rows(read(positives, _unedited(positives))),
        pooled_rows(read(negatives, _unedited(negatives))),
        normalise=False,
        provenance=Provenance(
            model="toyworld", dataset=pairs_digest(zip(positives, negatives, strict=True))
        ),
    )


@dataclass(frozen=True)
class SteeringFigures:
    """Shares of continued reviews, from 0 to 1.

    Attributes:
        flipped: the continuation has the sentiment opposite to the opening's.
        grammatical: the continuation consists of complete sentences of reviews.
        both: flipped and grammatical.
    """

    flipped: float
    grammatical: float
    both: float


def flip_reviews(
    generate: Generate,
    directions: SteeringModule,
    stream: Stream = STEERED_STREAM,
    scale: float = SCALE,
    num_reviews: int = NUM_CONTINUED,
) -> SteeringFigures:
    """Steer each review against the sentiment of its opening, at every token.

    With scale 0 no review is steered, and a good model flips no review.
    """
    openings = world.review_openings(num_reviews)
    vector = torch.tensor(directions[stream])
    edits = [[Edit("add", stream, vector, -scale if o.label else scale)] for o in openings]
    texts = generate([opening.text for opening in openings], edits)
    flipped = [_turns(*each) for each in zip(openings, texts, strict=True)]
    grammatical = [world.is_review(text) for text in texts]
    both = [f and g for f, g in zip(flipped, grammatical, strict=True)]
    return SteeringFigures(_share(flipped), _share(grammatical), _share(both))


@dataclass(frozen=True)
class AblationFigures:
    """What remains of a concept after its direction is projected out.

    Attributes:
        auroc: AUROC of a probe at the last tokens of held-out prompts, without edits.
        auroc_ablated: AUROC of the same probe on the rows of an ablated run.
        auroc_refitted: AUROC of a probe that was fitted to rows of ablated runs.
        kept: share of reviews whose continuation has the sentiment of the opening.
        kept_ablated: the same share under ablation. Chance is one half.
        grammatical_ablated: share of ablated reviews that are complete sentences of reviews.
    """

    auroc: float
    auroc_ablated: float
    auroc_refitted: float
    kept: float
    kept_ablated: float
    grammatical_ablated: float


def ablate_sentiment(
    generate: Generate,
    read: Read,
    directions: SteeringModule,
    stream: Stream = ABLATED_STREAM,
    probed: Stream = PROBED_STREAM,
    num_prompts: int = NUM_PROBED,
) -> AblationFigures:
    """Remove the sentiment's direction from one stream, at every token.

    Args:
        stream: where the direction is removed.
        probed: where the probe reads.
        num_prompts: number of prompts for fitting, and number of prompts for measuring.
    """
    edits = [Edit("ablate", stream, torch.tensor(directions[stream]))]
    fit, test = (world.sentiment_prompts(num_prompts, split=split) for split in ("train", "test"))

    def rows(prompts: Sequence[Prompt], edits: Edits) -> tuple[Tensor, list[bool]]:
        results = read([prompt.text for prompt in prompts], [edits] * len(prompts))
        return pooled_rows(results, [probed])[probed], [prompt.label for prompt in prompts]

    probe = train_probe(*rows(fit, ()), probed)
    refitted = train_probe(*rows(fit, edits), probed)
    ablated = rows(test, edits)
    openings = world.review_openings(NUM_CONTINUED)
    texts = [opening.text for opening in openings]
    plain = generate(texts, _unedited(texts))
    without = generate(texts, [edits] * len(texts))
    return AblationFigures(
        auroc=probe.auroc(*rows(test, ())),
        auroc_ablated=probe.auroc(*ablated),
        auroc_refitted=refitted.auroc(*ablated),
        kept=_share([_keeps(*each) for each in zip(openings, plain, strict=True)]),
        kept_ablated=_share([_keeps(*each) for each in zip(openings, without, strict=True)]),
        grammatical_ablated=_share([world.is_review(text) for text in without]),
    )


def _keeps(opening: Prompt, continuation: str) -> bool:
    polarity = world.polarity(continuation)
    return polarity > 0 if opening.label else polarity < 0


def _turns(opening: Prompt, continuation: str) -> bool:
    return _keeps(Prompt(opening.text, not opening.label), continuation)


# --- A country's capital -----------------------------------------------------


def move_capitals(
    generate: Generate,
    read: Read,
    token_ids: Callable[[str], list[int]],
    streams: Sequence[Stream],
) -> dict[Stream, float]:
    """Replace the country's row in "The capital of X is" by the row of another country's prompt.

    Every country's name is one token, so the prompts differ in one row before the first layer. Each
    prompt gets the next country's row.

    Returns:
        stream -> the share of prompts whose answer is the other country's whole capital.
    """
    phrasing = PHRASINGS[0]
    countries = world.world().countries
    prompts = [world.completion_of(phrasing, country)[0] for country in countries]
    pairs = zip(token_ids(prompts[0]), token_ids(prompts[1]), strict=True)
    (position,) = (p for p, (one, other) in enumerate(pairs) if one != other)
    results = read(prompts, _unedited(prompts))
    moved = {}
    for stream in streams:
        rows = [result[stream][position] for result in results]
        edits = [[Edit("set", stream, row, positions=(position,))] for row in [*rows[1:], rows[0]]]
        answers = generate(prompts, edits)
        expected = [f" {country.capital}." for country in [*countries[1:], countries[0]]]
        moved[stream] = _share([a.startswith(e) for a, e in zip(answers, expected, strict=True)])
    return moved


# --- Helpers -----------------------------------------------------------------


def _unedited(prompts: Sequence[str]) -> list[Edits]:
    return [()] * len(prompts)


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)
