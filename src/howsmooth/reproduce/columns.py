"""The layers that Figure 1 shows of a model, one column each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from howsmooth.reproduce.experiment import Request
from howsmooth.study.names import file_stem
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.prepare import Models, counted
from howsmooth.study.ranges import Ranges
from howsmooth.study.tools import Tools

__all__ = ["MODELS", "Column", "columns_of"]

MODELS = (
    ModelSpec("builtin-encoder"),
    ModelSpec("builtin-encoder", as_decoder=True),
    ModelSpec("gpt2", random_init=True),
)
"""The paper's three columns as far as they need no network: encoder, the same as decoder, random GPT-2."""

_MASKED_LAYER = 6
_FEW = 4  # words, or tokens, that suffice to see whether a layer is masked


@dataclass(frozen=True)
class Column:
    """A layer of a model: one column of the figure, and one store.

    Attributes
    ----------
    spec
        The model.
    layer
        Its layer.
    causal
        Whether the layer is masked.
    width
        Numbers a token, by which the time of a measurement is weighed.

    """

    spec: ModelSpec
    layer: int
    causal: bool
    width: int

    @property
    def stem(self) -> str:
        """The name of its folder."""
        return file_stem(self.spec.label, f"layer-{self.layer:02d}")

    def plan(self, request: Request, lengths: tuple[int, ...], samples: int) -> Plan:
        """Say what is measured of it."""
        return Plan(
            models=(self.spec,),
            texts=request.texts,
            lengths=lengths,
            samples=samples,
            layers=Ranges.parse(str(self.layer), "layers"),
            seed=request.seed,
            device=request.device,
            dtype=request.dtype,
        )


def columns_of(request: Request, tools: Tools) -> list[Column]:
    """Find the layers to show: those asked for, or the paper's choice for each model.

    Parameters
    ----------
    request
        What is asked for; without models, :data:`MODELS` are shown.
    tools
        What models and texts are loaded with.

    Returns
    -------
    list of Column
        Model by model. Without layers in the request, the first layer of a model without mask, and layer 6
        (the last one, if there are fewer) of a masked one.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If a model or text cannot be had, or a layer does not exist.

    """
    specs = request.models or MODELS
    models = Models(
        Plan(specs, request.texts, seed=request.seed, device=request.device, dtype=request.dtype), tools
    )
    content = tools.load_text(request.texts[0]).content
    beginning = " ".join(content.split(maxsplit=_FEW)[:_FEW])
    found = []
    for spec in specs:
        model = models.load(spec, content)
        ids = torch.tensor([model.tokenizer(beginning)[:_FEW]], device=request.device)
        site = tools.capture(model, ids, layers=[0], scope="attention")[0]
        count, _ = counted(model, spec.label)
        if request.layers is not None:
            layers = request.layers.resolve(count, spec.label, "layers")
        else:
            layers = (min(_MASKED_LAYER, count - 1),) if site.causal else (0,)
        found += [Column(spec, layer, bool(site.causal), site.x.shape[-1]) for layer in layers]
    return found
