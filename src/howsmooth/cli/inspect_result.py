"""The attention layers of a model for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth import __version__
from howsmooth.models import SCOPES, InspectedSite, Inspection, LoadedModel
from howsmooth.study.names import encodable, readable, sentence

__all__ = ["inspection_as_json", "show_inspection"]


def inspection_as_json(model: LoadedModel, found: Inspection) -> str:
    """Describe the layers as one JSON object."""
    described = {
        "howsmooth": __version__,
        "name": encodable(model.name),
        "source": encodable(model.source),
        "fingerprint": model.fingerprint,
        "max_length": model.max_length,
        **asdict(found),
    }
    return json.dumps(described, indent=2, allow_nan=False)


def show_inspection(model: LoadedModel, found: Inspection) -> None:
    """Print what all layers share, a table of what they do not, and what is refused."""
    console = Console()
    count = _count(len(found.sites), "attention layer")
    console.print(Text(encodable(f"{readable(model.name)}, {found.model}: {count}"), style="bold"))
    print(f"{encodable(sentence(readable(model.source, longest=300)))}\n")
    captured = [site for site in found.sites if site.scopes]
    facts = [_facts(site) for site in captured]
    shared = {key: value for key, value in (facts or [{}])[0].items() if all(f[key] == value for f in facts)}
    if shared:
        console.print("Every layer" if len(captured) == len(found.sites) else "Every layer that is captured")
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for key, value in shared.items():
            table.add_row(key, Text(value))
        console.print(Padding(table, (0, 0, 1, 2)))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layer", justify="right")
    table.add_column("name", overflow="fold")
    varied = [key for key in (facts or [{}])[0] if key not in shared]
    for key in varied:
        table.add_column(key)
    rest = dict(zip((site.layer for site in captured), facts, strict=True))
    for site in found.sites:
        told = rest.get(site.layer, {"scopes": "refused"} if "scopes" in varied else {})
        cells = [Text(told.get(key, "")) for key in varied]
        table.add_row(str(site.layer), Text(encodable(readable(site.name, longest=120))), *cells)
    console.print(table)
    if found.tokens is not None:
        print(
            f"\nMasks are those of {found.tokens} tokens; a longer window shows with more of them (--tokens)."
        )
    if not found.refusals:
        print("Nothing is refused.")
        return
    print("\nRefused:")
    for refusal in found.refusals:
        layers = "all layers" if len(refusal.layers) == len(found.sites) else _layers(refusal.layers)
        print(encodable(f"  {layers}, {_scopes(refusal.scopes)}: {readable(refusal.reason, longest=600)}"))


def _facts(site: InspectedSite) -> dict[str, str]:
    shares = "" if site.kv_heads == site.heads else f", {site.kv_heads} of keys and values"
    none = "none recognised"
    return {
        "heads": f"{site.heads}{shares}",
        "dimensions": f"tokens {site.d}, queries and keys {site.key_dim}, values {site.value_dim}",
        "mask": str(site.masking),
        "positions in scores": str(site.positions),
        "layout": site.layout or none,
        "norm of the input": site.norm or none,
        "its radius": "" if site.norm_radius is None else f"{site.norm_radius:.4g}",
        "scopes": _scopes(site.scopes),
    }


def _scopes(scopes: Sequence[str]) -> str:
    if tuple(scopes) == SCOPES:
        return "all scopes"
    return f"scope {scopes[0]}" if len(scopes) == 1 else f"scopes {', '.join(scopes)}"


def _layers(layers: Sequence[int]) -> str:
    """Name layers, runs of them by their ends."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return f"layers {', '.join(f'{r[0]} to {r[-1]}' if len(r) > 2 else ', '.join(map(str, r)) for r in runs)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
