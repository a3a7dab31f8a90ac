"""vllm-lens over HTTP: the steps of vllm_lens.py with vllm-lens's client. The client needs no vLLM.

vllm serve toyworld/model --max-model-len 256
python -m examples.faces.vllm_lens_client http://localhost:8000
"""

import sys

from toyworld.world import polarity, review_openings, sentiment_prompts
from vllm_scope.compat.vllm_lens import SteeringVector  # was: from vllm_lens import ...
from vllm_scope.compat.vllm_lens.client import (
    VLLMLensClient,  # was: from vllm_lens.client import ...
)

LAYER = 2


def run(client: VLLMLensClient) -> float:
    """The share of negative reviews that continue in a positive tone if they are steered."""
    direction = 0.0
    prompts = sentiment_prompts(40)
    for prompt in prompts:
        out = client.generate(
            prompt.text, max_tokens=1, capture_layers=[LAYER], activations_transport="binary"
        )
        last = out.activations["residual_stream"][0, -1].float()
        direction = direction + (last if prompt.label else -last) / (len(prompts) / 2)

    sv = SteeringVector(activations=direction[None], layer_indices=[LAYER], scale=0.75)
    openings = [p.text for p in review_openings(20) if not p.label]
    texts = [
        client.generate(opening, max_tokens=24, steering_vectors=[sv]).text for opening in openings
    ]
    return sum(polarity(text) > 0 for text in texts) / len(openings)


if __name__ == "__main__":
    turned = run(VLLMLensClient(sys.argv[1]))
    print(f"{turned:.0%} of negative reviews go on in a positive tone")
