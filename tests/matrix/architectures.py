"""Which architectures are compared, and by which class of transformers.

Owns:  `architectures`, `reference_of`, `by_transformers`, FIRST.
"""

from __future__ import annotations

from functools import cache

#: Decoders of transformers without a class in vLLM, which vLLM runs by its Transformers backend.
#: vLLM's registry names others.
OTHERS = (
    "AXK2ForCausalLM", "AriaTextForCausalLM", "BitNetForCausalLM", "CohereCompassForCausalLM",
    "DiffLlamaForCausalLM", "DogeForCausalLM", "Dots1ForCausalLM", "Emu3ForCausalLM",
    "Gemma4UnifiedForCausalLM", "HeliumForCausalLM", "JetMoeForCausalLM", "MiniMaxForCausalLM",
    "MinistralForCausalLM", "ModernBertDecoderForCausalLM", "NanoChatForCausalLM",
    "PersimmonForCausalLM", "PhimoeForCausalLM", "RecurrentGemmaForCausalLM",
    "SolarOpenForCausalLM", "YoutuForCausalLM", "ZayaForCausalLM",
)  # fmt: skip
#: What most people run. These are compared first.
FIRST = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "MistralForCausalLM",
    "PhiForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM",
    "GPTJForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "GraniteForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "MixtralForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "OlmoeForCausalLM",
    "Llama4ForCausalLM", "OPTForCausalLM", "FalconForCausalLM",
)  # fmt: skip


def architectures() -> list[str]:
    """The decoders of vLLM's registry, then those that only its Transformers backend runs."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return [*_TEXT_GENERATION_MODELS, *by_transformers()]


@cache
def by_transformers() -> tuple[str, ...]:
    from vllm.model_executor.models.registry import _TRANSFORMERS_SUPPORTED_MODELS

    named = [name for name in _TRANSFORMERS_SUPPORTED_MODELS if name.endswith("ForCausalLM")]
    return *named, *(name for name in OTHERS if name not in named)


def reference_of(architecture: str) -> str:
    """The class of transformers: its own, or another architecture's of the same class in vLLM."""
    import transformers
    from vllm.model_executor.models import registry

    classes = registry._TEXT_GENERATION_MODELS
    if hasattr(transformers, architecture) or architecture not in classes:
        return architecture
    same = [name for name, one in classes.items() if one == classes[architecture]]
    return next((name for name in same if hasattr(transformers, name)), architecture)
