"""Proved radii before the last norm layer: never beaten by ascents, and against 60 digits."""

from __future__ import annotations

import math

import mpmath as mp
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.certificates.norm_and_output_layer import prediction_radii

Case = tuple[hs.LayerNorm | hs.RMSNorm, Tensor, Tensor, Tensor]


def _case(kind: str, d: int = 12, vocabulary: int = 30, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    gain, weight, x = 1 + 0.5 * normal(d), 0.7 * normal(vocabulary, d), 2 * normal(d)
    if kind == "rms":
        return hs.RMSNorm(gain, eps=0.0), weight, torch.zeros(vocabulary, dtype=torch.float64), x
    return hs.LayerNorm(gain, 0.5 * normal(d), eps=0.5), weight, normal(vocabulary), x + 3


def _logits(case: Case, x: Tensor) -> Tensor:
    norm, weight, bias, _ = case
    h = x - x.mean(-1, keepdim=True) if isinstance(norm, hs.LayerNorm) else x
    shift = 0 if norm.bias is None else norm.bias
    return (norm.weight * h / (h.square().mean(-1, keepdim=True) + norm.eps).sqrt() + shift) @ weight.T + bias


def _divergence(case: Case, x: Tensor) -> Tensor:
    log_p, log_q = (_logits(case, y).log_softmax(-1) for y in (case[3], x))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _margin(case: Case, x: Tensor) -> Tensor:
    z, answer = _logits(case, x), int(_logits(case, case[3]).argmax())
    others = torch.arange(z.shape[-1]) != answer
    return z[..., answer] - z[..., others].amax(-1)


def _ascended(case: Case, what: object, size: float) -> Tensor:
    """Changes of a given size, from 500 random starts, that make a function of the token large."""
    g = torch.Generator().manual_seed(1)
    change = torch.randn(500, len(case[3]), generator=g, dtype=torch.float64)
    for step in range(60):
        change = (size * change / change.norm(dim=1, keepdim=True)).requires_grad_()
        (slope,) = torch.autograd.grad(what(case, case[3] + change).sum(), change)  # type: ignore[operator]
        turned = size * slope / slope.norm(dim=1, keepdim=True).clamp_min(1e-300)
        change = (change + turned * (1 - step / 60)).detach()
    return size * change / change.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_no_ascent_beats_the_radii(kind: str, epsilon: float) -> None:
    for seed in range(3):
        case = _case(kind, seed=seed)
        radius, of_answer = prediction_radii(*case, epsilon)
        found = _divergence(case, case[3] + _ascended(case, _divergence, radius))
        assert (0.6 if epsilon < 1 else 0.3) * epsilon < float(found.max()) <= epsilon
        rival = lambda case, x: -_margin(case, x)  # noqa: E731
        assert float(_margin(case, case[3] + _ascended(case, rival, of_answer)).min()) > 0
        assert float(_margin(case, case[3] + _ascended(case, rival, 1.2 * of_answer)).min()) < 0


def test_large_weights_leave_a_radius_that_holds() -> None:
    norm, weight, bias, x = _case("layer")
    case = norm, 1e5 * weight, bias, x
    radius, of_answer = prediction_radii(*case, 0.1)
    assert radius > 0
    assert of_answer > 0
    assert float(_divergence(case, x + _ascended(case, _divergence, radius)).max()) <= 0.1


def test_the_radius_of_an_answer_is_exact_where_the_closed_form_is() -> None:
    # The normalised token makes an angle of 60° with e1, and the answer changes where it is 120°.
    x = 5 * torch.tensor([0.5, 0.75**0.5, 0.0, 0.0], dtype=torch.float64)
    weight = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0]], dtype=torch.float64)
    norm, bias = hs.RMSNorm(torch.full_like(x, 0.5), eps=0.0), torch.tensor([1.0, 0], dtype=torch.float64)
    found = prediction_radii(norm, weight, bias, x, 0.1)[1]
    assert 5 * math.sin(math.pi / 3) * (1 - 1e-12) < found < 5 * math.sin(math.pi / 3)
    # A small length of the norm's own makes the token turn less.
    norm = hs.RMSNorm(torch.full_like(x, 0.5), eps=25.0)
    further = prediction_radii(norm, weight, 0 * bias, x, 0.1)[1]
    assert 0.85 * 2.5 < further < 2.5


def test_a_tie_has_no_radius() -> None:
    norm, weight, bias, x = _case("rms")
    answer = int(_logits((norm, weight, bias, x), x).argmax())
    weight[(answer + 1) % len(weight)] = weight[answer]
    assert prediction_radii(norm, weight, bias, x, 0.1)[1] == 0


def test_radii_in_sixty_digits() -> None:
    with mp.workdps(60):
        for seed in range(3):
            case = norm, weight, _, x = _case("rms", seed=seed)
            radius, of_answer = prediction_radii(*case, 1e-6)
            h = mp.matrix(x.tolist())
            rows = [
                [mp.mpf(w) * g for w, g in zip(row, norm.weight.tolist(), strict=True)]
                for row in weight.tolist()
            ]
            # Without biases an answer changes where the difference of two rows is orthogonal to the token.
            best = max(rows, key=lambda row: mp.fdot(row, h))
            apart = [[a - b for a, b in zip(best, row, strict=True)] for row in rows if row is not best]
            exact = min(mp.fdot(v, h) / mp.norm(v) for v in apart)
            assert of_answer <= exact
            assert of_answer > 0.9 * exact

            def log_p(token: mp.matrix, rows: list[list[mp.mpf]] = rows) -> list[mp.mpf]:
                scale = mp.sqrt(len(token)) / mp.norm(token)
                z = [scale * mp.fdot(row, token) for row in rows]
                total = mp.log(mp.fsum(mp.exp(value) for value in z))
                return [value - total for value in z]

            # The change with the largest divergence, of exactly the length of the radius.
            changes = _ascended(case, _divergence, radius)
            change = mp.matrix(changes[int(_divergence(case, x + changes).argmax())].tolist())
            before, after = log_p(h), log_p(h + change * (mp.mpf(radius) / mp.norm(change)))
            divergence = mp.fsum(mp.exp(a) * (a - b) for a, b in zip(before, after, strict=True))
            assert mp.mpf("0.9e-6") < divergence <= mp.mpf(1e-6)


def _two_logits(size: float, bias: tuple[float, float], far: float = 0.0) -> tuple[Case, mp.mpf]:
    """Two logits that move against each other if the token turns, so that the bounds are tight: the case, and
    the derivative of each by the angle. Both rows are ``far`` from it, in a direction that the norm removes.
    """
    row = size * torch.tensor([0.0, 0, 1, -1, 2, -2, 3, -3], dtype=torch.float64)
    weight = torch.stack((row, -row)) + far * torch.tensor([[1.0], [-3]], dtype=torch.float64)
    x = torch.tensor([5.0, -5, *[0] * 6], dtype=torch.float64)
    case = hs.LayerNorm(torch.ones_like(x), None, eps=0.0), weight, torch.tensor(bias).to(weight), x
    return case, mp.sqrt(8) * mp.norm(mp.matrix(row.tolist()))


@pytest.mark.parametrize(
    ("bias", "far", "reached"),
    [((0, 0), 0, 1e-13), ((0, -4), 0, 1e-11), ((1e6, 1e6 - 4), 0, 1e-8), ((0, -4), 1e8, 1e-4)],
)
def test_errors_of_rounding_make_the_radius_smaller(
    bias: tuple[float, float], far: float, reached: float
) -> None:
    epsilon = 2.0**-100  # so small that the proof loses nothing but what rounding costs
    with mp.workdps(80):
        case, slope = _two_logits(1.0, bias, far)
        move = slope * prediction_radii(*case, epsilon)[0] / mp.sqrt(50)
        p = 1 / (1 + mp.exp(bias[1] - bias[0]))
        divergence = mp.log(p * mp.exp(move) + (1 - p) * mp.exp(-move)) - (2 * p - 1) * move
        assert 1 - reached < divergence / epsilon <= 1


def test_the_first_chord_is_that_of_hoeffdings_lemma() -> None:
    case, slope = _two_logits(100.0, (0, 0))
    angle = math.asin(prediction_radii(*case, 0.1)[0] / 50**0.5)
    assert 0.09 < math.log(math.cosh(float(slope) * angle)) < 0.1


def test_logits_that_hardly_move_allow_a_right_angle() -> None:
    case, _ = _two_logits(1e-6, (0, 0))
    assert prediction_radii(*case, 0.1)[0] == pytest.approx(50**0.5, rel=1e-9)


def test_an_answer_among_far_rows_has_a_radius_that_holds() -> None:
    with mp.workdps(60):
        case, slope = _two_logits(1.0, (1, 0), 1e8)
        chord = 1 / (2 * slope)
        exact = mp.sqrt(50) * chord * mp.sqrt(1 - chord**2 / 4)
        assert 0.9999 * exact < prediction_radii(*case, 0.1)[1] < exact


def test_an_answer_that_rounding_decides_has_no_larger_radius() -> None:
    with mp.workdps(60):
        for seed in range(40):
            _, weight, _, x = _case("rms", d=2, vocabulary=2, seed=seed)
            norm = hs.RMSNorm(torch.ones_like(x), eps=0.0)
            bias = -weight @ (x / x.square().mean().sqrt())  # logits that differ by rounding alone
            found = prediction_radii(norm, weight, bias, x, 0.1)[1]
            token, (row, other) = mp.matrix(x.tolist()), weight.tolist()
            apart = mp.sqrt(2) * (mp.matrix(row) - mp.matrix(other))
            exact = mp.fdot(apart, token) / mp.norm(token) + mp.mpf(bias[0].item()) - mp.mpf(bias[1].item())
            assert found <= mp.norm(token) * abs(exact) / mp.norm(apart)
