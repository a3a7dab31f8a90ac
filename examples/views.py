"""Pages of views: scores, a sweep, a result, a lens, attention, features, and two answers.

Runs:  `python -m examples.views`.
From:  toyworld: openings of reviews, and questions about capitals.
To:    demo-output/views, one page for each view.

The rows are those of the reviews' last tokens after layer 2. The direction is the mean row of
positive reviews minus the mean row of negative reviews. A probe with this direction has the score
1/2 at the positive mean and -1/2 at the negative mean. The same direction steers a negative review.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from examples.demo import MODEL, OUTPUT, set_environment
from toyworld.world import review_openings, sentiment_prompts
from vllm_scope import (
    Add,
    Features,
    LensTopK,
    LogitDifference,
    Probe,
    Read,
    Sweep,
    scope,
    sweep,
)
from vllm_scope.views import attention_map, feature_list, side_by_side, token_strip

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_scope.views import TokenStrip

LAYER: Final = 2
QUESTION: Final = "Q: What is the capital of {}? A:"
ASKED: Final = QUESTION.format("Ritova")
CONFIG: Final = {
    "scope": {
        "sites": ["embed", "resid_post", "q", "k"],
        "saes": {"toy": str(MODEL / "sae")},
    }
}


def generate(llm: LLM, prompt: str, *actions: Any, num: int = 24) -> tuple[Any, list[str]]:
    """The result of a greedy answer, and the text of each token of the prompt and of the answer."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num, extra_args=scope(*actions))
    (out,) = llm.generate(prompt, params, use_tqdm=False)
    result, tokenizer = out.outputs[0].scope, llm.get_tokenizer()
    return result, [tokenizer.decode([i]) for i in result.token_ids]


def mood(llm: LLM) -> tuple[torch.Tensor, float]:
    """The vector from the mean of negative reviews to the mean of positive reviews, and a number.

    The vector is float32 [hidden_size]. The number is the dot product of the vector and the
    midpoint of the two means.
    """
    from vllm import SamplingParams

    prompts = sentiment_prompts(80)
    params = SamplingParams(max_tokens=1, extra_args=scope(Read("resid_post", layers=[LAYER])))
    outputs = llm.generate([p.text for p in prompts], params, use_tqdm=False)
    rows = torch.stack([out.scope["resid_post", LAYER][-1].float() for out in outputs])
    labels = torch.tensor([bool(p.label) for p in prompts])
    high, low = rows[labels].mean(0), rows[~labels].mean(0)
    direction = high - low
    return direction, float((high + low) @ direction / 2)


def write(llm: LLM, folder: Path) -> None:
    direction, middle = mood(llm)
    weight, bias = direction / direction.square().sum(), -middle / direction.square().sum()
    probe = Probe(weight, bias=float(bias), layer=LAYER, name="mood", threshold=0.0)

    def strip(*actions: Any) -> TokenStrip:
        opening = next(p.text for p in review_openings(20) if not p.label)
        result, tokens = generate(llm, opening, probe, *actions)
        return token_strip(
            tokens, result.scores["mood"], threshold=0.0, verdict=result.verdicts.get("mood"),
            caption="Mood of a review, token by token",
        )  # fmt: skip

    steered = Add(direction, layer=LAYER, scale=0.75, tokens="generated")
    strip().save(folder / "strip.html")
    side_by_side(strip(), strip(steered)).save(folder / "side.html")
    metric = LogitDifference(" Sotburg", " Rindos")  # Kimar's capital, Ritova's capital
    table = sweep(llm, ASKED, Sweep(QUESTION.format("Kimar"), metric=metric), progress=False)
    table.save(folder / "map.html")

    asked = LensTopK(top_k=5), Features("toy", top_k=4), probe
    result, tokens = generate(llm, ASKED, *asked, num=6)
    tokenizer = llm.get_tokenizer()
    result.picture(tokenizer).save(folder / "result.html")
    result.lens["lens"].decoded(tokenizer).picture(tokens).save(folder / "lens.html")
    countries = json.loads((MODEL / "sae" / "features.json").read_text())
    labels = {one["index"]: name for name, one in countries.items()}
    found = feature_list(result.features["toy"], tokens=tokens, labels=labels)
    found.save(folder / "features.html")
    result, tokens = generate(llm, ASKED, *(Read(site, layers=[3]) for site in "qk"), num=6)
    attention_map(result, 3, tokens=tokens).save(folder / "attention.html")


def main() -> None:
    from vllm import LLM

    set_environment()
    folder = OUTPUT / "views"
    folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(
        str(MODEL), dtype="float32", max_model_len=256, gpu_memory_utilization=0.3,
        additional_config=CONFIG,
    )  # fmt: skip
    write(llm, folder)
    print(f"Wrote {', '.join(sorted(path.name for path in folder.glob('*.html')))} to {folder}")


if __name__ == "__main__":
    main()
