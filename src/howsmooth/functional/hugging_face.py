"""Registration of howsmooth's attention function in Hugging Face transformers, as
``attn_implementation="howsmooth"``.

The library transformers is imported when :func:`register` is called, and not before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.errors import ArgumentError
from howsmooth.functional.attention import attention
from howsmooth.functional.lazy_mask import rule_mask

__all__ = ["register"]


def register() -> None:
    """Register howsmooth's attention function in Hugging Face transformers as
    ``attn_implementation="howsmooth"``.

    From then on, ``from_pretrained(..., attn_implementation="howsmooth")`` and
    ``model.set_attn_implementation("howsmooth")`` let any model whose attention goes through the
    ``AttentionInterface`` of transformers compute it by :func:`attention`: the same numbers as with
    ``"eager"``, all derivatives in every mode, and memory for the tokens, not for their pairs. Causal order,
    windows and padding are not stored as matrices.

    There are two differences from ``"eager"``. A query that sees no key, such as one of padding tokens on
    the left, has output zero, as in ``"sdpa"``, where ``"eager"`` returns the mean of all values. A mask of
    booleans that a model made itself says which keys are seen, as in ``"sdpa"``, where ``"eager"`` adds it to
    the scores.

    Raises
    ------
    ArgumentError
        Not here, but in the model's forward pass: if it asks for attention probabilities
        (``output_attentions=True``), or for a choice of keys that is not given as a mask.

    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("howsmooth", _attention_forward)
    AttentionMaskInterface.register("howsmooth", rule_mask)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute the attention output (batch, m, heads, value_dim) for a layer of a transformers model.

    The arguments are those that layers give to the functions of ``AttentionInterface``: queries
    (batch, heads, m, key_dim), keys and values (batch, kv_heads, n, ...). Without a mask every query sees
    every key, as in eager attention, whatever ``is_causal`` says.
    """
    _check_supported(rest)
    m, n = query.shape[-2], key.shape[-2]
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    sinks = s_aux if sinks is None else sinks
    rule: dict[str, object] = {}
    known = getattr(attention_mask, "rule", None)
    if attention_mask is not None and known is not None and attention_mask.shape[-2:] == (m, n):
        visible, padding = known
        rule = {"causal": visible.causal, "window": visible.window, "offset": visible.offset}
        attention_mask = None if padding is None else padding[:, None, None, :]
    if indices is not None:
        # A sparse layer names the keys (batch, m, count) that each query may see; masks hide some of them.
        chosen = torch.zeros(*indices.shape[:-1], n, dtype=torch.bool, device=query.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        attention_mask = _hide_unselected(attention_mask, chosen)
    numbers = {"mask": attention_mask, "score_bias": position_bias, "sinks": sinks}
    for name, t in numbers.items():
        if t is not None:
            rule[name] = t if t.dtype == torch.bool else t.to(query.dtype)
    dropped = dropout if module.training else 0.0
    out = attention(query, key, value, scale=scaling, softcap=softcap, dropout_p=dropped, **rule)
    if attention_mask is not None and attention_mask.is_floating_point():
        # Eager attention is NaN where a mask of numbers is −∞ for all keys. A model that reads its own mask
        # the wrong way round must not get numbers that look right.
        lost = torch.isneginf(attention_mask).all(dim=-1, keepdim=True)
        out = out.masked_fill(lost, float("nan"))
    return out.transpose(1, 2).contiguous(), None


def _hide_unselected(mask: Tensor | None, chosen: Tensor) -> Tensor:
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _check_supported(rest: dict[str, Any]) -> None:
    """Raise ArgumentError if a layer asks for an option that howsmooth's attention does not support."""
    if rest.get("output_attentions"):
        raise ArgumentError(
            "output_attentions",
            expected="False, because attention probabilities are not kept",
            got=repr(rest["output_attentions"]),
            remedy='Use attn_implementation="eager" for attention probabilities.',
        )
    for name in ("block_indices", "cache"):
        if rest.get(name) is not None:
            raise ArgumentError(
                name,
                expected="None, because keys are chosen by masks alone",
                got=f"a {type(rest[name]).__name__}",
                remedy='Use attn_implementation="eager" for this model.',
            )
