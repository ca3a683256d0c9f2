"""Padded sequences: a site for each, judged by finite differences of the padded model at its real tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartModel

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.models import capture
from howsmooth.nn import LipschitzMonitor
from tests._injected import central_difference, injected
from tests._tiny_models import tiny, token_ids

N = 7
LENGTHS = (4, 7, 5)


def padded(side: str) -> dict[str, Tensor]:
    """Three sequences of different lengths; what stands in their padding is no token of padding."""
    columns = torch.arange(N)
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = (columns < lengths if side == "right" else columns >= N - lengths).long()
    return {"input_ids": token_ids(3, N), "attention_mask": mask}


def tokens_at(model: nn.Module, given: dict[str, Tensor], name: str) -> Tensor:
    """The tokens that a module is given in the padded pass."""
    taken: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        taken.append(next(v for v in (*args, *kwargs.values()) if v.is_floating_point()).clone())

    handle = model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**given)
    handle.remove()
    return taken[0]


def test_order_scopes_and_implementations() -> None:
    model, given = tiny("gpt2"), padded("left")
    sites = capture(model, given, layers=[-1, 0], scope="head", heads=[1, 0])
    assert [(s.sequence, s.layer, s.head) for s in sites] == [
        (i, layer, head) for i in range(3) for layer in (2, 0) for head in (1, 0)
    ]
    whole = {**given, "attention_mask": torch.ones(3, N, dtype=torch.long)}
    (site,) = capture(model, whole, layers=[0], scope="block")
    assert site.sequence is None
    assert site.x.shape == (3, N, 24)


def test_padding_that_reaches_the_tokens_is_refused() -> None:
    model, given = tiny("bert"), padded("right")
    model.embeddings.register_forward_hook(lambda m, args, out: out + out.mean(dim=1, keepdim=True))
    with pytest.raises(CaptureError, match=r"layer 0 .* in sequence 0 are not the same without the padding"):
        capture(model, given, layers=[0])
    assert len(capture(model, {"input_ids": given["input_ids"]}, layers=[0])) == 1


def test_padding_that_makes_a_model_give_nan() -> None:
    # In float64 its mask holds the least float64, which its softmax turns into -inf in float32.
    with pytest.raises(CaptureError, match=r"layer 1 .* gives NaN at real tokens if it is given padding"):
        capture(tiny("llama", torch.float64, "eager"), padded("left"), layers=[0, 1])


def test_holes_are_real_tokens_at_their_own_positions() -> None:
    model = tiny("llama", torch.float64, "eager")
    given = {"input_ids": token_ids(1, N), "attention_mask": torch.tensor([[1, 1, 0, 1, 0, 1, 1]])}
    (site,) = capture(model, given, layers=[1])
    real = given["attention_mask"][0].bool()
    x = tokens_at(model, given, site.name)
    torch.testing.assert_close(site.x[0], x[0, real], rtol=1e-5, atol=1e-6)
    e = torch.zeros_like(x)
    e[0, real] = torch.randn(site.x[0].shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    own = injected(model, given, site.name, "layers.1.self_attn.o_proj")
    wanted = central_difference(own, x, e)[0, real]
    found = closed_form_jacobian(site.map, site.x).product(e[:, real])[0]
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6


def bart() -> nn.Module:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, **heads)
    return BartModel(config).double().eval()


def test_padding_of_a_decoder_is_refused_by_its_name() -> None:
    model, given = bart(), padded("left")
    with pytest.raises(ArgumentError, match="decoder_attention_mask"):
        capture(model, {**given, "decoder_attention_mask": given["attention_mask"]})
    sites = capture(model, padded("right"), layers=[0, 1])
    assert [(s.sequence, s.layer, s.x.shape[1]) for s in sites] == [
        (i, layer, n) for i, n in enumerate(LENGTHS) for layer in (0, 1)
    ]


def test_a_decoder_of_its_own_tokens_is_not_cut_with_the_encoder() -> None:
    model, given = bart(), padded("right")
    given["decoder_input_ids"] = token_ids(3, N, seed=5)
    sites = capture(model, given, layers=[0, 1])
    assert [(s.sequence, s.layer, s.x.shape[1]) for s in sites] == [
        (i, layer, count) for i, n in enumerate(LENGTHS) for layer, count in ((0, n), (1, N))
    ]
    own = tokens_at(model, given, sites[1].name)
    for site in sites[1::2]:
        torch.testing.assert_close(site.x[0], own[site.sequence])


def test_a_mask_of_pairs_of_decoder_tokens_is_kept_in_a_batch() -> None:
    model, given = bart(), padded("right")
    given["decoder_input_ids"] = token_ids(3, N, seed=5)
    # Each token sees itself and the token before it.
    near = torch.ones(N, N).tril().triu(-1).log().double()
    given["decoder_attention_mask"] = near.expand(3, 1, N, N)
    windows = [site.map.window for site in capture(model, given, layers=[1]) if site.map.causal]
    assert windows == [2, 2, 2]


@pytest.mark.parametrize("batch_first", [True, False])
def test_key_padding_masks_of_torch(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first).double().eval()
    x = torch.randn(3, N, 8, dtype=torch.float64)
    hidden = padded("right")["attention_mask"] == 0
    inputs = {"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": hidden}
    sites = capture(layer, inputs)
    assert [s.sequence for s in sites] == [0, 1, 2]
    for site, real, row in zip(sites, ~hidden, x, strict=True):
        assert torch.equal(site.x[0], row[real])

        def own(tokens: Tensor, row: Tensor = row, real: Tensor = real) -> Tensor:
            full = row.clone()
            full[real] = tokens[0]
            mask = ~real[None]
            t = full[None] if batch_first else full[:, None]
            return layer.self_attn(t, t, t, key_padding_mask=mask)[0].reshape(N, 8)[real]

        e = torch.randn_like(site.x)
        wanted = central_difference(own, site.x, e)
        found = closed_form_jacobian(site.map, site.x).product(e)[0]
        assert float((found - wanted).norm() / wanted.norm()) < 1e-7


def test_a_mask_of_another_shape_is_refused_before_the_model_runs() -> None:
    ids, short = token_ids(3, N), torch.ones(3, N - 1)
    for mask in (short, torch.ones(1, N), torch.zeros(4, N)):
        with pytest.raises(ArgumentError, match=r"^attention_mask: expected shape \(3, 7\), a number"):
            LipschitzMonitor(tiny("gpt2"), {"input_ids": ids, "attention_mask": mask})
    layer = nn.TransformerEncoderLayer(8, 2, 16)  # (n, batch, d)
    with pytest.raises(ArgumentError, match=r"^src_key_padding_mask: expected shape \(3, 7\), a number"):
        capture(layer, {"src": torch.randn(N, 3, 8), "src_key_padding_mask": torch.zeros(N, 3).bool()})
