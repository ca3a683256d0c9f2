"""Loading of a model and its tokenizer from a folder, the Hugging Face Hub or this package."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from howsmooth.errors import ArgumentError, CaptureError, ModelError
from howsmooth.memory import free_memory
from howsmooth.model_folders import BUILTIN_MODELS, NO_TOKENIZER
from howsmooth.models.float32_weights import HALF, computing_dtype, fingerprint, stored_dtype
from howsmooth.models.inputs.image_sources import load_images
from howsmooth.models.inputs.model_inputs import (
    check_model,
    in_dtype,
    max_length,
    model_inputs,
    takes_decoder_ids,
    vocabulary_size,
)
from howsmooth.models.inputs.submodels_by_modality import MODALITIES, choose_part, modality_of, named_parts
from howsmooth.models.loading.dummy_inputs import sample_inputs
from howsmooth.models.loading.model_location import Location, find
from howsmooth.models.loading.processors import (
    ImagePreparation,
    Preparation,
    audio_sample,
    image_preparation,
)
from howsmooth.models.loading.safety_checks import check_files
from howsmooth.models.loading.tokenizers import Tokenizer, own_tokenizer, trained_tokenizer
from howsmooth.models.loading.truncated_config import count_weights, shorten
from howsmooth.models.measurement_mode import measurement_mode, nested_configs, quiet
from howsmooth.models.model_call import ModelCall
from howsmooth.models.tracing.attention_recorder import AttentionLayer, trace_forward_pass
from howsmooth.seeds import torch_seed

__all__ = ["LoadedModel", "as_it_is_now", "builtin_names", "image_inputs", "load_model", "preparation_of"]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model whose layers can be captured, with its tokenizer and a record of where it comes from."""

    name: str  #: The name by which it was loaded.
    #: The model, or the chosen part of it, in evaluation mode and without gradients of its parameters.
    model: nn.Module
    #: The kind of its input: ``text``, ``image``, ``audio``, ``embeddings`` (embedded tokens) or ``other``.
    modality: str
    #: Turns a text into token ids without special tokens, by ``tokenizer.encode(text)``.
    tokenizer: Tokenizer
    tokenizer_source: str  #: A phrase that says where the tokenizer comes from.
    source: str  #: A phrase that says where the weights come from.
    stored: torch.dtype  #: The dtype of the weights in their file; of random weights, the dtype of the model.
    #: SHA-256 over configuration, weights and tokenizer, the same in every run and for every ``dtype`` that
    #: holds the weights exactly. A head, a part or ``as_decoder`` changes it.
    fingerprint: str
    max_length: int | None  #: Largest number of tokens in an input, None if the model states no limit.
    vocab_size: int | None  #: Number of token ids in the vocabulary, None if the model takes no token ids.
    layers: int | None  #: Number of attention layers, None if it is unknown; ``obstacle`` then says why.
    heads: int | None  #: Number of heads in the first attention layer, None if ``layers`` is None.
    #: Why no attention was found when the model ran on a short input; empty if attention was found.
    obstacle: str = ""
    #: How images become inputs of the model; for an audio model the inputs that stand for noise, if
    #: transformers can make them; None for other models.
    preparation: Preparation = None
    #: In what it differs from the model of this name: its part, "random init" and "as decoder".
    variant: str = ""
    # Names of weights that the fingerprint leaves out; None if it is known to be that of the weights now.
    _unread: frozenset[str] | None = None

    @property
    def label(self) -> str:
        """The name of the model for titles, with its variant, such as "gpt2 (random init)". For a model from
        a folder, it is the folder's name without its path.
        """
        path = Path(self.name).expanduser()
        base = path.resolve().name if path.is_dir() else self.name
        return f"{base} ({self.variant})" if self.variant else base

    def __repr__(self) -> str:
        found = f"{self.layers} layers of {self.heads} heads" if self.layers else "no attention found"
        stored, measured = (
            str(dtype).removeprefix("torch.") for dtype in (self.stored, computing_dtype(self.model))
        )
        weights = f"weights {stored}" + (f" measured in {measured}" if measured != stored else "")
        return f"LoadedModel({self.name}, {type(self.model).__name__}, {self.modality}, {found}, {weights})"


def builtin_names() -> tuple[str, ...]:
    """Return the names of the models that ship with the package."""
    return tuple(BUILTIN_MODELS)


def load_model(
    name: str | os.PathLike[str],
    *,
    random_init: bool = False,
    as_decoder: bool = False,
    part: str | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
    tokenizer_text: str | None = None,
    most_weights: int | None = None,
    head: bool = False,
) -> LoadedModel:
    """Load a model with its trained weights, or build a model with random weights.

    Weights are read from safetensors only, and code that comes with a model is never run.

    Parameters
    ----------
    name
        The name of a built-in model, a local folder, or a model id of the Hugging Face Hub; with
        ``random_init`` also a model type of transformers such as ``"gpt2"`` or ``"bert"``, which means the
        default configuration of that type if the Hub has no model of this name or cannot be reached.
    random_init
        Whether to build the architecture from its configuration, with the random initialisation of
        transformers.
    as_decoder
        Whether to run a BERT-type encoder as a decoder, with a causal mask.
    part
        The part of the model to keep: ``"text"``, ``"vision"`` or ``"audio"``, or the path of a module in the
        model such as ``"encoder"``. None keeps the whole model.
    seed
        Seed of the random weights. The caller's random state does not change.
    device
        The device of the model.
    dtype
        The floating-point dtype to which the weights are converted; None keeps the dtype of the file. A
        model in bfloat16 or float16 takes half the memory, and is measured in float32, layer by layer.
    tokenizer_text
        With ``random_init``: a text on which a byte-level BPE tokenizer is trained if the model has no
        tokenizer of its own. ``tokenizer_source`` then says so.
    most_weights
        With ``random_init``: a model with more weights than this is built with fewer layers, but at least one
        layer of every kind that its configuration names. ``source`` then says so.
    head
        Whether to load the model with its head, which computes logits: the class that its configuration names
        under ``architectures``. By default the base model is loaded, up to its last hidden state.

    Raises
    ------
    ArgumentError
        If an argument is not of the kind described.
    ModelError
        If there is no such model, or it cannot be read, run or used as requested.

    """
    _check_arguments(name, dtype, seed, part)
    target = _device(device)
    with quiet():
        place = find(os.fspath(name), random_init=random_init)
        config = _config(place)
        in_file = next((c.dtype for c in nested_configs(config) if getattr(c, "dtype", None)), None)
        short = ""
        if random_init and most_weights is not None:
            with place.reading():
                short = shorten(config, most_weights)
        kind = _class_with_head(place, config) if head else AutoModel
        build = partial(_built, place, config, kind, random_init, seed, dtype, part)
        path, model, unread = build()
        modality = modality_of(model)
        preparation, layers, obstacle = _observed(place, config, model, modality)
        if as_decoder:
            which = f"{place.name!r} ({type(model).__name__})"
            if not layers:
                raise CaptureError(obstacle)
            if modality != "text":
                raise ModelError(f"{which} takes no text, so it cannot run as a decoder.")
            if any(layer.causal for layer in layers):
                raise ModelError(f"{which} is a decoder already, and causal. Leave out as_decoder=True.")
            config.is_decoder = True
            path, model, unread = build()
            preparation, layers, obstacle = _observed(place, config, model, modality)
            # The traced masks decide whether the model is a decoder, not its class.
            if not layers or not all(layer.causal for layer in layers):
                raise ModelError(f"{which} cannot run as a decoder: its attention stays unmasked.")
        model.requires_grad_(requires_grad=False).eval().to(target)
        text = modality == "text"
        size = vocabulary_size(model) if text else None
        tokenizer, tokenizer_source = _tokenizer(place, random_init, tokenizer_text, modality, size or 0)
        digest = _fingerprint(model, unread, tokenizer)
    role = ", run as a decoder with its causal mask" if as_decoder else ""
    drawn = f"untrained weights (random initialisation, seed {seed}), configuration of "
    of = f"the part {path} of " if path else ""
    return LoadedModel(
        name=str(name),
        model=model,
        modality=modality,
        tokenizer=tokenizer,
        tokenizer_source=tokenizer_source,
        stored=stored_dtype(model) if random_init or in_file is None else in_file,
        source=f"{drawn * bool(random_init)}{of}{place.sentence}{role}{short and f', {short}'}",
        fingerprint=digest,
        max_length=max_length(model) if text else None,
        vocab_size=size,
        layers=len(layers) or None,
        heads=layers[0].heads if layers else None,
        obstacle=obstacle,
        preparation=preparation,
        variant=", ".join(
            word
            for word, on in ((part, part), ("random init", random_init), ("as decoder", as_decoder))
            if word and on
        ),
        _unread=frozenset(unread),
    )


def _fingerprint(model: nn.Module, unread: Collection[str], tokenizer: Tokenizer) -> str:
    settings = not isinstance(model, PreTrainedModel)  # a part has no configuration of its own
    return fingerprint(model, settings=settings, without=unread, more=tokenizer.serialized)


def as_it_is_now(of: LoadedModel, *, changed: bool = True) -> LoadedModel:
    """Return a loaded model with the fingerprint of its weights now, hashed if they may have ``changed``."""
    if of._unread is None:
        return of
    digest = _fingerprint(of.model, of._unread, of.tokenizer) if changed else of.fingerprint
    return replace(of, fingerprint=digest, _unread=None)


def image_inputs(
    model: LoadedModel, images: object = "builtin", *, size: int | tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Return model inputs made from a sequence of images, for a vision model or the vision part of a model.

    They are a dict with ``pixel_values`` (batch, channels, height, width) in the dtype of the model.

    Parameters
    ----------
    model
        The model, from :func:`load_model`.
    images
        As for :func:`~howsmooth.models.inputs.image_sources.load_images`; the batch has all of these images.
    size
        Height and width in pixels, or one number for both; by default the size of the model. Not every model
        accepts other sizes.

    Raises
    ------
    ModelError
        If the model takes no images.
    ArgumentError
        If the images cannot be read.

    """
    preparation = preparation_of(model)
    pair = (size, size) if isinstance(size, int) else size
    return in_dtype(model.model, preparation.prepared(list(load_images(images)), pair))


def preparation_of(model: LoadedModel) -> ImagePreparation:
    """Return the image processor of a model. Raise ModelError if the model does not take images."""
    if not isinstance(model.preparation, ImagePreparation):
        raise ModelError(
            f"{model.name!r} ({type(model.model).__name__}) takes {MODALITIES[model.modality]}, not images. "
            'If it has a part for that, choose it with part="vision".'
        )
    return model.preparation


def _check_arguments(name: object, dtype: object, seed: object, part: object) -> None:
    if not isinstance(name, str | os.PathLike) or not os.fspath(name).strip():
        module = isinstance(name, nn.Module)
        raise ArgumentError(
            "name",
            expected="a built-in name, a folder or a Hub id",
            got=f"a module, {type(name).__name__}" if module else repr(name),
            remedy="Functions that take a model take a module as it is." if module else "",
        )
    if dtype not in (None, torch.float32, torch.float64, *HALF):
        expected = "torch.float32, torch.float64, torch.bfloat16, torch.float16 or None"
        raise ArgumentError("dtype", expected=expected, got=str(dtype))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ArgumentError("seed", expected="an integer from 0 to 2**63 - 1", got=repr(seed))
    if part is not None and (not isinstance(part, str) or not part.strip()):
        raise ArgumentError("part", expected="None or the name of a part", got=repr(part))


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        expected = "a device that PyTorch can use here, such as 'cpu'"
        raise ArgumentError("device", expected=expected, got=str(device)) from error
    if target.type == "meta":
        raise ArgumentError("device", expected="a device that holds numbers, such as 'cpu'", got=str(device))
    return target


def _config(place: Location) -> Any:
    if place.location is None:
        config = CONFIG_MAPPING[place.name]()
    else:
        with place.reading():
            config = AutoConfig.from_pretrained(
                place.location, trust_remote_code=False, local_files_only=place.local_files_only
            )
    # A name of kernels may be that of a repository with compiled code, which transformers would run.
    config._attn_implementation = config._experts_implementation = None
    return config


def _class_with_head(place: Location, config: Any) -> Any:
    names = getattr(config, "architectures", None) or ()
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        named = f"names {', '.join(names)}" if names else "names none"
        raise ModelError(
            f"{place.name!r} has no head that transformers knows: its configuration {named} under "
            "'architectures'. Give a model that was saved with its head, or load it without one."
        )
    return found


def _built(
    place: Location,
    config: Any,
    kind: Any,
    random_init: bool,
    seed: int,
    dtype: torch.dtype | None,
    part: str | None,
) -> tuple[str, nn.Module, set[str]]:
    """Return the path of the chosen part, the part, and the names of its weights that the file lacks."""
    unread: set[str] = set()
    options: dict[str, Any] = {"trust_remote_code": False}
    if kind is AutoModel:  # without its pooler, which comes after all attention
        classes = MODEL_MAPPING.get(type(config), ())
        first = classes[0] if isinstance(classes, tuple | list) and classes else classes
        if isinstance(first, type) and "add_pooling_layer" in inspect.signature(first).parameters:
            options["add_pooling_layer"] = False
    # Weights are drawn on the CPU, for every target device and default device: a seed gives the same weights
    # everywhere, and only the CPU's random state, which fork_rng restores, is used.
    with place.reading(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if random_init:
            _check_memory(place, config, dtype)
        torch.default_generator.manual_seed(torch_seed(seed))
        if random_init:
            # Weights are drawn in float32, so that both precisions have the same numbers.
            build = kind.from_config if kind is AutoModel else kind._from_config
            model = build(config, dtype=torch.float32, **options).to(dtype or torch.float32)
        else:
            check_files(place, config)
            model, info = kind.from_pretrained(
                place.location,
                config=config,
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                local_files_only=place.local_files_only,
                output_loading_info=True,
                **options,
            )
            unread = set(info["missing_keys"])
    path, chosen = ("", model) if part is None else choose_part(model, part, place.name)
    unread = {key.removeprefix(f"{path}.") for key in unread if not path or key.startswith(f"{path}.")}
    # Many checkpoints lack the weights of the pooler, on which no attention and no hidden state depends.
    lost = sorted(key for key in unread if kind is not AutoModel or "pooler" not in key)
    if lost:
        raise ModelError(
            f"The weights of {place.name!r} are incomplete for {type(model).__name__}: {lost[0]} and "
            f"{len(lost) - 1} more are missing. Choose a complete checkpoint, or random_init. "
            "A model whose layers were replaced is profiled by hs.profile(model, text, tokenizer=...)."
        )
    parts, asked = named_parts(model), inspect.signature(model.forward).parameters
    together = {"text", "image"} <= set(parts.values()) and {"pixel_values", "return_loss"} <= set(asked)
    if not path and together:
        listed = ", ".join(f"{inner} with {_GIVEN.get(takes, takes)}" for inner, takes in parts.items())
        raise ModelError(
            f"{place.name!r} compares texts with images and needs both at once. Measure its parts one at a "
            f'time, each with part="NAME": {listed}.'
        )
    check_model(chosen)
    return path, chosen, unread


def _observed(
    place: Location, config: Any, model: nn.Module, modality: str
) -> tuple[Preparation, list[AttentionLayer], str]:
    """Return how a model gets its inputs, its attention layers on a short one, and why there are none."""
    if takes_decoder_ids(model) and modality != "text":
        raise ModelError(
            f"{place.name!r} is an encoder-decoder model ({type(model).__name__}) whose decoder takes other "
            'inputs than its encoder. Choose its encoder, with part="encoder".'
        )
    makers = {"image": image_preparation, "audio": audio_sample}
    preparation = makers[modality](place, config, model) if modality in makers else None
    try:
        named = model_inputs(model, sample_inputs(model, preparation)).named
        with measurement_mode(model):
            layers, _ = trace_forward_pass(ModelCall(model, dict(named), 1), ())
    except (ArgumentError, CaptureError) as error:
        return preparation, [], str(error)
    return preparation, layers, "" if layers else f"no softmax attention of {type(model).__name__} was seen"


def _check_memory(place: Location, config: Any, dtype: torch.dtype | None) -> None:
    free = free_memory(torch.device("cpu"))
    weights = count_weights(config)
    # Random weights are drawn in float32, and then converted.
    needed = weights * (4 if dtype is None or dtype == torch.float32 else 4 + dtype.itemsize)
    if needed > free:
        raise ModelError(
            f"{place.name!r} has {weights / 1e9:.1f} billion weights in its configuration, "
            f"{needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB of memory are free. "
            "Give a folder with a smaller config.json."
        )


# How inputs of each kind are given to the command line.
_GIVEN = {
    "text": "a text (--text)",
    "image": "images (--images)",
    "audio": "audio (as tensors, in Python)",
    "embeddings": "embedded tokens (--embeddings)",
}


def _tokenizer(
    place: Location, random_init: bool, text: str | None, modality: str, vocabulary: int
) -> tuple[Tokenizer, str]:
    if modality != "text":
        obstacle = f"{place.name!r} takes no text ({modality})."
        if modality == "audio":
            obstacle += " Give tensors, in Python: hs.capture(model, inputs), hs.profile(model, inputs)."
        elif modality in _GIVEN:
            obstacle += f" Give {_GIVEN[modality]}, to the commands that have the option."
        return Tokenizer(None, obstacle), "none"
    if place.location is not None:
        own = own_tokenizer(place.location, local_files_only=place.local_files_only)
        if own is not None:
            return own, "the model's own tokenizer"
    if random_init and text is not None:
        return (
            trained_tokenizer(text, vocabulary),
            "a byte-level BPE trained on the text, because the model has no usable tokenizer of its own",
        )
    remedy = "Give tokenizer_text to train one." if random_init else NO_TOKENIZER
    return Tokenizer(None, f"{place.name!r} has no usable tokenizer. {remedy}"), "none"
