"""Small random checkpoints of many families, and Hugging Face's streams for them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_LAYERS = 3
VOCAB = 512
_LLAMA_LIKE = {
    "hidden_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_COHERE = {**_LLAMA_LIKE, "tie_word_embeddings": True, "logit_scale": 0.25}
_SLIDING = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
#: vLLM's windows of Cohere 2 have one token more than Hugging Face's.
_WIDE = {"sliding_window": 1024}
#: family -> (model class in transformers, configuration)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", _LLAMA_LIKE),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in _LLAMA_LIKE.items() if k != "head_dim"}),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA_LIKE),
    "mistral": ("MistralForCausalLM", {**_LLAMA_LIKE, "sliding_window": None}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_LLAMA_LIKE, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**_LLAMA_LIKE, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 128, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 1024}
        | {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 128, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
        | {"ffn_dim": 256, "vocab_size": VOCAB, "max_position_embeddings": 1024}
        | {"word_embed_proj_dim": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "olmo2": ("Olmo2ForCausalLM", {k: v for k, v in _LLAMA_LIKE.items() if k != "head_dim"}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"decoder_sparse_step": 1, "norm_topk_prob": True},
    ),
    "cohere": ("CohereForCausalLM", _COHERE),
    "cohere2": ("Cohere2ForCausalLM", {**_COHERE, **_SLIDING, **_WIDE}),
    "cohere2_moe": (
        "Cohere2MoeForCausalLM",
        {**_COHERE, **_SLIDING, **_WIDE, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    # The last layer attends to the keys and values of the one before.
    "gemma4": (
        "Gemma4ForCausalLM",
        {**_LLAMA_LIKE, **_SLIDING, "tie_word_embeddings": True, "num_kv_shared_layers": 1}
        | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
        | {"global_head_dim": 64},
    ),
}

#: For comparisons in float32 alone: in bf16 Granite's rows differ from Hugging Face's by 0.011.
IN_FLOAT32: dict[str, tuple[str, dict]] = {
    "granite": ("GraniteForCausalLM", {**_LLAMA_LIKE, "logits_scaling": 8.0}),
}


def make_checkpoint(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model whose layers all matter: weights are drawn large enough that
    neighbouring layers' streams differ by much more than any tolerance here.

    Args:
        family: of FAMILIES or IN_FLOAT32.
        changes: of the family's configuration.
    """
    import transformers

    name, body = (FAMILIES | IN_FLOAT32)[family]
    model_class = getattr(transformers, name)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**(body | changes)))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 if "embed" in key or "wte" in key else 0.7 / weight.shape[-1] ** 0.5
                weight.normal_(0, scale)
            elif family == "olmo2" and "post_" in key:
                # Norms after attention and MLP set each layer's weight in the stream.
                weight.fill_(0.3)
            elif family == "gemma4" and "q_norm" in key:
                # Scores are not divided by the root of a head's size: the norm holds it.
                weight.fill_(0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4's
                buffer.fill_(0.8)
        if "moe" in family:
            _make_routing_decisive(model)
    path = folder / family
    # In float32, so that both dtypes of a test start from the same numbers.
    model.float().save_pretrained(path)
    return path


def _make_routing_decisive(model: torch.nn.Module) -> None:
    """Half of the tokens go to experts 0 and 1, the others to 2 and 3, by a wide margin.

    With random routers some token is always so near a tie that bf16 rounding picks
    another expert in another implementation, and its rows are rightly different.
    """
    direction = torch.zeros(_LLAMA_LIKE["hidden_size"])
    direction[0] = 1.0
    embedding = model.get_input_embeddings().weight
    sign = torch.arange(VOCAB) % 2 * 2.0 - 1.0
    embedding += 12.0 * sign[:, None] * direction
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "gate"):
            continue
        layer.mlp.gate.weight.copy_(torch.tensor([1.1, 1.0, -1.0, -1.1])[:, None] * direction)


#: (site, layer, rows -> rows)
Edit = tuple[str, int, Callable[[Tensor], Tensor]]


@dataclass
class Reference:
    """Hugging Face's model: the stream at every boundary, for a list of tokens."""

    path: Path
    dtype: torch.dtype

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            # Other attention implementations leave out Gemma 2's soft-capping.
            self.path,
            dtype=self.dtype,
            attn_implementation="eager",
        ).eval()
        if torch.cuda.is_available():
            self.model.cuda()
        base = self.model.base_model
        # vLLM's Transformers backend compiles the model's class, for the whole
        # process; this instance is to stay plain.
        base.do_not_compile = True
        base = getattr(base, "decoder", base)
        self._layers = base.layers if hasattr(base, "layers") else base.h
        norms = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
        self.norm = next(getattr(base, name) for name in norms if hasattr(base, name))
        self._streams: list[Tensor] = []
        self._layers[0].register_forward_pre_hook(self._entry, with_kwargs=True)
        for layer in self._layers:
            layer.register_forward_hook(self._exit)

    @cached_property
    def exact(self) -> Reference:
        """These very weights, computed in float32."""
        found = Reference(self.path, torch.float32)
        found.model.load_state_dict(self.model.state_dict())
        return found

    def _entry(self, module: object, args: tuple, kwargs: dict) -> None:
        self._streams.append(args[0] if args else kwargs["hidden_states"])

    def _exit(self, module: object, args: tuple, out: object) -> None:
        self._streams.append(out[0] if isinstance(out, tuple) else out)

    def edited(self, token_ids: list[int], edits: list[Edit]) -> tuple[dict, Tensor]:
        """The model's streams and logits with edits at the same places.

        Args:
            edits: (site, layer, function); the function gets the row [num_tokens, numbers of
                a row] of every position and returns the new ones.

        Returns:
            ((site, layer) -> [num_tokens, numbers of a row] of every site after its edits,
            logits [num_tokens, vocab])
        """
        streams: dict[tuple[str, int], Tensor] = {}

        def apply(site: str, layer: int, x: Tensor) -> Tensor:
            rows = x.reshape(len(token_ids), -1).clone()
            for where, number, function in edits:
                if (where, number) == (site, layer):
                    rows = function(rows.float()).to(x.dtype)
            streams[site, layer] = rows.cpu()
            return rows.view_as(x)

        def pre(layer: int):
            def hook(module: object, args: tuple, kwargs: dict) -> tuple:
                x = args[0] if args else kwargs["hidden_states"]
                x = apply("resid_pre", layer, x)
                if args:
                    return (x, *args[1:]), kwargs
                return args, kwargs | {"hidden_states": x}

            return hook

        def mid(layer: int):
            def hook(module: object, args: tuple) -> None:
                # In place: the layer goes on with this very tensor as its residual.
                args[0].copy_(apply("resid_mid", layer, args[0]))

            return hook

        def post(layer: int):
            def hook(module: object, args: tuple, out: object) -> object:
                if isinstance(out, tuple):
                    return (apply("resid_post", layer, out[0]), *out[1:])
                return apply("resid_post", layer, out)

            return hook

        def branch(site: str, layer: int):
            def hook(module: object, args: tuple, out: object) -> object:
                if isinstance(out, tuple):
                    return (apply(site, layer, out[0]), *out[1:])
                return apply(site, layer, out)

            return hook

        def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
            def at(site: str, x: Tensor) -> Tensor:  # [1, heads, num_tokens, head_dim]
                rows = x.transpose(1, 2)
                return apply(site, layer.layer_idx, rows).view_as(rows).transpose(1, 2)

            rows = at("q", query), at("k", key), at("v", value)
            out, weights = attention(layer, *rows, *args, **kwargs)
            return apply("z", layer.layer_idx, out), weights

        def project(layer: int):
            def hook(module: object, args: tuple) -> tuple:
                return (apply("mlp_post", layer, args[0]), *args[1:])

            return hook

        def enter(site: str, layer: int):
            def hook(module: object, args: tuple, kwargs: dict) -> tuple:
                if args:
                    return (apply(site, layer, args[0]), *args[1:]), kwargs
                rows = apply(site, layer, kwargs["hidden_states"])
                return args, kwargs | {"hidden_states": rows}

            return hook

        def route(layer: int):
            def hook(module: Any, args: tuple, out: tuple) -> tuple:
                # As Qwen3MoeTopKRouter.forward goes on.
                logits = apply("router_logits", layer, out[0])
                probs = torch.softmax(logits, dtype=torch.float, dim=-1)
                weights, experts = torch.topk(probs, module.top_k, dim=-1)
                if module.norm_topk_prob:
                    weights /= weights.sum(dim=-1, keepdim=True)
                return logits, weights.to(logits.dtype), experts

            return hook

        def final(module: object, args: tuple, out: Tensor) -> None:
            apply("ln_final", 0, out)

        module = sys.modules[type(self.model).__module__]
        attention = getattr(module, "eager_attention_forward", None)
        handles = [self.norm.register_forward_hook(final)]
        for k, layer in enumerate(self._layers):
            for site, name in self._branch_modules(layer).items():
                handles.append(getattr(layer, name).register_forward_hook(branch(site, k)))
            for site, names in (("attn_in", ("self_attn", "attn")), ("mlp_in", ("mlp",))):
                for name in names:
                    if (block := getattr(layer, name, None)) is not None:
                        hook = enter(site, k)
                        handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
            handles.append(layer.register_forward_pre_hook(pre(k), with_kwargs=True))
            names = ("pre_feedforward_layernorm", "ln_2", "post_attention_layernorm")
            norm = next((getattr(layer, n) for n in names if hasattr(layer, n)), None)
            if norm is not None:
                handles.append(norm.register_forward_pre_hook(mid(k)))
            handles.append(layer.register_forward_hook(post(k)))
            if (down := self._projection(layer)) is not None:
                handles.append(down.register_forward_pre_hook(project(k)))
            gate = getattr(getattr(layer, "mlp", None), "gate", None)
            if type(gate).__name__ == "Qwen3MoeTopKRouter":
                handles.append(gate.register_forward_hook(route(k)))
        if attention is not None:
            module.eager_attention_forward = attend
        try:
            with torch.no_grad():
                ids = torch.tensor([token_ids], device=self.model.device)
                logits = self.model(ids, use_cache=False).logits[0].float().cpu()
        finally:
            module.eager_attention_forward = attention
            for handle in handles:
                handle.remove()
        return streams, logits

    @staticmethod
    def _branch_modules(layer: Any) -> dict[str, str]:
        """Site -> the module whose output it is, of the layers that have such modules."""
        after = hasattr(layer, "pre_feedforward_layernorm")  # of Gemma's
        names = {
            "attn_out": "post_attention_layernorm" if after else "self_attn",
            "mlp_out": "post_feedforward_layernorm" if after else "mlp",
        }
        return {site: name for site, name in names.items() if hasattr(layer, name)}

    @staticmethod
    def _projection(layer: Any) -> Any:
        """The second projection of the MLP; None if the layer has experts."""
        owners = (getattr(layer, "mlp", None), layer)
        names = ("down_proj", "c_proj", "fc2", "dense_4h_to_h")
        found = (getattr(owner, name, None) for owner in owners for name in names)
        return next((one for one in found if one is not None), None)

    def parts(self, token_ids: list[int]) -> list[dict[str, Tensor]]:
        """Of each layer: `mlp_post`, [num_tokens, width], what goes into the second projection
        of its MLP; `attn_in` and `mlp_in`, what its attention and its MLP get; of the first one
        also `ln_final`, what the norm behind the layers gives."""
        streams, _ = self.edited(token_ids, [])
        found: list[dict[str, Tensor]] = [{} for _ in self._layers]
        for (site, layer), rows in streams.items():
            if site in ("attn_in", "mlp_in", "mlp_post", "ln_final"):
                found[layer][site] = rows
        return found

    def streams(self, token_ids: list[int]) -> list[Tensor]:
        """Boundary b -> [num_tokens, hidden_size]: 0 the embedding output, k + 1 the
        exit of layer k."""
        self._streams.clear()
        with torch.no_grad():
            ids = torch.tensor([token_ids], device=self.model.device)
            out = self.model(ids, output_hidden_states=True)
        streams = [s.reshape(len(token_ids), -1) for s in self._streams]
        # The hooks see what Hugging Face itself reports, up to the final norm.
        for ours, theirs in zip(streams[:-1], out.hidden_states[:-1], strict=True):
            assert torch.equal(ours, theirs[0])
        return [stream.cpu() for stream in streams]

    def branches(self, token_ids: list[int]) -> list[dict[str, Tensor]]:
        """Of each layer: `attn_out` and `mlp_out`, [num_tokens, hidden_size], as they come out
        of its modules, or of the norms behind these where it has such."""
        found: list[dict[str, Tensor]] = [{} for _ in self._layers]
        handles = []
        for layer, one in zip(self._layers, found, strict=True):
            for site, name in self._branch_modules(layer).items():

                def see(module, args, out, one=one, site=site):
                    rows = out[0] if isinstance(out, tuple) else out
                    one[site] = rows.reshape(len(token_ids), -1).cpu()

                handles.append(getattr(layer, name).register_forward_hook(see))
        try:
            streams = self.streams(token_ids)
        finally:
            for handle in handles:
                handle.remove()
        # What they add is what the stream grows by.
        for k, one in enumerate(found):
            total = streams[k].double() + one["attn_out"].double() + one["mlp_out"].double()
            assert row_error(total, streams[k + 1]) < TOLERANCE[self.dtype]
        return found

    def attention(self, token_ids: list[int]) -> list[dict[str, Tensor]]:
        """Of each layer: q, k, v and z, [num_tokens, heads, head_dim], as its attention
        function gets and gives them, and the weights, [heads, num_tokens, num_tokens]."""
        module = sys.modules[type(self.model).__module__]
        original = module.eager_attention_forward
        found: list[dict[str, Tensor]] = []

        def record(layer: object, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
            out, weights = original(layer, query, key, value, *args, **kwargs)
            rows = {"q": query, "k": key, "v": value}
            one = {name: x[0].transpose(0, 1).cpu() for name, x in rows.items()}
            found.append(one | {"z": out[0].cpu(), "weights": weights[0].cpu()})
            return out, weights

        module.eager_attention_forward = record
        try:
            with torch.no_grad():
                self.model(torch.tensor([token_ids], device=self.model.device), use_cache=False)
        finally:
            module.eager_attention_forward = original
        return found

    def patterns(self, token_ids: list[int]) -> list[Tensor]:
        """Of each layer: the model's `output_attentions`, [heads, num_tokens, num_tokens]."""
        with torch.no_grad():
            ids = torch.tensor([token_ids], device=self.model.device)
            out = self.model(ids, use_cache=False, output_attentions=True)
        return [weights[0].cpu() for weights in out.attentions]


def row_error(rows: Tensor, reference: Tensor) -> float:
    """The largest relative error of a row; infinity if one is not finite, since `max` of Python
    passes over NaN."""
    rows, reference = rows.double(), reference.double()
    error = float(((rows - reference).norm(dim=-1) / reference.norm(dim=-1)).max())
    return error if math.isfinite(error) else math.inf


TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


@cache
def reference(path: Path, dtype: torch.dtype) -> Reference:
    return Reference(path, dtype)


def check_inside(
    result,
    token_ids: list[int],
    expected: list[dict[str, Tensor]],
    sites: Sequence[str],
    layers: Iterable[int],
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> None:
    """Every position's rows of sites that are not of the stream.

    Args:
        expected: of each layer, site -> [num_tokens, ...], what is asked for and more.
        tolerance: the dtype's, where None.
    """
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    assert (result.status, result.dropped) == ("complete", 0), result
    for layer in layers:
        for site in sites:
            rows, right = result[site, layer], expected[layer][site]
            assert (rows.shape, rows.dtype) == (right.shape, dtype)
            assert result.positions(site, layer).tolist() == list(range(len(token_ids)))
            error = row_error(rows.flatten(1), right.flatten(1))
            assert error <= tolerance, (site, layer, error, tolerance)


def check_completion(result, prompt_ids: list[int], output_ids: list[int], ref: Reference) -> None:
    """Exactly one right row per position, at every stream that was asked for."""
    assert result.status == "complete", result
    assert result.dropped == 0
    assert result.expected == result.delivered
    token_ids = [*prompt_ids, *output_ids][:-1]
    expected = ref.streams(token_ids)
    assert result.keys()
    for site, layer in result.keys():
        boundary = layer + 1 if site == "resid_post" else layer
        assert result.positions(site, layer).tolist() == list(range(len(token_ids))), (site, layer)
        rows = result[site, layer]
        assert rows.dtype == ref.dtype
        assert rows.shape == expected[boundary].shape
        error = row_error(rows, expected[boundary])
        assert error <= TOLERANCE[ref.dtype], (site, layer, error)
