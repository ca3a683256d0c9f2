"""The leading singular value of every attention layer, as a penalty beside a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howsmooth.errors import ArgumentError
from howsmooth.jacobian.autodiff import one_backend
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.nn.penalty.directions import Directions
from howsmooth.nn.penalty.pair import Pair, begin, check_finite, check_steps, relative_residual, unit
from howsmooth.nn.penalty.recording import Call, Recorder, attention_layers
from howsmooth.nn.penalty.replica import drawing_nothing, replica
from howsmooth.nn.penalty.report import LayerReport, PenaltyReport

__all__ = ["SpectralPenalty"]

Reduction = Literal["mean", "max", "sum"]
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "max": torch.max,
    "sum": torch.sum,
}


class SpectralPenalty:
    """The local Lipschitz constants of a model's layers at the batch of the moment, as a number to minimise.

    Hooks see the inputs of the layers during your own forward pass; ``penalty()`` then returns the penalty
    at these inputs, with its gradient by the weights of each layer::

        with SpectralPenalty(model) as penalty:
            for x, y in batches:
                loss = criterion(model(x), y) + 0.01 * penalty()
                loss.backward()
                ...

    For each sequence of the batch it is σ = ⟨u, J v⟩, J the Jacobian of the layer's output by its tokens and
    (u, v) a pair of unit vectors, constant for the gradient, that is remembered from step to step and
    improved by one product with JᵀJ in each. Where the pair has converged, value and gradient are those of
    ‖J‖; before, the value is a lower estimate. ``penalty.report`` says which it is.

    The layer is run once more for it, on the same weights but in a body of its own (no dropout, evaluation
    mode, its own buffers, none of your hooks, float32 where the model has half precision or autocast): the
    model, its random numbers and its training mode are left as they are. So dropout is *frozen*: what is
    penalised is the map without it. A layer that is random in evaluation mode too is refused.

    Parameters
    ----------
    model
        Any module.
    layers
        Paths of modules, as in ``model.named_modules()``, or patterns of them ("encoder.layers.*.self_attn").
        By default the innermost modules whose class is called attention. What you name is what is measured:
        an attention with or without its output projection, its residual, its norm. The first floating-point
        argument (..., n, d) of a module is its tokens, and its first output what they become; where the
        same tensor is queries, keys and values it is moved in all three, everything else is held constant.
    on_input
        Whether the gradient also flows to the inputs of the layers, and so to what is before them.
    members
        How many sequences of a batch, from its first, take part; all by default. The cost goes with it. In
        shuffled batches they stand for the others, and few with more ``steps`` are better than many with one.
    steps
        Products with JᵀJ a call; the pair of the last call is where it begins. One is enough where the same
        sequences come again in the same places; for new sequences in each batch take two to five.
    first_steps
        Products for sequences that have no pair yet.
    rtol
        |J v − σ u| / σ at which a pair counts as converged.
    over_members, over_layers
        How the values of the sequences, and then of the layers, become one: "mean", "max" or "sum".
    transform
        A function of the values (members,), entry by entry, before they become one, such as
        ``lambda s: (s - 1).clamp(min=0)``.
    seed
        Of the random directions; the global random state is not used.

    Raises
    ------
    ArgumentError
        If an argument does not fit, or no layer is found.

    References
    ----------
    docs/theory/enforce.md (the gradient); docs/guide/penalties.md.

    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] | None = None,
        *,
        on_input: bool = False,
        members: int | None = None,
        steps: int = 1,
        first_steps: int = 8,
        rtol: float = 1e-2,
        over_members: Reduction = "mean",
        over_layers: Reduction = "mean",
        transform: Callable[[Tensor], Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError("model", expected="a torch.nn.Module", got=type(model).__name__)
        check_steps(steps, first_steps, rtol)
        if members is not None and (isinstance(members, bool) or not isinstance(members, int) or members < 1):
            raise ArgumentError("members", expected="an integer >= 1, or None for all", got=repr(members))
        for name, given in (("over_members", over_members), ("over_layers", over_layers)):
            if given not in _REDUCTIONS:
                raise ArgumentError(name, expected="'mean', 'max' or 'sum'", got=repr(given))
        self.layers = attention_layers(model, layers)
        self._recorder = Recorder(model, self.layers)
        self._on_input = bool(on_input)
        self._members = members
        self._checked: set[str] = set()
        self._steps, self._first_steps, self._rtol = steps, first_steps, rtol
        self._over_members, self._over_layers = _REDUCTIONS[over_members], _REDUCTIONS[over_layers]
        self._transform = transform
        self._seed = seed
        self._directions: dict[str, Directions] = {}
        self._report: PenaltyReport | None = None

    def attach(self) -> SpectralPenalty:
        """Begin to see the forward passes of the model."""
        self._recorder.attach()
        return self

    def detach(self) -> None:
        """Take all hooks away; the directions stay."""
        self._recorder.detach()

    def __enter__(self) -> SpectralPenalty:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __call__(self, tokens: Tensor | None = None) -> Tensor:
        """Return the penalty at the inputs of the last forward pass, a scalar to add to the loss.

        Parameters
        ----------
        tokens
            (batch, n), true where a token counts: for sequences that are padded. The others are neither moved
            nor looked at.

        Raises
        ------
        ArgumentError
            If no forward pass with gradients was seen, or a layer is random or cannot be run again.
        DerivativeError
            If a layer cannot be differentiated twice in reverse mode.
        NonFiniteError
            If its inputs, outputs or derivatives are not finite.

        """
        return self._over_layers(torch.stack(list(self.terms(tokens).values())))

    def terms(self, tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Return the penalty of each layer, by name, for weights of your own; see the class."""
        calls = self._recorder.named()
        terms: dict[str, Tensor] = {}
        reports: list[LayerReport] = []
        for name, call in calls.items():
            directions = self._directions.setdefault(name, Directions(self._seed))
            terms[name], report = self._of_layer(name, call, directions, tokens)
            reports.append(report)
        self._report = PenaltyReport(tuple(reports), self._rtol)
        first = next(iter(terms.values()))
        return {name: term.to(first) for name, term in terms.items()}

    @property
    def report(self) -> PenaltyReport:
        """What the last call found: values, residuals, and which have converged.

        Raises
        ------
        ArgumentError
            If there was none.

        """
        if self._report is None:
            raise ArgumentError("report", expected="a penalty that was called", got="none yet")
        return self._report

    def measure(
        self, *, rtol: float = 1e-3, confidence: float = 0.999, max_iterations: int = 200, seed: int = 0
    ) -> dict[str, LipschitzEstimate]:
        """Measure each layer at the inputs of the last forward pass, with an interval.

        What :func:`howsmooth.local_lipschitz` finds from random starts, for the same maps as the penalty
        sees: evaluation mode, every sequence with all its tokens. It costs some ten to a hundred products
        with JᵀJ; the directions of the penalty stay as they are.

        Parameters
        ----------
        rtol, confidence, max_iterations, seed
            As for :func:`howsmooth.local_lipschitz`.

        Returns
        -------
        dict
            One estimate of shape (members,) a layer.

        """
        found: dict[str, LipschitzEstimate] = {}
        for name, call in self._recorder.named().items():
            call.check_unchanged()
            body, x = replica(call.layer, call.name), call.members
            with torch.autocast(x.device.type, enabled=False), drawing_nothing(name, x.device):
                found[name] = local_lipschitz(
                    partial(call.run, body),
                    x,
                    rtol=rtol,
                    confidence=confidence,
                    max_iterations=max_iterations,
                    seed=seed,
                )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the directions, to go on after a checkpoint."""
        return {name: directions.state_dict() for name, directions in self._directions.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the directions that :meth:`state_dict` returned."""
        self._directions = {}
        for name, kept in state.items():
            self._directions[name] = Directions(self._seed)
            self._directions[name].load_state_dict(kept)

    def _of_layer(
        self, name: str, call: Call, directions: Directions, tokens: Tensor | None
    ) -> tuple[Tensor, LayerReport]:
        call.check_unchanged()
        body = replica(call.layer, call.name)
        if self._members is not None:
            whole, call = call, call.first(self._members)
            tokens = None if tokens is None else tokens[: self._members]
            if name not in self._checked:
                with drawing_nothing(name, whole.tokens.device), one_backend():
                    whole.check_first(body, self._members)
                self._checked.add(name)
        x = call.members.requires_grad_()
        weights: list[Tensor] = [p for p in call.layer.parameters() if p.requires_grad]
        on_input = self._on_input and call.tokens.requires_grad
        sought = [*weights, x] if on_input else weights
        # The graph that is made here is used up here: the loss gets numbers, so that it may be differentiated
        # in any way, and the memory is free again before the next layer.
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            with drawing_nothing(name, x.device):
                pair = Pair(lambda t: call.run(body, t), x, _real(tokens, x))
                u, upper = begin(pair, directions, self._steps, self._first_steps, self._rtol)
            u.requires_grad_()
            g = pair.pull_back(u)
            sigma = g.detach().flatten(1).norm(dim=1).requires_grad_()
            check_finite(sigma)
            term = self._over_members(sigma if self._transform is None else self._transform(sigma))
            (shares,) = torch.autograd.grad(term, sigma)
            v = unit(g.detach())
            if bool((shares == 0).any()):
                # A member without a share has no gradient by u to take J v from.
                jv = pair.push_forward(g, u, v)
                gradients = _gradients(g, v, shares, sought)
            else:
                scaled, *gradients = _gradients(g, v, shares, [u, *sought])
                assert scaled is not None
                jv = scaled / shares.view(-1, *(1,) * (scaled.ndim - 1))
        jv = jv.detach()
        residual = relative_residual(jv, u.detach())
        directions.keep(jv)
        report = LayerReport(name, sigma.detach(), residual, residual <= self._rtol, upper)
        inputs = list(weights)
        if on_input and (by_input := gradients.pop()) is not None:
            inputs.append(call.tokens)
            gradients.append(call.as_given(by_input))
        known: Tensor = _Known.apply(term.detach(), gradients, *inputs)  # type: ignore[no-untyped-call]
        return known, report


def _gradients(g: Tensor, v: Tensor, shares: Tensor, by: list[Tensor]) -> list[Tensor | None]:
    """Return the derivatives of Σ_b shares_b ⟨g_b, v_b⟩."""
    cotangent = v * shares.view(-1, *(1,) * (v.ndim - 1))
    found: tuple[Tensor | None, ...] = torch.autograd.grad(g, by, cotangent, allow_unused=True)
    return list(found)


class _Known(torch.autograd.Function):
    """A number whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = [None if g is None else g.to(t) for g, t in zip(gradients, inputs, strict=True)]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if g is None else (upstream * g).to(g) for g in ctx.gradients)


def _real(tokens: Tensor | None, x: Tensor) -> Tensor | None:
    """Check which tokens count, and return them as numbers."""
    if tokens is None:
        return None
    if not isinstance(tokens, Tensor) or tokens.shape != x.shape[:2]:
        got = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ArgumentError("tokens", expected=f"one truth value a token, {tuple(x.shape[:2])}", got=got)
    return tokens.to(device=x.device).bool().to(x.dtype)
