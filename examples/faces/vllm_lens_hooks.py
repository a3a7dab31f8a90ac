"""vllm-lens's hooks: Python functions between the layers. They need eager mode and one process.

VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m examples.faces.vllm_lens_hooks
"""

import torch
from vllm import LLM, SamplingParams

from examples.demo import MODEL, set_environment
from toyworld.world import polarity, review_openings, sentiment_prompts
from vllm_scope.compat.vllm_lens import Hook, HookContext  # was: from vllm_lens import ...

LAYER = 2


def keep_last(ctx: HookContext, h: torch.Tensor) -> None:
    ctx.saved.setdefault("last", h[-1].float())  # the row of the prompt's last token


def run(llm: LLM) -> float:
    """The share of negative reviews that continue in a positive tone if a hook steers them."""
    prompts = sentiment_prompts(80)
    sp = SamplingParams(max_tokens=1, extra_args={"apply_hooks": [Hook(keep_last, [LAYER])]})
    outputs = llm.generate([p.text for p in prompts], sp, use_tqdm=False)
    rows = [out.hook_results["0"]["last"] for out in outputs]
    signed = [row if p.label else -row for row, p in zip(rows, prompts, strict=True)]
    direction = sum(signed) / (len(prompts) / 2)

    def steer(ctx: HookContext, h: torch.Tensor) -> torch.Tensor:
        return h + 0.75 * direction.to(h.dtype)

    sp = SamplingParams(
        temperature=0.0, max_tokens=24, extra_args={"apply_hooks": [Hook(steer, [LAYER])]}
    )
    openings = [p.text for p in review_openings(40) if not p.label]
    outputs = llm.generate(openings, sp, use_tqdm=False)
    return sum(polarity(out.outputs[0].text) > 0 for out in outputs) / len(openings)


if __name__ == "__main__":
    set_environment()
    options = {"enforce_eager": True, "distributed_executor_backend": "uni"}
    turned = run(LLM(str(MODEL), max_model_len=256, **options))
    print(f"{turned:.0%} of negative reviews go on in a positive tone")
