"""Certified accuracy: the radius within which the class of each input of a classifier cannot change."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from howsmooth.errors import ArgumentError, NonFiniteError, check_number, check_whole, reason
from howsmooth.nn.certificates.model_bound import ModelCertificate, certify
from howsmooth.nn.certificates.module_propagation import has_rules
from howsmooth.nn.checks import check
from howsmooth.nn.parts.embedding_and_pooling import Patches
from howsmooth.rounding import above, limit_in_digits
from howsmooth.watching import Call, StopForward, watched

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """The certified radii and predictions of a classifier at some inputs.

    ``certificate`` is that of the model in float64. ``table`` has one row for each input, and columns
    ``index``; ``label``, if there are labels; ``predicted``; ``margin``, the logit of the label (or of the
    predicted class, without labels) minus the largest other logit; ``certified_radius``; and ``longest``, the
    norm of the input's longest token.
    """

    certificate: ModelCertificate
    table: pd.DataFrame

    @property
    def correct(self) -> int | None:
        """The number of inputs whose predicted class equals their label, or None without labels."""
        if "label" not in self.table:
            return None
        return int((self.table["predicted"] == self.table["label"]).sum())

    @property
    def reach(self) -> float:
        """The largest norm that a token can have when an input is changed within its certified radius.

        Nothing is proved for inputs with a token norm above the radius of the certificate. An evaluation
        whose ``radius`` is this number covers all inputs within the certified radii.
        """
        return float((self.table["longest"] + self.table["certified_radius"].clip(lower=0)).max())

    def __repr__(self) -> str:
        radius, radii = self.certificate.radius, self.table["certified_radius"]
        lines = [
            self.certificate.headline,
            f"{len(radii)} inputs, the longest token of norm {self.table['longest'].max():.4g}"
            + ("" if self.correct is None else f"; {self.correct} of the class of their label"),
            f"{self.certified(0.0)} with a certified radius: median of all "
            f"{limit_in_digits(radii.median(), 4, upper=False)}, largest "
            f"{limit_in_digits(radii.max(), 4, upper=False)}",
        ]
        if self.reach > radius:
            lines.append(
                f"This is proved for perturbed inputs whose tokens have norms of at most {radius:.6g}; "
                f"within the certified radii they reach {self.reach:.4g}, which "
                f"radius={1.001 * self.reach:.4g} or hs.nn.ClipTokens in front of the model covers."
            )
        return "\n".join(lines)

    def certified(self, radius: float) -> int:
        """Return for how many inputs the label (or else the prediction) is certified within ``radius``."""
        check_number("radius", radius, "a finite number >= 0", lambda number: 0 <= number < math.inf)
        return int((self.table["certified_radius"] > radius).sum())


def evaluate(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor | None = None,
    *,
    length: int,
    radius: float,
    batch: int = 256,
) -> Evaluation:
    """Certify a classifier, and compute for each input a distance within which its class cannot change.

    All computations use a float64 copy of the model in evaluation mode. Half-precision weights are converted
    exactly, but outputs that are computed in half precision are not covered. ArgumentError is raised if
    inputs or labels have a wrong type, shape or length, if tokens lie beyond the radius (the message counts
    these inputs), or if the outputs are not logits, or others for an input alone than in a batch.

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
        Number of tokens, and their largest norm, for the certificate. Inputs with longer tokens are refused.
        The radii hold for perturbed inputs that meet these conditions, too. A model that begins with
        :class:`~howsmooth.nn.ClipTokens` (behind ``Patches``) is certified for all inputs, with
        ``radius=math.inf``.
    batch
        Number of inputs in one forward pass.
    """
    import pandas as pd

    check_whole("batch", batch)
    for name, given in (("inputs", inputs), ("labels", inputs if labels is None else labels)):
        remedy = "torch.from_numpy(x) makes one of an array."
        check(isinstance(given, Tensor), name, "a tensor", type(given).__name__, remedy)
    fits = inputs.is_floating_point() and inputs.ndim >= 2 and 0 not in inputs.shape
    expected = "floating-point numbers of at least one input, scaled as in training"
    check(fits, "inputs", expected, f"{inputs.dtype} of shape {tuple(inputs.shape)}")
    finite = torch.isfinite(inputs).flatten(1).all(dim=1)
    if not bool(finite.all()):
        got = f"NaN or infinity in {int((~finite).sum())} of {len(inputs)} inputs"
        raise NonFiniteError("inputs", expected="finite numbers", got=got)
    exact, x = copy.deepcopy(model).double().eval(), inputs.detach().to("cpu", torch.float64)
    # The first input is the example for a model with a forward of its own.
    certificate = certify(exact, length, radius, inputs=None if has_rules(exact) else x[:1])
    tokens = _tokens_of(exact, x)
    got = f"{len(x)} inputs of {tokens.shape[1]} tokens"
    expected = f"inputs of {length} tokens, the length of the certificate"
    check(tokens.shape[1] == length, "inputs", expected, got)
    norms = torch.linalg.vector_norm(tokens, dim=-1).amax(dim=1)
    count = int((norms > above(radius, tokens.shape[-1])).sum())
    check(
        count == 0,
        "inputs",
        f"tokens of norm at most {radius:g}, the radius of the certificate",
        f"{count} of {len(x)} inputs with a longer one, the longest of norm {norms.max():g}",
        "Certify for a larger radius, or put hs.nn.ClipTokens in front of the model, which then has a "
        "certificate for radius=math.inf.",
    )
    logits = torch.cat([_logits(exact, part) for part in x.split(batch)])
    radii = certificate.certified_radius(logits, labels)
    last = min(batch, len(x)) - 1
    alone = _logits(exact, x[last : last + 1])
    same = torch.allclose(logits[last], alone[0], rtol=0.0, atol=1e-6 * float(logits[last].abs().amax()))
    expected, got = (
        "a forward that treats the inputs of a batch one by one",
        f"other logits for input {last} alone",
    )
    remedy = "Let the forward depend on neither the size of the batch nor the other inputs in it."
    check(same, "model", expected, f"{got} than in a batch", remedy)
    predicted = logits.argmax(dim=1)
    own = predicted if labels is None else labels.detach().to("cpu", torch.int64)
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
    return Evaluation(certificate, pd.DataFrame({name: column.numpy() for name, column in columns.items()}))


def _tokens_of(model: nn.Module, inputs: Tensor) -> Tensor:
    if inputs.ndim == 3:
        return inputs
    if inputs.ndim == 2:
        return inputs[:, None]
    first, one = None, inputs[:1]
    cutting = {
        name: m for name, m in model.named_modules() if isinstance(m, Patches | nn.Flatten | nn.Conv2d)
    }

    def starts(call: Call) -> None:
        raise StopForward(call.module if call.args and call.args[0] is one else None)

    try:
        with watched(cutting if inputs.ndim == 4 else {}, starts):
            _logits(model, one)
    except StopForward as stop:
        first = stop.value
    if isinstance(first, Patches):
        return first.forward(inputs)
    if isinstance(first, nn.Flatten):
        return inputs.flatten(1)[:, None]
    if isinstance(first, nn.Conv2d) and first.kernel_size == first.stride:
        size = first.kernel_size
        if size[0] <= inputs.shape[2] and size[1] <= inputs.shape[3]:
            return nn.functional.unfold(inputs, size, stride=size).mT
    expected = (
        "tokens (batch, n, d) or vectors (batch, d); images (batch, channels, height, width) for a model "
        "that begins with hs.nn.Patches, torch.nn.Flatten or a Conv2d with kernel_size == stride"
    )
    raise ArgumentError("inputs", expected=expected, got=f"shape {tuple(inputs.shape)}")


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            logits: Tensor = model(x)
    except (RuntimeError, IndexError, TypeError, AssertionError) as error:
        got = f"shape {tuple(x.shape)} ({reason(error)})"
        raise ArgumentError("inputs", expected="inputs that the model takes", got=got) from error
    got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    fits = isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(x)
    remedy = "End the model with hs.nn.MeanPool or TakeToken and a linear map."
    check(fits, "model", "a model whose output is logits (batch, classes)", got, remedy)
    return logits
