"""The Jacobian of any differentiable PyTorch map, by forward and reverse mode.

Fused attention kernels have no forward mode on the CPU, so both modes run under PyTorch's "math"
attention backend: one and the same function is differentiated in both directions. Before any number
is trusted the map is checked: same output twice (no dropout), members independent of each other,
products that are adjoint to each other and agree with the map's own values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.attention import TokenMap, Weighting
from howsmooth.errors import ArgumentError, DerivativeError, HowsmoothError, NonFiniteError
from howsmooth.spectral import LinearOperator

__all__ = [
    "MULTIPLES",
    "AutodiffJacobian",
    "allowance_for_rounding",
    "as_derivative_errors",
    "check_adjoint",
    "check_against_differences",
    "moved_by_rounding",
    "one_backend",
    "weighted_autodiff_jacobian",
]

# Roots of weights are divided by: this keeps them, and probabilities beside them, in float64's range.
_LEAST_LOG_WEIGHT = -600.0

# Moves of the tokens by rounding, and how many times the largest change is allowed for: of 1,920 saturated
# float32 maps one was off by more, by 2 %. By eight times one change one in 36 was, by up to 116 times.
# Each comes with a multiple of the direction: the product is the same multiple but for its own rounding.
MULTIPLES = (1.1, 1.3, 1.7, 1.9)
_ALLOWED = 16.0

# Modules whose output in training mode is random or depends on the other members of the batch.
_STATEFUL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class AutodiffJacobian(LinearOperator):
    """Jacobian of ``f`` at ``x`` by ``torch.func.jvp`` and ``torch.func.vjp``.

    Parameters
    ----------
    f
        A map of ``x`` to a tensor whose leading axes are those of ``x``; each member of the batch
        must depend on its own input only.
    x
        Point of linearisation, float32 or float64.
    batch_dims
        Number of leading axes of ``x`` that count members; by default all but the last two.

    Raises
    ------
    ArgumentError
        If ``f`` is a module in training mode with dropout or batch norm, gives different outputs for
        one input, mixes the batch, or returns something else than a tensor (batch, ...).
    DerivativeError
        If forward or reverse mode is not available, the two do not agree, or f's own values
        contradict them.
    NonFiniteError
        If f(x) is not finite.

    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, batch_dims: int | None = None) -> None:
        _refuse_training_mode(f)
        x = x.detach()
        lead = x.shape[: x.ndim - 2 if batch_dims is None else batch_dims]
        self._f = f
        self._x = x
        y = self._first_value()
        if not isinstance(y, Tensor) or y.shape[: len(lead)] != lead or y.ndim == len(lead):
            tensor = isinstance(y, Tensor)
            got = f"shape {tuple(cast(Tensor, y).shape)}" if tensor else type(y).__name__
            raise ArgumentError(
                "f",
                expected=f"a map to a tensor of shape {(*lead, '...')}, as the batch of x",
                got=got,
                remedy=f"Members are counted by the first axes of x, {len(lead)} of them here; batch_dims "
                "says how many, such as 1 for images (batch, channels, height, width), or 0 for one member."
                if tensor
                else "Return one tensor, for instance with lambda x: f(x)[0].",
            )
        if y.dtype != x.dtype:
            raise ArgumentError(
                "f",
                expected=f"an output in {x.dtype}, as x",
                got=str(y.dtype),
                remedy="Bring the map and x to one dtype, float32 or float64.",
            )
        if not bool(torch.isfinite(y).all()):
            raise NonFiniteError("f", expected="finite outputs at x", got="NaN or infinity")
        if not torch.equal(y, cast(Tensor, self._evaluate(x))):
            raise ArgumentError(
                "f",
                expected="the same output for the same input",
                got="two different outputs",
                remedy="Turn off dropout and other randomness, for instance with f.eval().",
            )
        self._y_shape = y.shape
        super().__init__(
            max(1, lead.numel()), tuple(x.shape[len(lead) :]), tuple(y.shape[len(lead) :]), x.dtype, x.device
        )
        with one_backend(), as_derivative_errors("reverse"):
            self._vjp = torch.func.vjp(f, x)[1]
        self._check_derivatives()

    def _first_value(self) -> object:
        """Return f(x); whatever f raises is said of it."""
        f, x = self._f, self._x
        try:
            return self._evaluate(x)
        except HowsmoothError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            remedy = "Call f(x) once by hand."
            if isinstance(f, nn.Module) and any(isinstance(m, nn.Embedding) for m in f.modules()):
                remedy = (
                    "It begins with token ids, in which there is no derivative: capture it with "
                    "hs.capture(f, ids) and measure site.map at site.x, or measure a function of its "
                    "embeddings, such as lambda e: f(inputs_embeds=e).last_hidden_state."
                )
            raise ArgumentError(
                "f",
                expected=f"a map that takes x, of shape {tuple(x.shape)} in {x.dtype}",
                got=f"{type(error).__name__}: {reason}",
                remedy=remedy,
            ) from error

    def _evaluate(self, x: Tensor) -> object:
        with torch.no_grad(), one_backend():
            return self._f(x)

    def _product(self, e: Tensor) -> Tensor:
        with one_backend(), as_derivative_errors("forward"):
            tangent = torch.func.jvp(self._f, (self._x,), (e.reshape(self._x.shape),))[1]
        return cast(Tensor, tangent).detach().reshape(self.batch, *self.out_shape)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        with one_backend(), as_derivative_errors("reverse"):
            (cotangent,) = self._vjp(u.reshape(self._y_shape))
        return cast(Tensor, cotangent).detach().reshape(self.batch, *self.in_shape)

    def _conditioning(self, e: Tensor, je: Tensor) -> Tensor:
        """Estimate the relative error of J from rounding inside f, which cannot be seen from outside.

        f evaluated in floating point is f at an input off by a rounding error; so J is taken again at tokens
        moved by one machine epsilon each, four times, and sixteen times the largest relative change is
        allowed for. Each product is one with another multiple of e, which rounds anew where terms cancel.
        """

        def products() -> Iterator[Tensor]:
            for c, x in zip(MULTIPLES, moved_by_rounding(self._x), strict=True):
                moved = torch.func.jvp(self._f, (x,), (c * e.reshape(x.shape),))[1]
                yield cast(Tensor, moved).detach().reshape(je.shape) / c

        with one_backend(), as_derivative_errors("forward"):
            return allowance_for_rounding(products(), je)

    def _check_derivatives(self) -> None:
        """Check that forward and reverse mode are adjoint, and that members do not see each other."""
        generator = torch.Generator().manual_seed(0)
        e = torch.randn(self.batch, *self.in_shape, generator=generator, dtype=torch.float64)
        u = torch.randn(self.batch, *self.out_shape, generator=generator, dtype=torch.float64)
        e, u = e.to(self._x), u.to(self._x)
        je, jtu = self._product(e), self._adjoint_product(u)
        forward = self._conditioning(e, je)
        reverse = allowance_for_rounding((self._adjoint_product(c * u) / c for c in MULTIPLES), jtu)
        self.rounding = torch.stack((self.rounding, forward, reverse)).amax(dim=0)
        # Over the whole batch, so that a map that mixes it passes here and is named below.
        check_adjoint(e, je, u, jtu, forward, reverse)
        check_against_differences(
            lambda x: cast(Tensor, self._evaluate(x)),
            self._x,
            e.reshape(self._x.shape),
            self._product,
            float(self.rounding.max()),
        )
        if _mixes(self._product, e):
            raise ArgumentError(
                "f",
                expected="members of the batch that do not depend on each other",
                got="a map that mixes them",
                remedy="Measure one member at a time, or put batch statistics in evaluation mode, or say "
                "with batch_dims how many of the first axes of x count members.",
            )

    def keeps_rows_apart(self) -> bool:
        """Tell whether J is not zero and maps each of two or more rows of one member to that row alone."""
        rows = self.in_shape[0]
        if rows < 2 or self.out_shape[:1] != (rows,):
            return False
        generator = torch.Generator().manual_seed(0)
        e = torch.randn(self.in_shape, generator=generator, dtype=torch.float64).to(self._x)
        return bool(self._product(e[None]).any()) and not _mixes(lambda e: self._product(e[None])[0], e)


def _mixes(product: Callable[[Tensor], Tensor], e: Tensor) -> bool:
    """Tell whether a part of the product, counted along its first axis, depends on another part of e.

    Parts i and j are told apart by one binary digit of their number: tangents on the parts with that digit
    set must leave all others still.
    """
    for digit in range((len(e) - 1).bit_length()):
        chosen = torch.tensor([bool(part >> digit & 1) for part in range(len(e))], device=e.device)
        moved = product(e * chosen.view(-1, *(1,) * (e.ndim - 1)))
        if bool(moved[~chosen].any()):
            return True
    return False


def moved_by_rounding(x: Tensor) -> Iterator[Tensor]:
    """Yield tokens whose every entry is moved by one machine epsilon, of a sign at random, four times."""
    generator = torch.Generator().manual_seed(1)
    for _ in MULTIPLES:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
        yield x * (1 + torch.finfo(x.dtype).eps * signs)


def allowance_for_rounding(moved: Iterable[Tensor], je: Tensor) -> Tensor:
    """Return sixteen times the largest relative change of each member's product ``je`` among some moved."""
    size = je.double().flatten(1).norm(dim=1)
    changes = [(product - je).double().flatten(1).norm(dim=1) for product in moved]
    change = torch.stack(changes).amax(dim=0)
    return _ALLOWED * torch.where(size > 0, change / size, 0.0).cpu()


def check_adjoint(e: Tensor, je: Tensor, u: Tensor, jtu: Tensor, forward: Tensor, reverse: Tensor) -> None:
    """Raise DerivativeError unless ⟨J e, u⟩ = ⟨e, Jᵀ u⟩, e and u Gaussian, up to the errors of J e and Jᵀ u.

    A relative error δ of J e that does not know of u moves the left side by about δ ‖J e‖, whatever its size;
    likewise on the right. ``forward`` and ``reverse`` are what rounding was seen to do to each member.
    """
    left, right = (je * u).sum(dtype=torch.float64), (e * jtu).sum(dtype=torch.float64)
    least = 1e4 * torch.finfo(e.dtype).eps
    sides = ((forward, je), (reverse, jtu))
    allowed = sum((least + float(error.max())) * float(t.double().norm()) for error, t in sides)
    if not float((left - right).abs()) <= allowed + torch.finfo(e.dtype).tiny:
        raise DerivativeError(
            "f: forward and reverse mode disagree (⟨J e, u⟩ is not ⟨e, Jᵀ u⟩). An in-place change or a "
            "custom derivative inside f is wrong; no number can be trusted."
        )


def check_against_differences(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    e: Tensor,
    product: Callable[[Tensor], Tensor],
    rounding: float,
) -> None:
    """Refuse a derivative that f itself contradicts, as where ``detach`` or ``no_grad`` cuts it off.

    Both modes of autodiff are cut off alike, so only f's values show it. Finite differences of several steps
    are taken for a witness where they agree with each other; where f bends within the step they do not, at
    a kink those of the two sides do not, and nothing is said. Nor is it where the rounding of f's values
    explains the difference, or that of products, which may be off by ``rounding``. Where f refuses inputs
    beside x, as on the sphere around a ball that it is defined on, differences are taken into the ball.
    """
    scale = float(x.double().square().mean().sqrt()) or 1.0
    step = scale * torch.finfo(x.dtype).eps ** (1 / 3)
    steps, at = (step, 0.6 * step, step / 4), f(x)
    try:
        sides = [(f(x + h * e) - at, at - f(x - h * e)) for h in steps]
        found = [(ahead + behind) / (2 * h) for h, (ahead, behind) in zip(steps, sides, strict=True)]
        kink = (sides[-1][0] - sides[-1][1]).norm() / steps[-1]
    except Exception:  # f takes x: whatever it raises is about what lies beside it
        longest = [torch.linalg.vector_norm(t, dim=-1).max() for t in (e, x)]
        e = e - x * (longest[0] / longest[1])
        try:
            found = [(4 * f(x + h * e) - 3 * at - f(x + 2 * h * e)) / (2 * h) for h in steps]
        except Exception:
            return
        kink = at.new_zeros(())
    fine = found[-1]
    je = product(e).reshape(fine.shape)
    off = (fine - je).norm()
    reliable = torch.stack([(one - fine).norm() for one in found]).amax() <= 0.05 * fine.norm()
    blurred = 16 * torch.finfo(x.dtype).eps * at.norm() / steps[-1]
    explained = (0.2 + rounding) * torch.maximum(fine.norm(), je.norm())
    if bool(reliable & (off > torch.stack((4 * kink, blurred, explained)).amax())):
        raise DerivativeError(
            "f: its derivative is not that of its values: finite differences contradict it. A detach, a "
            "no_grad or a custom derivative inside f cuts it off; measure a map without them."
        )


def weighted_autodiff_jacobian(f: TokenMap, x: Tensor, weighting: Weighting) -> AutodiffJacobian:
    """Return the operator of (√(a_i/a_j) J_ij) of a map at a measure, by automatic differentiation.

    It is the Jacobian of Y ↦ √a ∘ f(Y / √a) at Y = √a ∘ X, so that all checks hold for it as they stand.

    Parameters
    ----------
    f
        Any map that acts on measures.
    x
        Atoms (n, d), float64 as the map.
    weighting
        Their weights, none below e^-600.

    Raises
    ------
    ArgumentError
        If a weight is smaller, or the map does not act on such a measure.

    """
    smallest = float(weighting.log_weights.min())
    if smallest < _LEAST_LOG_WEIGHT:
        raise ArgumentError(
            "measure",
            expected=f"weights of at least exp({_LEAST_LOG_WEIGHT:g}), for automatic differentiation",
            got=f"exp({smallest:.6g})",
            remedy="Softmax attention has a closed form, which forms smaller weights in logarithms.",
        )
    root = (weighting.log_weights / 2).exp()[:, None].to(x)
    return AutodiffJacobian(lambda y: root * f._forward(y / root, weighting), root * x)


def _refuse_training_mode(f: Callable[[Tensor], Tensor]) -> None:
    if not isinstance(f, nn.Module):
        return
    for name, module in f.named_modules():
        active = module.training and (getattr(module, "p", 1.0) > 0)
        if isinstance(module, _STATEFUL) and active:
            raise ArgumentError(
                "f",
                expected="a module in evaluation mode",
                got=f"{type(module).__name__} '{name or 'f'}' in training mode",
                remedy="Call f.eval() first.",
            )


@contextmanager
def one_backend() -> Iterator[None]:
    """Let PyTorch's own attention run in the one kernel that has both modes."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def as_derivative_errors(mode: str) -> Iterator[None]:
    """Turn PyTorch's refusals to differentiate into one clear error."""
    try:
        yield
    except HowsmoothError:
        raise
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DerivativeError(
            f"f: {mode}-mode differentiation failed: {reason} Write the map with operations that have "
            f"{mode}-mode derivatives, or give one of howsmooth's own maps."
        ) from error
