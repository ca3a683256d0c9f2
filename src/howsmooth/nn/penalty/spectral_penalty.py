"""A penalty in the training loss on the leading singular value of the Jacobian of every attention layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howsmooth.errors import ArgumentError, NonFiniteError, check_number, check_whole
from howsmooth.jacobian.autodiff import one_backend
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.nn.checks import check
from howsmooth.nn.penalty.call_recorder import LayerCall, Penalty, drawing_nothing, replica
from howsmooth.nn.penalty.report import LayerReport, PenaltyReport
from howsmooth.nn.penalty.singular_value import Directions, JacobianOperator, begin, relative_residual, unit

__all__ = ["SpectralPenalty"]

Reduction = Literal["mean", "max", "sum"]
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "max": torch.max, "sum": torch.sum}


class SpectralPenalty(Penalty):
    """A training penalty on the local Lipschitz constants of the layers of a model at the current batch.

    The inputs of the layers are recorded in each forward pass ``model(x)``. ``penalty()`` then returns the
    penalty at these inputs, with its gradient in the weights of each layer::

        with SpectralPenalty(model) as penalty:
            for x, y in batches:
                loss = criterion(model(x), y) + 0.01 * penalty()
                loss.backward()
                ...

    For each sequence of the batch, the penalty is σ = ⟨u, J v⟩. Here J is the Jacobian of the layer's output
    with respect to its tokens, and (u, v) is a pair of unit vectors that the gradient treats as constant. The
    pair is kept between steps and improved by one product with JᵀJ in each step. Once it has converged, the
    penalty is ‖J‖ with its gradient. Before, the value is a lower estimate. ``penalty.report`` tells which is
    the case.

    For this, the layer is run again on a replica with the same weights. The replica is in evaluation mode,
    has its own buffers and none of the user's hooks, and computes in float32 if the model uses half precision
    or autocast. The model, its random numbers and its training mode do not change. Because the replica has no
    dropout, the penalty is that of the layer without dropout. The gradient is derived on the documentation
    page "Enforce: layers with a constant that is proved".

    ArgumentError names an argument of a wrong type or value, says that there was no forward pass with
    gradients, and names a layer that is random in evaluation mode or cannot be run again; DerivativeError
    one that cannot be differentiated twice in reverse mode, and NonFiniteError what is NaN or infinite.

    Parameters
    ----------
    model
        Any module.
    layers
        Paths of modules in ``model.named_modules()``, or patterns such as "encoder.layers.*.self_attn", in
        which * stands for what is between two dots: "encoder.layers.*" is all blocks, each as a whole. The
        penalty is then that of the named module as it is (scope ``module``). The default is the innermost
        modules whose class name contains "attention", with their output projection wherever the model applies
        it: scope ``attention``, as of :class:`~howsmooth.nn.LipschitzMonitor`. A module whose output
        projection is not found is taken as it is, with a warning. The tokens are the module's first
        floating-point argument (..., n, d), and the output is its first floating-point result. A tensor that
        is given as queries, keys and values is perturbed in all three. All other arguments are constant.
    on_input
        Whether the gradient also flows to the inputs of the layers, and so to the modules before them.
    members
        Number of sequences, from the start of each batch, that take part; by default all. The cost is
        proportional to it. In shuffled batches a few sequences represent the others, and few sequences with
        more ``steps`` are better than many with one step.
    steps
        Number of products with JᵀJ in each call, starting from the pair of the last call. One is enough if
        the same sequences return in the same places of the batch. For new sequences in each batch, use two to
        five.
    first_steps
        Number of products for sequences without a pair.
    rtol
        Relative residual |J v − σ u| / σ at which a pair counts as converged.
    over_members, over_layers
        Reductions over the sequences and then over the layers: "mean", "max" or "sum".
    transform
        Function that is applied to the values (members,) entry by entry before the reduction, such as
        ``lambda s: (s - 1).clamp(min=0)``.
    seed
        Seed of the random directions. The global random state is not used.
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
        check_whole("steps", steps)
        check_whole("first_steps", first_steps, least=2)
        if members is not None:
            check_whole("members", members)
        check_number("rtol", rtol, "a number between 0 and 1", lambda number: 0 < number < 1)
        for name, given in (("over_members", over_members), ("over_layers", over_layers)):
            check(given in _REDUCTIONS, name, "'mean', 'max' or 'sum'", repr(given))
        known = transform is None or callable(transform)
        check(known, "transform", "a function of tensors, or None", repr(transform))
        #: The scope that is asked for; the report has the scope of each layer.
        self.scope = "module" if layers else "attention"
        first = "" if members is None else f"the first {members} sequences, "
        settings = f"scope {self.scope}, {first}steps={steps}"
        super().__init__(model, layers, projected=layers is None, settings=settings)
        self._on_input = bool(on_input)
        self._members = members
        self._checked: set[str] = set()
        self._steps, self._first_steps, self._rtol = steps, first_steps, rtol
        self._over_members, self._over_layers = _REDUCTIONS[over_members], _REDUCTIONS[over_layers]
        self._transform = transform
        self._seed = seed
        self._directions: dict[str, Directions] = {}
        self._report: PenaltyReport | None = None

    def __call__(self, tokens: Tensor | None = None) -> Tensor:
        """Return the penalty at the inputs of the last forward pass, a scalar to add to the loss.

        ``tokens`` is a mask (batch, n), True or 1 for tokens that count, such as the ``attention_mask`` of
        padded sequences. Other tokens are not perturbed, and their outputs are ignored.
        """
        return self._over_layers(torch.stack(list(self.terms(tokens).values())))

    def terms(self, tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Return the penalty of each layer by name, so that the caller can weight the layers."""
        calls = self._named_calls()
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
        """The singular values in the last evaluation of the penalty, and whether they have converged."""
        if self._report is None:
            raise ArgumentError("report", expected="a penalty that was called", got="no call yet")
        return self._report

    def measure(
        self,
        tokens: Tensor | None = None,
        *,
        rtol: float = 1e-3,
        confidence: float = 0.999,
        max_iterations: int = 200,
        seed: int = 0,
    ) -> dict[str, LipschitzEstimate]:
        """Measure the local Lipschitz constant of each layer, with an interval of given confidence.

        The result has one estimate of shape (members,) for each layer, at the inputs of the last forward
        pass. The measurement is :func:`howsmooth.local_lipschitz`, with its arguments, from random starts, on
        the same replicas as the penalty. It costs about ten to a hundred products with JᵀJ. The directions of
        the penalty do not change. ``tokens`` is as for calling the penalty.
        """
        found: dict[str, LipschitzEstimate] = {}
        for name, call in self._named_calls().items():
            call.check_unchanged()
            x = call.members
            f = partial(call.run, replica(call.layer, call.name))
            real = _real(tokens, x)
            if real is not None:
                f = partial(_at_real_tokens, f, x, real)
            with torch.autocast(x.device.type, enabled=False), drawing_nothing(name, x.device):
                found[name] = local_lipschitz(
                    f, x, rtol=rtol, confidence=confidence, max_iterations=max_iterations, seed=seed
                )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the estimated singular vectors, for a checkpoint."""
        return {name: directions.state_dict() for name, directions in self._directions.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the estimated singular vectors of these layers from the result of :meth:`state_dict`."""
        check(isinstance(state, Mapping), "state", "what state_dict() returned", type(state).__name__)
        expected = f"the state of a penalty with the layers {', '.join(self.layers)}"
        remedy = "Wrapped models, as by DistributedDataParallel, name them otherwise."
        for name in state:
            own = name.partition("[")[0] in self.layers
            check(own, "state", expected, f"a layer {name!r}", remedy)
        self._directions = {}
        for name, kept in state.items():
            self._directions[name] = Directions(self._seed)
            self._directions[name].load_state_dict(kept)

    def _of_layer(
        self, name: str, call: LayerCall, directions: Directions, tokens: Tensor | None
    ) -> tuple[Tensor, LayerReport]:
        call.check_unchanged()
        body = replica(call.layer, call.name)
        if self._members is not None:
            # The cut is verified once for each layer, by comparing outputs.
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
        # The gradients are computed here, and the loss gets their values only. So the graph's memory is freed
        # before the next layer, and the loss can be differentiated in any mode.
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            with drawing_nothing(name, x.device):
                pair = JacobianOperator(lambda t: call.run(body, t), x, _real(tokens, x))
                u, upper = begin(pair, directions, self._steps, self._first_steps, self._rtol)
            u.requires_grad_()
            g = pair.pull_back(u)
            sigma = g.detach().flatten(1).norm(dim=1).requires_grad_()
            if not bool(sigma.isfinite().all()):
                raise NonFiniteError("X", expected="finite derivatives", got="NaN or infinity")
            changed = sigma if self._transform is None else self._transform(sigma)
            kind = type(changed).__name__
            check(isinstance(changed, Tensor), "transform", "a function that returns a tensor", kind)
            term = self._over_members(changed)
            # The share of a member is the derivative of the reduced term by its singular value.
            (shares,) = torch.autograd.grad(term, sigma)
            v = unit(g.detach())
            if bool((shares == 0).any()):
                # The gradient by u gives J v times the member's share, so a share of zero needs a separate
                # product.
                jv = pair.push_forward(g, u, v)
                gradients = _gradients(g, v, shares, sought)
            else:
                scaled, *gradients = _gradients(g, v, shares, [u, *sought])
                assert scaled is not None
                jv = scaled / shares.view(-1, *(1,) * (scaled.ndim - 1))
        jv = jv.detach()
        residual = relative_residual(jv, u.detach())
        directions.keep(jv)
        known = self._projections is not None and call.name not in self._projections.unknown
        scope = "attention" if known else "module"
        report = LayerReport(name, sigma.detach(), residual, residual <= self._rtol, upper, scope)
        inputs = list(weights)
        if on_input and (by_input := gradients.pop()) is not None:
            inputs.append(call.tokens)
            gradients.append(call.as_given(by_input))
        # The result is a number whose backward pass hands out these gradients.
        result: Tensor = _Known.apply(term.detach(), gradients, *inputs)  # type: ignore[no-untyped-call]
        return result, report


def _gradients(g: Tensor, v: Tensor, shares: Tensor, by: list[Tensor]) -> list[Tensor | None]:
    """Return the derivatives of Σ_b shares_b ⟨g_b, v_b⟩ with respect to the tensors ``by``."""
    cotangent = v * shares.view(-1, *(1,) * (v.ndim - 1))
    found: tuple[Tensor | None, ...] = torch.autograd.grad(g, by, cotangent, allow_unused=True)
    return list(found)


class _Known(torch.autograd.Function):
    """An autograd function that returns a number and gradients that were computed beforehand."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = [None if g is None else g.to(t) for g, t in zip(gradients, inputs, strict=True)]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if g is None else (upstream * g).to(g) for g in ctx.gradients)


def _at_real_tokens(f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor, t: Tensor) -> Tensor:
    y = f(torch.where(real.view(*real.shape, *(1,) * (x.ndim - 2)) > 0, t, x))
    return y * real.view(*real.shape, *(1,) * (y.ndim - 2))


def _real(tokens: Tensor | None, x: Tensor) -> Tensor | None:
    """Check the mask of tokens that count. Return it as numbers 1 and 0, or None if all tokens count."""
    if tokens is None:
        return None
    got = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
    fits = isinstance(tokens, Tensor) and tokens.shape == x.shape[:2]
    remedy = "Where layers see sequences of other lengths, make one penalty for each, by layers=."
    check(fits, "tokens", f"a mask of shape {tuple(x.shape[:2])}", got, remedy)
    binary = bool(((tokens == 0) | (tokens == 1)).all())
    check(binary, "tokens", "booleans, or ones and zeros", "other numbers")
    empty = int((~tokens.bool().any(dim=1)).sum())
    expected = "a mask that is true at the tokens that count, at least one in each sequence"
    remedy = "For a key_padding_mask, which is true at padding, give ~key_padding_mask."
    check(not empty, "tokens", expected, f"{empty} of {len(tokens)} sequences without one", remedy)
    return tokens.to(device=x.device).bool().to(x.dtype)
