"""From a plan to what moves and what moves it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import Compose, TokenMap
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.parameter_files import is_parameter_file
from howsmooth.study.flows.plan import FlowPlan
from howsmooth.study.flows.starts import DRAWN, draw_tokens, onto_sphere, read_tokens
from howsmooth.study.flows.systems import SYSTEMS, build_system
from howsmooth.study.plan import derive_seed
from howsmooth.study.ranges import Ranges
from howsmooth.study.sources import FoundLayer, ModelSource, Request, Source, open_source
from howsmooth.study.tools import Tools

__all__ = ["System", "open_system"]

_TOKENS, _DIMENSION = 40, 2


@dataclass(frozen=True, eq=False)
class System:
    """What moves, and what moves it.

    Attributes
    ----------
    label
        The name under which results stand.
    title
        What it is, in one phrase.
    text
        Of the tokens; empty without one.
    maps
        One map, or the layers of a model in sequence.
    layers
        How many layers there are, each lasting one unit of time; ``None`` for one map.
    x
        The tokens at the start, (n, d) in float64.
    radius
        That of the sphere, or the standard deviation of Gaussian tokens.
    fingerprint
        SHA-256 of the parameters' origin and of the tokens.
    norms
        Of a model: whether its norm layers take part; ``None`` if there is no model.

    """

    label: str
    title: str
    text: str
    maps: tuple[TokenMap, ...]
    layers: int | None
    x: Tensor
    radius: float
    fingerprint: str
    norms: bool | None = None

    @property
    def in_order(self) -> bool:
        """Whether tokens see those before them only, so that their order matters."""
        attentions = (f.outer if isinstance(f, Compose) else f for f in self.maps)
        return any(getattr(f, "causal", False) for f in attentions)

    def identity(self) -> dict[str, Any]:
        """Return what all frames of one store must have in common, apart from the plan."""
        return {"n": self.x.shape[0], "d": self.x.shape[1], "fingerprint": self.fingerprint}


def open_system(plan: FlowPlan, tools: Tools) -> System:
    """Build a named system, read a parameter file or load a model, and put the tokens in place.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If it cannot be had, or the start does not fit.

    """
    system = _named(plan) if plan.source in SYSTEMS else _found(plan, tools)
    if plan.closure and _kind(plan, given=False) != "gaussian":
        raise ArgumentError(
            "closure", expected="tokens drawn with --start gaussian", got=f"--start {plan.start}"
        )
    for name in ("closure", "rescale"):
        if getattr(plan, name) and system.layers is not None:
            raise ArgumentError(
                name,
                expected="one layer",
                got=f"{system.layers} layers in sequence",
                remedy=f"Choose one with --layers, or leave --{name} out.",
            )
    return system


def _kind(plan: FlowPlan, *, given: bool) -> str:
    """Say where the tokens come from, if that was left open; ``given`` if the source has some."""
    if plan.start != "auto":
        return plan.start
    return "given" if given else "sphere" if plan.sphere else "gaussian"


def _named(plan: FlowPlan) -> System:
    for option, on in (
        ("--layers", plan.layers != "all"),
        ("--random-init", plan.random_init),
        ("--as-decoder", plan.as_decoder),
        ("--norms", plan.norms),
    ):
        if on:
            raise ArgumentError("source", expected=f"a model with {option}", got=f"the system {plan.source}")
    if plan.attention == "sinkhorn" and plan.causal:
        raise ArgumentError(
            "causal",
            expected="softmax or l2 attention, as no causal weights are doubly stochastic",
            got="sinkhorn",
        )
    kind = _kind(plan, given=False)
    read = _read(plan, kind)
    d = read.shape[1] if read is not None else plan.dimension or _DIMENSION
    seed = derive_seed(purpose="system", name=plan.source, seed=plan.seed)
    f = build_system(
        plan.source,
        d,
        attention=plan.attention,
        causal=plan.causal,
        beta=plan.beta,
        generator=torch.Generator().manual_seed(seed),
    )
    x = read if read is not None else _drawn(plan, kind, plan.tokens or _TOKENS, d)
    x, radius = _placed(plan, x, drawn=read is None)
    named = SYSTEMS[plan.source]
    kind = f"{plan.attention} attention{', causal' if plan.causal else ''}"
    beta = "" if plan.beta == 1 else f", β = {plan.beta:g}"
    title = f"{named.title}; {kind}{beta}"
    return System(plan.source, title, "", (f,), None, x, radius, _digest(plan.source, x))


def _found(plan: FlowPlan, tools: Tools) -> System:
    """Take the attentions of a file or of a model."""
    for name, left in (("attention", "softmax"), ("causal", False), ("beta", 1.0), ("dimension", None)):
        if getattr(plan, name) != left:
            raise ArgumentError(
                name,
                expected=f"a named system ({', '.join(SYSTEMS)}) with --{name}",
                got=repr(plan.source),
                remedy="The attention of a model or file is taken as it is.",
            )
    of_file = is_parameter_file(plan.source)
    if of_file and plan.norms:
        raise ArgumentError(
            "source", expected="a model with --norms", got=f"the parameter file {plan.source!r}"
        )
    source = open_source(
        Request(
            name=plan.source,
            text=plan.text,
            layers=Ranges.parse(plan.layers, "layers"),
            heads=Ranges.parse("all", "heads"),
            scope="attention",
            random_init=plan.random_init,
            as_decoder=plan.as_decoder,
            seed=plan.seed,
        ),
        tools,
    )
    word = "file" if of_file else "text"
    kind = _kind(plan, given=source.longest is not None)
    kind = "given" if kind == word else kind
    read = _read(plan, kind) if kind != "given" else None
    length = _length(plan, source, kind, read)
    found = _layers(plan, source, length)
    maps = tuple(one.map.to(dtype=torch.float64) for one in found)
    x = _tokens(plan, kind, read, found[0], length)
    x, radius = _placed(plan, x, drawn=kind in DRAWN)
    layers = len(maps) if len(maps) > 1 else None
    title = maps[0].describe()
    if not of_file:
        where = found[0].place if layers is None else f"{layers} layers in sequence"
        title = f"{where}, {'with' if plan.norms else 'without'} norm layers; {title}"
    text = source.text if kind == "given" else ""
    norms = None if of_file else plan.norms
    return System(source.label, title, text, maps, layers, x, radius, _digest(source.fingerprint, x), norms)


def _layers(plan: FlowPlan, source: Source, length: int) -> list[FoundLayer]:
    """Take the velocity of each layer: attention alone, or behind its norm layer."""
    if not plan.norms or not isinstance(source, ModelSource):
        attentions = source.attentions(length)
        _check(attentions[0].attention, plan.source)
        return [FoundLayer(one.layer, "", one.attention, one.x) for one in attentions]
    try:
        found = source.blocks(length)
    except CaptureError as error:
        raise CaptureError(f"{error} Without --norms there is attention alone.") from error
    for one in found:
        if one.layout != "pre-norm":
            raise ArgumentError(
                "norms",
                expected="pre-norm layers, X + f(N(X)), which are steps of a flow",
                got=f"the {one.layout} {one.place} of {plan.source!r}",
                remedy="Leave --norms out; --sphere with --method residual puts norms behind the steps.",
            )
    return found


def _length(plan: FlowPlan, source: Source, kind: str, read: Tensor | None) -> int:
    if read is not None:
        return int(read.shape[0])
    if kind == "given" and source.usual_length is None:
        raise ArgumentError(
            "start",
            expected="a file with tokens X",
            got=f"{plan.source!r} without",
            remedy="Choose a --start.",
        )
    length = plan.tokens or (source.usual_length if kind == "given" else _TOKENS) or _TOKENS
    if kind == "given" and source.longest is not None and length > source.longest:
        raise ArgumentError("tokens", expected=f"at most {source.longest}", got=str(length))
    return length


def _check(f: TokenMap, source: str) -> None:
    if f.d != f.d_out:
        raise ArgumentError(
            "source",
            expected="attention whose values have the dimension of its tokens, or with an output matrix",
            got=f"d = {f.d} and d_out = {f.d_out} in {source!r}",
        )


def _tokens(plan: FlowPlan, kind: str, read: Tensor | None, first: FoundLayer, length: int) -> Tensor:
    d = first.map.d
    if read is not None:
        if read.shape[1] != d:
            raise ArgumentError("start", expected=f"tokens (n, {d})", got=f"shape {tuple(read.shape)}")
        return read
    if kind != "given":
        return _drawn(plan, kind, length, d)
    if first.x is None:
        raise ArgumentError("tokens", expected="the number of tokens of the file", got=str(length))
    return first.x.double()


def _read(plan: FlowPlan, kind: str) -> Tensor | None:
    """Read the tokens, if the start is a file of them."""
    if kind in DRAWN:
        return None
    if kind in ("text", "file"):
        raise ArgumentError(
            "start", expected=f"a source with tokens of its own for {kind}", got=repr(plan.source)
        )
    x = read_tokens(Path(kind))
    for name, there in (("tokens", x.shape[0]), ("dimension", x.shape[1])):
        asked = getattr(plan, name)
        if asked is not None and asked != there:
            raise ArgumentError(
                name, expected=f"{there}, as in {kind}", got=str(asked), remedy=f"Leave --{name} out."
            )
    return x


def _drawn(plan: FlowPlan, kind: str, n: int, d: int) -> Tensor:
    seed = derive_seed(purpose="start", kind=kind, n=n, d=d, seed=plan.seed)
    return draw_tokens(kind, n, d, plan.radius, seed)


def _placed(plan: FlowPlan, x: Tensor, *, drawn: bool) -> tuple[Tensor, float]:
    """Put the tokens on their sphere, if there is one; return them with its radius."""
    if not plan.sphere:
        return x, plan.radius
    radius = plan.radius if drawn else float(x.square().sum(dim=1).mean().sqrt())
    return onto_sphere(x, radius), radius


def _digest(origin: str, x: Tensor) -> str:
    return hashlib.sha256(origin.encode() + x.numpy().tobytes()).hexdigest()
