"""The logits of a model on one input when the keys and values of its attention layers are perturbed.

Keys and values are meant as the softmax takes them: after norm layers and rotary positions, as in the KV
cache of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.as_called import as_called
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.tolerance import relative_error
from howsmooth.models.tracing.recorder import run, run_with_attention
from howsmooth.models.tracing.softmax_call import SoftmaxCall, plain_attention
from howsmooth.seeds import torch_seed

__all__ = ["LogitsOfModel"]

#: Returns other keys and values of a layer, given its index, its keys and its values (*lead, kv_heads, n,
#: dim); or None to leave them as they are.
Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor] | None]

_SAME = 1e-3  # relative difference of logits above which the intercepted model is not the model


class LogitsOfModel:
    """The logits of a model on one input, with or without changed keys and values in its attention layers.

    Parameters
    ----------
    model
        The model, as :func:`~howsmooth.models.capture` takes it.
    inputs
        The model's inputs for one sequence.

    Raises
    ------
    CaptureError
        If the model has no logits, or its attention cannot be replaced.

    """

    def __init__(self, model: nn.Module, inputs: Tensor | Mapping[str, Any]) -> None:
        self.model = model
        with as_called(model, inputs) as given:
            self.named = given.named
            output = run(model, self.named)
        #: The logits of the unchanged model, (rows, classes): one row for each token, or for the sequence.
        self.logits = self._rows(output)
        again = self.changed(lambda layer, keys, values: (keys, values))
        if relative_error(again, self.logits) > _SAME:
            raise CaptureError(
                f"{type(self.model).__name__} has other logits if its attention is computed from its keys "
                "and values one layer at a time."
            )

    def changed(self, change: Change) -> Float[Tensor, "rows classes"]:
        """Return the logits that the model computes with changed keys and values.

        Raises
        ------
        CaptureError
            If the keys and values of a layer cannot be read.

        """
        with measurement_mode(self.model):
            return self._run(change)

    def mean_kl(self, change: Change) -> float:
        """Return the mean KL divergence between the predictions of the model with original and with changed
        keys and values.

        It is Σ p log(p / p') over the classes, with the probabilities p of the model and p' of the changed
        model, in nats, averaged over the rows of the logits.
        """
        p, other = (t.double().log_softmax(dim=-1) for t in (self.logits, self.changed(change)))
        return float((p.exp() * (p - other)).sum(dim=-1).mean().clamp_min(0.0))

    def squared_gradients(self, samples: int, seed: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the squared derivatives of the log-likelihood with respect to the keys and values of each
        layer, averaged over classes that are drawn from the model's predictions.

        Classes are drawn from the model's own prediction, one for each row, and their log-probabilities are
        summed over the rows. So the means over draws estimate the diagonal of the Fisher information times
        the number of rows. To second order, independent errors of variance σ² in the entries of a key change
        the prediction by a mean Kullback–Leibler divergence of Σ σ² (Fisher diagonal) / 2.

        Parameters
        ----------
        samples
            Number of draws. Each takes one backward pass through the model.
        seed
            Seed of the draws.

        Returns
        -------
        dict
            For each layer index the means of its keys and of its values, each of the shape (*lead, kv_heads,
            n, dim) that they have in the model.

        """
        leaves: dict[int, tuple[Tensor, Tensor]] = {}

        def change(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            made = tuple(torch.zeros_like(t, requires_grad=True) for t in (keys, values))
            leaves[layer] = made[0], made[1]
            return keys + made[0], values + made[1]

        generator = torch.Generator().manual_seed(torch_seed(seed))
        with measurement_mode(self.model), torch.enable_grad():
            log_p = self._run(change).log_softmax(dim=-1)
        p = log_p.detach().double().exp().cpu()
        every = [leaf for pair in leaves.values() for leaf in pair]
        sums = [torch.zeros(t.shape, dtype=torch.float64) for t in every]
        for _ in range(samples):
            drawn = torch.multinomial(p, 1, generator=generator).to(log_p.device)
            likelihood = log_p.gather(1, drawn).sum()
            found = torch.autograd.grad(likelihood, every, retain_graph=True, allow_unused=True)
            for one, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    one += gradient.double().cpu().square()
        means = [one / samples for one in sums]
        return {layer: (means[2 * i], means[2 * i + 1]) for i, layer in enumerate(leaves)}

    def _run(self, change: Change) -> Tensor:
        def attend(layer: int, softmax: SoftmaxCall) -> Tensor | None:
            if softmax.query is None or softmax.key is None:
                raise CaptureError(f"The keys of layer {layer} cannot be read: {softmax.obstacle}.")
            other = change(layer, softmax.key, softmax.value)
            if other is None:
                return None
            return plain_attention(replace(softmax, key=other[0], value=other[1]))

        return self._rows(run_with_attention(self.model, self.named, attend))

    def _rows(self, output: object) -> Float[Tensor, "rows classes"]:
        """Return the logits in the output of a model, with one row for each prediction."""
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim < 2 or logits.shape[-1] < 2:
            raise CaptureError(f"{type(self.model).__name__} has no logits.")
        return logits.flatten(0, -2)
