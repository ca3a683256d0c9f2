"""Every layer of hs.nn with what it does not take: a sentence that says so, never a number or a traceback.

What an annotation rules out (a list for a tensor) is tried without the checks of annotations that these tests
run under.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import ArgumentError, CertificateError, HowsmoothError, NonFiniteError
from tests._nn_layers import ATTENTION, DIM, LAYERS, LENGTH, PARTS, RADIUS, inputs, tokens_of
from tests._selection import pairs

BATCH = 2
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def built(name: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name].build(**settings).eval()


def called(layer: nn.Module, *arguments: Any, **keywords: Any) -> Tensor:
    return tokens_of(layer(*arguments, **keywords))


# ---- inputs


def wrong_inputs(name: str) -> dict[str, Tensor]:
    layer, x = LAYERS[name], inputs(LAYERS[name])
    found = {
        "whole numbers": x.long(),
        "booleans": x > 0,
        "complex numbers": x.to(torch.complex64),
        "no axis": torch.tensor(1.0),
        "sparse": x.to_sparse(),
    }
    if not layer.any_dim:
        found |= {"another dimension": torch.cat([x, x], -1), "no dimension": x[..., :0]}
    if not layer.any_length:
        found |= {"more tokens": torch.cat([x, x], 1), "fewer tokens": x[:, :2]}
    if next(built(name).parameters(), None) is not None:
        found["another device"] = x.to("meta")
    if name in ATTENTION or name == "SelfAttentionBlock":
        found |= {
            "one axis": x[0, 0],
            "four axes": x[None],
            "an empty batch": x[:0],
            "no tokens": x[:, :0],
            "another precision": x.double(),
            "beyond the radius": 1.2 * x,
        }
    if name in ("OrthogonalLinear", "SpectralLinear"):
        found |= {"another precision": x.double(), "half precision": x.half()}
    if name == "MeanPool":
        found["no tokens"] = x[:, :0]
    if name == "Patches":
        found |= {"odd sides": x[..., :3], "three axes": x[0]}
    if name in ("PrependToken", "TakeToken", "MeanPool"):
        found["two axes"] = x[0]
    if name == "TakeToken":
        found["no tokens"] = x[:, :0]
    return found


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_inputs_that_do_not_fit_are_refused(name: str) -> None:
    layer = built(name)
    called(layer, inputs(LAYERS[name]))
    for words, x in wrong_inputs(name).items():
        print(words)
        with pytest.raises(ArgumentError, match=r"^(query|x|length|num_tokens): expected ") as refused:
            called(layer, x)
        assert len(str(refused.value)) < 400, words


@pytest.mark.parametrize("name", sorted(ATTENTION))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_attention_refuses_numbers_that_are_none(name: str, value: float) -> None:
    x = inputs(LAYERS[name])
    x[1, 2, 3] = value
    for beyond in ("refuse", "clip"):
        with pytest.raises(NonFiniteError, match="query: expected finite numbers"):
            called(built(name, beyond=beyond), x)


@pytest.mark.parametrize("name", sorted(PARTS))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parts_never_make_numbers_of_what_is_none(name: str, value: float) -> None:
    """A token that is not a number, or infinite, gives one that is not finite, or nothing."""
    layer, x = built(name), inputs(LAYERS[name])
    x.view(BATCH, -1)[1, -1] = value  # of the last token, which TakeToken(-1) takes
    try:
        y = called(layer, x)
    except NonFiniteError:
        return
    assert torch.isfinite(y[0]).all()
    assert not torch.isfinite(y[1]).all()


@pytest.mark.parametrize(("name", "value"), pairs(sorted(LAYERS), [math.nan, math.inf]))
def test_no_constant_is_stated_for_weights_that_are_no_numbers(name: str, value: float) -> None:
    reference = built(name)
    for parameter, _ in reference.named_parameters():
        layer = built(name)
        with torch.no_grad():
            dict(layer.named_parameters())[parameter].view(-1)[0] = value
        with pytest.raises(NonFiniteError, match="expected finite numbers"):
            hs.nn.certify(layer, LENGTH, RADIUS)
        if name in ATTENTION:
            for ask in (layer.lipschitz_bound, layer.output_radius):
                with pytest.raises(NonFiniteError):
                    ask(LENGTH, RADIUS)
            # A shift of the outputs has no part in the constant, and makes them no numbers.
            with contextlib.suppress(NonFiniteError):
                assert not torch.isfinite(called(layer, inputs(LAYERS[name]))).all()


@pytest.mark.parametrize("name", sorted(ATTENTION))
@pytest.mark.parametrize("scale", [1e-30, 1e12, 1e18])
def test_clipping_is_a_projection_at_every_size(name: str, scale: float) -> None:
    layer, x = built(name, beyond="clip"), inputs(LAYERS[name])
    short = x * min(scale, RADIUS / (0.9 * RADIUS))
    torch.testing.assert_close(called(layer, scale * x), called(layer, short), rtol=1e-4, atol=1e-6)


# 1e30 squared is no float32 number, but all of these maps have limits there.
LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    "ClipTokens": lambda x: 1.25 * x / x.norm(dim=-1, keepdim=True),
    "LipschitzLayerNorm": lambda x: 0.5 * nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1),
    "LipschitzRMSNorm": lambda x: x / x.norm(dim=-1, keepdim=True),
}


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_large_tokens_are_not_lost(name: str) -> None:
    x = inputs(LAYERS[name])
    for scale in (1e18, 1e30):
        torch.testing.assert_close(called(built(name), scale * x), LIMITS[name](x))


# ---- cross-attention and masks


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_cross_attention_is_refused(name: str) -> None:
    layer, x = built(name), inputs(LAYERS[name])
    assert torch.equal(called(layer, x, x, x), called(layer, x))
    for which, arguments in (("key", (x, x.clone())), ("value", (x, x, x.clone()))):
        with pytest.raises(ArgumentError, match=f"{which}: expected None, or the tensor given as query"):
            called(layer, *arguments)


WRONG_MASKS: dict[str, tuple[str, Tensor]] = {
    "another length": ("attn_mask: expected shape", CAUSAL[:3]),
    "four axes": ("attn_mask: expected shape", CAUSAL[None, None]),
    "three masks for two times two heads": ("attn_mask: expected shape", CAUSAL.expand(3, -1, -1)),
    "whole numbers": ("attn_mask: expected a boolean or floating-point", CAUSAL.int()),
    "complex numbers": ("attn_mask: expected a boolean", CAUSAL.to(torch.complex64)),
    "NaN": ("attn_mask: expected finite numbers or -inf", torch.full((LENGTH, LENGTH), math.nan)),
    "infinity": ("attn_mask: expected finite numbers", torch.full((LENGTH, LENGTH), math.inf)),
    "sparse": ("attn_mask: expected a dense tensor", CAUSAL.float().to_sparse()),
    "another device": ("attn_mask: expected a dense tensor", CAUSAL.to("meta")),
    "all hidden": ("attn_mask: expected ", torch.ones_like(CAUSAL)),
    "all at minus infinity": ("attn_mask: expected ", torch.full((LENGTH, LENGTH), -math.inf)),
    "padding of another shape": (
        "key_padding_mask: expected shape",
        torch.zeros(LENGTH, BATCH, dtype=torch.bool),
    ),
    "padding of one axis": ("key_padding_mask: expected shape", torch.zeros(LENGTH, dtype=torch.bool)),
    "padding of whole numbers": (
        "key_padding_mask: expected a boolean",
        torch.zeros(BATCH, LENGTH, dtype=torch.int64),
    ),
    "padding of NaN": ("key_padding_mask: expected ", torch.full((BATCH, LENGTH), math.nan)),
    "padding of all": ("key_padding_mask: expected ", torch.ones(BATCH, LENGTH, dtype=torch.bool)),
}
# Those that a layer without a mask refuses besides, as its constant does not cover them.
UNPROVED: dict[str, dict[str, Any]] = {
    "causal": {"attn_mask": CAUSAL},
    "causal by a word": {"is_causal": True},
    "numbers": {"attn_mask": torch.linspace(-1, 1, LENGTH**2).reshape(LENGTH, LENGTH)},
    "padding": {"key_padding_mask": torch.tensor([[False] * 3 + [True]] * BATCH)},
}


@pytest.mark.parametrize("kind", ["none", "any", "additive"])
@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_masks_that_do_not_fit_are_refused(name: str, kind: str) -> None:
    layer, x = built(name, mask=kind), inputs(LAYERS[name])
    for name, (words, mask) in WRONG_MASKS.items():
        print(name)
        with pytest.raises(ArgumentError, match=f"^{words}"):
            called(layer, x, **{words.split(":")[0]: mask})
    # Together they hide all keys of the first query.
    padding = torch.tensor([[True] + [False] * 3] * BATCH)
    with pytest.raises(ArgumentError, match="mask: expected "):
        called(layer, x, attn_mask=CAUSAL, key_padding_mask=padding)


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_masks_that_a_constant_does_not_cover_are_refused(name: str) -> None:
    layer, x = built(name), inputs(LAYERS[name])
    for words, mask in UNPROVED.items():
        print(words)
        with pytest.raises(ArgumentError, match=r"for which the constant was proved|without a causal mask"):
            called(layer, x, **mask)
    # Masks that hide nothing change nothing.
    nothing = torch.zeros(LENGTH, LENGTH)
    for mask in (nothing, nothing.bool()):
        assert torch.equal(called(layer, x, attn_mask=mask), called(layer, x))
    with pytest.raises(ArgumentError, match="expected a boolean mask, or a mask of zeros and -inf"):
        called(built(name, mask="any"), x, attn_mask=UNPROVED["numbers"]["attn_mask"])


# ---- lengths and radii


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_lengths_and_radii_that_are_none_are_refused(name: str) -> None:
    layer: Any = built(name)
    for ask in (layer.lipschitz_bound, layer.output_radius):
        ask(LENGTH, RADIUS)
        for length in (0, -1, True, 10**400):
            with pytest.raises(ArgumentError, match="length: expected "):
                ask(length, RADIUS)
        for radius in (-1.0, math.nan):
            with pytest.raises(ArgumentError, match="radius: expected "):
                ask(LENGTH, radius)


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_attention_states_a_constant_where_it_takes_inputs(name: str) -> None:
    layer: Any = built(name)
    for length, radius in ((LENGTH + 1, 1.0), (LENGTH - 1, 1.0), (LENGTH, 2 * RADIUS), (LENGTH, math.inf)):
        for ask in (layer.lipschitz_bound, layer.output_radius):
            with pytest.raises(ArgumentError, match=r"(length|radius): expected "):
                ask(length, radius)
        with pytest.raises(CertificateError, match="has no constant here"):
            hs.nn.certify(layer, length, radius)
    clipping: Any = built(name, beyond="clip", shorter=True)
    full = clipping.lipschitz_bound(LENGTH, RADIUS).value
    assert full == pytest.approx(1.0)
    assert clipping.lipschitz_bound(LENGTH, 3 * RADIUS).value == full
    assert clipping.lipschitz_bound(LENGTH - 2, RADIUS).value <= full * (1 + 1e-9)
    assert called(clipping, inputs(LAYERS[name])[:, :2]).shape == (BATCH, 2, DIM)


# ---- precision and modes


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_half_precision_is_computed_in_single(name: str) -> None:
    layer, x = built(name), inputs(LAYERS[name])
    weights = list(layer.parameters())
    wanted = called(layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = called(layer, x)
    assert torch.equal(inside, wanted)
    slopes = (torch.autograd.grad(y.square().sum(), weights, allow_unused=True) for y in (inside, wanted))
    for one, other in zip(*slopes, strict=True):
        assert one is other is None or torch.equal(one, other)
    for dtype in (torch.float16, torch.bfloat16):
        half = x.to(dtype)
        for stored in (torch.float32, dtype):
            rounded = built(name).to(stored)
            exact = built(name)
            exact.load_state_dict(rounded.state_dict())
            y = called(rounded, half)
            assert y.dtype == dtype
            assert torch.equal(y, called(exact, half.float()).to(dtype))


@pytest.mark.parametrize("name", sorted(PARTS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_in_half_precision_are_near_or_refused(name: str, dtype: torch.dtype) -> None:
    layer, x = built(name), inputs(LAYERS[name])
    wanted = called(layer, x)
    near = {"rtol": 0.02, "atol": 0.03}
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(called(layer, x).float(), wanted, **near)
    for cast in (lambda: called(layer, x.to(dtype)), lambda: called(built(name).to(dtype), x.to(dtype))):
        if name in ("OrthogonalLinear", "SpectralLinear", "AverageResidual"):
            with pytest.raises(ArgumentError, match=r"(x|weight): expected .*float32"):
                cast()
        else:
            torch.testing.assert_close(cast().float(), wanted, **near)
    if next(layer.parameters(), None) is not None:
        with pytest.raises(CertificateError, match="in which no constant is certified"):
            hs.nn.certify(built(name).to(dtype), LENGTH, RADIUS)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_training_is_the_same_function(name: str) -> None:
    layer, x = built(name), inputs(LAYERS[name])
    with torch.no_grad():
        if name == "SpectralLinear":
            # In training its estimates of singular vectors get better; where they are right, they stay.
            layer.settle()
            torch.testing.assert_close(
                called(layer.train(), x), called(layer.eval(), x), rtol=1e-5, atol=1e-6
            )
            with pytest.raises(CertificateError, match=r"Call model\.eval\(\)"):
                hs.nn.certify(layer.train(), LENGTH, RADIUS)
            return
        assert torch.equal(called(layer.train(), x), called(layer.eval(), x))


# ---- constructors, and what annotations rule out, without their checks


NONE = [0, -1, 2.5, "x", None, True]
SETTINGS = {
    "embed_dim": NONE,
    "num_heads": [*NONE, 4],
    "length": NONE,
    "radius": [0, -1.0, math.nan, math.inf, "x", True, 1j],
    "constant": [0, -1.0, math.nan, math.inf, "x", True],
    "beyond": ["x", None, 1],
    "device": ["nonsense", "cuda:99", 3.5],
    "dtype": [torch.int64, torch.complex64, torch.bool, "float32", 32],
    "mask": [
        "x",
        None,
        3,
        torch.ones(3, 4, dtype=torch.bool),
        torch.zeros(4, 4),
        [[1, 2], [3]],
        torch.ones(4, 4, dtype=torch.bool),
        [[True] * 4] * 4,
    ],
}
PLACED = {
    "OrthogonalLinear": (4, 4),
    "SpectralLinear": (4, 4),
    "CenterNorm": (4,),
    "LipschitzLayerNorm": (4,),
    "LipschitzRMSNorm": (4,),
    "AddPositions": (4, 4),
    "PrependToken": (4,),
}


def wrong_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls with arguments that no annotation allows, each with its description."""
    for name, layer in LAYERS.items():
        module, x = layer.build().eval(), inputs(layer)
        for words, given in {"a list": x.tolist(), "nothing": None, "NumPy": x.numpy(), "words": "x"}.items():
            yield (f"{name} takes {words}", partial(module, given))
        for ask in ("lipschitz_bound", "output_radius"):
            for pair in [
                (2.5, 1.0),
                ("4", 1.0),
                (None, 1.0),
                (LENGTH, "x"),
                (LENGTH, None),
                (LENGTH, 1j),
                (LENGTH, True),
                (LENGTH, 10**400 if name in ATTENTION else -(10**400)),
                (LENGTH, [1.0]),
            ]:
                yield (f"{name}.{ask}{str(pair)[:40]}", partial(getattr(module, ask), *pair))
        for words, given in {"a number": 3, "words": "mask", "a list": [[False] * LENGTH] * LENGTH}.items():
            if name in ATTENTION:
                yield (f"{name} attn_mask {words}", partial(module, x, attn_mask=given))
                yield (f"{name} key_padding_mask {words}", partial(module, x, key_padding_mask=given))
                yield (f"{name} key {words}", partial(module, x, given))

    for name in ATTENTION:
        usual = {"embed_dim": 6, "num_heads": 2, "length": LENGTH, "radius": 1.5, "constant": 1.0}
        for key, values in SETTINGS.items():
            for i, value in enumerate(values):
                yield (f"{name}({key} {i})", partial(getattr(hs.nn, name), **(usual | {key: value})))

    for name, sizes in PLACED.items():
        part = getattr(hs.nn, name)
        for place in range(len(sizes)):
            for value in NONE:
                changed = [value if i == place else size for i, size in enumerate(sizes)]
                yield (f"{name}({changed})", partial(part, *changed))
        for key in ("device", "dtype"):
            for i, value in enumerate(SETTINGS[key]):
                yield (f"{name}({key} {i})", partial(part, *sizes, **{key: value}))
    for name in ("GroupSort", "Patches"):
        for value in NONE:
            yield (f"{name}({value!r})", partial(getattr(hs.nn, name), value))
    for value in (0, -1.0, math.nan, math.inf, "x", None, True):
        yield (f"ClipTokens({value!r})", partial(hs.nn.ClipTokens, value))
    for value in (2.5, "x", None, True):
        yield (f"TakeToken({value!r})", partial(hs.nn.TakeToken, value))
    for value in ("x", None, 3):
        yield (f"Residual({value!r})", partial(hs.nn.Residual, value))
        yield (f"AverageResidual({value!r})", partial(hs.nn.AverageResidual, value))
        yield (f"SelfAttentionBlock({value!r})", partial(hs.nn.SelfAttentionBlock, value))
        yield (f"certify({value!r})", partial(hs.nn.certify, value, 4, 1.0))


@pytest.mark.usefixtures("unchecked")
def test_what_no_annotation_allows_is_refused_by_a_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = list(wrong_calls())
    assert len(calls) > 500
    for label, call in calls:
        with pytest.raises(HowsmoothError) as refused:
            pytest.fail(f"{label}: not refused, but taken: {call()}")
        told = str(refused.value)
        assert "\n" not in told, label
        assert ": expected " in told, label
    assert not list(tmp_path.iterdir())
