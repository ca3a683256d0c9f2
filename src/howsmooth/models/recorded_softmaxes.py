"""A record of a model's softmax attentions on one input, and its logits with other keys, values or weights.

Keys and values are meant as the softmax takes them: after norm layers and rotary positions, and expanded from
their latent in latent attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from howsmooth.attention import SelfAttention
from howsmooth.errors import CaptureError, HowsmoothError
from howsmooth.models.as_called import as_called
from howsmooth.models.float32_weights import Place, places_of, substituted, weights_in_memory
from howsmooth.models.identification.non_softmax_layers import NO_SOFTMAX, NonSoftmaxTracer
from howsmooth.models.identification.qkv_projections import weight_and_bias
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.padded_sequences import check_one_sequence
from howsmooth.models.tolerance import relative_error
from howsmooth.models.tracing.attention_recorder import (
    AttentionLayer,
    is_linear,
    output_of,
    run_once,
    run_with_attention,
)
from howsmooth.models.tracing.mask_and_bias import split_mask
from howsmooth.models.tracing.module_replay import first_tensor
from howsmooth.models.tracing.softmax_call import SoftmaxCall, plain_attention
from howsmooth.seeds import torch_seed
from howsmooth.watching import Call, watched

__all__ = ["RecordedModel", "RecordedSoftmax"]

#: Returns other keys and values of a layer, given its index, its keys and its values (*lead, heads, n, dim);
#: or None to leave them as they are.
Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor] | None]

_SAME = 1e-3  # relative difference of outputs above which the intercepted model is not the model
_CROSS = "its queries and keys come from different tokens (cross-attention)"


@dataclass(eq=False)
class RecordedSoftmax:
    """The softmax of an attention layer in a recorded run, with the output projection if it is known."""

    layer: AttentionLayer
    softmax: SoftmaxCall
    #: Why it is not one self-attention with known keys and values, in a phrase; "" if it is.
    obstacle: str
    #: The linear module that alone is given the concatenated heads; None if there is none.
    projection: nn.Module | None
    #: The number of heads of keys and values without their copies: some models repeat them for each query.
    kv_heads: int

    def by_head(self, t: Float[Tensor, "*lead heads n dim"]) -> Float[Tensor, "kv_heads copies n dim"]:
        """Reshape keys or values to (kv_heads, copies, n, dim). Some models repeat each head as copies."""
        return t.reshape(self.kv_heads, -1, *t.shape[-2:])

    def attention(self) -> tuple[SelfAttention, Float64[Tensor, "n n"]]:
        """Return the layer in float64 as a map of one-hot tokens, and these tokens.

        At them the queries, keys and values of the map are those of the recorded run. The output of the map
        is that of the projection, or the concatenated heads if there is none. A CaptureError says why the
        layer is no such map.
        """
        softmax, q, k = self.softmax, self.softmax.query, self.softmax.key
        if self.obstacle or q is None or k is None:
            raise CaptureError(self.obstacle)
        n = k.shape[-2]
        if q.shape[-2] != n:
            raise CaptureError(f"it attends from {q.shape[-2]} tokens to {n}")
        if (q.ndim > 3 and q.shape[0] != 1) or (q.ndim > 4 and self.projection is None):
            raise CaptureError("its softmax acts on windows of the tokens")
        visible, bias = (
            None if t is None else t.expand(*t.shape[:-2], n, n).reshape(-1, n, n)
            for t in split_mask(self.layer, softmax.mask)
        )
        if visible is not None and not torch.equal(visible, visible[:1].expand_as(visible)):
            raise CaptureError("its heads have different masks")
        weight, output_bias = None, None
        if self.projection is not None:
            with weights_in_memory(self.projection):
                weight, output_bias = map(_double, weight_and_bias(self.projection))
        return SelfAttention(
            _double(q.flatten(0, -3).mT),
            _double(self.by_head(k)[:, 0].mT),
            _double(self.by_head(softmax.value)[:, 0].mT),
            weight,
            output_bias=output_bias,
            scale=softmax.scale,
            causal=softmax.causal,
            mask=None if visible is None else visible[0].cpu(),
            score_bias=_double(bias),
            softcap=softmax.softcap,
            sinks=_double(softmax.sinks),
        ), torch.eye(n, dtype=torch.float64)


class RecordedModel:
    """The softmaxes of a model on one unpadded sequence, and the model's logits if keys or values are
    changed.

    A CaptureError says that the model computes no softmax attention, or gives another output if each softmax
    is computed from the queries, keys and values that were read.
    """

    def __init__(self, model: nn.Module, inputs: Tensor | Mapping[str, Any]) -> None:
        self.model = model
        #: The attention layers, in the order of the forward pass.
        self.layers: list[RecordedSoftmax] = []
        self._heads: Tensor | None = None  # of the last softmax, concatenated
        self._given: list[tuple[nn.Module, Tensor]] = []  # modules that were given them, with their outputs
        self._vocabularies: set[int] = set()  # sizes of the embedding tables that are given the token ids
        name, others = type(model).__name__, NonSoftmaxTracer()

        def record(layer: AttentionLayer, softmax: SoftmaxCall) -> Tensor | None:
            others.on_layer(layer)
            return self._record(layer, softmax)

        with as_called(model, inputs) as self.call:
            check_one_sequence(self.call)
            with others.watching(model), watched(dict(model.named_modules()), ends=self._ends):
                recorded = run_with_attention(self.call, record)
            #: The names of the layers that mix tokens without a softmax, such as linear attention.
            self.without_softmax = [f"{one.name} ({one.module})" for one in others.find(1)]
            if not self.layers:
                other = "".join(f" Its layer {one} has {NO_SOFTMAX}." for one in self.without_softmax[:1])
                raise CaptureError(f"No softmax attention of {name} was seen.{other}")
            output = run_once(self.call)
            #: The logits of the unchanged model, (rows, classes): one row for each token, or for the
            #: sequence. None if the model has none.
            self.logits = self._rows(output)
            tensor: Any = first_tensor if self.logits is None else self._rows
            if relative_error(tensor(recorded), tensor(output)) > _SAME:
                why = "; ".join(dict.fromkeys(at.obstacle for at in self.layers if at.obstacle))
                raise CaptureError(
                    f"{name} has another output if each softmax is computed from its queries, keys and values"
                    f"{': ' if why else ''}{why}."
                )
            self._find_cross_attention()

    def mean_kl(self, change: Change) -> float:
        """Return the mean KL divergence between the model's own predictions and those with changed keys and
        values.

        It is Σ p log(p / p') over the classes, with the probabilities p of the model and p' of the changed
        model, in nats, averaged over the rows of the logits.
        """
        with measurement_mode(self.model):
            return self.divergence(self._changed(change))

    def divergence(self, logits: Float[Tensor, "rows classes"]) -> float:
        """Return the mean KL divergence between the model's own predictions and those of other logits."""
        assert self.logits is not None
        p, other = (t.double().log_softmax(dim=-1) for t in (self.logits, logits))
        return float((p.exp() * (p - other)).sum(dim=-1).mean().clamp_min(0.0))

    def run(
        self, blocks: Mapping[str, nn.Module], weights: Callable[[str], Sequence[Place]] = lambda name: ()
    ) -> tuple[Any, dict[str, Float[Tensor, " entries"]]]:
        """Return the logits, and the outputs of some blocks in their order, if they have other weights.

        ``weights`` gives those of the block with a name, which are its own again when its call ends. No block
        lies in another, and the caller sets the measurement mode.
        """
        outputs: dict[str, list[Tensor]] = {}

        def starts(call: Call) -> None:
            stack.enter_context(substituted(weights(call.name)))

        def ends(call: Call) -> None:
            stack.close()
            outputs.setdefault(call.name, []).append(first_tensor(call.output).flatten().clone())

        # After an exception, half-precision weights would be put back in the wrong order.
        own = list(places_of(part for block in blocks.values() for part in block.modules()))
        with substituted(own), ExitStack() as stack, watched(blocks, starts, ends):
            logits = self._rows(run_once(self.call))
        return logits, {name: torch.cat(parts) for name, parts in outputs.items()}

    def squared_gradients(self, samples: int, seed: int) -> dict[int, list[Tensor]]:
        """Return the squared derivatives (kv_heads, n, dim) of the log-likelihood with respect to the keys
        and values of each layer that could be read. They are averaged over random draws of classes.

        Classes are drawn from the model's own prediction, one for each row, and their log-probabilities are
        summed over the rows. So the means over draws estimate the diagonal of the Fisher information times
        the number of rows. To second order, independent errors of variance σ² in the entries of a key change
        the prediction by a mean Kullback–Leibler divergence of Σ σ² (Fisher diagonal) / 2.
        """
        leaves: dict[int, list[Tensor]] = {}

        def change(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
            at = self.layers[layer]
            if at.obstacle:
                return None
            by_head = [at.by_head(t) for t in (keys, values)]
            leaves[layer] = [torch.zeros_like(t[:, :1], requires_grad=True) for t in by_head]
            k, v = (t + leaf for t, leaf in zip(by_head, leaves[layer], strict=True))
            return k.reshape(keys.shape), v.reshape(values.shape)

        generator, sums = torch.Generator().manual_seed(torch_seed(seed)), None
        with measurement_mode(self.model), torch.enable_grad():
            log_p = self._changed(change).log_softmax(dim=-1)
            p = log_p.detach().double().exp().cpu()
            every = [leaf for pair in leaves.values() for leaf in pair]
            for _ in range(samples if leaves else 0):
                drawn = torch.multinomial(p, 1, generator=generator).to(log_p.device)
                likelihood = log_p.gather(1, drawn).sum()
                found = torch.autograd.grad(likelihood, every, retain_graph=True, materialize_grads=True)
                squares = [gradient[:, 0].double().cpu().square() for gradient in found]
                sums = squares if sums is None else [a + b for a, b in zip(sums, squares, strict=True)]
        means = iter([one / samples for one in sums or []])
        return {layer: [next(means), next(means)] for layer in leaves}

    # ---- the recorded run

    def _record(self, layer: AttentionLayer, softmax: SoftmaxCall) -> Tensor | None:
        output = _computed(softmax)
        if self.layers and self.layers[-1].layer is layer:
            self.layers[-1].obstacle, self._heads = "it has several softmaxes", None
            return output
        heads = output_of(softmax) if output is None else output
        # The model may change its tensors later.
        q, k = (None if t is None else t.clone() for t in (softmax.query, softmax.key))
        v = softmax.value.clone()
        softmax = replace(softmax, query=q, key=k, value=v, output=None, probabilities=None)
        projection = layer.module.out_proj if isinstance(layer.module, nn.MultiheadAttention) else None
        kv_heads = _different([t.flatten(0, -3) for t in (k, v) if t is not None])
        self.layers.append(RecordedSoftmax(layer, softmax, softmax.obstacle, projection, kv_heads))
        self._heads, self._given = heads.flatten(0, -3).movedim(0, 1).flatten(1), []
        return output

    def _ends(self, call: Call) -> None:
        """Note embedding tables of ids; of nested modules given the heads, the innermost projects them."""
        given = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
        if len(given) != 1:
            return
        if isinstance(call.module, nn.Embedding) and any(
            _alike(given[0], t) for t in self.call.named.values() if isinstance(t, Tensor)
        ):
            self._vocabularies.add(call.module.num_embeddings)
        if self._heads is None or not _alike(given[0], self._heads):
            return
        if any(p.ndim > 1 for p in call.module.parameters()):
            self._given.append((call.module, first_tensor(call.output)))
            module, output = self._given[0]
            alone = is_linear(module) and all(_alike(other, output) for _, other in self._given)
            self.layers[-1].projection = module if alone else None

    def _find_cross_attention(self) -> None:
        """Mark layers in which changing one input of the model changes only the queries or only the keys."""

        def compare(layer: AttentionLayer, softmax: SoftmaxCall) -> Tensor | None:
            own = self.layers[layer.index].softmax
            pairs = ((softmax.query, own.query), (softmax.key, own.key))
            if len({_alike(a, b) for a, b in pairs if a is not None and b is not None}) > 1:
                self.layers[layer.index].obstacle = _CROSS
            return _computed(softmax)

        for name, value in self.call.named.items():
            if not isinstance(value, Tensor):
                continue
            moved = value.flip(tuple(range(1, value.ndim)))
            other = replace(self.call, named={**self.call.named, name: moved})
            if not torch.equal(moved, value):
                with suppress(HowsmoothError):  # the model may refuse these inputs
                    run_with_attention(other, compare)

    # ---- other keys and values

    def _changed(self, change: Change) -> Float[Tensor, "rows classes"]:
        def attend(layer: AttentionLayer, softmax: SoftmaxCall) -> Tensor | None:
            if softmax.key is None:
                return None
            other = change(layer.index, softmax.key, softmax.value)
            return None if other is None else _computed(replace(softmax, key=other[0], value=other[1]))

        logits = self._rows(run_with_attention(self.call, attend))
        assert logits is not None
        return logits

    def _rows(self, output: Any) -> Float[Tensor, "rows classes"] | None:
        """Return the logits, one row a prediction; unnamed ones have one for each token of a vocabulary."""
        named = getattr(output, "logits", None)
        logits = named if isinstance(named, Tensor) else first_tensor(output)
        if logits.ndim < 2 or logits.shape[-1] < 2:
            return None
        known = logits is named or (not isinstance(output, dict) and logits.shape[-1] in self._vocabularies)
        return logits.flatten(0, -2) if known else None


def _computed(softmax: SoftmaxCall) -> Tensor | None:
    if softmax.obstacle or softmax.query is None or softmax.key is None:
        return None
    return plain_attention(softmax)


def _different(operands: list[Tensor]) -> int:
    """Return how many heads keys and values (heads, n, dim) have, if equal neighbours count once."""
    heads = len(operands[0])
    for number in (number for number in range(1, heads) if heads % number == 0):
        groups = [t.unflatten(0, (number, -1)) for t in operands]
        if all(torch.equal(group, group[:, :1].expand_as(group)) for group in groups):
            return number
    return heads


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape[-1:] != b.shape[-1:] or a.numel() != b.numel():
        return False
    return torch.equal(a.flatten(), b.flatten())


def _double(t: Tensor | None) -> Any:
    return None if t is None else t.detach().cpu().double()
