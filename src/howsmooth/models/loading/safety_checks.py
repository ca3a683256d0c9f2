"""Checks that refuse unsafe files of a model before transformers reads its weights.

``trust_remote_code=False`` and ``use_safetensors=True`` are not enough: a configuration can name a pickle as
the file of its weights, and an index of weights can list pickles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from howsmooth.errors import ModelError
from howsmooth.model_folders import check_weights
from howsmooth.models.loading.model_location import Location

__all__ = ["check_files"]

_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


def check_files(place: Location, config: Any) -> None:
    """Raise ModelError unless the weights are files in safetensors format inside the model's folder.

    Quantised weights are refused, since transformers may download kernels for them, and so are adapters,
    which transformers uses or ignores depending on the installed packages.
    """
    cannot = f"{place.name!r} cannot be loaded:"
    folder = Path(place.location or "")
    if place.location is not None and folder.is_dir():
        check_weights(place.name, folder)
    named = getattr(config, "transformers_weights", None)
    if named is not None:
        _check_name(cannot, named, "its configuration", (".safetensors", ".safetensors.index.json"))
    index = _INDEX if named is None else named
    found = place.file(index) if index.endswith(".json") else None
    if found is not None:
        try:
            parts = set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"its {index[:100]} is not an index of weights ({type(error).__name__})"
            raise ModelError(f"{cannot} {why}.") from error
        for part in parts:
            _check_name(cannot, part, "the index of its weights", (".safetensors",))
    configs = (config, config.get_text_config(decoder=True))
    if any(getattr(one, "quantization_config", None) is not None for one in configs):
        raise ModelError(f"{cannot} its weights are quantised. Give the model in full precision.")
    if place.file(_ADAPTER) is not None:
        raise ModelError(
            f"{place.name!r} holds an adapter ({_ADAPTER}), which is not read. Merge it into the model, and "
            "give the folder of the merged one."
        )


def _check_name(cannot: str, name: object, where: str, endings: tuple[str, ...]) -> None:
    names = f"{cannot} {where} names the weights {str(name)[:100]!r}"
    if not isinstance(name, str) or not name.endswith(endings):
        raise ModelError(
            f"{names}, and howsmooth reads safetensors only, never a pickle. Convert them to safetensors."
        )
    if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name:
        raise ModelError(f"{names}, outside the model's folder.")
