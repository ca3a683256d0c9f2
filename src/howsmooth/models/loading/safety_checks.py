"""Checks that refuse unsafe files and ignore unsafe settings of a model before transformers reads its
weights.

``trust_remote_code=False`` and ``use_safetensors=True`` are not enough. A configuration can name a pickle as
the file of its weights, an index of weights can list pickles, and the attention implementation can be the
name of a repository with compiled code, which transformers downloads and runs if the package kernels is
installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from howsmooth.errors import ModelError
from howsmooth.models.loading.model_location import Place

__all__ = ["check_files", "forget_implementations"]

_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


def forget_implementations(config: Any) -> None:
    """Remove the settings of a configuration that select kernels for attention and mixture-of-experts layers.

    Transformers then chooses the kernels.
    """
    config._attn_implementation = None
    config._experts_implementation = None


def check_files(place: Place, config: Any) -> None:
    """Raise ModelError if weights are not in safetensors format, are quantised, or belong to an adapter.

    Raises
    ------
    ModelError
        If the configuration or the index of the weights names a file that is no safetensors file, or a file
        outside the model's folder; if the weights are quantised, for which transformers may download kernels;
        or if there is an adapter, which transformers uses or ignores depending on the installed packages.

    """
    if place.location is None:
        return
    index: object = _INDEX
    named = getattr(config, "transformers_weights", None)
    if named is not None:
        _check_name(place, named, "its configuration", (".safetensors", ".safetensors.index.json"))
        index = named if str(named).endswith(".json") else None
    if index is not None:
        for part in _parts(place, str(index)):
            _check_name(place, part, "the index of its weights", (".safetensors",))
    if any(
        getattr(one, "quantization_config", None) is not None
        for one in (config, config.get_text_config(decoder=True))
    ):
        raise ModelError(
            f"{place.name!r} cannot be loaded: its weights are quantised. Give the model in full precision."
        )
    if place.file(_ADAPTER) is not None:
        raise ModelError(
            f"{place.name!r} holds an adapter ({_ADAPTER}), which is not read. Merge it into the model, and "
            "give the folder of the merged one."
        )


def _check_name(place: Place, name: object, where: str, endings: tuple[str, ...]) -> None:
    if not isinstance(name, str) or not name.endswith(endings):
        raise ModelError(
            f"{place.name!r} cannot be loaded: {where} names the weights {str(name)[:100]!r}, and howsmooth "
            "reads safetensors only, never a pickle. Convert them to safetensors."
        )
    if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name:
        raise ModelError(
            f"{place.name!r} cannot be loaded: {where} names the weights {name[:100]!r}, outside the model's "
            "folder."
        )


def _parts(place: Place, index: str) -> set[object]:
    """Return the set of names of the weight files that an index file lists. The set is empty if the model has
    no index file.
    """
    found = place.file(index)
    if found is None:
        return set()
    try:
        listed = json.loads(found.read_text(encoding="utf-8"))["weight_map"]
        return set(listed.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{place.name!r} cannot be loaded: its {index[:100]} is not an index of weights "
            f"({type(error).__name__})."
        ) from error
