"""Images: what is read, what is refused, those made by code, and how they become the inputs of a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BitImageProcessorPil,
    CLIPConfig,
    DeiTImageProcessorPil,
    DINOv3ViTConfig,
    SamVisionConfig,
    SiglipVisionConfig,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    YolosConfig,
    YolosImageProcessorPil,
)

from howsmooth.errors import ArgumentError, ModelError
from howsmooth.models import LoadedModel, image_inputs, load_model
from howsmooth.models.inputs.builtin_images import BUILTIN_SIDE
from howsmooth.models.inputs.image_sources import load_images
from howsmooth.models.loading.model_location import Location
from howsmooth.models.loading.processors import ImagePreparation, image_preparation

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
    np.testing.assert_array_equal(load_images(tmp_path / f"a.{ending}")[0], pixels)


def test_grey_is_three_equal_colours_and_transparent_is_white(tmp_path: Path) -> None:
    grey = picture(4, 6, 1)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    deep = grey.astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    clear = picture(4, 6, 4)
    clear[0, :, 3], clear[1, :, 3] = 0, 255
    Image.fromarray(clear).save(tmp_path / "clear.png")
    images = load_images([tmp_path / name for name in ("grey.png", "deep.png", "clear.png")])
    for read in (images[0], images[1]):
        np.testing.assert_array_equal(read, np.broadcast_to(grey[..., None], (4, 6, 3)))
    pixels = np.asarray(images[2])
    assert (pixels[0] == 255).all()
    np.testing.assert_array_equal(pixels[1], clear[1, :, :3])


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    made = Image.fromarray(picture(4, 6))
    exif = made.getexif()
    exif[0x0112] = 6
    made.save(tmp_path / "turned.png", exif=exif)
    assert load_images(tmp_path / "turned.png")[0].size == (4, 6)


def test_a_folder_gives_its_images_in_order_and_passes_over_the_rest(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / ".hidden").mkdir()
    for side, place in enumerate(("b.png", "a.jpg", "deeper/c.png", ".hidden/d.png"), 8):
        Image.fromarray(picture(side, side)).save(tmp_path / place)
    (tmp_path / "notes.txt").write_text("no image")
    images = load_images(tmp_path)
    assert [images[index].width for index in range(len(images))] == [9, 8, 10]
    assert images.name == tmp_path.name
    before = images.digest
    Image.fromarray(picture(8, 8, seed=1)).save(tmp_path / "b.png")
    assert load_images(tmp_path).digest != before


def test_a_whole_disk_is_no_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.models.inputs.image_sources._MOST_ENTRIES", 3)
    for name in "abcd":
        (tmp_path / name).touch()
    with pytest.raises(ArgumentError, match="the images themselves"):
        load_images(tmp_path)


def test_grey_of_many_digits_is_read_from_zero_to_one(tmp_path: Path) -> None:
    grey = picture(4, 6, 1)
    Image.fromarray(grey.astype(np.float32) / 255).save(tmp_path / "a.tiff")
    np.testing.assert_array_equal(load_images(tmp_path / "a.tiff")[0], np.repeat(grey[..., None], 3, axis=2))
    for value in (7.0, np.nan):
        Image.fromarray(np.full((3, 4), value, np.float32)).save(tmp_path / "a.tiff")
        with pytest.raises(ArgumentError, match="grey values from 0 to 1"):
            load_images(tmp_path / "a.tiff")


def write(folder: Path, kind: str) -> Path:
    """Something that is no image."""
    path = folder / "x.png"
    if kind == "array":
        path = folder / "x.npy"
        np.save(path, picture(4, 4))
    elif kind == "text":
        path.write_text("This is no picture.")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut short":
        Image.fromarray(picture(50, 50)).save(path)
        path.write_bytes(path.read_bytes()[:500])
    elif kind == "huge":
        Image.new("1", (100_000, 1000)).save(path)
    elif kind == "a strip":
        Image.new("1", (101, 1)).save(path)
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
        ("array", "cannot identify"),
        ("text", "cannot identify"),
        ("empty", "cannot identify"),
        ("cut short", "can be read"),
        ("huge", "100000000 pixels"),
        ("a strip", "101 x 1"),
        ("a folder of texts", "none in"),
        ("nowhere", "not there"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path: Path, kind: str, word: str) -> None:
    with pytest.raises(ArgumentError, match=word) as error:
        load_images(write(tmp_path, kind))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [3, [], [3], torch.zeros(3, 5, 5), np.zeros((5, 5, 3)), "a\0b", "x" * 5000])
def test_arguments(given: Any) -> None:
    with pytest.raises(ArgumentError):
        load_images(given)


def test_a_file_given_twice_is_taken_once(tmp_path: Path) -> None:
    Image.fromarray(picture(4, 4)).save(tmp_path / "a.png")
    assert len(load_images([tmp_path, tmp_path / "a.png"])) == 1


# ---- made by code


def test_builtin_images_are_different_structured_and_the_same_every_time() -> None:
    images = load_images()
    assert len({images[index].tobytes() for index in range(30)}) == len(images) == 30
    assert images.digest == "7619c5dbd49c5bed8849b20701b6bf46dfd2e1245f1534ab20e26157a37c9d54"
    for index in range(6):
        pixels = np.asarray(images[index], dtype=float)
        assert pixels.shape == (BUILTIN_SIDE, BUILTIN_SIDE, 3)
        # Neighbouring pixels of white noise are not alike; those of structured images are.
        assert np.corrcoef(pixels[:, :-1].ravel(), pixels[:, 1:].ravel())[0, 1] > 0.6


def test_noise_has_the_spectrum_of_natural_images() -> None:
    power = np.abs(np.fft.fft2(np.asarray(load_images()[1]).mean(axis=-1))) ** 2
    frequency = np.fft.fftfreq(BUILTIN_SIDE)
    radius = np.hypot(frequency[:, None], frequency[None, :])
    inside = (radius > 0.02) & (radius < 0.3)
    slope = np.polyfit(np.log(radius[inside]), np.log(power[inside]), 1)[0]
    assert -2.4 < slope < -1.5


# ---- preparation


def files(folder: Path, **settings: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def inputs_of(
    loaded: LoadedModel, pixels: np.ndarray, size: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    assert isinstance(loaded.preparation, ImagePreparation)
    return loaded.preparation.prepared([Image.fromarray(pixels)], size)


PICTURES = [picture(20, 32), picture(40, 40, seed=1), picture(9, 5, seed=2)]


COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
BIT = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 24}, "crop_size": 16}
SIDE = {"size": {"height": 16, "width": 16}}
DEIT = {"feature_extractor_type": "DeiTFeatureExtractor", "size": 20, "crop_size": 16, "resample": 0}
UNCHANGED = {"do_normalize": False, "do_rescale": False, "size": 24}
#: Settings of the files, if there are any, the processor that is wanted, and the size that is asked for.
PROCESSORS: dict[str, tuple[dict[str, Any] | None, Any, tuple[int, int] | None]] = {
    "vit": (COLOURS | SIDE, ViTImageProcessorPil(**COLOURS, **SIDE), None),
    "bit": (BIT, BitImageProcessorPil(**BIT), None),
    "deit": (DEIT, DeiTImageProcessorPil(**DEIT), None),
    "unchanged values": (UNCHANGED, ViTImageProcessorPil(**UNCHANGED), None),
    "not resized": ({"do_resize": False, **COLOURS}, ViTImageProcessorPil(size=16, **COLOURS), None),
    "no files": (None, ViTImageProcessorPil(**SIDE), None),
    "of another size": (BIT, BitImageProcessorPil(size={"shortest_edge": 48}, crop_size=32), (32, 32)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_inputs_are_those_of_the_processor(vit: Path, name: str) -> None:
    settings, wanted, size = PROCESSORS[name]
    loaded = load_model(vit if settings is None else files(vit, **settings))
    source = "the defaults of the model's type" if settings is None else "settings of the model's files"
    assert f"{type(wanted).__name__} ({source})" in str(loaded.preparation)
    for pixels in PICTURES:
        given = inputs_of(loaded, pixels, size)
        values = wanted(Image.fromarray(pixels), return_tensors="pt")["pixel_values"].float()
        assert torch.equal(given["pixel_values"], values)
        # The model has positions for 16 x 16 pixels.
        assert ("interpolate_pos_encoding" in given) == (values.shape[-1] != 16)
    if size is not None:
        assert inputs_of(loaded, PICTURES[0], (8, 32))["pixel_values"].shape == (1, 3, 8, 32)


def save(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder


def test_where_proportions_decide_the_size_images_are_made_square(tmp_path: Path) -> None:
    changes = SIZES | {"image_size": [32, 32], "patch_size": 16}
    folder = files(save(tmp_path, YolosConfig(**changes)), size={"shortest_edge": 48, "longest_edge": 60})
    loaded = load_model(folder, random_init=True)
    wanted = YolosImageProcessorPil()(
        [Image.fromarray(one) for one in PICTURES], size={"height": 48, "width": 48}, return_tensors="pt"
    )
    for pixels, made in zip(PICTURES, wanted["pixel_values"], strict=True):
        assert torch.equal(inputs_of(loaded, pixels)["pixel_values"][0], made)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (DINOv3ViTConfig(**SIZES), {"image_processor_type": "DINOv3ViTImageProcessorFast"}),
        (DINOv3ViTConfig(**SIZES), {}),
        (
            SiglipVisionConfig(**SIZES),
            {"image_processor_type": "Elsewhere", "auto_map": {"AutoImageProcessor": "a.B"}},
        ),
        (SamVisionConfig(**SIZES, output_channels=8, window_size=2, global_attn_indexes=[1]), {}),
    ],
)
def test_the_processor_of_vit_stands_in_for_one_that_cannot_be_used(
    tmp_path: Path, config: Any, settings: Any
) -> None:
    own = settings and {"image_mean": [0.1, 0.2, 0.3], "size": {"height": 16, "width": 16}}
    folder = save(tmp_path, config)
    loaded = load_model(files(folder, **settings, **own) if settings else folder, random_init=True)
    assert re.search("cannot be used|no processor that can be used", str(loaded.preparation))
    wanted = ViTImageProcessorPil(**{"size": {"height": 16, "width": 16}, **own})
    assert torch.equal(
        inputs_of(loaded, PICTURES[0])["pixel_values"],
        wanted(Image.fromarray(PICTURES[0]), return_tensors="pt")["pixel_values"],
    )


def clip(**changes: Any) -> CLIPConfig:
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return CLIPConfig(text_config=text | {"vocab_size": 30}, vision_config=SIZES | changes, projection_dim=8)


def test_a_vision_part_has_the_processor_of_the_whole_model(tmp_path: Path) -> None:
    loaded = load_model(save(tmp_path, clip()), random_init=True, part="vision")
    assert "CLIPImageProcessorPil (the defaults of the model's type)" in str(loaded.preparation)
    assert inputs_of(loaded, PICTURES[0])["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize("part", [None, "vision"])
def test_a_model_of_one_channel_sees_grey(tmp_path: Path, part: str | None) -> None:
    folder = save(tmp_path, clip(num_channels=1) if part else ViTConfig(**SIZES, num_channels=1))
    loaded = load_model(folder, random_init=True, part=part)
    assert "the defaults of the model's type" in str(loaded.preparation)
    pixels = picture(16, 16)
    given = inputs_of(loaded, pixels)["pixel_values"]
    grey = pixels @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(given[0, 0], grey / 127.5 - 1, atol=1 / 127.5)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"image_std": [0, 0, 0]}',
        '{"image_mean": [1, 2]}',
        '{"image_mean": "grey"}',
        '{"rescale_factor": 1e999}',
        '{"size": {"height": 1000000, "width": 1000000}}',
        '{"size": {"width": "large"}}',
        '{"preprocess": 3}',
    ],
)
def test_files_that_cannot_be_understood(vit: Path, content: str) -> None:
    (vit / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match="no usable way from images") as error:
        load_model(vit)
    assert "\n" not in str(error.value)


def test_a_model_cannot_ask_for_an_image_that_fills_the_memory(tmp_path: Path) -> None:
    place = Location("large", None, "", local_files_only=True)
    with pytest.raises(ModelError, match="1000000 x 1000000"):
        image_preparation(place, ViTConfig(image_size=10**6), torch.nn.Identity())
    with pytest.raises(ArgumentError, match="from 1 to 4096"):
        image_inputs(load_model(save(tmp_path, ViTConfig(**SIZES)), random_init=True), size=5000)


def test_files_become_the_inputs_of_a_model(vit: Path, tmp_path: Path) -> None:
    loaded = load_model(vit, dtype=torch.float64)
    for seed in range(2):
        Image.fromarray(picture(20, 20, seed=seed)).save(tmp_path / f"{seed}.png")
    given = image_inputs(loaded, [tmp_path / "0.png", tmp_path / "1.png"], size=24)
    assert given["pixel_values"].shape == (2, 3, 24, 24)
    assert given["pixel_values"].dtype == torch.float64
    wanted = inputs_of(loaded, picture(20, 20, seed=1), (24, 24))["pixel_values"][0]
    assert torch.equal(given["pixel_values"][1], wanted.double())


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(ModelError, match="takes text, not images"):
        image_inputs(load_model("builtin-encoder"))
