"""Stand-ins for the models and texts of ``bound``: small attentions, real in all else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.study.tasks.bounds import bound_site
from tests._cases import D, dense_jacobian, random_attention, rotary
from tests._study import FakeModel, Tools, make_tools, words

LAYERS, HEADS = 2, 3


@dataclass(frozen=True)
class SmallModel(FakeModel):
    """Two layers of three heads; the second is causal, and the first follows a norm."""

    layers: int = LAYERS
    heads: int = HEADS
    rotary: bool = False
    masked: bool = False

    def attention(self, layer: int, n: int) -> hs.SelfAttention:
        position = torch.arange(n)
        return random_attention(
            20 + layer,
            heads=HEADS,
            causal=layer == 1,
            dtype=torch.float32,
            rotary=rotary(n, 2, torch.float32) if self.rotary else None,
            mask=(position[:, None] - position[None, :]).abs() <= 2 if self.masked else None,
        )


def norm() -> hs.LayerNorm:
    return hs.LayerNorm(torch.linspace(0.5, 1.5, D))


def tokens(ids: Tensor) -> Tensor:
    """Tokens (batch, n, d) that a norm layer may have given: they depend on the token ids alone."""
    angles = ids[..., None].double() * torch.arange(1, D + 1)
    return norm()(torch.sin(angles).float())


def small_tools(model: FakeModel | None = None, count: int = 100) -> Tools:
    """Stand-ins for models and texts: a small model named ``small``, and ``count`` tokens of prose."""
    made, _ = make_tools(models={"small": model or SmallModel()}, texts={"prose": words(count), "empty": " "})

    def capture(
        model: SmallModel,
        inputs: Tensor,
        layers: Sequence[int] | None = None,
        scope: str = "attention",
        heads: Sequence[int] | None = None,
    ) -> list[Any]:
        sites = []
        for layer in range(model.layers) if layers is None else layers:
            whole = model.attention(layer, inputs.shape[1])
            parts: list[tuple[int | None, hs.TokenMap]] = [(None, whole)]
            if scope == "head":
                parts = [(h, whole.head(h)) for h in (range(model.heads) if heads is None else heads)]
            elif scope == "heads":
                parts = [(None, whole.without_output())]
            elif scope == "block":
                parts = [(None, hs.Residual(hs.Compose(whole, norm()) if layer == 0 else whole))]
            sites += [
                SimpleNamespace(
                    layer=layer,
                    head=h,
                    scope=scope,
                    causal=whole.causal,
                    masking="causal" if whole.causal else "window" if model.masked else "none",
                    layout="pre-norm",
                    x=2 * tokens(inputs) if scope == "block" else tokens(inputs),
                    map=f,
                    norm=norm() if layer == 0 else None,
                )
                for h, f in parts
            ]
        return sites

    return replace(made, capture=capture, measure=hs.local_lipschitz, bound=bound_site)


@contextmanager
def small_sources(model: FakeModel | None = None, count: int = 100) -> Iterator[None]:
    """Put the stand-ins of :func:`small_tools` in the places of the library's own functions."""
    tools = small_tools(model, count)
    with (
        patch("howsmooth.models.load_model", tools.load_model),
        patch("howsmooth.models.capture", tools.capture),
        patch("howsmooth.texts.load_text", tools.load_text),
    ):
        yield


def plain_table(
    attention: hs.SelfAttention,
    X: Tensor | None = None,
    *,
    length: int | None = None,
    radius: float | None = None,
) -> pd.DataFrame:
    """What ``howsmooth.bounds.table`` gives, with one bound of each kind and no work."""
    rows: list[tuple[Any, ...]] = [
        ("Lip(f on B_R^n)", 800.0, "theorem", "upper", math.inf, True, "A theorem")
    ]
    rows.append(("Lip(f on B_R^n)", math.inf, "other", "upper", math.inf, False, "Another (needs: luck)"))
    if X is not None:
        x = X.double()
        f = attention.to(dtype=torch.float64)
        log = float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2).log())
        rows[:0] = [
            ("‖D_X f‖", log, "measured", "lower", math.exp(log), True, "local_lipschitz"),
            ("‖D_X f‖", log, "measured", "upper", math.exp(log), True, "local_lipschitz"),
            ("‖D_X f‖", log + 1, "certificate", "upper", math.exp(log + 1), True, "A certificate"),
        ]
        radius = radius or float(x.norm(dim=-1).max())
    frame = pd.DataFrame(
        [row[2:] for row in rows],
        columns=["name", "side", "value", "holds", "source"],
        index=pd.Index([row[0] for row in rows], name="quantity"),
    )
    frame.attrs = {
        "length": length if X is None else len(X),
        "radius": radius,
        "radius_from": "",
        "log_values": [row[1] for row in rows],
    }
    return frame
