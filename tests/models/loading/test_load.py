"""Loading: folders, built-in models, untrained models, tokenizers, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertModel,
    GPT2Model,
    MambaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from howsmooth.errors import ArgumentError, CaptureError, ModelError
from howsmooth.models import builtin_names, capture, load_model
from howsmooth.models.loading import model_location
from howsmooth.models.loading.tokenizers import Tokenizer, trained_tokenizer
from tests._tiny_models import VOCABULARY, tiny, token_ids

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 40


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_location, "hub_reachable", lambda: False)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder with a tiny BERT with a language-model head (so: no pooler) and a word tokenizer."""
    folder = tmp_path / "bert"
    config = tiny("bert").config
    with torch.random.fork_rng():
        torch.manual_seed(5)
        BertForMaskedLM(config).save_pretrained(folder)
    known = "the cat sat on a mat and it was all that had to do"
    words = {"[UNK]": 0, **{word: i + 1 for i, word in enumerate(known.split())}}
    raw = RawTokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_local_folder(bert: Path) -> None:
    torch.manual_seed(11)
    random = torch.get_rng_state()
    loaded = load_model(str(bert))
    assert (loaded.name, loaded.label) == (str(bert), "bert")
    assert torch.equal(torch.get_rng_state(), random)
    assert (loaded.layers, loaded.heads, loaded.vocab_size, loaded.max_length) == (3, 4, VOCABULARY, 32)
    assert str(bert) in loaded.source
    assert loaded.tokenizer_source == "the model's own tokenizer"
    assert loaded.tokenizer.encode("the cat") == [1, 2]
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    weights = load_file(bert / "model.safetensors")
    key = "encoder.layer.1.attention.self.query.weight"
    assert torch.equal(loaded.model.state_dict()[key], weights[f"bert.{key}"])
    site = capture(loaded, torch.tensor([loaded.tokenizer.encode("the cat sat on the mat")]))[0]
    assert site.x.shape == (1, 6, 24)
    assert load_model(bert).fingerprint == loaded.fingerprint


def test_float64_holds_the_same_numbers(bert: Path) -> None:
    single, double = load_model(bert), load_model(bert, dtype=torch.float64)
    assert not any(
        "pooler" in key for key in single.model.state_dict()
    )  # it would be random: the file has none
    for a, b in zip(single.model.parameters(), double.model.parameters(), strict=True):
        assert b.dtype == torch.float64
        assert torch.equal(a.double(), b)


def test_representation_is_one_line() -> None:
    for dtype, words in ((torch.float64, " measured in float64"), (None, " measured in float32")):
        assert repr(load_model("builtin-encoder", dtype=dtype)) == (
            f"LoadedModel(builtin-encoder, BertModel, text, 4 layers of 8 heads, weights float16{words})"
        )


def test_half_precision_file_is_read_weights_in_memory(tmp_path: Path) -> None:
    tiny("gpt2").half().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    sites = capture(loaded, torch.tensor([[5, 7, 2]]))
    assert {(site.stored, site.x.dtype) for site in sites} == {(torch.float16, torch.float32)}


def test_fingerprint_sees_weights_configuration_and_tokenizer(bert: Path) -> None:
    prints = {load_model(bert).fingerprint, load_model(bert, as_decoder=True).fingerprint}
    weights = load_file(bert / "model.safetensors")
    weights["bert.encoder.layer.0.attention.self.query.bias"][0] += 1e-3
    save_file(weights, bert / "model.safetensors", metadata={"format": "pt"})
    prints.add(load_model(bert).fingerprint)
    tokenizer = json.loads((bert / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["dog"] = 30
    (bert / "tokenizer.json").write_text(json.dumps(tokenizer))
    prints.add(load_model(bert).fingerprint)
    assert len(prints) == 4
    assert all(len(p) == 64 for p in prints)


def test_fingerprint_is_the_same_in_every_dtype_that_holds_the_weights(tmp_path: Path) -> None:
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    dtypes = (None, torch.float32, torch.float64, torch.bfloat16)
    assert len({load_model(tmp_path, dtype=dtype).fingerprint for dtype in dtypes}) == 1
    tiny("llama").save_pretrained(tmp_path)
    assert load_model(tmp_path, dtype=torch.bfloat16).fingerprint != load_model(tmp_path).fingerprint


def test_variants_of_a_model_are_in_its_label(bert: Path) -> None:
    assert load_model(bert).label == bert.name
    untrained = load_model(bert, random_init=True, as_decoder=True)
    assert untrained.label == f"{bert.name} (random init, as decoder)"


def test_tokens_of_sentencepiece_keep_their_leading_space() -> None:
    vocabulary = {"<unk>": 0, "▁": 1, "▁the": 2, "the": 3, "<0x0A>": 4, "<0xE2>": 5}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))
    assert tokenizer.decoded([1, 2, 3, 4, 5]) == [" ", " the", "the", "\n", "<0xE2>"]


def test_bytes_that_are_a_part_of_a_character_are_written_as_numbers() -> None:
    raw = RawTokenizer(
        models.WordLevel({"<unk>": 0, "ĠâĢ": 1, "Ļ": 2, "Ġcat": 3, "Ã©": 4}, unk_token="<unk>")
    )
    raw.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))
    assert tokenizer.decoded([1, 2, 3, 4]) == [" <0xE2><0x80>", "<0x99>", " cat", "é"]


def test_fingerprint_is_the_same_in_another_folder(bert: Path, tmp_path: Path) -> None:
    before = load_model(bert).fingerprint
    assert load_model(bert.rename(tmp_path / "elsewhere")).fingerprint == before


def test_nothing_is_printed_and_logging_is_restored(bert: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    hub = logging.getLogger("huggingface_hub").level
    load_model(bert, as_decoder=True).tokenizer.encode("the cat " * 600)
    with pytest.raises(ModelError):
        load_model("nobody/has-this")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    assert logging.getLogger("huggingface_hub").level == hub


# ---- untrained weights


def test_random_init_of_a_folder(bert: Path) -> None:
    random = torch.get_rng_state()
    one, same, other = (load_model(bert, random_init=True, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), random)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert "untrained weights" in one.source
    assert "seed 1" in one.source
    trained = load_model(bert).model.state_dict()
    key = "encoder.layer.0.attention.self.query.weight"
    weight = one.model.state_dict()[key]
    assert not torch.equal(weight, trained[key])
    assert float(weight.std()) == pytest.approx(0.02, rel=0.1)  # BERT's own initialisation
    assert one.tokenizer_source == "the model's own tokenizer"
    double = load_model(bert, random_init=True, seed=1, dtype=torch.float64)
    assert torch.equal(double.model.state_dict()[key], weight.double())


def test_random_init_of_a_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model("electra", random_init=True, tokenizer_text=TEXT)
    assert (loaded.layers, loaded.heads, loaded.vocab_size) == (12, 4, 30522)
    assert "the default electra of transformers" in loaded.source
    assert "byte-level BPE trained on the text" in loaded.tokenizer_source
    ids = loaded.tokenizer.encode("the age of wisdom")
    assert 0 < len(ids) < 17
    capture(loaded, torch.tensor([ids]), layers=[0])


def test_random_init_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.models.loading.load.free_memory", lambda _: 2**30)
    with pytest.raises(ModelError, match=r"'llama' has 6\.\d billion weights.*25 GiB.*1 GiB"):
        load_model("llama", random_init=True)


def test_trained_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = trained_tokenizer(TEXT, 262), trained_tokenizer(TEXT, 262)
    assert first.serialized == second.serialized
    ids = first.encode("the worst of all — déjà vu!" + TEXT)
    assert 256 <= max(ids) < 262
    assert len(trained_tokenizer(TEXT, 10**6).encode("It was the best of times")) < 12
    monkeypatch.setattr("howsmooth.models.loading.tokenizers.TRAINED_VOCABULARY", 259)
    assert max(trained_tokenizer(TEXT, 10**6).encode(TEXT)) == 258
    with pytest.raises(ModelError, match="256"):
        trained_tokenizer(TEXT, 255)


def test_without_a_tokenizer(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.tokenizer_source == "none"
    with pytest.raises(ModelError, match=r"no usable tokenizer.*token ids .*--tokens FILE"):
        loaded.tokenizer.encode("some text")
    assert len(capture(loaded, token_ids(1, 4))) == 3
    with pytest.raises(ModelError, match="tokenizer_text"):
        load_model(tmp_path, random_init=True).tokenizer.encode("some text")


# ---- decoders


def test_bert_as_a_decoder(bert: Path) -> None:
    encoder, decoder = load_model(bert), load_model(bert, as_decoder=True)
    assert "decoder" in decoder.source
    ids = token_ids(1, 6)
    assert [s.masking for s in capture(encoder, ids)] == ["none"] * 3
    assert [s.masking for s in capture(decoder, ids)] == ["causal"] * 3
    for a, b in zip(encoder.model.parameters(), decoder.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_as_decoder_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(ModelError, match="decoder already"):
        load_model(tmp_path / "llama", as_decoder=True)
    config = DistilBertConfig(vocab_size=VOCABULARY, dim=24, hidden_dim=32, n_layers=1, n_heads=2)
    DistilBertModel(config).save_pretrained(tmp_path / "distilbert")
    with pytest.raises(ModelError, match="stays unmasked"):
        load_model(tmp_path / "distilbert", as_decoder=True)


# ---- refusals


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        (3, {}, "name"),
        (nn.Linear(2, 2), {}, "name: .*got a module, Linear"),
        (" ", {}, "name"),
        ("builtin-encoder", {"dtype": torch.int8}, "torch.float16"),
        ("builtin-encoder", {"seed": -1}, "seed"),
        ("builtin-encoder", {"seed": True}, "seed"),
        ("builtin-encoder", {"device": "cuda:99"}, "cuda:99"),
        ("builtin-encoder", {"device": "abacus"}, "abacus"),
        ("builtin-encoder", {"device": "meta"}, "a device that holds numbers"),
    ],
)
def test_arguments(name: Any, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        load_model(name, **arguments)


def _folder(path: Path, kind: str) -> Path:
    folder = path / kind
    folder.mkdir()
    if kind == "weights only in a pickle":
        GPT2Model(tiny("gpt2").config).config.save_pretrained(folder)
        (folder / "pytorch_model.bin").write_bytes(b"pickle")
    elif kind == "configuration only":
        tiny("gpt2").config.save_pretrained(folder)
    elif kind == "broken configuration":
        (folder / "config.json").write_text("{")
        (folder / "model.safetensors").write_bytes(b"")
    elif kind == "broken weights":
        tiny("gpt2").save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"not safetensors")
    elif kind == "unknown type":
        (folder / "config.json").write_text('{"model_type": "from-the-future"}')
        (folder / "model.safetensors").write_bytes(b"")
    elif kind == "remote code":
        (folder / "config.json").write_text(
            '{"model_type": "mine", "auto_map": {"AutoConfig": "code.MyConfig"}}'
        )
        (folder / "code.py").write_text("raise SystemExit('this must never run')")
        (folder / "model.safetensors").write_bytes(b"")
    elif kind == "incomplete weights":
        tiny("gpt2").save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        del weights["h.1.attn.c_attn.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif kind == "a file":
        folder.rmdir()
        folder.write_text("text")
    elif kind == "nowhere":
        folder.rmdir()
    return folder


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("empty", "no config.json"),
        ("weights only in a pickle", "convert them to safetensors"),
        ("configuration only", "no model.safetensors"),
        ("broken configuration", "cannot be read"),
        ("broken weights", "cannot be read"),
        ("unknown type", "cannot be read"),
        ("remote code", "never runs"),
        ("incomplete weights", r"incomplete.*h\.1\.attn\.c_attn\.weight"),
        ("a file", "is a file"),
        ("nowhere", "no folder"),
    ],
)
def test_folders(tmp_path: Path, kind: str, word: str) -> None:
    with pytest.raises(ModelError, match=word) as error:
        load_model(_folder(tmp_path, kind))
    assert "\n" not in str(error.value)
    assert kind in str(error.value)


def test_a_file_of_parameters_is_refused_with_the_commands_that_take_one(tmp_path: Path) -> None:
    (tmp_path / "AV.npz").write_bytes(b"")
    with pytest.raises(ModelError, match=r"make a howsmooth\.SelfAttention"):
        load_model(tmp_path / "AV.npz")


def test_relative_folder_that_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    with pytest.raises(ModelError, match="holds no model"):
        load_model("docs")


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 5000, "a\0b"])
def test_names_that_no_file_system_takes(name: str) -> None:
    with pytest.raises(ModelError, match="There is no model") as error:
        load_model(name)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["mine:Small", "package.models:Small", "mine.Small"])
def test_names_of_python_classes_are_told_the_way_in_python(name: str) -> None:
    with pytest.raises(ModelError, match=r"give the module to hs\.profile"):
        load_model(name)


def test_hub_out_of_reach() -> None:
    with pytest.raises(ModelError) as error:
        load_model("nobody/has-this")
    for word in ("nobody/has-this", "no network", "folder", "builtin-encoder", "random_init"):
        assert word in str(error.value)


def test_a_model_without_attention_is_loaded_and_says_so(tmp_path: Path) -> None:
    MambaConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, state_size=4).save_pretrained(
        tmp_path
    )
    loaded = load_model(tmp_path, random_init=True)
    assert (loaded.layers, loaded.heads) == (None, None)
    assert "no softmax attention of MambaModel was seen" in loaded.obstacle
    with pytest.raises(CaptureError, match="No softmax attention of MambaModel"):
        capture(loaded, token_ids(1, 4))


def test_an_encoder_decoder_as_a_whole_and_in_part(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    config.save_pretrained(tmp_path)
    whole = load_model(tmp_path, random_init=True)
    assert (whole.modality, whole.layers, whole.heads) == ("text", 3, 2)
    assert [site.layer for site in capture(whole, token_ids(1, 4))] == [0, 1]  # the last is cross-attention
    encoder = load_model(tmp_path, random_init=True, part="encoder")
    assert (encoder.layers, encoder.vocab_size) == (1, VOCABULARY)
    assert "the part encoder of" in encoder.source
    assert encoder.fingerprint != whole.fingerprint
    with pytest.raises(ModelError, match=r"no part 'vision'.*encoder \(text\), decoder \(text\)"):
        load_model(tmp_path, random_init=True, part="vision")


# ---- folders of other tools, and the models that ship with the package


def test_sentence_transformers_folders(bert: Path, tmp_path: Path) -> None:
    outer = tmp_path / "sentences"
    outer.mkdir()
    bert.rename(outer / "0_Transformer")
    modules = [
        {"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (outer / "modules.json").write_text(json.dumps(modules))
    assert load_model(outer).layers == 3


@pytest.mark.parametrize("name", builtin_names())
def test_builtin_models(name: str) -> None:
    loaded = load_model(name)
    assert name in loaded.source
    assert loaded.tokenizer_source == "the model's own tokenizer"
    ids = loaded.tokenizer.encode("The iterator raises an exception when it is exhausted.")
    sites = capture(loaded, torch.tensor([ids]), scope="block")
    assert len(sites) == loaded.layers == 4
    assert {s.causal for s in sites} == {name == "builtin-decoder"}
    assert load_model(name).fingerprint == loaded.fingerprint


# ---- real trained weights
