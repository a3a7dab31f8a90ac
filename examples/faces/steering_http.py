"""The steering fork: a module by name, and vectors for one phase only."""

import json
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

from examples.demo import MODEL, set_environment
from toyworld.world import polarity, review_openings, sentiment_prompts
from vllm_scope import Read, scope
from vllm_scope.faces.steering_http import load_modules

LAYER = 2


def run(llm: LLM) -> dict[str, float]:
    """By way of steering: the share of negative reviews that go on in a positive tone."""
    prompts = sentiment_prompts(80)
    read = scope(Read("post_block", [LAYER], tokens="last_prompt"))
    outputs = llm.generate(
        [p.text for p in prompts], SamplingParams(max_tokens=1, extra_args=read), use_tqdm=False
    )
    rows = [out.scope["post_block", LAYER][0].float() for out in outputs]
    signed = [row if p.label else -row for row, p in zip(rows, prompts, strict=True)]
    vector = (sum(signed) / (len(prompts) / 2)).tolist()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "positive.json"
        path.write_text(json.dumps({"post_block": {str(LAYER): vector}}))
        load_modules(llm, [f"positive={path}"])  # was: --steering-modules positive=...
    hooks = {"post_block": {LAYER: {"vector": vector, "scale": 0.75}}}
    ways = {
        "not at all": None,
        "module": {"steering_module_ref": ("positive", 0.75)},
        "vectors": {"steering_vectors": hooks},
        "prefill and decode": {
            "prefill_steering_vectors": hooks,
            "decode_steering_vectors": hooks,
        },
    }
    openings = [p.text for p in review_openings(40) if not p.label]
    turned = {}
    for name, extra_args in ways.items():
        params = SamplingParams(temperature=0.0, max_tokens=24, extra_args=extra_args)
        outputs = llm.generate(openings, params, use_tqdm=False)
        turned[name] = sum(polarity(o.outputs[0].text) > 0 for o in outputs) / len(openings)
    return turned


if __name__ == "__main__":
    set_environment()
    for name, share in run(LLM(str(MODEL), max_model_len=256)).items():
        print(f"{share:4.0%} of negative reviews go on in a positive tone; steered: {name}")
