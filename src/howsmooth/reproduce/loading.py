"""The tools of a study with a memory, so that an experiment of several parts loads a model once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

from howsmooth.study.tools import Model, TextLike, Tools

__all__ = ["remembering"]

# An untrained model is another one on each text, as a tokenizer may be trained on it: one a text.
_MODELS = 2


def remembering(tools: Tools) -> Tools:
    """Return tools that keep the last models and all texts that they loaded, and compute no bounds.

    Bounds have an experiment of their own; beside each measurement they would take longer than all others.
    """
    models: OrderedDict[tuple[Any, ...], Model] = OrderedDict()
    texts: dict[str, TextLike] = {}

    def load_model(name: str, **options: Any) -> Model:
        key = (name, *sorted(options.items()))
        if key in models:
            models.move_to_end(key)
            return models[key]
        # Let go of old ones before the new one needs the memory: all of another name, and the oldest.
        for other in [one for one in models if one[0] != name]:
            del models[other]
        while len(models) >= _MODELS:
            models.popitem(last=False)
        models[key] = tools.load_model(name, **options)
        return models[key]

    def load_text(name: str) -> TextLike:
        if name not in texts:
            texts[name] = tools.load_text(name)
        return texts[name]

    return replace(tools, load_model=load_model, load_text=load_text, bound=None)
