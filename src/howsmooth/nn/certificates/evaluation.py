"""Evaluation of a certified classifier on data: the radius within which the class of each input cannot
change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.nn.certificates.certificate import ModelCertificate
from howsmooth.nn.certificates.graph_propagation import first_module
from howsmooth.nn.certificates.model_bound import certify
from howsmooth.nn.certificates.module_propagation import has_rules
from howsmooth.nn.checks import check_size
from howsmooth.nn.parts.embedding_and_pooling import ClipTokens, Patches
from howsmooth.roundoff import limit_in_digits

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Evaluation", "evaluate"]

# Relative allowance for the rounding of a norm in float64.
_SLACK = 1e-12
# The name of the projection in the table. No module of a model has a name with brackets.
_CLIP = "(clip)"


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """The certified radii and predictions of a classifier at some inputs.

    Attributes
    ----------
    certificate
        Certificate of the model in float64. With ``clip`` it is the certificate, for all inputs, of the model
        that clips its inputs first.
    table
        Table with one row for each input, and columns ``index``; ``label``, if there are labels;
        ``predicted``; ``margin``, the logit of the label (or of the predicted class, without labels) minus
        the largest other logit; ``certified_radius``; and ``longest``, the norm of the input's longest token
        before clipping.
    radius
        Largest norm of a token for which the certificate was requested.
    clipped
        Number of inputs with a token beyond this radius, which were clipped.
    labelled
        Whether labels were given.

    """

    certificate: ModelCertificate
    table: pd.DataFrame
    radius: float
    clipped: int
    labelled: bool

    @property
    def correct(self) -> int | None:
        """The number of inputs whose predicted class equals their label, or None without labels."""
        if not self.labelled:
            return None
        return int((self.table["predicted"] == self.table["label"]).sum())

    @property
    def reach(self) -> float:
        """The largest norm that a token can have when an input is changed within its certified radius.

        Without ``clip``, nothing is proved for inputs with a token norm above ``radius``. An evaluation whose
        ``radius`` is this number covers all inputs within the certified radii.
        """
        return float((self.table["longest"] + self.table["certified_radius"].clip(lower=0)).max())

    def __repr__(self) -> str:
        total, radii = len(self.table), self.table["certified_radius"]
        unbounded = math.isinf(self.certificate.radius)
        where = f"clipped to norm {self.radius:.6g}" if unbounded else f"of norm at most {self.radius:.6g}"
        if math.isinf(self.radius):
            where = "of any norm"
        lines = [
            f"Lipschitz constant at most {limit_in_digits(self.certificate.constant, 6, upper=True)} on "
            f"{self.certificate.length} tokens {where}",
            f"{total} inputs, the longest token of norm {self.table['longest'].max():.4g}"
            + (f"; {self.correct} of the class of their label" if self.labelled else ""),
            f"{self.certified(0.0)} with a certified radius: median of all "
            f"{limit_in_digits(radii.median(), 4, upper=False)}, largest "
            f"{limit_in_digits(radii.max(), 4, upper=False)}",
        ]
        if self.reach > self.certificate.radius:
            lines.append(
                f"This is proved for perturbed inputs whose tokens have norms of at most {self.radius:.6g}; "
                f"within the certified radii they reach {self.reach:.4g}, which "
                f"radius={1.001 * self.reach:.4g} or clip=True covers."
            )
        return "\n".join(lines)

    def certified(self, radius: float) -> int:
        """Return the number of inputs whose certified radius is larger than ``radius``.

        These inputs are classified correctly, if labels were given, and provably keep their class within this
        distance.

        Raises
        ------
        ArgumentError
            If the radius is not a finite number >= 0.

        """
        if isinstance(radius, bool) or not (math.isfinite(radius) and radius >= 0):
            raise ArgumentError("radius", expected="a finite number >= 0", got=repr(radius))
        return int((self.table["certified_radius"] > radius).sum())


def evaluate(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor | None = None,
    *,
    length: int,
    radius: float,
    clip: bool = False,
    batch: int = 256,
) -> Evaluation:
    """Certify a classifier, and compute for each input a distance within which its class cannot change.

    All computations use a float64 copy of the model in evaluation mode. Half-precision weights are converted
    exactly, but outputs that are computed in half precision are not covered.

    Parameters
    ----------
    model
        A model that :func:`~howsmooth.nn.certify` certifies, whose output is logits (batch, classes). It may
        have a ``forward`` of its own, for which the first input is the example.
    inputs
        Tokens (batch, n, d); vectors (batch, d), each of which is one token; or images (batch, channels,
        height, width) for a model that begins with :class:`~howsmooth.nn.Patches` or a
        :class:`torch.nn.Conv2d` whose patches do not overlap (tokens are patches), or with
        :class:`torch.nn.Flatten` (an image is one token).
    labels
        Classes (batch,). Without labels, radii refer to the predicted classes.
    length, radius
        Number of tokens, and their largest norm, for the certificate. An input with a longer token raises an
        error, or is clipped. The radii hold for perturbed inputs that meet these conditions, too; with
        ``clip`` all inputs do.
    clip
        Whether to project the tokens of all inputs onto the ball of this radius, as
        :class:`~howsmooth.nn.ClipTokens` does. The certificate then belongs to the model with this
        projection in front, and holds for all inputs.
    batch
        Number of inputs in one forward pass.

    Raises
    ------
    ArgumentError
        If inputs or labels have a wrong type, shape or length, if tokens lie beyond the radius and ``clip``
        is not set (the message counts these inputs), or if the outputs are not logits, or are others for an
        input alone than in a batch.
    NonFiniteError
        If an input, a weight or a logit is NaN or infinite.
    CertificateError
        If the model cannot be certified.

    """
    import pandas as pd

    check_size("batch", batch)
    exact = copy.deepcopy(model).double().eval()
    x = _checked_inputs(inputs)
    # The first input is the example for a model with a forward of its own.
    certificate = certify(exact, length, radius, inputs=None if has_rules(exact) else x[:1])
    tokens = _tokens_of(exact, x)
    if tokens.shape[1] != length:
        raise ArgumentError(
            "inputs",
            expected=f"inputs of {length} tokens, the length of the certificate",
            got=f"{len(x)} inputs of {tokens.shape[1]} tokens",
        )
    norms = torch.linalg.vector_norm(tokens, dim=-1).amax(dim=1)
    beyond = norms > radius * (1 + _SLACK)
    count = int(beyond.sum())
    if count and not clip:
        raise ArgumentError(
            "inputs",
            expected=f"tokens of norm at most {radius:g}, the radius of the certificate",
            got=f"{count} of {len(x)} inputs with a longer one, the longest of norm {norms.max():g}",
            remedy="Certify for a larger radius, or clip them (clip=True): the certificate is then "
            "that of the model that clips.",
        )
    if clip:
        # The projection onto the ball has the constant 1, so with it in front the model's constant on the
        # ball holds on the whole space.
        clipping = ClipTokens(radius)
        (row,) = certify(clipping, length, math.inf).rows
        rows = (replace(row, path=_CLIP), *certificate.rows)
        certificate = replace(certificate, radius=math.inf, rows=rows)
        x = _inputs_of(exact, clipping(tokens), x.shape)
    if labels is not None:
        _check_tensor("labels", labels)
    if labels is not None and (labels.ndim != 1 or len(labels) != len(x) or not _whole(labels)):
        raise ArgumentError(
            "labels",
            expected=f"integers, one for each of {len(x)} inputs",
            got=f"{labels.dtype} of shape {tuple(labels.shape)}",
        )
    labels = None if labels is None else labels.detach().to("cpu", torch.int64)
    logits = torch.cat(list(_logits(exact, x, batch)))
    radii = certificate.certified_radius(logits, labels)
    last = min(batch, len(x)) - 1
    alone = next(_logits(exact, x[last : last + 1], 1))
    if not torch.allclose(logits[last], alone[0], rtol=0.0, atol=1e-6 * float(logits[last].abs().amax())):
        raise ArgumentError(
            "model",
            expected="a forward that treats the inputs of a batch one by one",
            got=f"other logits for input {last} alone than in a batch",
            remedy="Let the forward depend on neither the size of the batch nor the other inputs in it.",
        )
    predicted = logits.argmax(dim=1)
    own = predicted if labels is None else labels
    # The largest logit of another class.
    others = logits.scatter(1, own[:, None], -math.inf).amax(dim=1)
    columns = {
        "index": torch.arange(len(x)),
        **({} if labels is None else {"label": own}),
        "predicted": predicted,
        "margin": logits.gather(1, own[:, None])[:, 0] - others,
        "certified_radius": radii,
        "longest": norms,
    }
    table = pd.DataFrame({name: column.numpy() for name, column in columns.items()})
    return Evaluation(certificate, table, float(radius), count, labels is not None)


def _checked_inputs(inputs: Tensor) -> Tensor:
    """Check the inputs of a classifier, and return them in float64 on the CPU.

    Raises
    ------
    ArgumentError
        If the inputs are not a tensor of floating-point numbers, or if there are none.
    NonFiniteError
        If a number is NaN or infinite.

    """
    _check_tensor("inputs", inputs)
    if not inputs.is_floating_point():
        raise ArgumentError(
            "inputs",
            expected="floating-point numbers, scaled as in training",
            got=str(inputs.dtype),
            remedy="Give the inputs in the form in which the model receives them.",
        )
    if inputs.ndim < 2 or 0 in inputs.shape:
        raise ArgumentError("inputs", expected="at least one input", got=f"shape {tuple(inputs.shape)}")
    finite = torch.isfinite(inputs).flatten(1).all(dim=1)
    if not bool(finite.all()):
        raise NonFiniteError(
            "inputs",
            expected="finite numbers",
            got=f"NaN or infinity in {int((~finite).sum())} of {len(inputs)} inputs",
        )
    return inputs.detach().to("cpu", torch.float64)


def _tokens_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Convert the inputs of a model to the tokens (batch, n, d) to which its certificate refers.

    Raises
    ------
    ArgumentError
        If the inputs are images and the model does not begin with Patches, Flatten, or a convolution of
        patches that do not overlap; or if they have another number of axes.
    CertificateError
        If the inputs are images and the forward of the model cannot be recorded.

    """
    if inputs.ndim == 3:
        return inputs
    if inputs.ndim == 2:
        return inputs[:, None]
    first = first_module(model) if inputs.ndim == 4 else None
    if isinstance(first, Patches):
        return first.forward(inputs)
    if isinstance(first, nn.Flatten):
        return inputs.flatten(1)[:, None]
    if isinstance(first, nn.Conv2d) and first.kernel_size == first.stride:
        size = first.kernel_size
        if size[0] <= inputs.shape[2] and size[1] <= inputs.shape[3]:
            return nn.functional.unfold(inputs, size, stride=size).mT
    raise ArgumentError(
        "inputs",
        expected="tokens (batch, n, d) or vectors (batch, d); images (batch, channels, height, width) for a "
        "model that begins with hs.nn.Patches, torch.nn.Flatten or a Conv2d with kernel_size == stride",
        got=f"shape {tuple(inputs.shape)}",
    )


def _inputs_of(model: nn.Module, tokens: Tensor, shape: torch.Size) -> Tensor:
    """Convert tokens back to inputs of shape ``shape``, as the inverse of :func:`_tokens_of`."""
    first = first_module(model) if len(shape) == 4 else None
    if isinstance(first, Patches | nn.Conv2d):
        size = first.patch_size if isinstance(first, Patches) else first.kernel_size
        return nn.functional.fold(tokens.mT, shape[2:], size, stride=size)
    return tokens.reshape(shape)


def _logits(model: nn.Module, x: Tensor, batch: int) -> Iterator[Tensor]:
    for part in x.split(batch):
        try:
            with torch.no_grad():
                logits = model(part)
        except (RuntimeError, IndexError, TypeError, AssertionError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ArgumentError(
                "inputs", expected="inputs that the model takes", got=f"shape {tuple(x.shape)} ({reason})"
            ) from error
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(part):
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ArgumentError(
                "model",
                expected="a model whose output is logits (batch, classes)",
                got=f"a model whose output has {got}"
                if isinstance(logits, Tensor)
                else f"an output of type {got}",
                remedy="End the model with hs.nn.MeanPool or TakeToken and a linear map.",
            )
        yield logits


def _check_tensor(argument: str, given: object) -> None:
    if not isinstance(given, Tensor):
        remedy = "torch.from_numpy(x) makes one of an array."
        raise ArgumentError(argument, expected="a tensor", got=type(given).__name__, remedy=remedy)


def _whole(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
