"""Models of strangers on the Hugging Face Hub, played by a server on this machine.

The same files as in ``tests/test_trust.py`` come over a network here, into a cache of the test's own.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from huggingface_hub import constants
from transformers.utils import hub as transformers_hub

from howsmooth.errors import ModelError
from howsmooth.models import load_model
from tests._tiny_models import tiny

COMMIT = "a" * 40


class Hub:
    """A server with repositories, each a dictionary from names of files to bytes."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = unquote(self.path.partition("?")[0]).lstrip("/")
                hub.asked.append(path)
                status, headers, body = hub.answer(path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if not path:
            return 200, {}, b""
        if path.startswith("api/models/"):
            name = "/".join(path.split("/")[2:4])
            files = self.repositories.get(name)
            if files is None:
                return 404, {"X-Error-Code": "RepoNotFound"}, b""
            said = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(said).encode()
        owner, name, _, _, *rest = [*path.split("/"), "", "", ""]
        files = self.repositories.get(f"{owner}/{name}")
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        file = "/".join(rest).rstrip("/")
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        body = files[file]
        return 200, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    cache = str(tmp_path / "home" / "cache")
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # transformers keeps one client for the process. Made by an earlier test it would ask another server than
    # this one, and wait long for its answers.
    monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
    monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a good model."""
    folder = tmp_path_factory.mktemp("good")
    tiny("gpt2").save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def changed(files: dict[str, bytes], **values: object) -> dict[str, bytes]:
    return {**files, "config.json": json.dumps(json.loads(files["config.json"]) | values).encode()}


def outside(tmp_path: Path) -> list[str]:
    """What was written beside the cache."""
    cache = tmp_path / "home" / "cache"
    return [str(path) for path in tmp_path.rglob("*") if path not in (cache, cache.parent, *cache.rglob("*"))]


def test_a_good_model_is_read_and_once_more_without_the_hub(
    hub: Hub, good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["somebody/model"] = good
    loaded = load_model("somebody/model")
    assert loaded.source == "the Hugging Face Hub model somebody/model"
    assert any(path.endswith("model.safetensors") for path in hub.asked)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_model("somebody/model").fingerprint == loaded.fingerprint
    assert hub.asked == []
    assert outside(tmp_path) == []


PICKLE, OUTSIDE = b"\x80\x04.", "../../../../../../escaped.safetensors"


def parts(files: dict[str, bytes], name: str, content: bytes) -> dict[str, bytes]:
    """The files of a model whose weights are in a part of that name."""
    index = json.dumps({"weight_map": {"wte.weight": name}}).encode()
    return {"config.json": files["config.json"], "model.safetensors.index.json": index, name: content}


NEVER = "howsmooth reads safetensors only, never a pickle"
SPOILED: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "only a pickle": (
        lambda files: {"config.json": files["config.json"], "pytorch_model.bin": PICKLE},
        "cannot be read: OSError",
    ),
    "a pickle among the parts": (lambda files: parts(files, "w.bin", PICKLE), NEVER),
    "parts outside": (lambda files: parts(files, OUTSIDE, b"escaped"), "outside the model's folder"),
    "weights outside": (
        lambda files: changed(
            {**files, "../../w.safetensors": b""}, transformers_weights="../../w.safetensors"
        ),
        "outside the model's folder",
    ),
    "a pickle named by the configuration": (
        lambda files: changed(
            {**files, "adapter_model.bin": PICKLE}, transformers_weights="adapter_model.bin"
        ),
        NEVER,
    ),
    "code": (
        lambda files: changed(
            {**files, "code.py": b"open('went-off', 'w')"},
            model_type="own",
            auto_map={"AutoConfig": "code.C"},
        ),
        "needs code that comes with the model, which howsmooth never runs",
    ),
    "an adapter": (lambda files: {**files, "adapter_config.json": b"{}"}, "holds an adapter"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_refused_is_not_even_fetched(
    hub: Hub,
    good: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    spoil, sentence = SPOILED[name]
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    hub.repositories["somebody/model"] = spoil(good)
    with pytest.raises(ModelError) as error:
        load_model("somebody/model")
    assert sentence in str(error.value)
    assert outside(tmp_path) == []
    fetched = [path.name for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not [name for name in fetched if name.endswith((".bin", ".py", "escaped.safetensors"))]


@pytest.mark.parametrize("name", ["../up", "a/../up", "a--b/..", "somebody/..", "-/-", "a/b\0c"])
def test_names_that_are_none_of_the_hub(hub: Hub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError):
        load_model(name)
    assert outside(tmp_path) == []
