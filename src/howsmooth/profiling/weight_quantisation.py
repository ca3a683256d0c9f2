"""The effects of quantised weights of a model's blocks: what is predicted and simulated for each part.

A block is an entry of a list of modules that holds an attention, or its neighbour in the list. The weights of
its linear maps are quantised: of ``nn.Linear``, of transformers' ``Conv1D``, of ``nn.MultiheadAttention``, and
of experts that transformers keeps in one tensor with three axes. All else stays exact.

If weights W are quantised to Q, the block's output and the logits z change to first order by their derivatives
along Q − W, which one pass in forward mode gives. For the change u of logits with the probabilities p, the
divergence KL(p ‖ p') is to second order uᵀ (diag(p) − p pᵀ) u / 2, half the variance of u under p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from howsmooth.errors import ArgumentError, HowsmoothError
from howsmooth.jacobian.autodiff import Linearisation, one_backend
from howsmooth.models.float32_weights import HALF, Place
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.recorded_softmaxes import RecordedModel
from howsmooth.models.tracing.attention_recorder import is_linear
from howsmooth.profiling.quantisers import group_of, quantised_weight
from howsmooth.threads import renew_threads

__all__ = ["QuantisedWeights", "refuse_quantised"]

_EXACT = "in no linear map that is known, and stays exact"


def refuse_quantised(model: nn.Module) -> None:
    """Raise ArgumentError unless all matrices of a model are floating-point tensors in memory."""
    full = {*HALF, torch.float32, torch.float64}
    odd = [
        f"{name} {'outside of the memory' if p.is_meta else f'in {p.dtype}'}"
        for name, p in model.named_parameters()
        if p.ndim > 1 and (p.dtype not in full or p.is_meta or type(p.data) is not Tensor)
    ]
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        odd.append("a quantization_config")
    if odd:
        expected, remedy = "weights that are not quantised, in memory", "Load the model in full precision."
        raise ArgumentError("model", expected=expected, got=odd[0], remedy=remedy)


class _Weight(NamedTuple):
    table: dict[str, Any]  # of the module's parameters
    name: str
    exact: Tensor
    transposed: bool  # whether its last axis has the output channels

    def quantised(self, bits: int, quantiser: str) -> Tensor:
        return quantised_weight(self.wide, bits, quantiser, transposed=self.transposed)

    @property
    def wide(self) -> Tensor:
        return self.exact.detach().float() if self.exact.dtype in HALF else self.exact.detach()

    @property
    def width(self) -> int:
        return self.exact.shape[-2 if self.transposed else -1]


class QuantisedWeights:
    """The linear weights in the blocks of a recorded model, of which some may be quantised."""

    def __init__(
        self, whole: RecordedModel, bits: Sequence[int], quantisers: Sequence[str], *, logits: bool
    ) -> None:
        self.whole, self.bits, self.logits = whole, bits, logits
        self.left_out: dict[str, list[str]] = {}  # what is left out, by the reason
        self._exact: dict[str, None] = {}  # matrices that are in no linear map
        model, attentions = whole.model, [at.layer for at in whole.layers]
        roots = {at.root_name for at in attentions}
        lists = {name.rpartition(".")[0] for name in roots}
        lists = {name for name in lists if isinstance(model.get_submodule(name), nn.ModuleList)}
        self.blocks = {
            name: block
            for name, block in model.named_modules()
            if name and (name in roots or name.rpartition(".")[0] in lists)
        }
        with measurement_mode(model):
            _, self._outputs = whole.run(self.blocks)
        self.names = list(self._outputs)  # of those that run, in this order
        self.parts: list[dict[str, list[_Weight]]] = []
        for name in self.names:
            inside = [at.name[len(name) + 1 :] for at in attentions if at.root_name == name]
            parts: dict[str, list[_Weight]] = {}
            for path, weight in self._weights(self.blocks[name]):
                tops = {one.partition(".")[0] for one in inside}
                part = "attention" if path.partition(".")[0] in tops else "MLP"
                parts.setdefault(part if tops - {""} else "block", []).append(weight)
            self.parts.append(parts)
        every = [weight for parts in self.parts for weights in parts.values() for weight in weights]
        if not every:
            expected = "blocks in a module list that hold an attention and linear maps"
            remedy = "Load the model in full precision."
            raise ArgumentError("model", expected=expected, got=type(model).__name__, remedy=remedy)
        acts = {
            one: [one if group_of(one, w.width) == one else "channel" for w in every] for one in quantisers
        }
        #: Of quantisers that act alike on all weights, the first.
        self.quantisers = [one for i, one in enumerate(acts) if acts[one] not in [*acts.values()][:i]]

    def _weights(self, block: nn.Module) -> Iterator[tuple[str, _Weight]]:
        """Yield the weights of a block's linear maps, each with its path; note the other matrices."""
        for path, module in block.named_modules():
            experts, of_torch = (
                getattr(module, "is_transposed", None),
                isinstance(module, nn.MultiheadAttention),
            )
            for name, p in module.named_parameters(recurse=False):
                linear = (is_linear(module) and name == "weight") or (
                    of_torch and name.endswith("proj_weight")
                )
                if linear or (isinstance(experts, bool) and p.ndim == 3):
                    transposed = not isinstance(module, nn.Linear) and not of_torch and experts is not False
                    yield f"{path}.{name}".lstrip("."), _Weight(module._parameters, name, p, transposed)
                elif p.ndim > 1 and not isinstance(module, nn.Embedding):
                    self._exact[f"{type(module).__name__}.{name}"] = None

    def also_left_out(self) -> None:
        """Note the matrices that have no place among the rows of all layers."""
        if self._exact:
            self.left_out[_EXACT] = list(self._exact)

    def simulated_kl(self, bits: Mapping[tuple[int, str], int], quantiser: str) -> float:
        """Return the mean divergence if ``bits`` says which parts are quantised, and how."""

        def weights(block: str) -> list[Place]:
            index = self.names.index(block) if block in self.names else -1
            return [
                (w.table, w.name, w.quantised(bits[index, part], quantiser))
                for part, given in self.parts[index].items()
                if (index, part) in bits
                for w in given
            ]

        renew_threads()
        with measurement_mode(self.whole.model):
            logits, _ = self.whole.run(self.blocks, weights)
        assert logits is not None
        return self.whole.divergence(logits)

    def rows(self, index: int) -> list[dict[str, Any]]:
        """Return the table's rows of one block."""
        cases = product(self.parts[index].items(), self.quantisers, self.bits)
        return [self._row(index, part, given, *how) for (part, given), *how in cases]

    def _row(
        self, index: int, part: str, given: Sequence[_Weight], quantiser: str, bits: int
    ) -> dict[str, Any]:
        name, whole = self.names[index], self.whole
        block, size = {name: self.blocks[name]}, self._outputs[name].numel()
        quantised = [w.quantised(bits, quantiser) for w in given]
        errors = [q - w.wide for q, w in zip(quantised, given, strict=True)]

        def along(t: Tensor) -> Tensor:
            """Return the output of the block, and the logits, at the weights W + t (Q − W)."""
            moved = [(w.table, w.name, w.wide + t.to(e) * e) for w, e in zip(given, errors, strict=True)]
            logits, outputs = whole.run(block, lambda _: moved)
            return torch.cat((outputs[name], *(() if logits is None else (logits.flatten(),))))

        renew_threads()
        with measurement_mode(whole.model):
            start = torch.zeros((), dtype=self._outputs[name].dtype)
            slope = _slope(along, start).double()
            at_once = [(w.table, w.name, q) for w, q in zip(given, quantised, strict=True)]
            logits, outputs = whole.run(block, lambda _: at_once)
        predicted_kl = kl = math.nan
        if self.logits and logits is not None and whole.logits is not None:
            kl, p = whole.divergence(logits), whole.logits.double().softmax(dim=-1)
            u = slope[size:].view_as(p)
            u = u - (p * u).sum(dim=-1, keepdim=True)
            predicted_kl = 0.5 * float((p * u.square()).sum(dim=-1).mean())
        own = self._outputs[name].double()
        return {
            "layer": index,
            "part": part,
            "bits": bits,
            "quantiser": quantiser,
            "predicted": float(slope[:size].norm()),
            "change": float((outputs[name].double() - own).norm()),
            "output_norm": float(own.norm()),
            "predicted_kl": predicted_kl,
            "kl": kl,
            "entries": sum(w.exact.numel() for w in given),
            "name": name,
        }


def _slope(f: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Return the derivative of f at a number t, by forward mode or, without one, by reverse mode twice."""
    with one_backend():
        try:
            return torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]
        except HowsmoothError:
            return Linearisation(f, t, math.inf).product(torch.ones_like(t))
