"""Print the result of ``howsmooth inspect`` as tables or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from howsmooth.cli.terminal_output import as_json, counted, heading, say, show_table
from howsmooth.models import SCOPES, InspectedSite, Inspection, LoadedModel
from howsmooth.study.text_formatting import readable, sentence

__all__ = ["inspection_as_json", "show_inspection"]


def inspection_as_json(model: LoadedModel, found: Inspection) -> str:
    """Return the origin of a model and the properties of its attention layers as one JSON object."""
    return as_json(
        name=model.name,
        source=model.source,
        fingerprint=model.fingerprint,
        max_length=model.max_length,
        **asdict(found),
    )


def show_inspection(model: LoadedModel, found: Inspection) -> None:
    """Print what all attention layers have in common, a table of what differs, and the layers refused."""
    attention = [site for site in found.sites if site.layer is not None]
    count = counted(len(attention), "attention layer")
    if len(attention) < len(found.sites):
        count += f", {counted(len(found.sites) - len(attention), 'layer')} without a softmax"
    heading(f"{readable(model.name)}, {found.model}: {count}")
    say(f"{sentence(readable(model.source, longest=300))}\n")
    captured = [site for site in found.sites if site.scopes]
    facts = [_facts(site) for site in captured]
    shared = {key: value for key, value in (facts or [{}])[0].items() if all(f[key] == value for f in facts)}
    if len(captured) == 1:
        shared = facts[0]
    if shared:
        say("Every layer" if len(captured) == len(found.sites) else "Every layer that is captured")
        show_table(["", " "], shared.items(), left=[""], wrapped=[" "])
        say("")
    _show_layers(found, [key for key in (facts or [{}])[0] if key not in shared])
    if found.tokens is not None:
        say(
            f"\nThe masks are those of an input of {found.tokens} tokens; a longer sliding window is visible "
            "only with more --tokens."
        )
    for reason in dict.fromkeys(site.path_reason for site in captured):
        of = [site for site in captured if site.path_reason == reason]
        say(f"{_sentence_of(of, found)}: {of[0].path}, {readable(str(reason), longest=600)}")
    if found.unreached:
        say(f"Not reached by this input: {', '.join(found.unreached)} (choose it with --part).")
    if not found.refusals:
        say("No layer is refused.")
        return
    say("\nRefused:")
    for refusal in found.refusals:
        of = [site for site in found.sites if site.name in refusal.names]
        where = _sentence_of([site for site in of if site.layer in (*refusal.layers, None)], found)
        scopes = "" if refusal.scopes == SCOPES else f", {_scopes(refusal.scopes)}"
        say(f"  {where}{scopes}: {readable(refusal.reason, longest=600)}")


def _show_layers(found: Inspection, varied: list[str]) -> None:
    """Print a table of the layers, with one row for all layers that have the same properties."""
    names = ["layer", "name", *varied]
    rows = []
    alike: dict[tuple[str, ...], list[InspectedSite]] = {}
    for site in found.sites:
        told = _facts(site) if site.scopes else {"scopes": f"refused: {site.kind}"}
        # The radius differs in every layer, so it does not separate layers that are otherwise alike.
        key = (_pattern(site.name), site.kind, *(v for k, v in told.items() if k in varied and k != _RADIUS))
        alike.setdefault(key, []).append(site)
    for sites in alike.values():
        told = _facts(sites[0]) if sites[0].scopes else {"scopes": f"refused: {sites[0].kind}"}
        told[_RADIUS] = _radius(sites)
        name = sites[0].name if len(sites) == 1 else f"{_common_path(sites)} ({len(sites)} alike)"
        layers = [site.layer for site in sites if site.layer is not None]
        cells = [told.get(key, "") for key in varied]
        if "scopes" not in varied and not sites[0].scopes:
            name += f": {told['scopes']}"
        rows.append([_runs(layers) if layers else "-", readable(name, longest=120), *cells])
    show_table(names, rows, wrapped=names)


_RADIUS = "its radius"


def _facts(site: InspectedSite) -> dict[str, str]:
    shares = "" if site.kv_heads == site.heads else f", {site.kv_heads} of keys and values"
    queries = "" if site.key_dim is None else f"queries and keys {site.key_dim}, "
    none = "none recognised"
    return {
        "heads": f"{site.heads}{shares}",
        "dimensions": f"tokens {site.d}, {queries}values {site.value_dim}",
        "mask": str(site.masking),
        "positions in scores": str(site.positions),
        "layout": site.layout or none,
        "norm of the input": site.norm or none,
        _RADIUS: _radius([site]),
        "path": str(site.path),
        "scopes": _scopes(site.scopes),
    }


def _radius(sites: Sequence[InspectedSite]) -> str:
    found = sorted(site.norm_radius for site in sites if site.norm_radius is not None)
    ends = list(dict.fromkeys(f"{radius:.4g}" for radius in found[:1] + found[-1:]))
    return " to ".join(ends)


def _pattern(name: str) -> str:
    """Replace the numbers in a module path by stars, so that layers of one kind have the same pattern."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _common_path(sites: Sequence[InspectedSite]) -> str:
    """Return the module path that some layers have in common, with a star where their paths differ."""
    parts = zip(*(site.name.split(".") for site in sites), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _sentence_of(sites: Sequence[InspectedSite], found: Inspection) -> str:
    """Name some layers by their indices, and layers without an index by their module paths."""
    layers = [site.layer for site in sites if site.layer is not None]
    if layers and len(layers) == len(found.sites):
        return "All layers" if len(layers) > 1 else "The layer"
    named = [f"{'Layer' if len(layers) == 1 else 'Layers'} {_runs(layers)}"] if layers else []
    paths: dict[str, list[InspectedSite]] = {}
    for site in sites:
        if site.layer is None:
            paths.setdefault(_pattern(site.name), []).append(site)
    named += [
        of[0].name if len(of) == 1 else f"{_common_path(of)} ({len(of)} layers)" for of in paths.values()
    ]
    return ", ".join(named)


def _scopes(scopes: Sequence[str]) -> str:
    if tuple(scopes) == SCOPES:
        return "all scopes"
    return f"scope {scopes[0]}" if len(scopes) == 1 else f"scopes {', '.join(scopes)}"


def _runs(layers: Sequence[int]) -> str:
    """List layer indices as text, with three or more consecutive ones as "first to last"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
