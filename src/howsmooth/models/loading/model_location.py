"""The location of a model with a given name: in this package, in a folder or on the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_session
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

from howsmooth.errors import HowsmoothError, ModelError, reason, similar_name
from howsmooth.models.builtin import BUILTIN_MODELS, builtin_folder

__all__ = ["Place", "find", "hub_reachable"]

# "package.module:Class", "model.py" or "module.Class"; a colon is in no name of the Hub.
_OF_PYTHON = re.compile(r":|\.py$|^[a-z_][\w.]*\.[A-Z]\w*$")


@dataclass(frozen=True)
class Place:
    """The location of the files of a model: a folder, the Hugging Face Hub, or none."""

    name: str  #: The name that the user gave.
    #: A folder or a Hub id; None for the default configuration of the model type ``name``.
    location: str | None
    sentence: str  #: A phrase for reports that says where the model is.
    local_files_only: bool  #: Whether only files on this machine may be used.

    def file(self, name: str) -> Path | None:
        """Return the path of a file of the model, downloaded if necessary, or None if it has no such file."""
        if self.location is None:
            return None
        with self.reading():
            found = cached_file(
                self.location,
                name,
                local_files_only=self.local_files_only,
                _raise_exceptions_for_missing_entries=False,
                # Offline, a file that is not in the cache counts as missing: it cannot be read later either.
                _raise_exceptions_for_connection_errors=not self.local_files_only,
            )
        return None if found is None else Path(found)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Convert every error of transformers to a ModelError about this model."""
        try:
            yield
        except HowsmoothError:
            raise
        except Exception as error:
            raise ModelError(self._failure(error)) from error

    def _failure(self, error: Exception) -> str:
        """Return a sentence that says why transformers cannot read the model."""

        def caused_by(kind: type[Exception]) -> bool:
            return any(isinstance(one, kind) for one in (error, error.__cause__, error.__context__))

        why = f"cannot be read: {type(error).__name__}: {reason(error)}"
        if "trust_remote_code" in str(error):
            return (
                f"{self.name!r} needs code that comes with the model, which howsmooth never runs. "
                "Choose a model whose architecture is part of transformers."
            )
        if self.location is None or Path(self.location).is_dir():
            return f"The model {self.name!r} {why}"
        if caused_by(GatedRepoError):
            return f"The Hub model {self.name!r} is gated: log in with `hf auth login` and accept its terms."
        if caused_by(RepositoryNotFoundError):
            return f"The Hugging Face Hub has no model {self.name!r} (or it is private). {_remedy(self.name)}"
        if self.local_files_only or caused_by(LocalEntryNotFoundError):
            return (
                f"The model {self.name!r} is neither built in nor a local folder, and the Hugging Face Hub "
                "cannot be reached (no network), nor does its cache here hold the model. "
                f"{_remedy(self.name)}"
            )
        return f"The Hub model {self.name!r} {why}"


def _remedy(name: str) -> str:
    told = (
        f"Give the folder of a model, a built-in one ({', '.join(BUILTIN_MODELS)}), or build one with "
        "untrained weights from a model type such as 'gpt2' with random_init (--random-init)."
    )
    if _OF_PYTHON.search(name):
        told = (
            "It looks like a Python class or file, which commands do not load: give the module to "
            'hs.profile, or to hs.capture and hs.local_lipschitz, as the page "Measure a model" shows under '
            f'"A module of your own". {told}'
        )
    return f"{told} {similar_name(name, (*BUILTIN_MODELS, *CONFIG_MAPPING))}".rstrip()


def find(name: str, *, random_init: bool) -> Place:
    """Find the location of the files of a model by the name of the model. Whether the Hub has them is not
    checked.

    Raises
    ------
    ModelError
        If the name is a folder without a model, or looks like a path that does not exist.

    """
    if name in BUILTIN_MODELS:
        return Place(name, str(builtin_folder(name)), f"the built-in model {name}", local_files_only=True)
    path = Path(name).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # the name is too long or has a null character, say
        shown = repr(name if len(name) <= 80 else f"{name[:77]}...")
        raise ModelError(f"There is no model {shown}: {reason(error)}. {_remedy(name)}") from None
    if path.is_dir() and (folder := _model_folder(path)) is not None:
        return Place(name, str(folder), f"the local folder {path}", local_files_only=True)
    is_type = random_init and name in CONFIG_MAPPING
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
        raise ModelError(f"{name!r} {what}.{hint} {_remedy(name)}")
    # What no name of the Hub looks like.
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or re.search(r"[\\:]", name):
        raise ModelError(f"There is no folder {name!r}. {_remedy(name)}")
    offline = not hub_reachable()
    place = Place(name, name, f"the Hugging Face Hub model {name}", local_files_only=offline)
    if is_type:
        try:
            AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=offline)
        except Exception:  # the Hub has no such model, or offline the cache has not
            return Place(name, None, f"the default {name} of transformers", local_files_only=True)
    return place


def _model_folder(folder: Path) -> Path | None:
    """Return the folder with the config.json of the model: the given one or, for sentence-transformers, one
    inside it; None if there is none.
    """
    inside = []
    if not (folder / "config.json").is_file() and (folder / "modules.json").is_file():
        try:
            modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
            inside = [folder / str(m["path"]) for m in modules if str(m["type"]).endswith("Transformer")]
        except (ValueError, KeyError, TypeError):
            return None
    return next((one for one in (folder, *inside) if (one / "config.json").is_file()), None)


def hub_reachable() -> bool:
    """Return True if the Hugging Face Hub answers within five seconds; its client would retry for longer."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)
    except Exception:  # no network, no name service, or a proxy that refuses
        return False
    return True
