"""Tiny untrained models of each type, and their sublayers called by hand: the oracle of the capture tests.

The sublayers are written out here from each type's architecture, independently of how capture finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
)

VOCABULARY = 60
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SHARED, "num_key_value_heads": 2}
_DROPOUT = {"hidden_dropout_prob": 0.9, "attention_probs_dropout_prob": 0.9}
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], tuple[type[PreTrainedModel], Any]]] = {
    "bert": lambda: (BertModel, BertConfig(**_SHARED, **_DROPOUT)),
    "bert-decoder": lambda: (BertModel, BertConfig(**_SHARED, **_DROPOUT, is_decoder=True)),
    "gpt2": lambda: (GPT2Model, GPT2Config(**_GPT2, attn_pdrop=0.9, resid_pdrop=0.9, embd_pdrop=0.9)),
    "gpt2-by-layer": lambda: (GPT2Model, GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True)),
    "llama": lambda: (LlamaModel, LlamaConfig(**_GROUPED, attention_dropout=0.9)),
    "mistral": lambda: (MistralModel, MistralConfig(**_GROUPED, sliding_window=3)),
    "qwen2": lambda: (Qwen2Model, Qwen2Config(**_GROUPED)),
}


def tiny(name: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> PreTrainedModel:
    """A tiny model in evaluation mode, with biases, and weights so large that attention is not uniform."""
    make, config = CONFIGS[name]()
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(config)
        with torch.no_grad():
            for key, p in model.named_parameters():
                gain = "norm" in key.lower() or ".ln_" in key
                p.copy_(1 + 0.3 * torch.randn_like(p) if gain and p.ndim == 1 and "bias" not in key else p)
                if p.ndim == 1 and "bias" in key:
                    p.copy_(0.3 * torch.randn_like(p))
                elif p.ndim == 2:
                    p.copy_(torch.randn_like(p) * (1.5 / p.shape[-1] ** 0.5))
    return model.to(dtype).eval()


def token_ids(batch: int, n: int, seed: int = 0) -> Tensor:
    """Random token ids."""
    return torch.randint(3, VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(seed))


class WithoutDowncast(TorchFunctionMode):
    """Undo the conversions to float32 that transformers hides in norms, softmaxes and constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
                return args[0]
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _owner_and_layer(model: PreTrainedModel, layer: int) -> tuple[Any, Any]:
    if isinstance(model, BertModel):
        root = model.encoder.layer[layer]
        return root.attention.self, root
    if isinstance(model, GPT2Model):
        return model.h[layer].attn, model.h[layer]
    return model.layers[layer].self_attn, model.layers[layer]


def sublayer(
    model: PreTrainedModel, ids: Tensor, layer: int, scope: str
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The model's own input and sublayer at a scope, as a function of the tokens, with its real arguments."""
    owner, root = _owner_and_layer(model, layer)
    seen: dict[str, Any] = {}

    def keep_owner(module: Any, args: Any, kwargs: Any) -> None:
        rest = {k: v for k, v in kwargs.items() if k != "hidden_states"}
        seen.update(x=kwargs.get("hidden_states", args[0] if args else None), rest=(args[1:], rest))

    def keep_root(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(h=kwargs.get("hidden_states", args[0] if args else None))

    hooks = [
        owner.register_forward_pre_hook(keep_owner, with_kwargs=True),
        root.register_forward_pre_hook(keep_root, with_kwargs=True),
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    args, kwargs = seen["rest"]

    def attention(x: Tensor) -> Tensor:
        out = owner(x, *args, **kwargs)[0]
        return root.attention.output.dense(out) if isinstance(model, BertModel) else out

    def heads(x: Tensor) -> Tensor:
        projection = {BertModel: lambda: root.attention.output.dense, GPT2Model: lambda: owner.c_proj}
        taken: list[Tensor] = []
        module = projection.get(type(model), lambda: owner.o_proj)()
        hook = module.register_forward_pre_hook(lambda m, a: taken.append(a[0]))
        attention(x)
        hook.remove()
        return taken[0]

    def block(h: Tensor) -> Tensor:
        if isinstance(model, BertModel):
            return root.attention.output.LayerNorm(h + attention(h))
        norm = root.ln_1 if isinstance(model, GPT2Model) else root.input_layernorm
        return h + attention(norm(h))

    def residual(x: Tensor) -> Tensor:
        return x + attention(x)

    functions = {"heads": heads, "attention": attention, "residual": residual, "block": block}
    return (seen["h"] if scope == "block" else seen["x"]).detach(), functions[scope]
