"""An attack within balls of the l2 norm: projected gradient ascent on the margin, many steps, several starts.

Of growing radii each one is also attacked from what the smaller one found, so that the images which survive
become fewer with the radius, as they do for an attack that finds everything. Nothing keeps the attacked
images within [0, 1]: the certificate does not ask for it either, and the attack is stronger without.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

#: An attacked image is within the radius up to this share of it less, so that rounding does not take it out.
INSIDE = 1 - 1e-9


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logit of the label less the largest other one, (batch,); negative where that is given."""
    own = logits.gather(1, labels[:, None])[:, 0]
    return own - logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1)


def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radii: Sequence[float],
    *,
    steps: int = 50,
    starts: int = 2,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the smallest margin found within each radius, (radii, batch), and where, (radii, *images.shape).

    The search is done in float32, each of its results is judged in float64.

    Parameters
    ----------
    model
        In float64, from images (batch, ...) to logits (batch, classes), members independent.
    images, labels
        What is attacked, in float64; (batch,).
    radii
        Radii, growing.
    steps
        Gradient steps of each start, with lengths that fall from a quarter of the radius to a thousandth.
    starts
        Random starts, beside those at the best found within the radius before, at the image, and at the image
        towards each of the two strongest other classes.
    seed
        Of the random starts.

    """
    generator = torch.Generator().manual_seed(seed)
    single = copy.deepcopy(model).float().requires_grad_(False)
    with torch.no_grad():
        clean = model(images)
    best, moves = margins(clean, labels), torch.zeros_like(images)
    rivals = clean.scatter(1, labels[:, None], -torch.inf).topk(2, dim=1).indices
    found = []
    for radius in radii:
        for kind in range(4 + starts):
            here = (best > 0).nonzero()[:, 0]  # what is broken stays broken
            if not len(here):
                break
            start = moves[here] if kind == 0 else torch.zeros_like(images[here])
            if kind >= 4:
                start = torch.randn(images.shape, generator=generator, dtype=images.dtype)[here] * 1e9
            rival = rivals[here, kind - 2] if kind in (2, 3) else None
            move = _ascend(single, images[here].float(), labels[here], start.float(), rival, radius, steps)
            move = _inside(move.double(), radius)
            with torch.no_grad():
                value = margins(model(images[here] + move), labels[here])
            better = value < best[here]
            best[here[better]], moves[here[better]] = value[better], move[better]
        found.append((best.clone(), moves.clone()))
    return torch.stack([value for value, _ in found]), torch.stack([move for _, move in found])


def _ascend(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    move: Tensor,
    rival: Tensor | None,
    radius: float,
    steps: int,
) -> Tensor:
    """Return the move with the smallest margin on one path of each image."""
    move = _inside(move, radius)
    least = torch.full((len(images),), torch.inf, dtype=images.dtype)
    where = move.clone()
    left = torch.arange(len(images))  # of which the margin is still positive
    for step in range(steps + 1):
        x = (images[left] + move[left]).requires_grad_()
        logits = model(x)
        margin = margins(logits, labels[left])
        now = margin.detach()
        better = now < least[left]
        least[left[better]], where[left[better]] = now[better], move[left[better]]
        goal = margin
        if rival is not None:
            own, other = (logits.gather(1, which[left, None])[:, 0] for which in (labels, rival))
            goal = own - other
        (slope,) = torch.autograd.grad(goal.sum(), x)
        length = radius * 0.25 * 0.004 ** (step / steps)
        norm = slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1).clamp(min=1e-30)
        move[left] = _inside(move[left] - length * slope / norm, radius)
        left = left[now > 0]
        if not len(left):
            break
    return where


def _inside(move: Tensor, radius: float) -> Tensor:
    """Project on the ball."""
    norm = move.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    return move * (radius * INSIDE / norm.clamp(min=radius * INSIDE))
