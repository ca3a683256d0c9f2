"""Find the folder that the name of a model stands for, and check the files in it.

PyTorch and transformers are not imported here, so that a wrong name is told at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from howsmooth.errors import ArgumentError, ModelError, reason, similar_name

__all__ = [
    "BUILTIN_MODELS", "NO_TOKENIZER", "builtin_folder", "check_classifier", "check_positions",
    "check_tokenizer", "check_weights", "folder_of", "remedy", "stated_sizes",
]  # fmt: skip

NO_TOKENIZER = (
    "Save its tokenizer in the folder, or give token ids instead of text: --tokens FILE, or the key tokens "
    "of a plan file; or embedded tokens, to the commands that take --embeddings FILE. In Python give ids, or "
    "tokenizer= to hs.profile."
)
"""What to do for a model without a tokenizer."""

#: The names of the built-in models: a BERT type, trained by masked-token prediction, and a GPT-2 type,
#: trained by next-token prediction.
BUILTIN_MODELS = ("builtin-encoder", "builtin-decoder")

# "package.module:Class", "model.py" or "module.Class"; a colon is in no name of the Hub.
_OF_PYTHON = re.compile(r":|\.py$|^[a-z_][\w.]*\.[A-Z]\w*$")
_READS_TEXT = re.compile(
    rb'(?s)(?!.*"(?:conv_dim|num_mel_bins|image_size|vision_config|audio_config)").*"vocab_size"'
)
# Types of models with one attention a layer, and the keys of their sizes in config.json.
_REGULAR = ("bert", "distilbert", "electra", "gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")
_SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "positions": ("max_position_embeddings", "n_positions"),
}
_OF_LANGUAGE = re.compile(r"(LMHeadModel|ForCausalLM|ForMaskedLM|ForPreTraining)$")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.bpe", "*.tiktoken", "tekken.json")


def builtin_folder(name: str) -> Path:
    """Return the folder of a built-in model, with its configuration, weights, tokenizer and model card."""
    return Path(__file__).parent / "models" / "builtin" / name.removeprefix("builtin-")


def folder_of(name: str, *, random_init: bool, types: Collection[str] | None = None) -> Path | None:
    """Return the local folder that holds the configuration of a model. It is None for the name of a model on
    the Hugging Face Hub, and for a model type such as gpt2.

    ``types`` are the model types, if they are known. ModelError is raised if the name is a folder without a
    model, or looks like a path that does not exist, or like the name of a built-in model.
    """
    if name in BUILTIN_MODELS:
        return builtin_folder(name)
    known, path = types or (), Path(name).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # the name is too long or has a null character, say
        shown = repr(name if len(name) <= 80 else f"{name[:77]}...")
        raise ModelError(f"There is no model {shown}: {reason(error)}. {remedy(name, known)}") from None
    if path.is_dir() and (folder := _with_config(path)) is not None:
        return folder
    is_type = random_init and (name.isidentifier() if types is None else name in types)
    if path.exists() and not is_type:
        what = "holds no model (no config.json)" if path.is_dir() else "is a file, not the folder of a model"
        inside = sorted(one.parent.name for one in path.glob("*/config.json"))
        hint = f" Models are in the folders {', '.join(inside)} inside." if inside else ""
        if path.suffix in (".npy", ".npz", ".safetensors"):
            hint = (
                " Tensors of your own make a howsmooth.SelfAttention in Python, which hs.bounds.table bounds."
            )
        elif path.suffix == ".toml":
            hint = " A plan file is given as howsmooth measure --plan FILE."
        raise ModelError(f"{name!r} {what}.{hint} {remedy(name, known)}")
    # What no name of the Hub looks like.
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or re.search(r"[\\:]", name):
        raise ModelError(f"There is no folder {name!r}. {remedy(name, known)}")
    if name not in known and get_close_matches(name, BUILTIN_MODELS, cutoff=0.9):
        raise ModelError(f"There is no built-in model {name!r}. {remedy(name, known)}")
    return None


def remedy(name: str, types: Collection[str] = ()) -> str:
    """Return advice on what to give in place of the name of a model that is not found."""
    told = (
        f"Give the folder of a model, a built-in one ({', '.join(BUILTIN_MODELS)}), or build one with "
        "untrained weights from a model type such as 'gpt2' with random_init=True."
    )
    if _OF_PYTHON.search(name):
        told = (
            "It looks like a Python class or file, which commands do not load: give the module to "
            'hs.profile, or to hs.capture and hs.local_lipschitz, as the page "See how constants grow with '
            f'the length" shows under "From Python". {told}'
        )
    return f"{told} {similar_name(name, (*BUILTIN_MODELS, *types))}".rstrip()


def check_weights(name: str, folder: Path) -> None:
    """Raise ModelError if the folder of a model holds no weights in safetensors format."""
    if any(folder.glob("*.safetensors")):
        return
    why = "it has a configuration but no model.safetensors"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        why = "its weights are pickled, which howsmooth never reads; convert them to safetensors"
    raise ModelError(f"{name!r} cannot be loaded: {why}. random_init=True takes its configuration alone.")


def check_tokenizer(name: str, folder: Path) -> None:
    """Raise ModelError if a model reads token ids, but the tokenizer files in its folder are missing or
    damaged.
    """
    files = [path for pattern in _TOKENIZERS for path in folder.glob(pattern)]
    try:
        for path in files:
            if path.suffix == ".json":
                json.loads(path.read_bytes())
        if files or not _READS_TEXT.match((folder / "config.json").read_bytes()):
            return
        why = "has no usable tokenizer"
    except (OSError, ValueError) as error:
        why = f"has no usable tokenizer: its {path.name} cannot be read ({reason(error)})"
    raise ModelError(f"{name!r} {why}. {NO_TOKENIZER}")


def check_classifier(name: str, folder: Path) -> None:
    """Raise ModelError if the configuration in a folder says that the model is a language model."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        kinds = json.loads((folder / "config.json").read_bytes())["architectures"]
        if kinds and all(map(_OF_LANGUAGE.search, kinds)):
            raise ModelError(
                f"{name!r} is no classifier but a language model ({', '.join(kinds)}). Give the folder of a "
                "trained classifier, such as one of BertForSequenceClassification."
            )


def stated_sizes(folder: Path) -> dict[str, int]:
    """Return the numbers of ``layers``, ``heads`` and ``positions`` of the model in a folder. Sizes that its
    configuration alone does not tell for certain are left out.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        if config["model_type"] not in _REGULAR or config.get("add_cross_attention"):
            return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    sizes = {}
    for size, keys in _SIZES.items():
        found = [config[key] for key in keys if key in config]
        if len(found) == 1 and type(found[0]) is int and found[0] > 0:
            sizes[size] = found[0]
    return sizes


def check_positions(lengths: Collection[int], most: int, label: str) -> None:
    """Raise ArgumentError if one of the ``lengths`` exceeds ``most``, the number of positions of a model."""
    if lengths and max(lengths) > most:
        raise ArgumentError(
            "lengths",
            expected=f"at most {most} tokens, the positions of {label}",
            got=str(max(lengths)),
            remedy=f"Give --lengths {most}, or smaller ones.",
        )


def _with_config(folder: Path) -> Path | None:
    """Return the given folder or, for sentence-transformers, one inside it with config.json, or None."""
    inside = []
    if not (folder / "config.json").is_file() and (folder / "modules.json").is_file():
        try:
            modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
            inside = [folder / str(m["path"]) for m in modules if str(m["type"]).endswith("Transformer")]
        except (ValueError, KeyError, TypeError):
            return None
    return next((one for one in (folder, *inside) if (one / "config.json").is_file()), None)
