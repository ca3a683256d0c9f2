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
        blocks = dict[str, nn.Module]()
        for name, module in model.named_modules():
            nested = any(name.startswith(f"{outer}.") for outer in blocks)
            if not nested and (name in roots or name.rpartition(".")[0] in lists):
                blocks[name] = module
        with measurement_mode(model):
            #: The output of each block that runs, in their order.
            self.outputs = recorded.run(blocks)[1]
        self.names, self.blocks = list(self.outputs), {name: blocks[name] for name in self.outputs}
        #: What is left out, by the reason.
        self.left_out: dict[str, list[str]] = {}
        self.parts: list[dict[str, list[_Weight]]] = [{} for _ in self.names]
        for (name, block), parts in zip(self.blocks.items(), self.parts, strict=True):
            # The modules in the block that hold an attention; "" is the block itself.
            inside = [at.name[len(name) + 1 :] for at in attentions if f"{at.name}.".startswith(f"{name}.")]
            tops = {path.partition(".")[0] for path in inside}
            for path, weight in self._weights(block):
                part = "attention" if path.partition(".")[0] in tops else "MLP"
                parts.setdefault(part if tops - {""} else "block", []).append(weight)
        # Groups that hold the longest row are output channels. Of quantisers that act alike, the first stays.
        every = (w for parts in self.parts for weights in parts.values() for w in weights)
        longest = max((w.exact.shape[-1 - w.transposed] for w in every), default=0)
        alike = {group_of(q, longest).replace("token", "channel"): q for q in reversed(quantisers)}
        self.quantisers = [q for q in quantisers if q in alike.values()]

    def _weights(self, block: nn.Module) -> Iterator[tuple[str, _Weight]]:
        """Yield the weights of a block's linear maps, each with its path; note the other matrices."""
        for path, module in block.named_modules():
            of_torch = isinstance(module, nn.MultiheadAttention)
            experts = getattr(module, "is_transposed", None)  # as transformers says of those of a mixture
            for name, p in module.named_parameters(recurse=False):
                linear = name.endswith("proj_weight") if of_torch else is_linear(module) and name == "weight"
                if linear or (isinstance(experts, bool) and p.ndim == 3):
                    transposed = not isinstance(module, nn.Linear) and not of_torch and experts is not False
                    yield f"{path}.{name}".lstrip("."), _Weight(module._parameters, name, p, transposed)
                elif p.ndim > 1 and not isinstance(module, nn.Embedding) and not name.endswith("bias"):
                    left = self.left_out.setdefault(_EXACT, [])
                    left += {f"{type(module).__name__}.{name}"} - set(left)

    def simulated_kl(self, bits: Mapping[tuple[int, str], int], quantiser: str) -> float:
        """Return the mean divergence if ``bits`` says which parts are quantised, and to how many bits."""

        def weights(name: str) -> list[Place]:
            index = self.names.index(name)
            given = [(bits.get((index, part)), w) for part, some in self.parts[index].items() for w in some]
            return [(w.table, w.name, w.quantised(count, quantiser)[1]) for count, w in given if count]

        renew_threads()
        with measurement_mode(self.recorded.model):
            return self.recorded.divergence(self.recorded.run(self.blocks, weights)[0])

    def rows(self, index: int, whole: RecordedModel | None) -> Iterator[dict[str, Any]]:
        """Yield the table's rows of one block, with divergences if ``whole`` is given."""
        name, parts, predicted_kl, kl = self.names[index], self.parts[index], math.nan, math.nan
        own = self.outputs[name].double()
        for part, quantiser, bits in product(parts, self.quantisers, self.bits):
            renew_threads()
            slope, real = self._along([(w, *w.quantised(bits, quantiser)) for w in parts[part]], name)
            if whole is not None and whole.logits is not None:
                p = whole.logits.double().softmax(dim=-1)
                u, logits = (y[len(own) :].view_as(p) for y in (slope, real))
                # Half the variance of u under p.
                predicted_kl = 0.5 * float((p * (u - (p * u).sum(-1, keepdim=True)).square()).sum(-1).mean())
                kl = whole.divergence(logits)
            place = {"layer": index, "part": part, "bits": bits, "quantiser": quantiser}
            sizes = (slope[: len(own)], real[: len(own)] - own, own)
            norms = zip(("predicted", "change", "output_norm"), (float(y.norm()) for y in sizes), strict=True)
            others = {"entries": sum(w.exact.numel() for w in parts[part]), "name": name}
            yield place | dict(norms) | {"predicted_kl": predicted_kl, "kl": kl} | others

    def _along(self, given: Sequence[tuple[_Weight, Tensor, Tensor]], name: str) -> list[Tensor]:
        """Return a block's output with the logits: their derivative along the error, and their values."""
        block, own = {name: self.blocks[name]}, self.outputs[name]

        def moved(t: Tensor) -> Tensor:
            places = [(one.table, one.name, t.to(w) * q + (1 - t.to(w)) * w) for one, w, q in given]
            logits, outputs = self.recorded.run(block, lambda _: places)
            return torch.cat((outputs[name], own[:0] if logits is None else logits.flatten()))

        zero = torch.zeros((), dtype=own.dtype)
        with measurement_mode(self.recorded.model):
            with one_backend():
                try:
                    slope = torch.func.jvp(moved, (zero,), (zero + 1,))[1]
                except HowsmoothError:  # something has no forward mode
                    slope = Linearisation(moved, zero, math.inf).product(zero + 1)
            return [y.detach().double() for y in (slope, moved(zero + 1))]
