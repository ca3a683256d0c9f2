"""The built-in images. They are drawn by code, need no download, and are the same on every machine.

There are six kinds, each with structure that plain noise lacks: *gratings* (waves of one frequency and
direction), *noise* with the spectrum of natural images (power falling as the square of the frequency, Field
1987), *leaves* (discs that hide each other, the dead-leaves model of natural images, Lee, Mumford and Huang
2001), *shapes* (rectangles and ellipses on a shaded ground), *blobs* (smooth spots of colour) and *letters*
(lines of small characters of an invented script, like a printed page).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BUILTIN_SIDE", "builtin_images"]

BUILTIN_SIDE = 256
"""Height and width of the built-in images, in pixels."""

_OF_EACH_KIND = 5

Canvas = np.ndarray[Any, np.dtype[np.float64]]

# The coordinates of the pixels, from 0 to 1.
_X = ((np.arange(BUILTIN_SIDE) + 0.5) / BUILTIN_SIDE)[None, :]
_Y = _X.T


def builtin_images() -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Draw five built-in images of each kind, of shape (256, 256, 3) with values from 0 to 255."""
    # NumPy promises that the numbers of this older generator never change.
    drawn = [
        _KINDS[index % len(_KINDS)](np.random.RandomState(1000 + index))
        for index in range(_OF_EACH_KIND * len(_KINDS))
    ]
    return [np.rint(255.0 * np.clip(one, 0.0, 1.0)).astype(np.uint8) for one in drawn]


def _colour(random: np.random.RandomState) -> Canvas:
    return random.uniform(0.05, 0.95, 3)


def _gratings(random: np.random.RandomState) -> Canvas:
    angle, waves = random.uniform(0, np.pi), random.uniform(3, 24)
    phase = 2 * np.pi * (waves * (np.cos(angle) * _X + np.sin(angle) * _Y) + random.uniform())
    share = (0.5 + 0.5 * np.sin(phase))[..., None]
    return np.asarray(share * _colour(random) + (1 - share) * _colour(random))


def _noise(random: np.random.RandomState) -> Canvas:
    frequency = np.fft.fftfreq(BUILTIN_SIDE)
    radius = np.hypot(frequency[:, None], frequency[None, :])
    radius[0, 0] = np.inf  # removes the constant part of the spectrum
    waves = np.fft.fft2(random.standard_normal((3, BUILTIN_SIDE, BUILTIN_SIDE))) / radius
    fields = np.fft.ifft2(waves).real
    fields /= fields.std(axis=(1, 2), keepdims=True)
    # The three colour channels are correlated, as in natural images.
    return np.asarray(0.5 + 0.18 * np.moveaxis(0.8 * fields[:1] + 0.6 * fields, 0, -1))


def _leaves(random: np.random.RandomState) -> Canvas:
    drawn = np.ones((BUILTIN_SIDE, BUILTIN_SIDE, 3)) * _colour(random)
    for _ in range(250):
        # Radii between 0.02 and 0.3 with density r^-3, which makes the image look alike at all scales.
        radius = (0.02**-2 - random.uniform() * (0.02**-2 - 0.3**-2)) ** -0.5
        column, row = random.uniform(-0.1, 1.1, 2)
        drawn[(_X - column) ** 2 + (_Y - row) ** 2 < radius**2] = _colour(random)
    return drawn


def _shapes(random: np.random.RandomState) -> Canvas:
    drawn = np.asarray((0.4 + 0.6 * _Y)[..., None] * _colour(random) * np.ones((1, BUILTIN_SIDE, 1)))
    for number in range(8):
        angle = random.uniform(0, np.pi)
        column, row = random.uniform(0.1, 0.9, 2)
        along, across = random.uniform(0.05, 0.25, 2)
        u = ((_X - column) * np.cos(angle) + (_Y - row) * np.sin(angle)) / along
        v = ((_Y - row) * np.cos(angle) - (_X - column) * np.sin(angle)) / across
        inside = u**2 + v**2 < 1 if number % 2 else np.maximum(np.abs(u), np.abs(v)) < 1
        drawn[inside] = _colour(random)
    return drawn


def _blobs(random: np.random.RandomState) -> Canvas:
    drawn, total = np.zeros((BUILTIN_SIDE, BUILTIN_SIDE, 3)), np.zeros((BUILTIN_SIDE, BUILTIN_SIDE, 1))
    for _ in range(12):
        column, row = random.uniform(0, 1, 2)
        width = random.uniform(0.06, 0.2)
        weight = np.exp(-((_X - column) ** 2 + (_Y - row) ** 2) / (2 * width**2))[..., None] + 1e-6
        drawn += weight * _colour(random)
        total += weight
    return drawn / total


def _letters(random: np.random.RandomState) -> Canvas:
    signs = random.uniform(size=(20, 7, 5)) < 0.45
    scale = int(random.randint(1, 4))
    drawn = np.ones((BUILTIN_SIDE, BUILTIN_SIDE, 3)) * (0.8 + 0.2 * random.uniform(size=3))
    ink = 0.35 * random.uniform(size=3)
    high, wide, margin = 7 * scale, 5 * scale, 8
    for top in range(margin, BUILTIN_SIDE - margin - high, high + 4 * scale):
        for left in range(margin, BUILTIN_SIDE - margin - wide + 1, wide + scale):
            if random.uniform() > 0.18:  # else a space between words
                sign = signs[random.randint(20)].repeat(scale, axis=0).repeat(scale, axis=1)
                drawn[top : top + high, left : left + wide][sign] = ink
    return drawn


_KINDS = (_gratings, _noise, _leaves, _shapes, _blobs, _letters)
