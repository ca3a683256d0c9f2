"""The function ``profile``, which measures the local Lipschitz constants of all attention layers and heads of
a model at one input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError
from howsmooth.lipschitz import head_lipschitz, local_lipschitz
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.models.captured_layer import Site
from howsmooth.models.identification.layer_identification import VerifiedLayer
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling.lipschitz_profile_result import Profile
from howsmooth.profiling.model_input import Inputs, Layers, Model, given_inputs, layers_of, loaded_if_named
from howsmooth.profiling.token_influence import Influence
from howsmooth.profiling.token_influence import influence as influence_of
from howsmooth.seeds import derive_seed
from howsmooth.study.plans import PROFILE_RTOL, Plan

__all__ = ["SCOPES", "profile"]

SCOPES = ("attention", "head")
"""The scopes of a profile: each layer with all its heads and output projection, and each head alone."""


def profile(
    model: Model,
    inputs: Inputs,
    *,
    span: slice | tuple[int, int] | str | None = None,
    layers: Layers = None,
    scopes: Sequence[str] = SCOPES,
    tokenizer: Any = None,
    rtol: float = PROFILE_RTOL,
    confidence: float = Plan.confidence,
    max_iterations: int = Plan.max_iterations,
    seed: int = Plan.seed,
    memory: int | None = None,
    influence: bool = False,
    on_layer: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure the local Lipschitz constant of every attention layer and head of a model at one input.

    The model is treated layer by layer. The attention of a layer is captured
    (:func:`~howsmooth.models.capture`) and measured as a whole (:func:`howsmooth.local_lipschitz`); then all
    its heads are measured in one batch. ``Profile.refused`` names the layers that cannot be measured, with
    the reasons.

    Parameters
    ----------
    model
        A model of :func:`~howsmooth.models.load_model`, any ``torch.nn.Module`` with softmax attention, or
        the name or folder of a model, whose weights are then kept in the dtype of their file. Models in
        bfloat16 and float16 are measured in float32, layer by layer.
    inputs
        A text; token ids (n,) or (1, n); or a dict of the model's inputs for one sequence. A text needs a
        tokenizer, and is encoded without special tokens: give token ids to have them.
    span
        Which tokens of a text or of token ids are measured, counted from 0, the last not included: a slice,
        a pair, or a string such as "0:128". By default all, or the first 512 of a longer input; the result
        says which.
    layers
        Which layers, as for :func:`~howsmooth.models.capture`; all by default.
    scopes
        "attention" for each layer with all its heads and output projection, "head" for each head alone; both
        by default.
    tokenizer
        A tokenizer of transformers, for a model that was not loaded by its name.
    rtol, confidence, max_iterations, memory
        As for :func:`howsmooth.local_lipschitz`.
    seed
        Seed of all random starts; each layer and head has a start of its own.
    influence
        Whether :func:`howsmooth.influence` is measured for the layer with the largest constant, in the scope
        "attention". The time of this measurement grows with n²: some seconds at 64 tokens, a minute at 256.
    on_layer
        Called with the number of layers that are done, and the number of all layers, zero while unknown. By
        default a progress bar is shown on a terminal and in a notebook.

    Returns
    -------
    Profile
        With ``table`` (a row for each layer and head), ``tokens``, ``plot()``, and more.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    CaptureError
        If no layer can be measured; the message says why.
    ModelError
        If a model given by its name cannot be loaded, or has no tokenizer for a text.

    """
    wanted = _checked_scopes(scopes)
    if influence and "attention" not in wanted:
        raise ArgumentError("influence", expected='False without the scope "attention"', got="True")
    given = given_inputs(loaded_if_named(model), inputs, span, tokenizer)
    check_accuracy(rtol, confidence, given.computed)
    how = {"rtol": rtol, "confidence": confidence, "max_iterations": max_iterations, "memory": memory}
    measured = _Measured(how, seed, wanted, given.words)
    for index, layer in layers_of(given, layers, on_layer):
        measured.add(index, layer)
    of_tokens = measured.influence() if influence else None
    if not measured.rows:
        what = type(given.module).__name__
        raise CaptureError(f"No layer of {what} can be measured. {measured.refused[0]}")
    origin = given.origin()
    precision = {name: origin[name] for name in ("stored", "computed")}
    return Profile(
        **origin,
        table=PrintedTable(measured.rows).astype({"head": "Int64"}).assign(**precision),
        tokens=pd.concat(measured.shares, ignore_index=True),
        words=tuple(given.words or ()),
        n=measured.n,
        confidence=confidence,
        rtol=rtol,
        seed=seed,
        refused=tuple(measured.refused),
        influence=of_tokens,
    )


def _checked_scopes(scopes: object) -> tuple[str, ...]:
    given = (scopes,) if isinstance(scopes, str) else tuple(scopes) if isinstance(scopes, Sequence) else ()
    if not given or any(scope not in SCOPES for scope in given):
        raise ArgumentError("scopes", expected=f"some of {', '.join(SCOPES)}", got=repr(scopes))
    return given


# ---- the measurement


class _Measured:
    """The measurements of the layers of a model, collected layer by layer as rows of the tables of
    a profile.
    """

    def __init__(
        self, how: dict[str, Any], seed: int, scopes: tuple[str, ...], words: list[str] | None
    ) -> None:
        self.how, self.seed, self.scopes, self.words = how, seed, scopes, words
        self.n = 0
        self.rows: list[dict[str, Any]] = []
        self.shares: list[pd.DataFrame] = []
        self.refused: list[str] = []
        self.most_sensitive: tuple[float, Site] | None = None

    def add(self, index: int, layer: VerifiedLayer | CaptureError) -> None:
        """Measure one layer in each scope; if a scope cannot be measured, record the error."""
        if isinstance(layer, CaptureError):
            self.refused.append(str(layer))
            return
        self.n = max(self.n, layer.tokens.shape[1])
        for scope in self.scopes:
            try:
                for head, estimate in self._estimates(index, layer, scope):
                    self._append(layer, scope, head, estimate)
            except HowsmoothError as error:
                self.refused.append(f"Layer {index}, scope {scope}: {error}")

    def _estimates(
        self, index: int, layer: VerifiedLayer, scope: str
    ) -> Iterator[tuple[int | None, LipschitzEstimate]]:
        seed = derive_seed(purpose="profile", seed=self.seed, layer=index, scope=scope)
        if scope == "attention":
            (site,) = layer.sites("attention")
            found = local_lipschitz(site.map, site.x[0], seed=seed, **self.how)
            if self.most_sensitive is None or float(found.value) > self.most_sensitive[0]:
                self.most_sensitive = float(found.value), site
            yield None, found
            return
        attention, x = layer.found.map, layer.tokens[0]
        if not hasattr(attention, "head"):
            raise CaptureError(f"its heads cannot be taken alone ({layer.found.reason}).")
        heads = head_lipschitz(attention, x, seed=seed, **self.how)
        yield from ((head, heads[head]) for head in range(len(heads.value)))

    def _append(self, layer: VerifiedLayer, scope: str, head: int | None, found: LipschitzEstimate) -> None:
        place = layer.self_attention.layer
        self.rows.append(
            {
                "layer": place.index,
                "head": head,
                "scope": scope,
                "value": float(found.value),
                "lower": float(found.lower),
                "upper": float(found.upper),
                "confidence": found.confidence,
                "converged": bool(found.converged),
                "iterations": int(found.iterations),
                "method": found.method,
                "masking": layer.found.masking,
                "name": place.name,
            }
        )
        shares = found.tokens()
        if self.words is not None and len(self.words) == len(shares):
            shares["token"] = self.words
        shares.insert(0, "scope", scope)
        shares.insert(0, "head", head)
        shares.insert(0, "layer", place.index)
        self.shares.append(shares.astype({"head": "Int64"}))

    def influence(self) -> Influence | None:
        """Measure how far each output token moves with each input token, for the layer with the largest
        constant; return None if the measurement fails.
        """
        if self.most_sensitive is None:
            return None
        site = self.most_sensitive[1]
        seed = derive_seed(purpose="profile", seed=self.seed, layer=site.layer, scope="influence")
        how = {name: self.how[name] for name in ("confidence", "max_iterations")}
        try:
            return influence_of(site, seed=seed, **how)
        except HowsmoothError as error:
            self.refused.append(f"Influence in layer {site.layer}: {error}")
            return None
