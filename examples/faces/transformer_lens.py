"""TransformerLens: a cache of activations under TransformerLens's names."""

from vllm import LLM, SamplingParams

from examples.demo import MODEL, set_environment
from vllm_scope import Read, scope

PROMPT = "My father told me about the book Goldette. Happily, it was"


def run(llm: LLM) -> dict[str, float]:
    """Layer, as "blocks.0" -> mean norm of the rows that the layer adds to the stream."""
    spec = scope(Read("embed", tokens="prompt"), Read("resid_post", tokens="prompt"))
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, extra_args=spec), use_tqdm=False)
    # was: _, cache = model.run_with_cache(prompt)
    cache = output.scope.as_cache()
    added = {}
    for i in range(sum("hook_resid_post" in name for name in cache)):
        # [batch, pos, d_model]
        before, after = cache[f"blocks.{i}.hook_resid_pre"], cache[f"blocks.{i}.hook_resid_post"]
        added[f"blocks.{i}"] = float((after - before).norm(dim=-1).mean())
    return added


if __name__ == "__main__":
    set_environment()
    for name, norm in run(LLM(str(MODEL), max_model_len=256)).items():
        print(f"{name} adds a row of length {norm:.1f}")
