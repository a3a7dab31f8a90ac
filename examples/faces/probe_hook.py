"""vllm-probe-hook: the hidden states of generated tokens, as a field of the outputs."""

from typing import Any

from examples.demo import MODEL, set_environment
from vllm_scope.compat.probe_hook import LLM, SamplingParams  # was: from vllm_probe_hook import ...

PROMPTS = ["My father told me about the book Goldette. Happily, it was", "The capital of"]


def run(**vllm_kwargs: Any) -> list[Any]:
    llm = LLM(str(MODEL), layers=[2, 4], include_prefill=True, max_model_len=256, **vllm_kwargs)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    for output in outputs:
        num_tokens = len(output.outputs[0].token_ids)
        # The last sampled token is not processed. With process_last_token=True it is.
        assert output.hidden_states[4].shape[0] == num_tokens - 1
    llm.llm_engine.engine_core.shutdown()
    return outputs


if __name__ == "__main__":
    set_environment()
    for output in run():
        decode, prefill = output.hidden_states[4], output.prefill_hidden[4]
        print(f"{output.prompt!r}: {list(prefill.shape)} rows of it, {list(decode.shape)} after")
