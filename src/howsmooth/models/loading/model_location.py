"""Where a model with a given name is found: in this package, in a folder or on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_session
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

from howsmooth.errors import HowsmoothError, ModelError, reason
from howsmooth.model_folders import BUILTIN_MODELS, builtin_folder, folder_of, remedy

__all__ = ["Location", "find", "hub_reachable"]


@dataclass(frozen=True)
class Location:
    """Where the files of a model are: in a folder, on the Hugging Face Hub, or nowhere."""

    name: str  #: The name that the user gave.
    #: A folder or a Hub id; None for the default configuration of the model type ``name``.
    location: str | None
    sentence: str  #: A phrase for reports that says where the model is.
    local_files_only: bool  #: Whether only files on this machine may be used.

    def file(self, name: str) -> Path | None:
        """Return the path of a file of the model, downloaded if necessary, or None if it does not exist."""
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
        """Return a context manager that turns errors of transformers into ModelErrors about this model."""
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
        instead = remedy(self.name, CONFIG_MAPPING)
        if caused_by(RepositoryNotFoundError):
            return f"The Hugging Face Hub has no model {self.name!r} (or it is private). {instead}"
        if self.local_files_only or caused_by(LocalEntryNotFoundError):
            return (
                f"The model {self.name!r} is neither built in nor a local folder, and the Hugging Face Hub "
                "cannot be reached (no network), nor does its cache here hold the model. "
                f"{instead}"
            )
        return f"The Hub model {self.name!r} {why}"


def find(name: str, *, random_init: bool) -> Location:
    """Return the location of a model's files, given the model's name. Whether the Hub has them is not
    checked.

    Raises
    ------
    ModelError
        If the name is a folder without a model, or looks like a path that does not exist.

    """
    if name in BUILTIN_MODELS:
        return Location(name, str(builtin_folder(name)), f"the built-in model {name}", local_files_only=True)
    folder = folder_of(name, random_init=random_init, types=CONFIG_MAPPING)
    if folder is not None:
        where = f"the local folder {Path(name).expanduser()}"
        return Location(name, str(folder), where, local_files_only=True)
    offline = not hub_reachable()
    place = Location(name, name, f"the Hugging Face Hub model {name}", local_files_only=offline)
    if random_init and name in CONFIG_MAPPING:
        try:
            AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=offline)
        except Exception:  # the Hub has no such model, or offline the cache has not
            return Location(name, None, f"the default {name} of transformers", local_files_only=True)
    return place


def hub_reachable() -> bool:
    """Return True if the Hugging Face Hub answers within five seconds; its client would retry for longer."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)
    except Exception:  # no network, no name service, or a proxy that refuses
        return False
    return True
