"""Images: what is read, what is refused, those made by code, and how they become the inputs of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import SwinConfig, SwinModel, ViTConfig, ViTModel

import howsmooth as hs
from howsmooth.errors import ArgumentError, CaptureError, ModelError
from howsmooth.models import load_model
from howsmooth.models.builtin_images import BUILTIN_COUNT, BUILTIN_SIDE, builtin_image
from howsmooth.models.feeding import ImageFeed, feed_of, image_inputs
from howsmooth.models.images import load_images
from howsmooth.models.places import Place
from howsmooth.models.preparation import image_preparation

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return values if channels > 1 else values[..., 0]


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ViTModel(ViTConfig(**SIZES))
        for p in model.parameters():
            p.data += 0.2 * torch.randn_like(p)
        model.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


# ---- reading


@pytest.mark.parametrize("ending", ["png", "bmp", "tiff", "webp", "gif", "ppm"])
def test_files_of_many_formats_hold_the_pixels_that_were_written(tmp_path: Path, ending: str) -> None:
    pixels = picture(5, 7)
    if ending == "gif":
        pixels[...] = pixels[:1, :1]  # few colours survive
    options: dict[str, Any] = {"lossless": True} if ending == "webp" else {}
    Image.fromarray(pixels).save(tmp_path / f"a.{ending}", **options)
    (read,) = [load_images(tmp_path / f"a.{ending}")[0]]
    assert read.shape == (3, 5, 7)
    assert read.dtype == torch.float32
    np.testing.assert_array_equal(
        read.numpy(), np.moveaxis(pixels, -1, 0).astype(np.float32) / np.float32(255)
    )


def test_grey_is_three_equal_colours_and_transparent_is_white(tmp_path: Path) -> None:
    grey = picture(4, 6, 1)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    deep = grey.astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    clear = picture(4, 6, 4)
    clear[0, :, 3], clear[1, :, 3] = 0, 255
    Image.fromarray(clear).save(tmp_path / "clear.png")
    images = load_images([tmp_path / name for name in ("grey.png", "deep.png", "clear.png")])
    assert images.names == ("grey.png", "deep.png", "clear.png")
    for read in (images[0], images[1]):
        np.testing.assert_allclose(read.numpy(), np.broadcast_to(grey / 255.0, (3, 4, 6)), atol=1e-6)
    assert bool((images[2][:, 0] == 1).all())
    np.testing.assert_allclose(images[2][:, 1].numpy(), clear[1, :, :3].T / 255.0, atol=1e-6)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    made = Image.fromarray(picture(4, 6))
    exif = made.getexif()
    exif[0x0112] = 6
    made.save(tmp_path / "turned.png", exif=exif)
    assert load_images(tmp_path / "turned.png")[0].shape == (3, 6, 4)


def test_a_folder_gives_its_images_in_order_and_passes_over_the_rest(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / ".hidden").mkdir()
    for place in ("b.png", "a.jpg", "deeper/c.png", ".hidden/d.png"):
        Image.fromarray(picture(8, 8)).save(tmp_path / place)
    (tmp_path / "notes.txt").write_text("no image")
    images = load_images(tmp_path)
    assert images.names == ("a.jpg", "b.png", "c.png")
    assert images.name == tmp_path.name
    before = images.digest
    Image.fromarray(picture(8, 8, seed=1)).save(tmp_path / "b.png")
    assert load_images(tmp_path).digest != before


def test_a_whole_disk_is_no_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.models.images._MOST_ENTRIES", 3)
    for name in "abcd":
        (tmp_path / name).touch()
    with pytest.raises(ArgumentError, match="the images themselves"):
        load_images(tmp_path)


def test_arrays_and_tensors() -> None:
    pixels = picture(4, 6)
    floats = pixels.astype(np.float64) / 255
    same = [load_images(one)[0] for one in (pixels, floats, torch.from_numpy(pixels).movedim(-1, 0))]
    for one in same[1:]:
        torch.testing.assert_close(one, same[0])
    batch = load_images(np.stack([pixels, pixels[::-1]]))
    assert len(batch) == 2
    assert torch.equal(batch[1], same[0].flip(1))
    assert load_images(torch.rand(2, 1, 5, 5))[1].shape == (3, 5, 5)


def write(folder: Path, kind: str) -> Path:
    """Something that is no image."""
    path = folder / ("x.npy" if kind.startswith("array") else "x.png")
    arrays: dict[str, Any] = {
        "array of ids": np.arange(12).reshape(3, 4),
        "array of four channels": np.zeros((3, 4, 4), np.uint8),
        "array too bright": np.full((3, 4), 7.0),
        "array of nan": np.full((3, 4), np.nan),
        "array of nothing": np.zeros((0, 4, 3), np.uint8),
        "array of no images": np.zeros((0, 4, 4, 3), np.uint8),
        "array of one number": np.array(3.0),
        "array of words": np.array([["a", "b"]]),
    }
    if kind in arrays:
        np.save(path, arrays[kind])
    elif kind == "array with a damaged header":
        np.save(path, picture(4, 4))
        path.write_bytes(path.read_bytes().replace(b"}", b"{"))
    elif kind == "array of objects":
        np.save(path, np.array([{}, 1], dtype=object), allow_pickle=True)
    elif kind == "text":
        path.write_text("This is no picture.")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut short":
        Image.fromarray(picture(50, 50)).save(path)
        path.write_bytes(path.read_bytes()[:500])
    elif kind == "huge":
        Image.new("1", (70_000, 1000)).save(path)
    elif kind == "a folder of texts":
        (folder / "texts").mkdir()
        (folder / "texts" / "a.txt").write_text("a")
        return folder / "texts"
    elif kind == "nowhere":
        return folder / "nowhere"
    return path


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("array of ids", "int64"),
        ("array of four channels", "shape"),
        ("array too bright", "Divide bytes by 255"),
        ("array of nan", "NaN"),
        ("array of nothing", "shape"),
        ("array of no images", "at least one"),
        ("array of one number", "shape"),
        ("array of words", "bytes"),
        ("array of objects", "array of numpy"),
        ("array with a damaged header", "array of numpy"),
        ("text", "a file that is none"),
        ("empty", "a file that is none"),
        ("cut short", "can be read"),
        ("huge", "70000 x 1000"),
        ("a folder of texts", "none in"),
        ("nowhere", "not there"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path: Path, kind: str, word: str) -> None:
    with pytest.raises(ArgumentError, match=word) as error:
        load_images(write(tmp_path, kind))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [3, [], [3], torch.zeros(4, 5, 5), torch.zeros(5), "a\0b", "x" * 5000])
def test_arguments(given: Any) -> None:
    with pytest.raises(ArgumentError):
        load_images(given)


def test_a_file_twice_is_refused(tmp_path: Path) -> None:
    Image.fromarray(picture(4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ArgumentError, match="twice"):
        load_images([tmp_path, tmp_path / "a.png"])


# ---- made by code


def test_builtin_images_are_different_structured_and_the_same_every_time() -> None:
    images = load_images()
    assert len(images) == len(set(images.names)) == BUILTIN_COUNT
    assert images.digest == load_images("builtin").digest
    flat = torch.stack([images[i] for i in range(6)])
    assert flat.shape == (6, 3, BUILTIN_SIDE, BUILTIN_SIDE)
    assert 0 <= float(flat.min()) <= float(flat.max()) <= 1
    for i in range(6):
        # Neighbouring pixels of white noise are not alike; those of structured images are.
        a, b = flat[i, :, :, :-1].reshape(-1), flat[i, :, :, 1:].reshape(-1)
        assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.6
    assert not np.array_equal(builtin_image(0), builtin_image(6))


def test_noise_has_the_spectrum_of_natural_images() -> None:
    power = np.abs(np.fft.fft2(builtin_image(1).mean(axis=-1))) ** 2
    frequency = np.fft.fftfreq(BUILTIN_SIDE)
    radius = np.hypot(frequency[:, None], frequency[None, :])
    inside = (radius > 0.02) & (radius < 0.3)
    slope = np.polyfit(np.log(radius[inside]), np.log(power[inside]), 1)[0]
    assert -2.4 < slope < -1.5


# ---- preparation


def naive(image: np.ndarray, mean: list[float], std: list[float]) -> np.ndarray:
    return (image - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]


def test_preparation_of_the_files_is_used_and_said(vit: Path) -> None:
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    (vit / "preprocessor_config.json").write_text(
        json.dumps(
            {"image_mean": mean, "image_std": std, "do_normalize": True, "size": {"shortest_edge": 99}}
        )
    )
    loaded = load_model(vit)
    assert "mean 0.1, 0.2, 0.3" in str(loaded.preparation)
    pixels = picture(16, 16)
    given = image_inputs(loaded, pixels)
    assert list(given) == ["pixel_values"]
    np.testing.assert_allclose(
        given["pixel_values"][0].numpy(), naive(np.moveaxis(pixels / 255.0, -1, 0), mean, std), atol=1e-5
    )


def test_without_files_the_usual_numbers_are_taken_and_said(vit: Path) -> None:
    loaded = load_model(vit)
    assert "the model says none" in str(loaded.preparation)
    given = image_inputs(loaded, np.ones((16, 16)))["pixel_values"]
    assert bool((given == 1).all())  # (1 - 0.5) / 0.5


def test_images_keep_their_proportions_and_lose_what_is_too_much(vit: Path) -> None:
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = 255
    given = image_inputs(load_model(vit), wide)["pixel_values"]
    assert given.shape == (1, 3, 16, 16)
    assert bool((given == 1).all())  # the middle third
    small = image_inputs(load_model(vit), picture(5, 3))["pixel_values"]
    assert small.shape == (1, 3, 16, 16)
    assert -1 <= float(small.min()) <= float(small.max()) <= 1


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "cannot be read"),
        ("[]", "no table"),
        ('{"image_std": [0, 0, 0]}', "not above zero"),
        ('{"image_mean": [1, 2]}', "3 channels"),
        ('{"image_mean": "grey"}', "cannot be understood"),
        ('{"rescale_factor": null}', "cannot be understood"),
    ],
)
def test_files_that_cannot_be_understood(vit: Path, content: str, word: str) -> None:
    (vit / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match=word):
        load_model(vit)


def test_a_model_cannot_ask_for_an_image_that_fills_the_memory() -> None:
    place = Place("large", None, "", local_files_only=True)
    with pytest.raises(ModelError, match="1000000 x 1000000"):
        image_preparation(place, ViTConfig(image_size=10**6), torch.nn.Identity())


# ---- lengths


def test_the_length_of_an_image_is_the_number_of_its_patches(vit: Path) -> None:
    loaded = load_model(vit)
    assert (loaded.modality, loaded.layers, loaded.heads, loaded.vocab_size) == ("image", 2, 2, None)
    feed = feed_of(load_images(), loaded)
    assert isinstance(feed, ImageFeed)
    assert feed.usual == (2, 5, 10, 17)  # 1, 4, 9 and 16 patches, and the class token
    for n in (5, 37):
        sites = hs.capture(loaded, feed.inputs([3, 4], n))
        assert [tuple(site.x.shape) for site in sites] == [(2, n, 16)] * 2
        assert len(feed.words(0, n)) == n
    assert feed.words(0, 5) == ("class", "1,1", "1,2", "2,1", "2,2")


def test_a_model_without_other_sizes_has_one_length(tmp_path: Path) -> None:
    SwinModel(
        SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)
    ).save_pretrained(tmp_path / "swin")
    loaded = load_model(tmp_path / "swin")
    with pytest.raises(CaptureError, match="64 in layers 0; 16 in layers 1"):
        feed_of(load_images(), loaded)
    assert max(feed_of(load_images(), loaded, [1]).usual) == 16


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(ModelError, match="takes text, not images"):
        image_inputs(load_model("builtin-encoder"))
