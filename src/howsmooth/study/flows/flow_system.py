"""Load the system of a flow: the maps that move the tokens, and the tokens at the start."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import Compose, L2Attention, SelfAttention, SinkhornAttention, TokenMap
from howsmooth.errors import ArgumentError, CaptureError, ModelError, similar_name
from howsmooth.models.attention_parameter_files import is_parameter_file
from howsmooth.models.inputs.array_files import read_arrays
from howsmooth.seeds import derive_seed
from howsmooth.study.attention_sources import AttentionSource, ModelSource, open_attention_source
from howsmooth.study.flows.flow_plan import FlowPlan
from howsmooth.study.plans import SourcePlan

__all__ = ["SYSTEMS", "System", "build_system", "load_system"]

_TOKENS, _DIMENSION = 40, 2
_DRAWN = ("gaussian", "sphere")
_ENDINGS = (".npy", ".npz")


@dataclass(frozen=True, eq=False)
class System:
    """The maps that move the tokens of a flow, and the tokens at the start.

    Attributes
    ----------
    label
        The name of the system in results.
    title
        A phrase that describes the system.
    text
        The name of the text from which the tokens come; empty if they come from no text.
    maps
        One map, or the layers of a model in sequence.
    start
        Where the tokens come from: ``gaussian``, ``sphere``, ``given`` by the source, or the path of a file.
    x
        The tokens at the start, of shape (n, d) in float64.
    radius
        The radius of the sphere, or the standard deviation of Gaussian tokens.
    origin
        The name of a system, or a digest of a model or parameter file; it identifies the parameters.
    norms
        Whether the norm layers of a model take part; ``None`` if there is no model.

    """

    label: str
    title: str
    text: str
    maps: tuple[TokenMap, ...]
    start: str
    x: Tensor
    radius: float
    origin: str
    norms: bool | None = None

    @property
    def layers(self) -> int | None:
        """The number of layers that move the tokens one after another; ``None`` for a single map.

        Each layer lasts one unit of time.
        """
        return len(self.maps) if len(self.maps) > 1 else None

    @property
    def in_order(self) -> bool:
        """True if attention is causal, so that the order of the tokens matters."""
        attentions = (f.outer if isinstance(f, Compose) else f for f in self.maps)
        return any(getattr(f, "causal", False) for f in attentions)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 that identifies the parameters and the initial tokens of the system."""
        return hashlib.sha256(self.origin.encode() + self.x.numpy().tobytes()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """Return the number n and dimension d of the tokens, and the fingerprint of the system."""
        return {"n": self.x.shape[0], "d": self.x.shape[1], "fingerprint": self.fingerprint}


def load_system(plan: FlowPlan) -> System:
    """Build a named system, read a parameter file or load a model, and prepare the tokens at the start.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the system cannot be loaded, or the start does not fit it.

    """
    system = _named(plan) if plan.source in SYSTEMS else _of_source(plan)
    if plan.closure and system.start != "gaussian":
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


def _placed(plan: FlowPlan, start: str, x: Tensor) -> tuple[Tensor, float]:
    """Return the initial tokens and a radius.

    If the plan asks for a sphere, the tokens are projected onto it, and the radius is its radius. Otherwise,
    the radius is that of the random tokens.
    """
    given = start not in _DRAWN
    if given and plan.radius is not None and not plan.sphere:
        raise ArgumentError(
            "radius", expected="none for given tokens without --sphere", got=f"{plan.radius:g}"
        )
    usual = float(x.square().sum(dim=1).mean().sqrt()) if given and plan.sphere else 1.0
    radius = plan.radius or usual
    return _onto_sphere(x, radius) if plan.sphere else x, radius


# ---- Named systems, after Geshkovski, Letrouit, Polyanskiy, Rigollet (2023, 2024)


Matrices = Callable[[int, torch.Generator], tuple[Tensor, Tensor, Tensor]]
"""A function of the dimension d and a generator that returns the matrices Q, K, V of shape (d, d)."""


def _eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def _one_direction(d: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    value = -0.5 * _eye(d)
    value[0, 0] = 1.0
    return _eye(d), _eye(d), value


def _turning(d: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    value = _eye(d)
    if d > 1:
        value[:2, :2] = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    return _eye(d), _eye(d), value


def _random(d: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, d, d, generator=generator, dtype=torch.float64) / d**0.5
    return query, key, value


SYSTEMS: Mapping[str, tuple[str, Matrices]] = {
    "identity": ("queries, keys and values are the tokens", lambda d, _: (_eye(d),) * 3),
    "negative": (
        "queries and keys are the tokens, values their negatives",
        lambda d, _: (_eye(d), _eye(d), -_eye(d)),
    ),
    "one-direction": ("values grow along the first axis and shrink along the others", _one_direction),
    "turning": ("values are the tokens, turned and stretched in the first plane", _turning),
    "random": ("queries, keys and values by Gaussian matrices", _random),
}
"""A description and the matrices of each named system. Random matrices come from the generator."""


def build_system(plan: FlowPlan, d: int) -> TokenMap:
    """Build the attention of a named system in dimension d; random matrices depend on the plan's seed.

    Scores are β⟨q_i, k_j⟩, or −β|q_i − k_j|² for the attention ``l2``. ``sinkhorn`` makes the attention
    weights doubly stochastic.
    """
    seed = derive_seed(purpose="system", name=plan.source, seed=plan.seed)
    matrices = SYSTEMS[plan.source][1](d, torch.Generator().manual_seed(seed))
    query, key, value = (matrix[None] for matrix in matrices)
    if plan.attention == "l2":
        return L2Attention(query, key, value, scale=plan.beta, causal=plan.causal)
    if plan.attention == "sinkhorn":
        return SinkhornAttention(query, key, value, scale=plan.beta)
    return SelfAttention(query, key, value, scale=plan.beta, causal=plan.causal)


def _named(plan: FlowPlan) -> System:
    of_models = ("--layers", "--random-init", "--as-decoder", "--norms")
    asked = (bool(plan.layers.items), plan.random_init, plan.as_decoder, plan.norms)
    for option, on in zip(of_models, asked, strict=True):
        if on:
            raise ArgumentError("source", expected=f"a model with {option}", got=f"the system {plan.source}")
    if plan.attention == "sinkhorn" and plan.causal:
        raise ArgumentError(
            "causal",
            expected="softmax or l2 attention, because causal weights cannot be doubly stochastic",
            got="sinkhorn",
        )
    start = _kind_of_start(plan)
    if start in _DRAWN:
        x = _draw_tokens(plan, start, plan.tokens or _TOKENS, plan.dimension or _DIMENSION)
    else:
        x = _read_tokens(plan, Path(start))
    title = f"{SYSTEMS[plan.source][0]}; {plan.attention} attention"
    # Without spaces, at which the title of an animation could be broken.
    title += f"{', causal' if plan.causal else ''}{'' if plan.beta == 1 else f', β={plan.beta:g}'}"
    maps = (build_system(plan, x.shape[1]),)
    return System(plan.source, title, "", maps, start, *_placed(plan, start, x), plan.source)


# ---- Parameter files and models


def _of_source(plan: FlowPlan) -> System:
    """Build the system of a flow from the attention of a parameter file or a model."""
    for name, left in (("attention", "softmax"), ("causal", False), ("beta", 1.0), ("dimension", None)):
        if getattr(plan, name) != left:
            raise ArgumentError(
                name,
                expected=f"a named system ({', '.join(SYSTEMS)}) with --{name}",
                got=repr(plan.source),
                remedy="The attention of a model or file cannot be changed by this option.",
            )
    of_file = is_parameter_file(plan.source)
    if of_file and plan.norms:
        raise ArgumentError(
            "source", expected="a model with --norms", got=f"the parameter file {plan.source!r}"
        )
    source = _opened(plan)
    start = _kind_of_start(plan, _provided_start(plan, source, of_file=of_file))
    read = None if start in (*_DRAWN, "given") else _read_tokens(plan, Path(start))
    length = plan.tokens or (source.usual_length if start == "given" else None) or _TOKENS
    if read is not None:
        length = int(read.shape[0])
    elif start == "given" and source.longest is not None and length > source.longest:
        raise ArgumentError("tokens", expected=f"at most {source.longest}", got=str(length))
    found = _layers(plan, source, length)
    layer, first, given = found[0]
    if start in _DRAWN:
        x = _draw_tokens(plan, start, length, first.d)
    elif read is None:
        if given is None:
            raise ArgumentError("tokens", expected="the number of tokens of the file", got=str(length))
        x = given.double()
    elif read.shape[1] != first.d:
        raise ArgumentError("start", expected=f"tokens (n, {first.d})", got=f"shape {tuple(read.shape)}")
    else:
        x = read
    maps = tuple(f.to(dtype=torch.float64) for _, f, _ in found)
    title = maps[0].describe()
    if not of_file:
        where = f"layer {layer}" if len(maps) == 1 else f"{len(maps)} layers in sequence"
        title = f"{where}, {'with' if plan.norms else 'without'} norm layers; {title}"
    text = source.text if start == "given" else ""
    norms = None if of_file else plan.norms
    placed = _placed(plan, start, x)
    return System(source.label, title, text, maps, start, *placed, source.identity, norms)


def _opened(plan: FlowPlan) -> AttentionSource:
    """Open the model or parameter file of a flow. For an unknown name, the error lists the named systems."""
    try:
        asked = {
            name: getattr(plan, name) for name in ("source", "layers", "random_init", "as_decoder", "seed")
        }
        text = None if is_parameter_file(plan.source) else plan.text
        return open_attention_source(SourcePlan(text=text, **asked))
    except ModelError as error:
        if Path(plan.source).exists():
            raise
        meant = similar_name(plan.source, SYSTEMS)
        listed = f"The named systems are {', '.join(SYSTEMS)}."
        raise ModelError(f"{error} {listed} {meant}".rstrip()) from error


def _provided_start(plan: FlowPlan, source: AttentionSource, *, of_file: bool) -> str:
    """Return the value of the option ``start`` for tokens that the source itself provides: ``text`` if it is
    a model, and ``file`` if it is a parameter file.

    The result is empty if the model or file provides no tokens.
    """
    word = "file" if of_file else "text"
    if source.longest is not None:
        return word
    if plan.start == word:
        raise ArgumentError(
            "start",
            expected="a file with tokens X",
            got=f"{plan.source!r} without",
            remedy="Choose a --start.",
        )
    return ""


def _layers(
    plan: FlowPlan, source: AttentionSource, length: int
) -> list[tuple[int, TokenMap, Tensor | None]]:
    """Return for each layer its index, the map that gives the velocity, and the input tokens (n, d), if any.

    The map is attention alone, or attention after its norm layer.
    """
    if not plan.norms or not isinstance(source, ModelSource):
        found = source.attentions(length)
        f = found[0].attention
        if f.d != f.d_out:
            raise ArgumentError(
                "source",
                expected="attention whose values have the dimension of its tokens, or with an output matrix",
                got=f"d = {f.d} and d_out = {f.d_out} in {plan.source!r}",
            )
        return [(one.layer, one.attention, one.x) for one in found]
    try:
        sites = source.sites(length, "block")
    except CaptureError as error:
        raise CaptureError(f"{error} Leave --norms out to use attention alone.") from error
    for one in sites:
        if one.layout != "pre-norm":
            raise ArgumentError(
                "norms",
                expected="pre-norm layers, X + f(N(X)), which are steps of a flow",
                got=f"the {one.layout} layer {one.layer} of {plan.source!r}",
                remedy="Leave --norms out; --sphere with --method residual normalises after each step.",
            )
    return [(one.layer, one.map.inner, one.x[0].detach().cpu()) for one in sites]


# ---- Tokens at the start


def _kind_of_start(plan: FlowPlan, own: str = "") -> str:
    """Return where the initial tokens come from: ``gaussian``, ``sphere``, ``given`` or a file's path.

    ``own`` is the origin of the tokens that the model or parameter file provides, ``text`` or ``file``; empty
    if there are none.
    """
    if plan.start == "auto":
        return "given" if own else "sphere" if plan.sphere else "gaussian"
    return "given" if own and plan.start == own else plan.start


def _draw_tokens(plan: FlowPlan, kind: str, n: int, d: int) -> Float64[Tensor, "n d"]:
    """Draw n tokens: from N(0, radius² I) for ``gaussian``, uniformly with norm ``radius`` for ``sphere``."""
    seed = derive_seed(purpose="start", kind=kind, n=n, d=d, seed=plan.seed)
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    radius = plan.radius or 1.0
    return _onto_sphere(x, radius) if kind == "sphere" else radius * x


def _onto_sphere(x: Float64[Tensor, "n d"], radius: float) -> Float64[Tensor, "n d"]:
    """Project each token radially onto the sphere around zero that has the given radius."""
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    if not bool((norms > 0).all()):
        raise ArgumentError(
            "start", expected="tokens that are not zero on a sphere", got="a token that is zero"
        )
    placed: Tensor = x * (radius / norms)
    return placed


def _read_tokens(plan: FlowPlan, path: Path) -> Float64[Tensor, "n d"]:
    """Read tokens (n, d) from a ``.npy`` file, or from ``X`` in a ``.npz`` file; refuse pickled data."""
    if str(path) in ("text", "file"):
        raise ArgumentError(
            "start", expected=f"a source with tokens of its own for {path}", got=repr(plan.source)
        )
    x = _array_of(path)
    for name, there in (("tokens", x.shape[0]), ("dimension", x.shape[1])):
        asked = getattr(plan, name)
        if asked is not None and asked != there:
            raise ArgumentError(
                name, expected=f"{there}, as in {path}", got=str(asked), remedy=f"Leave --{name} out."
            )
    return x


def _array_of(path: Path) -> Float64[Tensor, "n d"]:
    if path.suffix not in _ENDINGS:
        raise ArgumentError(
            "start",
            expected=f"auto, {', '.join(_DRAWN)}, text, file, or a name that ends in {' or '.join(_ENDINGS)}",
            got=repr(str(path)),
        )
    array = read_arrays(path, "file of tokens", _ENDINGS).get("X" if path.suffix == ".npz" else "")
    if array is None or array.ndim != 2 or 0 in array.shape:
        got = "none of that name" if array is None else f"shape {tuple(array.shape)}"
        raise ArgumentError("start", expected=f"an array X (n, d) of numbers in {path}", got=got)
    x = array.double()
    if not bool(torch.isfinite(x).all()):
        raise ArgumentError("start", expected=f"finite numbers in {path}", got="NaN or infinity")
    return x
