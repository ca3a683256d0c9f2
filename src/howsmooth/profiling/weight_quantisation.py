"""The effects of quantised weights of a model's blocks: what is predicted and simulated for each part.

A block is an entry of a list of modules that holds an attention, or its neighbour in the list. The weights of
its linear maps are quantised; all else stays exact. If weights W become Q, the block's output and the logits
change to first order by their derivatives along Q − W, which one pass in forward mode gives. For the change u
of logits with the probabilities p, KL(p ‖ p') is to second order uᵀ (diag(p) − p pᵀ) u / 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from howsmooth.profiling.quantisers import group_of, rounded, steps_and_zeros
from howsmooth.threads import renew_threads

__all__ = ["QuantisedWeights", "refuse_quantised"]

_EXACT = "matrices of no linear map that is known, which stay exact"


def refuse_quantised(model: nn.Module) -> None:
    """Raise ArgumentError unless all matrices of a model are floating-point tensors in memory."""
    full = {*HALF, torch.float32, torch.float64}
    odd = [
        f"{name} {'outside of memory' if p.is_meta else f'in {p.dtype}'}"
        for name, p in model.named_parameters()
        if p.ndim > 1 and (p.dtype not in full or p.is_meta or type(p.data) is not Tensor)
    ]
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        odd.append("a quantization_config")
    if odd:
        expected, remedy = "weights in memory, not quantised", "Give the model in full precision."
        raise ArgumentError("model", expected=expected, got=odd[0], remedy=remedy)


class _Weight(NamedTuple):
    table: dict[str, Any]  # of the module's parameters
    name: str
    exact: Tensor  # (*lead, out, in), or (*lead, in, out) if transposed
    transposed: bool

    def quantised(self, bits: int, quantiser: str) -> tuple[Tensor, Tensor]:
        """Return the weight in the dtype of the computation, and rounded."""
        w = self.exact.detach()
        w = (w.float() if w.dtype in HALF else w).transpose(-1, -1 - self.transposed)
        near = rounded(w, *steps_and_zeros(w, bits, "token" if quantiser == "channel" else quantiser, "V"))
        return w.transpose(-1, -1 - self.transposed), near.transpose(-1, -1 - self.transposed)


class QuantisedWeights:
    """The linear weights in the blocks of a recorded model, of which some may be quantised."""

    def __init__(self, recorded: RecordedModel, bits: Sequence[int], quantisers: Sequence[str]) -> None:
        self.recorded, self.bits, model = recorded, bits, recorded.model
        attentions = [at.layer for at in recorded.layers]
        roots = {at.root_name for at in attentions} - {""}
        lists = {name.rpartition(".")[0] for name in roots}
        lists = {name for name in lists if isinstance(model.get_submodule(name), nn.ModuleList)}
        modules = dict(model.named_modules())
        blocks = {
            name: modules[name] for name in modules if {name} & roots or {name.rpartition(".")[0]} & lists
        }
        with measurement_mode(model):
            #: The output of each block that runs, in their order.
            self.outputs = recorded.run(blocks)[1]
        self.names = list(self.outputs)
        self.blocks = {name: blocks[name] for name in self.names}
        #: What is left out, by the reason.
        self.left_out: dict[str, list[str]] = {}
        self.parts: list[dict[str, list[_Weight]]] = []
        for name in self.names:
            # The modules in the block that hold an attention; "" is the block itself.
            tops = {at.name[len(name) + 1 :].partition(".")[0] for at in attentions if at.root_name == name}
            self.parts.append({})
            for path, weight in self._weights(self.blocks[name]):
                part = "attention" if path.partition(".")[0] in tops else "MLP"
                self.parts[-1].setdefault(part if tops - {""} else "block", []).append(weight)
        every = [w for parts in self.parts for weights in parts.values() for w in weights]
        if not every:
            expected = "linear weights beside an attention in an entry of a module list"
            got = type(model).__name__
            raise ArgumentError("model", expected=expected, got=got, remedy="Give it in full precision.")
        # Groups that hold the longest row are output channels. Of quantisers that act alike, the first stays.
        longest = max(w.exact.shape[-1 - w.transposed] for w in every)
        alike = {group_of(q, longest).replace("token", "channel"): q for q in reversed(quantisers)}
        self.quantisers = [q for q in quantisers if q in alike.values()]

    def _weights(self, block: nn.Module) -> Iterator[tuple[str, _Weight]]:
        """Yield the weights of a block's linear maps, each with its path; note the other matrices."""
        for path, module in block.named_modules():
            of_torch = isinstance(module, nn.MultiheadAttention)
            experts = getattr(
                module, "is_transposed", None
            )  # transformers says so of all experts of a mixture
            for name, p in module.named_parameters(recurse=False):
                linear = (is_linear(module) and name == "weight") or (
                    of_torch and name.endswith("proj_weight")
                )
                if linear or (isinstance(experts, bool) and p.ndim == 3):
                    transposed = not isinstance(module, nn.Linear) and not of_torch and experts is not False
                    yield f"{path}.{name}".lstrip("."), _Weight(module._parameters, name, p, transposed)
                elif p.ndim > 1 and not isinstance(module, nn.Embedding):
                    left = self.left_out.setdefault(_EXACT, [])
                    left += {f"{type(module).__name__}.{name}"} - set(left)

    def simulated_kl(self, bits: Mapping[tuple[int, str], int], quantiser: str) -> float:
        """Return the mean divergence if ``bits`` says which parts are quantised, and how."""

        def weights(name: str) -> list[Place]:
            index = self.names.index(name)
            some = [
                (bits[index, part], w)
                for part in self.parts[index]
                if (index, part) in bits
                for w in self.parts[index][part]
            ]
            return [(w.table, w.name, w.quantised(count, quantiser)[1]) for count, w in some]

        renew_threads()
        with measurement_mode(self.recorded.model):
            return self.recorded.divergence(self.recorded.run(self.blocks, weights)[0])

    def rows(self, index: int, whole: RecordedModel | None) -> list[dict[str, Any]]:
        """Return the table's rows of one block, with divergences if ``whole`` is given."""
        name, parts = self.names[index], self.parts[index]
        found = []
        for part, quantiser, bits in product(parts, self.quantisers, self.bits):
            renew_threads()
            predicted, real = self._changed(name, [(w, *w.quantised(bits, quantiser)) for w in parts[part]])
            own = self.outputs[name].double()
            predicted_kl = kl = math.nan
            if whole is not None and whole.logits is not None:
                p = whole.logits.double().softmax(dim=-1)
                u = predicted[1].double().view_as(p)
                u = u - (p * u).sum(dim=-1, keepdim=True)
                predicted_kl = 0.5 * float((p * u.square()).sum(dim=-1).mean())
                kl = whole.divergence(real[1].view_as(p))
            found.append(
                {
                    "layer": index,
                    "part": part,
                    "bits": bits,
                    "quantiser": quantiser,
                    "predicted": float(predicted[0].double().norm()),
                    "change": float((real[0].double() - own).norm()),
                    "output_norm": float(own.norm()),
                    "predicted_kl": predicted_kl,
                    "kl": kl,
                    "entries": sum(w.exact.numel() for w in parts[part]),
                    "name": name,
                }
            )
        return found

    def _changed(self, name: str, given: Sequence[tuple[_Weight, Tensor, Tensor]]) -> Any:
        """Return the derivative of a block's output and of the logits along the errors of its weights, and
        both with the quantised weights.
        """
        block, size = {name: self.blocks[name]}, len(self.outputs[name])

        def along(t: Tensor) -> Tensor:
            moved = [(one.table, one.name, w + t.to(w) * (q - w)) for one, w, q in given]
            logits, outputs = self.recorded.run(block, lambda _: moved)
            return torch.cat((outputs[name], outputs[name][:0] if logits is None else logits.flatten()))

        with measurement_mode(self.recorded.model):
            start = torch.zeros((), dtype=self.outputs[name].dtype)
            with one_backend():
                try:
                    slope = torch.func.jvp(along, (start,), (start + 1,))[1]
                except HowsmoothError:  # something has no forward mode
                    slope = Linearisation(along, start, math.inf).product(start + 1)
            return tuple((y[:size], y[size:]) for y in (slope, along(start + 1)))
