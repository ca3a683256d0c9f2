"""The Jacobian of any differentiable PyTorch map, by automatic differentiation.

The graph of the map at its point is kept. Reverse mode over it gives Jᵀu, which is linear in u, so that
reverse mode over that gives J e: no product evaluates the map again. PyTorch's forward mode does so, and
takes several times as long in a Transformer; it checks the products, and replaces them where the graph does
not fit.

PyTorch's fused attention kernels have no forward mode on the CPU, so both modes run with its "math" attention
backend. The same function is then differentiated in both directions. The map is checked before a number is
given out: it returns the same output twice (no dropout), members of the batch do not depend on each other,
the two products are adjoint to each other, and finite differences of the map agree with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.errors import ArgumentError, DerivativeError, HowsmoothError, NonFiniteError
from howsmooth.jacobian.lost_products import overflows, underflows, values_out_of_range
from howsmooth.memory import memory_budget
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.operator import check_finite
from howsmooth.spectral.scaling import PowersOfTwo, in_range, out_of_range, times_power

__all__ = [
    "MULTIPLES", "AutodiffJacobian", "Linearisation", "allowance_for_rounding", "as_derivative_errors",
    "check_adjoint", "check_against_differences", "moved_by_rounding", "one_backend",
    "weighted_autodiff_jacobian",
]  # fmt: skip

# Smallest log-weight of an atom. Tokens are divided by the roots of the weights, and this keeps the roots,
# and the probabilities beside them, in the range of float64.
_LEAST_LOG_WEIGHT = -600.0

# To estimate the rounding error, each product is computed again four times for a multiple of the direction,
# which changes the rounding but not the exact product, and those with Jᵀ also at tokens moved by one machine
# epsilon.
MULTIPLES = (1.1, 1.3, 1.7, 1.9)
# The largest of the four changes is multiplied by this. Of 960 saturated float32 maps none had a larger
# error; the largest was 0.8 of it. With a single change, multiplied by eight, one in 36 had, by up to 116
# times.
_ALLOWED = 16.0
# If a float64 operator judges the result, one repeated product and this factor are enough: float64 rounds 2²⁹
# times finer, so that a generous estimate costs nothing. Of the maps above none had a larger error than 928
# times a single change.
_ALLOWED_IF_JUDGED = 2048.0
# Relative rounding up to which so generous an estimate is taken.
_SMALL = 1e-2

# How many graphs of the map must fit into memory for the derivative of the graph to be kept.
_GRAPHS = 4
# From so many tokens on, forward mode is taken: attention in memory O(n), for which that is faster.
_LONG = 1024

# Seed of the vectors along which derivatives are checked
_CHECK_SEED = 0x9D2C5680

# Modules whose output in training mode is random or depends on the other members of the batch.
_STATEFUL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class AutodiffJacobian(LinearOperator):
    """The Jacobian of a map ``f`` at a point ``x``, computed by automatic differentiation in PyTorch.

    Parameters
    ----------
    f
        A map of ``x`` to a tensor whose leading axes are those of ``x``; each member of the batch
        must depend on its own input only.
    x
        Point of linearisation, float32 or float64.
    batch_dims
        Number of leading axes of ``x`` that are batch axes; by default all axes but the last two.
    start
        Vectors (members, ...) along which the derivatives are checked; by default Gaussian ones.
    rounding
        The relative rounding error of the products for each member, if ``f`` was checked before, in another
        dtype; then it is not checked again.
    float64_bytes
        How many bytes a float64 operator of the same map may use, which judges what is found with this one.

    Attributes
    ----------
    graph_bytes
        How many bytes the kept graph takes, weights included; infinite where they cannot be counted.
    judged
        Whether a float64 operator fits into ``float64_bytes``. If so, rounding is estimated from a single
        repeated product.
    powers
        The powers of two by which the checks multiplied the products to bring them into range.

    Raises
    ------
    ArgumentError
        If ``f`` is a module in training mode with dropout or batch norm, gives different outputs for
        one input, mixes the batch, or returns something else than a tensor (batch, ...).
    DerivativeError
        If forward or reverse mode is not available, if the two do not agree, or if finite differences
        of ``f`` contradict them.
    NonFiniteError
        If f(x) is not finite, or the products underflow whatever vectors they are taken with.

    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        x: Tensor,
        batch_dims: int | None = None,
        *,
        start: Tensor | None = None,
        rounding: Tensor | None = None,
        float64_bytes: float = 0.0,
    ) -> None:
        _refuse_training_mode(f)
        x = x.detach()
        lead = x.shape[: x.ndim - 2 if batch_dims is None else batch_dims]
        self._f = f
        self._x = x
        # Estimating the rounding needs a second graph, and each is followed by that of its derivative.
        most = memory_budget(None, x.device) // _GRAPHS if x.shape[len(lead)] < _LONG else 0
        try:
            with as_derivative_errors("reverse"):
                self._kept = Linearisation(f, x, most, watched=True)
        except Exception:
            self._refuse_failing()
            raise
        y: object = self._kept.y
        if not isinstance(y, Tensor) or y.shape[: len(lead)] != lead or y.ndim == len(lead):
            tensor = isinstance(y, Tensor)
            got = f"shape {tuple(cast(Tensor, y).shape)}" if tensor else type(y).__name__
            raise ArgumentError(
                "f",
                expected=f"a map to a tensor of shape {(*lead, '...')}, as the batch of x",
                got=got,
                remedy=f"The first {len(lead)} axes of x were taken as batch axes; set batch_dims to their "
                "number, such as 1 for images (batch, channels, height, width), or 0 for one member."
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
        y = y.detach()
        self._y_shape = y.shape
        shapes = tuple(x.shape[len(lead) :]), tuple(y.shape[len(lead) :])
        super().__init__(max(1, lead.numel()), *shapes, x.dtype, x.device, rounding)
        self.graph_bytes = self._kept.graph_bytes
        # The weights and the graph take twice as many bytes in float64.
        self.judged = x.dtype == torch.float32 and 2 * self.graph_bytes <= float64_bytes
        self.powers = PowersOfTwo.ones(self.batch)
        if rounding is None:
            self._check_derivatives(y, start)

    def _refuse_other_outputs(self, again: Tensor | None) -> None:
        """Raise ArgumentError if two outputs of f at x differ; ``again`` is the second output, or None."""
        # Where derivatives are computed too, the same operations may round otherwise; then values decide.
        if again is not None and torch.equal(self._kept.y, again):
            return
        first, second = (cast(Tensor, self._evaluate(self._x)) for _ in range(2))
        if not torch.equal(first, second):
            raise ArgumentError(
                "f",
                expected="the same output for the same input",
                got="two different outputs",
                remedy="Turn off dropout and other randomness, for instance with f.eval().",
            )

    def _refuse_failing(self) -> None:
        f, x = self._f, self._x
        try:
            self._evaluate(x)
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
        with as_derivative_errors("reverse"):
            twice = self._kept.twice
        with one_backend(), as_derivative_errors("reverse" if twice else "forward"):
            tangent = self._kept.product(e.reshape(self._x.shape))
        return tangent.reshape(self.batch, *self.out_shape)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        with one_backend(), as_derivative_errors("reverse"):
            return self._transposed(self._kept, u)

    def _transposed(self, at: Linearisation, u: Tensor) -> Tensor:
        return at.adjoint_product(u.reshape(self._y_shape)).reshape(self.batch, *self.in_shape)

    def _forward_product(self, e: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return f(x) and J e by forward mode; if f has no forward mode, return None and J e."""
        try:
            with one_backend(), as_derivative_errors("forward"):
                y, tangent = _by_forward_mode(self._f, self._x, e.reshape(self._x.shape))
        except DerivativeError:
            if not self._kept.twice:
                raise
            return None, self._product(e)
        return y, tangent.reshape(self.batch, *self.out_shape)

    def _conditioning(self, u: Tensor, jtu: Tensor) -> Tensor:
        """Estimate the relative error that rounding inside f causes in Jᵀu, which was computed as ``jtu``.

        Rounding inside f acts like a rounding error of its input. So Jᵀu is computed four more times, at
        tokens moved by one machine epsilon each and for multiples of u, which round terms that cancel
        otherwise. For Gaussian vectors such changes of J are as large in Jᵀu as in J e, which takes longer.
        Where the result is judged in float64, one repetition and a larger factor are enough if the estimate
        is small. If not, the finer estimate is made, because a map that loses all digits is refused by it.
        """

        def products() -> Iterator[Tensor]:
            for c, x in zip(MULTIPLES, moved_by_rounding(self._x), strict=True):
                moved = partial(self._transposed, Linearisation(self._f, x, -1))
                yield self.powers.adjoint_product(moved, c * u) / c

        with one_backend(), as_derivative_errors("reverse"):
            made = products()
            first = next(made)
            if self.judged:
                generous = allowance_for_rounding([first], jtu, _ALLOWED_IF_JUDGED)
                if float(generous.max()) <= _SMALL:
                    return generous
            return allowance_for_rounding(itertools.chain([first], made), jtu)

    def _check_derivatives(self, y: Tensor, start: Tensor | None) -> None:
        """``start`` is the direction, random if None; ``y`` is f(x)."""
        # Not the seed of a start, as ⟨J e, e⟩ = ⟨e, Jᵀe⟩ shows less than two independent vectors.
        generator = torch.Generator().manual_seed(_CHECK_SEED)
        e = start
        if e is None:
            e = torch.randn(self.batch, *self.in_shape, generator=generator, dtype=torch.float64)
        u = torch.randn(self.batch, *self.out_shape, generator=generator, dtype=torch.float64)
        e, u = e.to(self._x), u.to(self._x)
        again, je = self._forward_product(e)
        self._refuse_other_outputs(again)
        unscaled = first = self._product(e) if self._kept.twice else je
        self.powers, first = in_range(self, e, first)
        if self.powers:
            je = self.powers.product(lambda e: self._forward_product(e)[1], e)
        jtu = self.powers.adjoint_product(self._adjoint_product, u)
        self._refuse_out_of_range(e, first, u, jtu)
        check_finite(torch.stack([t.flatten().abs().max() for t in (je, first, jtu)]))
        reverse = self._conditioning(u, jtu)
        product = partial(self.powers.product, self._product)
        if self.judged and float(reverse.max()) <= _SMALL:
            forward = reverse
        else:
            forward = allowance_for_rounding((product(c * e) / c for c in MULTIPLES), first)
        apart = _adjoint_defect(e, je, u, jtu)
        self.rounding = torch.stack((self.rounding, forward, reverse, apart)).amax(dim=0)
        # The check sums over the whole batch. A map that mixes the batch passes it, and gets the error below.
        total = self.powers.total
        sizes = total[_nonzero(je).cpu().numpy()].min(initial=total.max()) - total
        with self._range_first(e, u):
            check_adjoint(e, times_power(je, sizes), u, times_power(jtu, sizes), forward, reverse)
        # Where only scaled products are not zero, the values of f have underflowed, too, and show nothing.
        shown, known = e, first
        if self.powers:
            lost = _nonzero(first) & ~_nonzero(unscaled)
            known = times_power(first, -self.powers.total)
            shown, known = (torch.where(lost.view(-1, *(1,) * (t.ndim - 1)), 0.0, t) for t in (shown, known))
        with self._range_first(e, u):
            check_against_differences(
                lambda x: cast(Tensor, self._evaluate(x)),
                self._x,
                y,
                shown.reshape(self._x.shape),
                self._product,
                float(self.rounding.max()),
                known,
            )
        if _mixes(product, e):
            raise ArgumentError(
                "f",
                expected="members of the batch that do not depend on each other",
                got="a map that mixes them",
                remedy="Measure one member at a time, or put batch statistics in evaluation mode, or say "
                "with batch_dims how many of the first axes of x are batch axes.",
            )

    def _refuse_out_of_range(self, e: Tensor, je: Tensor, u: Tensor, jtu: Tensor) -> None:
        """Raise NonFiniteError if a product is spoilt by over- or underflow; a Jacobian of zeros passes."""
        lost = ~(_nonzero(je) & _nonzero(jtu))
        scaled = torch.from_numpy(self.powers.total != 0).to(lost.device)
        if bool(lost.any()):
            there = lost.view(-1, *(1,) * (u.ndim - 1)), lost.view(-1, *(1,) * (e.ndim - 1))
            if self._underflows(torch.where(there[1], e, 0.0), torch.where(there[0], u, 0.0)):
                raise self._out_of_range("products that underflow to zero inside f")
        if self._kept.infinite and overflows(self._f, self._x):
            raise self._out_of_range("numbers that overflow inside f")
        # Members of any other size are none of this, and are replaced by one of these.
        if bool((lost | scaled).any()):
            x = self._x.reshape(self.batch, *self.in_shape)
            chosen = (lost | scaled).view(-1, *(1,) * (x.ndim - 1))
            x = torch.where(chosen, x, x[lost | scaled][:1]).reshape(self._x.shape)
            if values_out_of_range(self._f, x):
                raise self._out_of_range("numbers that underflow or overflow inside f")

    @contextmanager
    def _range_first(self, e: Tensor, u: Tensor) -> Iterator[None]:
        """Replace a DerivativeError by a NonFiniteError if numbers inside f overflow or underflow."""
        try:
            yield
        except DerivativeError as error:
            lost = self._underflows(e, u, digits=True)
            if lost or values_out_of_range(self._f, self._x):
                raise self._out_of_range("numbers that underflow or overflow inside f") from error
            raise

    def _underflows(self, e: Tensor, u: Tensor, *, digits: bool = False) -> bool:
        u = times_power(u, self.powers.adjoint_before).reshape(self._y_shape)
        e = times_power(e, self.powers.before).reshape(self._x.shape)
        with one_backend():
            return self._kept.underflows(e, u, digits=digits)

    def _out_of_range(self, got: str) -> NonFiniteError:
        return NonFiniteError(
            "f",
            expected=f"a Jacobian whose products stay in the range of {self.dtype}",
            got=got,
            remedy="Measure f and x in float64."
            if self.dtype == torch.float32
            else "Multiply small weights by a constant, and divide the result by it.",
        )

    def keeps_rows_apart(self) -> bool:
        """Return True if row i of J E depends only on row i of E. The operator must have one member; the
        result is False for J = 0 and for fewer than two tokens.
        """
        rows = self.in_shape[0]
        if rows < 2 or self.out_shape[:1] != (rows,):
            return False
        generator = torch.Generator().manual_seed(0)
        e = torch.randn(self.in_shape, generator=generator, dtype=torch.float64).to(self._x)

        def product(e: Tensor) -> Tensor:
            return self.powers.product(self._product, e[None])[0]

        return bool(product(e).any()) and not _mixes(product, e)


class Linearisation:
    """The Jacobian J of a map at one point, whose products are computed along the autograd graph of the map.

    The graph of u ↦ Jᵀu is kept too, and gives J e, if the graph of the map takes at most ``most`` bytes and
    can be differentiated twice; otherwise J e takes forward mode, by ``forward`` if it is given. An infinite
    ``most`` spares the counting, whose hooks only the garbage collector frees. With ``watched`` the attribute
    ``infinite`` says whether the derivative is made of infinite numbers.
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        x: Tensor,
        most: float,
        *,
        watched: bool = False,
        forward: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._forward = forward or (lambda x, e: _by_forward_mode(f, x, e)[1])
        self._x = x.detach().requires_grad_()
        self._most = most
        self.infinite = False
        kept: dict[int, int] = {}

        def counted(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            kept[storage._cdata] = storage.nbytes()  # Tensors that wrap others have no data pointer.
            if watched and not self.infinite and t.grad_fn is not None and t.is_floating_point():
                # Weights are not made by f, and are large: a transposed one has a graph, but of its own.
                given = t._base is not None and t._base.is_leaf
                self.infinite = not given and bool(t.isposinf().any())
            return t

        try:
            hooks = nullcontext() if math.isinf(most) else saved_tensors_hooks(counted, lambda t: t)
            with torch.enable_grad(), one_backend(), hooks:
                self.y = f(self._x)
            # How many bytes PyTorch keeps for reverse mode, weights included
            self.graph_bytes: float = sum(kept.values())
        except RuntimeError as error:
            # A map that is itself a gradient by torch.func refuses to be counted.
            if "saved tensor hooks" not in str(error):
                raise
            with torch.enable_grad(), one_backend():
                self.y = f(self._x)
            self.graph_bytes = math.inf
        self._jtu: Tensor | None = None

    @cached_property
    def twice(self) -> bool:
        """Whether J e is computed by differentiating u ↦ Jᵀu. The first use creates the graph of this map."""
        if self.graph_bytes > self._most:
            return False
        self._u = torch.zeros_like(self.y).requires_grad_()
        try:
            with torch.enable_grad(), one_backend():
                self._jtu = _gradient(self.y, self._x, self._u, create_graph=True)
            zero = torch.zeros_like(self._x)
            linear = self._jtu is not None and _gradient(self._jtu, self._u, zero) is not None
        except RuntimeError:
            linear = False
        # Jᵀu knows nothing of u if the map is locally constant, or if a custom derivative is made only once.
        return linear or not self.adjoint_product(torch.ones_like(self.y)).any()

    def product(self, e: Tensor) -> Tensor:
        """Return the product J e of the Jacobian with a tangent ``e``."""
        if not self.twice:
            return self._forward(self._x.detach(), e)
        found = None if self._jtu is None else _gradient(self._jtu, self._u, e)
        return torch.zeros_like(self.y) if found is None else found

    def adjoint_product(self, u: Tensor) -> Tensor:
        """Return the product Jᵀu of the transposed Jacobian with a cotangent ``u``."""
        found = _gradient(self.y, self._x, u)
        return torch.zeros_like(self._x) if found is None else found

    def underflows(self, e: Tensor, u: Tensor, *, digits: bool = False) -> bool:
        """Return True if some number underflows to zero while Jᵀu or J e is computed. With ``digits``, also
        return True if a number falls below the smallest normal number, where it loses digits.
        """
        if self.y.grad_fn is None:
            return False
        twice = self.twice and self._jtu is not None and self._jtu.grad_fn is not None
        return underflows(self.y, self._x, u, digits) or (
            twice and underflows(cast(Tensor, self._jtu), self._u, e, digits)
        )


def _gradient(y: Tensor, x: Tensor, u: Tensor, *, create_graph: bool = False) -> Tensor | None:
    """Return (∂y/∂x)ᵀ u without freeing the graph, or None if y does not depend on x."""
    if not y.requires_grad:
        return None
    options = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    found: Tensor | None = torch.autograd.grad(y, x, u, **options)[0]
    return found


def _by_forward_mode(f: Callable[[Tensor], Tensor], x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    y, tangent, *_ = torch.func.jvp(f, (x,), (e,))
    return cast(Tensor, y).detach(), cast(Tensor, tangent).detach()


def _mixes(product: Callable[[Tensor], Tensor], e: Tensor) -> bool:
    """Return True if some entry of the result depends on an entry of the input with another index."""
    for digit in range((len(e) - 1).bit_length()):
        chosen = torch.tensor([bool(part >> digit & 1) for part in range(len(e))], device=e.device)
        moved = product(e * chosen.view(-1, *(1,) * (e.ndim - 1)))
        if bool(moved[~chosen].any()):
            return True
    return False


def moved_by_rounding(x: Tensor) -> Iterator[Tensor]:
    """Yield four copies of ``x`` with each entry times 1 + ε or 1 − ε at random (ε: machine epsilon)."""
    generator = torch.Generator().manual_seed(1)
    for _ in MULTIPLES:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
        limits = torch.finfo(x.dtype)
        # Numbers below the smallest normal one move by the smallest positive number.
        yield x * (1 + limits.eps * signs) + torch.where(x == 0, 0.0, limits.tiny * limits.eps * signs)


def allowance_for_rounding(moved: Iterable[Tensor], je: Tensor, allowed: float = _ALLOWED) -> Tensor:
    """Estimate the relative rounding error of each member of a product ``je`` (batch, ...). It is ``allowed``
    times the largest relative difference from repetitions ``moved``, which round differently.
    """
    exponents = np.zeros(len(je), dtype=np.int64)
    if je.dtype == torch.float64:  # squares of float32 numbers are in range
        exponents = -out_of_range(je)
    je = times_power(je, exponents)
    size = je.double().flatten(1).norm(dim=1)
    changes = [(times_power(product, exponents) - je).double().flatten(1).norm(dim=1) for product in moved]
    change = torch.stack(changes).amax(dim=0)
    return allowed * torch.where(size > 0, change / size, 0.0).cpu()


def _nonzero(t: Tensor) -> Tensor:
    return t.flatten(1).any(dim=1)


def _length(t: Tensor) -> float:
    """Return the Euclidean norm of a tensor, even if squares of its entries leave the range of float64."""
    t = t.double()
    length = float(t.norm())
    if 1e-140 < length < 1e140:
        return length
    largest = float(t.abs().max())
    return largest * float((t / largest).norm()) if 0 < largest < math.inf else length


def check_adjoint(e: Tensor, je: Tensor, u: Tensor, jtu: Tensor, forward: Tensor, reverse: Tensor) -> None:
    """Raise DerivativeError unless ⟨J e, u⟩ = ⟨e, Jᵀu⟩ up to rounding, for Gaussian e and u. The relative
    rounding errors of J e and Jᵀu are about ``forward`` and ``reverse``, for each member.

    A relative error δ of J e, independent of u, changes ⟨J e, u⟩ by about δ ‖J e‖, and likewise for Jᵀ u.
    """
    left, right = (je * u).sum(dtype=torch.float64), (e * jtu).sum(dtype=torch.float64)
    least = 1e4 * torch.finfo(e.dtype).eps
    sides = ((forward, je), (reverse, jtu))
    allowed = sum((least + float(error.max())) * _length(t) for error, t in sides)
    if not float((left - right).abs()) <= allowed + torch.finfo(e.dtype).tiny:
        raise DerivativeError(
            "f: forward and reverse mode disagree (⟨J e, u⟩ is not ⟨e, Jᵀ u⟩). An in-place change or a "
            "custom derivative inside f is wrong, or rounding inside f leaves no digit of its derivative, as "
            "in a saturated softmax; no number can be trusted."
            + (" In the latter case measure f and x in float64." if e.dtype == torch.float32 else "")
        )


def _adjoint_defect(e: Tensor, je: Tensor, u: Tensor, jtu: Tensor) -> Tensor:
    """Estimate the relative rounding error that explains why ⟨J e, u⟩ and ⟨e, Jᵀu⟩ differ."""
    left, right = ((a * b).flatten(1).sum(dim=1, dtype=torch.float64) for a, b in ((je, u), (e, jtu)))
    size = torch.maximum(je.double().flatten(1).norm(dim=1), jtu.double().flatten(1).norm(dim=1))
    apart = torch.where(size > 0, (left - right).abs() / size, 0.0).cpu()
    return torch.where(apart > 1e4 * torch.finfo(e.dtype).eps, _ALLOWED * apart, 0.0)


def check_against_differences(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    e: Tensor,
    product: Callable[[Tensor], Tensor],
    rounding: float,
    je: Tensor | None = None,
) -> None:
    """Raise DerivativeError if finite differences of ``f`` at ``x`` along ``e`` contradict its derivative
    ``product``. ``y`` is f(x), and ``je`` is the product with ``e``, if it is known.

    A ``detach`` or ``no_grad`` inside f cuts off forward and reverse mode alike, so only the values of f show
    it. A single value is enough if its difference from f(x) is explained. Differences count as evidence only
    if those for three step lengths agree, and if forward and backward differences agree, which rules out a
    kink. Differences that rounding explains are allowed: the rounding of the values of f, and the relative
    error ``rounding`` of the products. If f refuses inputs near x, for instance because x is on the boundary
    of the ball where f is defined, the steps are taken towards the inside of the ball.
    """
    scale = _length(x) / math.sqrt(x.numel()) or 1.0
    # Shorter steps than those at the smallest normal number have few digits, or are zero.
    step = max(scale, torch.finfo(x.dtype).tiny) * torch.finfo(x.dtype).eps ** (1 / 3)
    steps, at = (step / 4, 0.6 * step, step), y.detach()

    # Values of f are rounded, and lose all digits below the smallest normal number.
    tiny = torch.finfo(x.dtype).tiny * math.sqrt(at.numel())
    blurred = (16 * torch.finfo(x.dtype).eps * _length(at) + tiny) / steps[0]

    def explained(fine: Tensor, along: Tensor, kink: float, step: float = 1.0) -> bool:
        known = je if along is e and je is not None and step == 1.0 else product(step * along) / step
        known = known.reshape(fine.shape)
        rough = (0.2 + rounding) * max(_length(fine), _length(known))
        return not _length(fine - known) > max(4 * kink, blurred, rough)

    try:
        ahead = (f(x + steps[0] * e) - at) / steps[0]
    except Exception:  # f accepts x, so it refuses an input near x
        pass
    else:
        if explained(ahead, e, 0.0):
            return
    # The longer steps are taken only if the difference of the shortest one is not explained.
    for some in (steps[:1], steps):
        taken = _differences(f, x, at, e, some)
        if taken is None:
            return
        along, found, kink = taken
        if explained(found[0], along, kink):
            return
    fine = found[0]
    # Reliable if all steps agree to 5 %
    alike = max(_length(one - fine) for one in found) <= 0.05 * _length(fine)
    # So short a step may underflow inside f and inside its derivative.
    if alike and not explained(fine, along, kink, steps[0]):
        raise DerivativeError(
            "f: finite differences contradict its derivative. A detach, a no_grad or a custom "
            "derivative inside f makes the derivative wrong, or f rounds so small changes away; measure a "
            "map without them."
        )


def _differences(
    f: Callable[[Tensor], Tensor], x: Tensor, at: Tensor, e: Tensor, steps: Sequence[float]
) -> tuple[Tensor, list[Tensor], float] | None:
    """Compute finite differences of ``f`` at ``x`` along a direction, for several step lengths. Return the
    direction, the differences, and how far the one-sided differences of the first step disagree, or None if
    ``f`` refuses all inputs near ``x``.

    The direction is ``e`` unless ``f`` refuses inputs along it. ``at`` is f(x).
    """
    try:
        sides = [(f(x + h * e) - at, at - f(x - h * e)) for h in steps]
    except Exception:  # f accepts x, so it refuses an input near x
        longest = [torch.linalg.vector_norm(t, dim=-1).max() for t in (e, x)]
        # Directions into the ball, with one-sided differences of second order.
        e = e - x * (longest[0] / longest[1])
        try:
            found = [(4 * f(x + h * e) - 3 * at - f(x + 2 * h * e)) / (2 * h) for h in steps]
        except Exception:
            return None
        return e, found, 0.0
    found = [(ahead + behind) / (2 * h) for h, (ahead, behind) in zip(steps, sides, strict=True)]
    return e, found, _length(sides[0][0] - sides[0][1]) / steps[0]


def weighted_autodiff_jacobian(f: TokenMap, x: Tensor, weighting: Weighting) -> AutodiffJacobian:
    """Return the Jacobian of a float64 map at a measure, by automatic differentiation. Its blocks are
    √(a_i/a_j) ∂y_i/∂x_j, for atoms x_i (n, d) with weights a_i and images y_i.

    Raise ArgumentError if a weight is below e^-600, or the map does not act on such a measure. It is the
    Jacobian of Y ↦ √a ∘ f(Y / √a) at Y = √a ∘ X, so the checks of :class:`AutodiffJacobian` apply.
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
    """Let PyTorch's attention use only its "math" backend, which has both forward and reverse mode."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def as_derivative_errors(mode: str) -> Iterator[None]:
    """Convert errors of forward-mode or reverse-mode differentiation to a DerivativeError."""
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
