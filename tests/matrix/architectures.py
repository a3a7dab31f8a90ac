"""Which architectures are compared, and by which class of transformers.

Owns:  `architectures`, `reference_of`, `by_transformers`, `multimodal`, FIRST.
"""

from __future__ import annotations

from functools import cache

from tests.matrix.vision import import_torchvision

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
#: The same of models that see, of transformers' own classes.
OTHERS_SEEING = (
    "AyaVisionForConditionalGeneration", "ChameleonForConditionalGeneration",
    "DeepseekOcr2ForConditionalGeneration", "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration", "FastVlmForConditionalGeneration",
    "Glm46VForConditionalGeneration", "GotOcr2ForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration", "Idefics2ForConditionalGeneration",
    "InstructBlipForConditionalGeneration", "JanusForConditionalGeneration",
    "LightOnOcrForConditionalGeneration", "Ovis2ForConditionalGeneration",
    "PerceptionLMForConditionalGeneration", "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration", "VipLlavaForConditionalGeneration",
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
    """The decoders of vLLM's registry, those that only its Transformers backend runs, and, with
    torchvision, the same of multimodal models."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return list(dict.fromkeys([*_TEXT_GENERATION_MODELS, *by_transformers(), *multimodal()]))


@cache
def by_transformers() -> tuple[str, ...]:
    """Architectures that only vLLM's Transformers backend runs."""
    from vllm.model_executor.models.registry import _TRANSFORMERS_SUPPORTED_MODELS

    named = [name for name in _TRANSFORMERS_SUPPORTED_MODELS if name.endswith("ForCausalLM")]
    seeing = _seeing_by_transformers() if import_torchvision() else ()
    return *named, *(name for name in OTHERS if name not in named), *seeing


@cache
def multimodal() -> tuple[str, ...]:
    """The multimodal architectures; none without torchvision."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    return (*_MULTIMODAL_MODELS, *_seeing_by_transformers()) if import_torchvision() else ()


def is_multimodal(name: str) -> bool:
    """True for an architecture that sees or hears, with or without torchvision."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    return name in _MULTIMODAL_MODELS or name in _seeing_by_transformers()


def _seeing_by_transformers() -> tuple[str, ...]:
    from vllm.model_executor.models.registry import (
        _MULTIMODAL_MODELS,
        _TRANSFORMERS_SUPPORTED_MODELS,
    )

    named = [name for name in _TRANSFORMERS_SUPPORTED_MODELS if not name.endswith("ForCausalLM")]
    others = [name for name in OTHERS_SEEING if name not in _MULTIMODAL_MODELS]
    return *named, *others


def reference_of(architecture: str) -> str:
    """The class of transformers: its own, or another architecture's of the same class in vLLM."""
    import transformers
    from vllm.model_executor.models import registry

    classes = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    if hasattr(transformers, architecture) or architecture not in classes:
        return architecture
    same = [name for name, one in classes.items() if one == classes[architecture]]
    return next((name for name in same if hasattr(transformers, name)), architecture)
