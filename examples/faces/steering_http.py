"""The steering fork: rows captured to files, a module by name, vectors for prefill and decode."""

import json
import tempfile
from pathlib import Path

import torch

from examples.demo import MODEL, set_environment
from toyworld.world import polarity, review_openings, sentiment_prompts
from vllm_scope.compat.steering_http import LLM, SamplingParams, load_modules, read_request

LAYER = 2


def direction(llm: LLM) -> list[float]:
    """The difference of the mean rows of positive and negative reviews, read from files."""
    prompts = sentiment_prompts(80)
    asked = [
        SamplingParams(
            max_tokens=1,
            capture={
                "filesystem": {
                    "request_id": f"review-{i}",
                    "tag": "sentiment",
                    "hooks": {"post_block": [LAYER]},
                    "positions": "last_prompt",
                }
            },
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate([p.text for p in prompts], asked, use_tqdm=False)
    rows = []
    for output in outputs:
        result = output.capture_results["filesystem"]
        assert result.status == "ok", result.error
        entry = read_request(result.payload[0])[LAYER, "post_block"]
        # bfloat16 rows arrive as bits, because numpy has no bfloat16.
        rows.append(torch.from_numpy(entry.array).view(getattr(torch, entry.dtype))[0].float())
    signed = [row if p.label else -row for row, p in zip(rows, prompts, strict=True)]
    return (sum(signed) / (len(prompts) / 2)).tolist()


def run(llm: LLM) -> dict[str, float]:
    """Way of steering -> the share of negative reviews that continue in a positive tone."""
    vector = direction(llm)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "positive.json"
        path.write_text(json.dumps({"vectors": {"post_block": {str(LAYER): vector}}}))
        load_modules(llm, [f"positive={path}"])  # was: --steering-modules positive=...
    hooks = {"post_block": {LAYER: {"vector": vector, "scale": 0.75}}}
    ways = {
        "not at all": {},
        "module": {"steering_module_ref": ("positive", 0.75)},
        "vectors": {"steering_vectors": hooks},
        "prefill and decode": {
            "prefill_steering_vectors": hooks,
            "decode_steering_vectors": hooks,
        },
    }
    openings = [p.text for p in review_openings(40) if not p.label]
    turned = {}
    for name, fields in ways.items():
        params = SamplingParams(temperature=0.0, max_tokens=24, **fields)
        outputs = llm.generate(openings, params, use_tqdm=False)
        turned[name] = sum(polarity(o.outputs[0].text) > 0 for o in outputs) / len(openings)
    return turned


if __name__ == "__main__":
    set_environment()
    with tempfile.TemporaryDirectory() as captures:
        consumer = {"name": "filesystem", "params": {"root": captures}}
        llm = LLM(str(MODEL), max_model_len=256, enable_steering=True, capture_consumers=[consumer])
        for name, share in run(llm).items():
            print(f"{share:4.0%} of negative reviews go on in a positive tone; steered: {name}")
