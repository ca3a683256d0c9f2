"""Handwritten digits of scikit-learn: 1797 images of 8 × 8 pixels, within the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TEST_IMAGES = 500
SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """Images (count, 1, 8, 8), float64 with pixels in [0, 1], and labels (count,), int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: slice | Tensor) -> Digits:
        return Digits(self.images[which], self.labels[which])


def load() -> tuple[Digits, Digits]:
    """Return the training images and the test images, always the same, 1297 and 500, stratified."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        message = "The digits are part of scikit-learn, which is not installed: pip install scikit-learn."
        raise SystemExit(message) from error
    pixels, names = load_digits(return_X_y=True)
    parts = train_test_split(
        range(len(names)), test_size=TEST_IMAGES, random_state=SPLIT_SEED, stratify=names
    )
    images = torch.from_numpy(pixels / 16.0).reshape(-1, 1, 8, 8)  # pixels are whole numbers up to 16
    labels = torch.from_numpy(names).long()
    train, test = (Digits(images[part], labels[part]) for part in map(torch.tensor, parts))
    return train, test
