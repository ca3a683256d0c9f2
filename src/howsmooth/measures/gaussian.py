"""Gaussian measures. Unmasked attention acts on them as an affine map, so their images are Gaussian, too.

Proof: documentation page "Maps on measures", section "Gaussian measures".
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Compose, L2Attention, LayerScale, Residual, SelfAttention, TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import AbstractMeasure, check_measure
from howsmooth.errors import ArgumentError, check_whole
from howsmooth.measures.discrete import DiscreteMeasure, check_numbers
from howsmooth.seeds import torch_seed

__all__ = ["Gaussian", "affine_action", "affine_action_at"]

# A covariance may be asymmetric or have negative eigenvalues up to this many units of d · eps, relative to
# its largest entry or eigenvalue. Rounding in a product such as B Bᵀ stays below this limit.
_ROUNDINGS = 32


class Gaussian(AbstractMeasure):
    """The normal distribution on R^d with a given mean and covariance.

    Unmasked attention acts on it as an affine map x ↦ M x + c, so f(gaussian) is Gaussian, too. This holds
    for :class:`~howsmooth.attention.SelfAttention`, :class:`~howsmooth.attention.L2Attention`, and residuals
    and compositions of them. Other maps raise an error; apply them to a sample instead.

    Parameters
    ----------
    mean
        The mean (d,), float32 or float64, finite.
    covariance
        The covariance (d, d) in the same dtype, symmetric and positive semidefinite up to rounding. It may be
        singular.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or shape, or the covariance is not symmetric or has a negative
        eigenvalue.
    NonFiniteError
        If an argument contains NaN or infinity.

    """

    def __init__(self, mean: object, covariance: object) -> None:
        self.mean: Float[Tensor, " d"] = _tensor("mean", mean, 1)
        sigma = _tensor("covariance", covariance, 2)
        d = self.mean.shape[0]
        if sigma.shape != (d, d):
            raise ArgumentError(
                "covariance", expected=f"shape ({d}, {d}), as mean", got=f"shape {tuple(sigma.shape)}"
            )
        if (sigma.dtype, sigma.device) != (self.mean.dtype, self.mean.device):
            raise ArgumentError(
                "covariance",
                expected=f"{self.mean.dtype} on {self.mean.device}, as mean",
                got=f"{sigma.dtype} on {sigma.device}",
            )
        self.covariance: Float[Tensor, "d d"] = _covariance(sigma)

    @property
    def d(self) -> int:
        """The dimension of the space on which the Gaussian is defined."""
        return self.mean.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the mean and the covariance of the Gaussian."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """The device of the mean and the covariance of the Gaussian."""
        return self.mean.device

    def __repr__(self) -> str:
        rank = int(torch.linalg.matrix_rank(self.covariance.detach(), hermitian=True))
        return f"Gaussian(d={self.d}, covariance of rank {rank})"

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Gaussian:
        """Return the Gaussian with its mean and covariance in another dtype or on another device."""
        return Gaussian(
            self.mean.to(dtype=dtype, device=device), self.covariance.to(dtype=dtype, device=device)
        )

    def sample(self, n: object, seed: object) -> DiscreteMeasure:
        """Return the empirical measure of ``n`` independent points drawn from the Gaussian.

        Raises
        ------
        ArgumentError
            If n is not an integer >= 1, or the seed is not an integer.

        """
        count = check_whole("n", n)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentError("seed", expected="a whole number", got=repr(seed))
        generator = torch.Generator().manual_seed(torch_seed(seed))
        drawn = torch.randn(count, self.d, generator=generator, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(self.covariance.double())
        # The symmetric square root is unique, so the sample does not depend on the choice of eigenvectors.
        root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
        return DiscreteMeasure(self.mean + (drawn.to(self.device) @ root).to(self.dtype))

    def push_forward(self, f: TokenMap) -> Gaussian:
        """Return the image of the Gaussian under the map ``f``, which is a Gaussian and equals
        ``f(gaussian)``.

        The image is N(M α + c, M Σ Mᵀ), with M and c of :func:`affine_action`.

        Raises
        ------
        ArgumentError
            If dimension, dtype or device of map and Gaussian differ, or the image is not Gaussian.

        """
        matrix, shift = affine_action(f, self)
        return Gaussian(matrix @ self.mean + shift, matrix @ self.covariance @ matrix.mT)

    def weighted_tokens(self) -> tuple[Tensor, Weighting]:
        """Raise ArgumentError, because a Gaussian has no atoms that could be returned as tokens."""
        raise ArgumentError(
            "measure",
            expected="a measure with atoms",
            got="a Gaussian",
            remedy="Use a sample of it, gaussian.sample(n, seed).",
        )


def affine_action(
    f: TokenMap, gaussian: Gaussian
) -> tuple[Float[Tensor, "d_out d"], Float[Tensor, " d_out"]]:
    """Return the matrix M and the vector c for which the attention map ``f`` moves each point x of a Gaussian
    to M x + c.

    Head h of self-attention, with A_h = scale · K_hᵀQ_h and b_h = scale · K_hᵀb_q,h, weights the keys at
    query x so that they are distributed as the Gaussian shifted by Σ(A_h x + b_h). Hence M = Σ_h O_h Σ A_h
    and c = Σ_h O_h(α + Σ b_h) + biases, where O_h is the product of the output and value matrices of head h.
    For L2 attention the shifted Gaussian has the mean (I + 2sΣK_hᵀK_h)⁻¹(α + 2sΣK_hᵀ(Q_h x + b_q,h − b_k,h)).

    Parameters
    ----------
    f
        The attention map, without a mask, norm layers and rotary positions.
    gaussian
        The Gaussian N(α, Σ) in R^d, in the dtype and on the device of the map.

    Raises
    ------
    ArgumentError
        If dimension, dtype or device of map and Gaussian differ, or the image is not Gaussian, as for a mask,
        a norm layer or rotary positions.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, *A Unified Perspective on the Dynamics of Deep Transformers*, 2025.
    Proof: documentation page "Maps on measures", section "Gaussian measures".

    """
    check_measure(gaussian, f)
    return affine_action_at(f, gaussian.mean, gaussian.covariance)


def affine_action_at(
    f: TokenMap, mean: Float[Tensor, " d"], covariance: Float[Tensor, "d d"]
) -> tuple[Float[Tensor, "d_out d"], Float[Tensor, " d_out"]]:
    """Return the matrix M and the vector c for which the attention map ``f`` moves each point x of N(mean,
    covariance) to M x + c.

    The arguments are not checked.
    """
    match f:
        case SelfAttention() | L2Attention():
            return _attention_action(f, mean, covariance)
        case LayerScale():
            return torch.diag(f.weight), torch.zeros_like(mean)
        case Residual():
            matrix, shift = affine_action_at(f.inner, mean, covariance)
            return matrix + torch.eye(len(mean), dtype=mean.dtype, device=mean.device), shift
        case Compose():
            matrix, shift = affine_action_at(f.inner, mean, covariance)
            outer, outer_shift = affine_action_at(
                f.outer, matrix @ mean + shift, matrix @ covariance @ matrix.mT
            )
            return outer @ matrix, outer @ shift + outer_shift
        case _:
            raise _not_gaussian(f.describe())


def _attention_action(
    f: SelfAttention | L2Attention, mean: Tensor, covariance: Tensor
) -> tuple[Float[Tensor, "d_out d"], Float[Tensor, " d_out"]]:
    # A mask, positions or changed scores let queries see other weights than e^{⟨Ax, y⟩}.
    if f.causal or (
        isinstance(f, SelfAttention)
        and (f.mask is not None or f.window is not None or f.rotary is not None or f.feature_names())
    ):
        raise _not_gaussian(f.describe() + (", rotary positions" if getattr(f, "rotary", None) else ""))
    group = f.heads // f.kv_heads
    key, value = (t.repeat_interleave(group, dim=0) for t in (f.key, f.value))
    bias = torch.zeros_like(f.query[:, :, 0]) if f.query_bias is None else f.query_bias
    # For head h and query x, the Gaussian of reweighted keys has the mean seen_matrix x + seen_shift.
    if isinstance(f, SelfAttention):
        lifted = f.scale * covariance @ key.mT
        seen_matrix, seen_shift = lifted @ f.query, mean + (lifted @ bias[..., None])[..., 0]
    else:
        if f.key_bias is not None:
            bias = bias - f.key_bias.repeat_interleave(group, dim=0)
        lifted = 2 * f.scale * covariance @ key.mT
        identity = torch.eye(f.d, dtype=f.dtype, device=f.device)
        right = torch.cat((lifted @ f.query, (mean + (lifted @ bias[..., None])[..., 0])[..., None]), dim=-1)
        solved = torch.linalg.solve(identity + lifted @ key, right)
        seen_matrix, seen_shift = solved[..., :-1], solved[..., -1]
    matrix = (value @ seen_matrix).flatten(0, 1)
    rows = (value @ seen_shift[..., None])[..., 0]
    if f.value_bias is not None:
        rows = rows + f.value_bias.repeat_interleave(group, dim=0)
    shift = rows.flatten()
    if f.output is None:
        return matrix, shift
    shift = f.output @ shift
    return f.output @ matrix, shift if f.output_bias is None else shift + f.output_bias


def _not_gaussian(what: str) -> ArgumentError:
    return ArgumentError(
        "measure",
        expected="unmasked softmax or L2 attention, residuals and compositions of them, for a Gaussian",
        got=what,
        remedy="The image of a Gaussian is not Gaussian here: use a sample, gaussian.sample(n, seed).",
    )


def _tensor(name: str, value: object, axes: int) -> Tensor:
    shape = "(d,)" if axes == 1 else "(d, d)"
    if not isinstance(value, Tensor):
        raise ArgumentError(
            name, expected=f"a tensor {shape}", got=type(value).__name__, remedy="Use torch.as_tensor."
        )
    if value.ndim != axes or value.numel() == 0:
        raise ArgumentError(name, expected=f"shape {shape}, d >= 1", got=f"shape {tuple(value.shape)}")
    check_numbers(name, value)
    return value


def _covariance(sigma: Tensor) -> Tensor:
    """Check that a matrix is a covariance matrix up to rounding, and return it exactly symmetric."""
    allowed = _ROUNDINGS * sigma.shape[0] * torch.finfo(sigma.dtype).eps
    skew = float((sigma - sigma.mT).detach().abs().max())
    if skew > allowed * float(sigma.detach().abs().max()):
        raise ArgumentError(
            "covariance",
            expected="a symmetric matrix",
            got=f"entries that differ by {skew:.3g} across the diagonal",
            remedy="Write (covariance + covariance.mT) / 2 if that is rounding.",
        )
    # Halves are added because the sum of entries near the largest float would overflow.
    symmetric = 0.5 * sigma + 0.5 * sigma.mT
    values = torch.linalg.eigvalsh(symmetric.detach().double())
    if float(values[0]) < -allowed * float(values.abs().max()):
        raise ArgumentError(
            "covariance",
            expected="no negative eigenvalue",
            got=f"an eigenvalue {float(values[0]):.3g} (the largest is {float(values[-1]):.3g})",
        )
    return symmetric
