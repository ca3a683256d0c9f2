"""The command ``howsmooth inspect``, which lists attention layers and what can be measured on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json, heading, say, show_table
from howsmooth.cli.typer_command import Shown, command
from howsmooth.scopes import CROSS_SCOPE, SCOPES
from howsmooth.study.options import Integer, Told, options
from howsmooth.study.plans import AsDecoder, Part, RandomInit, Source
from howsmooth.words import counted, readable, sentence

if TYPE_CHECKING:
    from howsmooth.models import InspectedSite, Inspection, LoadedModel

__all__ = ["InspectionPlan", "inspect"]


_MOST_WEIGHTS = 10**9

_EXAMPLES = (
    "Every layer is captured once in every scope, and its map is compared with the model's own output. A "
    "layer that cannot be captured is listed with the reason, for example cross-attention, token mixing "
    "without a softmax, or a mask that depends on the tokens. The exit code is 0 if some layer is captured, "
    "and 2 if none is or the model is not found.",
    "Examples:",
    "[cyan]howsmooth inspect builtin-encoder[/]  a model with its weights",
    "[cyan]howsmooth inspect gpt2 --random-init[/]  an architecture, without its weights",
    "[cyan]howsmooth inspect ./folder --random-init --as-decoder[/]  a folder with only a config.json",
    "[cyan]howsmooth inspect t5 --random-init[/]  encoder and decoder",
    "[cyan]howsmooth inspect vit --random-init[/]  a vision model, on a generated image",
    "[cyan]howsmooth inspect clip --random-init --part vision[/]  one of a model's parts",
    "With --random-init, a configuration of more than a billion weights is built with at least 2 layers, and "
    "only as many as include every kind of layer that it names; the result says so.",
    "[cyan]howsmooth inspect ./folder --tokens 200 --json[/]  JSON for another program",
)


@options
class InspectionPlan:
    """The options of the command ``howsmooth inspect``: the model to inspect, and how to build it."""

    source: Source
    random_init: RandomInit = False
    as_decoder: AsDecoder = False
    part: Part = None
    tokens: Annotated[
        Annotated[Integer, Field(ge=2)] | None,
        Told("N"),
        "Length of the input of random token ids, for a text model. A sliding window is visible only if "
        "it is shorter than the input. Default: 16, or fewer if the model takes no more.",
    ] = None


@command(*_EXAMPLES)
def inspect(plan: InspectionPlan, shown: Shown) -> int:
    """List the attention layers of a model: heads, mask, positions, norms, and what can be measured."""
    from howsmooth.models import inspect_model, load_model

    with shown_progress(quiet=shown.quiet) as display:
        display.phase("Reading")
        how = {name: getattr(plan, name) for name in ("random_init", "as_decoder", "part")}
        loaded = load_model(plan.source, most_weights=_MOST_WEIGHTS, **how)
        display.phase("Inspecting")
        found = inspect_model(loaded, tokens=plan.tokens, on_layer=display.counter("layer"))
    if shown.json:
        origin = {name: getattr(loaded, name) for name in ("name", "source", "fingerprint", "max_length")}
        typer.echo(as_json(**origin, stored=_stored(loaded), **asdict(found)))
    else:
        _show(loaded, found)
    return 0 if any(site.scopes for site in found.sites) else 2


def _show(model: LoadedModel, found: Inspection) -> None:
    """Print what all attention layers share, a table of their differences, and the refused layers."""
    attention = [site for site in found.sites if site.layer is not None]
    count = counted(len(attention), "attention layer")
    if len(attention) < len(found.sites):
        count += f", {counted(len(found.sites) - len(attention), 'layer')} without a softmax"
    heading(f"{readable(model.name)}, {found.model}: {count}")
    say(f"{sentence(readable(model.source, longest=300))} Weights in {_stored(model)}.\n")
    captured = [site for site in found.sites if site.scopes]
    first, *others = [_facts(site) for site in captured] or [{}]
    shared = {key: value for key, value in first.items() if all(one[key] == value for one in others)}
    if shared:
        say("Every layer" if len(captured) == len(found.sites) else "Every layer that is captured")
        show_table(["", " "], shared.items(), left=[""], wrapped=[" "])
        say("")
    _show_layers(found, [key for key in first if key not in shared])
    if found.tokens is not None:
        # An image or a piece of audio has a fixed number of tokens.
        settings = getattr(getattr(model.model, "config", None), "__dict__", {})
        windows = [size for name, size in settings.items() if "window" in name and type(size) is int]
        longer = model.modality in ("text", "embeddings") and max(windows, default=0) > found.tokens
        more = f"; a sliding window of {max(windows)} is visible only with more --tokens" if longer else ""
        say(f"\nThe masks are those of an input of {found.tokens} tokens{more}.")
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
    """Print a table of the layers, in which those with the same properties share one row."""
    names = ["layer", "name", *varied]
    rows = []
    alike: dict[tuple[str, ...], list[InspectedSite]] = {}
    for site in found.sites:
        told = _facts(site)
        # The radius differs in every layer, so it does not separate layers that are otherwise alike.
        key = (_pattern(site.name), site.kind, *(v for k, v in told.items() if k in varied and k != _RADIUS))
        alike.setdefault(key, []).append(site)
    for sites in alike.values():
        told = _facts(sites[0]) | {_RADIUS: _radius(sites)}
        name = sites[0].name if len(sites) == 1 else f"{_common_path(sites)} ({len(sites)} alike)"
        if "scopes" not in varied and not sites[0].scopes:
            name += f": {told['scopes']}"
        cells = [readable(name, longest=120), *(told.get(key, "") for key in varied)]
        rows.append([_runs([site.layer for site in sites if site.layer is not None]) or "-", *cells])
    show_table(names, rows, wrapped=names)


def _stored(model: LoadedModel) -> str:
    return str(model.stored).removeprefix("torch.")


_RADIUS = "largest norm after it"


def _facts(site: InspectedSite) -> dict[str, str]:
    if not site.scopes:
        return {"scopes": f"refused: {site.kind}"}
    shares = "" if site.kv_heads == site.heads else f", {site.kv_heads} of keys and values"
    queries = "" if site.key_dim is None else f"queries and keys {site.key_dim}, "
    none = "" if CROSS_SCOPE in site.scopes else "none recognised"
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
    return " to ".join(dict.fromkeys(f"{radius:.4g}" for radius in found[:1] + found[-1:]))


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _common_path(sites: Sequence[InspectedSite]) -> str:
    """Return the module path of several layers, with a star at each place where their paths differ."""
    parts = zip(*(site.name.split(".") for site in sites), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _sentence_of(sites: Sequence[InspectedSite], found: Inspection) -> str:
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
    """Return layer indices as text; three or more consecutive indices are written as "first to last"."""
    # Consecutive layers have the same distance from their places in the list.
    groups = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    runs = [[layer for _, layer in group] for _, group in groups]
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
