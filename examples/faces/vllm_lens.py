"""vllm-lens: read the residual stream, make a steering vector from the rows, and steer."""

from vllm import LLM, SamplingParams

from examples.demo import MODEL, set_environment
from toyworld.world import polarity, review_openings, sentiment_prompts
from vllm_scope.compat.vllm_lens import SteeringVector  # was: from vllm_lens import ...

LAYER = 2


def run(llm: LLM) -> float:
    """The share of negative reviews that continue in a positive tone if they are steered."""
    prompts = sentiment_prompts(80)
    sp = SamplingParams(max_tokens=1, extra_args={"output_residual_stream": [LAYER]})
    outputs = llm.generate([p.text for p in prompts], sp, use_tqdm=False)
    # (n_layers, n_positions, hidden_dim)
    last = [out.activations["residual_stream"][0, -1].float() for out in outputs]
    positive = sum(row for row, p in zip(last, prompts, strict=True) if p.label)
    negative = sum(row for row, p in zip(last, prompts, strict=True) if not p.label)
    direction = (positive - negative) / (len(prompts) / 2)

    sv = SteeringVector(activations=direction[None], layer_indices=[LAYER], scale=0.75)
    sp = SamplingParams(temperature=0.0, max_tokens=24, extra_args={"apply_steering_vectors": [sv]})
    openings = [p.text for p in review_openings(40) if not p.label]
    outputs = llm.generate(openings, sp, use_tqdm=False)
    return sum(polarity(out.outputs[0].text) > 0 for out in outputs) / len(openings)


if __name__ == "__main__":
    set_environment()
    turned = run(LLM(str(MODEL), max_model_len=256))
    print(f"{turned:.0%} of negative reviews go on in a positive tone")
