"""Readers of audio from .wav and .npy files or arrays, and synthesis of the built-in audio."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from scipy.io import wavfile
from torch import Tensor

from howsmooth.errors import ArgumentError, reason
from howsmooth.models.inputs.array_files import DataSource, check_range, read_array, shown

__all__ = ["Audio", "Waveform", "load_audio"]

_BUILTIN_SECONDS = 60
_BUILTIN_RATE = 16000
_RATES = range(1000, 768001)
_MOST_SAMPLES = 2**28
_MOST_CHANNELS = 32

Waveform = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True, eq=False)
class Audio(DataSource):
    """A recording with one channel, given by its samples and their rate.

    Attributes
    ----------
    rate
        Samples per second.
    samples
        Array (samples,) of float32 values from -1 to 1.

    """

    rate: int
    samples: Waveform = field(repr=False)

    @property
    def size(self) -> int:
        """Number of audio samples in the recording."""
        return len(self.samples)

    @property
    def seconds(self) -> float:
        """Length of the recording in seconds."""
        return len(self.samples) / self.rate

    def at(self, rate: int) -> Waveform:
        """Return the samples at another sampling rate, resampled without aliasing by a polyphase filter."""
        if rate == self.rate:
            return self.samples
        from scipy.signal import resample_poly  # half a second, which only audio at another rate need pay

        shared = math.gcd(rate, self.rate)
        made = resample_poly(self.samples.astype(np.float64), rate // shared, self.rate // shared)
        return np.asarray(made, dtype=np.float32)


def load_audio(source: object = "builtin", rate: int | None = None) -> Audio:
    """Read audio from a file or an array, and average its channels.

    Parameters
    ----------
    source
        ``"builtin"`` for a minute of synthesised audio; a ``.wav`` file; or a ``.npy`` file, an array or a
        tensor of shape (samples,) or (samples, channels). Channels are averaged. Signed integers are divided
        by the largest magnitude of their type, and unsigned bytes have silence at 128, as in ``.wav`` files.
        Floating-point values must be between -1 and 1.
    rate
        Samples per second of an array, 16,000 by default. A ``.wav`` file states its own rate.

    Raises
    ------
    ArgumentError
        If the file cannot be read, or if the samples have another shape or range, or there are none or too
        many of them.

    """
    if isinstance(source, Audio):
        return source
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int) or rate not in _RATES):
        raise ArgumentError("rate", expected=f"an integer from {_RATES[0]} to {_RATES[-1]}", got=repr(rate))
    if isinstance(source, str) and source == "builtin":
        return _builtin()
    if isinstance(source, Tensor):
        source = source.detach().cpu().numpy()
    if isinstance(source, np.ndarray):
        return _audio("audio", "audio given as an array", rate or _BUILTIN_RATE, source, "audio")
    path = Path(source).expanduser() if isinstance(source, str | os.PathLike) else Path()
    if path.suffix.lower() == ".npy":
        found, array = rate or _BUILTIN_RATE, read_array(path)
    elif path.suffix.lower() == ".wav":
        found, array = _wav(path)
        if rate not in (None, found):
            raise ArgumentError("rate", expected=f"None, or the {found} that {path.name} says", got=str(rate))
    else:
        raise ArgumentError(
            "audio",
            expected="'builtin', a file that ends in .wav or .npy, or an array",
            got=repr(source)[:80],
            remedy="Convert other formats to .wav first.",
        )
    return _audio(path.stem, f"audio of {path}", found, array, shown(path))


def _wav(path: Path) -> tuple[int, np.ndarray]:
    """Return the sampling rate and the samples of a .wav file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns of chunks without samples, such as a title
            rate, samples = wavfile.read(path)
    except Exception as error:  # scipy raises many kinds of errors for a damaged file
        raise ArgumentError(
            shown(path), expected="a .wav file", got=f"one that cannot be read ({reason(error)})"
        ) from error
    if rate not in _RATES:
        raise ArgumentError(
            shown(path), expected=f"from {_RATES[0]} to {_RATES[-1]} samples a second", got=str(rate)
        )
    return int(rate), samples


def _audio(name: str, source: str, rate: int, array: np.ndarray, argument: str) -> Audio:
    samples = _mono(array, argument)
    seconds = len(samples) / rate
    digest = hashlib.sha256(f"{rate} ".encode() + samples.tobytes()).hexdigest()
    return Audio(name, f"{source}, {seconds:.4g} seconds at {rate} samples a second", digest, rate, samples)


def _mono(array: np.ndarray, argument: str) -> Waveform:
    """Check an array of audio samples, and return the mean of its channels, scaled to the range -1 to 1."""
    channels = array[:, None] if array.ndim == 1 else array
    if channels.ndim != 2 or not 1 <= channels.shape[1] <= _MOST_CHANNELS:
        raise ArgumentError(
            argument,
            expected="samples of shape (samples,) or (samples, channels)",
            got=f"shape {tuple(array.shape)}",
        )
    if not 0 < len(channels) <= _MOST_SAMPLES:
        raise ArgumentError(argument, expected=f"from 1 to {_MOST_SAMPLES} samples", got=str(len(channels)))
    if channels.dtype == np.uint8:  # in .wav files of eight bits, silence is 128
        values = (channels.astype(np.float32) - 128.0) / 128.0
    elif channels.dtype.kind == "i":
        values = (channels.astype(np.float64) / -float(np.iinfo(channels.dtype).min)).astype(np.float32)
    elif channels.dtype.kind == "f":
        check_range(channels, -1.0 - 1e-6, 1.0 + 1e-6, argument)
        values = channels.astype(np.float32)
    else:
        raise ArgumentError(argument, expected="integer or floating-point samples", got=str(channels.dtype))
    return np.asarray(values.mean(axis=1), dtype=np.float32)


@cache
def _builtin() -> Audio:
    """Synthesise a minute of audio that consists of syllables, of which three quarters are voiced and the
    others are noise.
    """
    random = np.random.RandomState(2000)
    count = _BUILTIN_SECONDS * _BUILTIN_RATE
    made = 0.002 * random.standard_normal(count)
    place = 0.1
    while place < _BUILTIN_SECONDS - 0.5:
        length = random.uniform(0.08, 0.3)
        t = np.arange(int(length * _BUILTIN_RATE)) / _BUILTIN_RATE
        if random.uniform() < 0.75:
            pitch = random.uniform(90, 220) * (1 + random.uniform(-0.3, 0.3) * t / length)
            formants = random.uniform((250, 900, 2300), (850, 2200, 3300))
            phase = 2 * np.pi * np.cumsum(pitch) / _BUILTIN_RATE
            syllable = np.zeros_like(t)
            for harmonic in range(1, 25):
                loud = np.exp(-(((harmonic * pitch.mean() - formants[:, None]) / 180.0) ** 2)).sum()
                syllable += (loud + 0.02) / harmonic**0.5 * np.sin(harmonic * phase)
        else:
            syllable = 0.5 * np.diff(random.standard_normal(len(t) + 1))
        start = int(place * _BUILTIN_RATE)
        made[start : start + len(t)] += np.sin(np.pi * t / length) ** 2 * syllable
        place += length + (random.uniform(0.25, 0.6) if random.uniform() < 0.15 else random.uniform(0, 0.06))
    # Rounding to sixteen bits makes the samples equal on all machines.
    samples = np.rint(made / np.abs(made).max() * 0.9 * 32767).astype(np.int16)
    source = "audio made by code, nothing downloaded: syllables of moving pitch, with pauses"
    return _audio("builtin-audio", source, _BUILTIN_RATE, samples, "audio")
