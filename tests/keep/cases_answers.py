"""Answers about a whole model at one input: profiles, influence, precision, radii; and a small study."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import howsmooth as hs
from tests.keep.cases_models import TYPES, filled, token_ids
from tests.keep.numbers import AtLeast, Close, Interval, Number, case, digest_of, numbers


def language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return filled(GPT2LMHeadModel(GPT2Config(**TYPES["gpt2"][2])))


def classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {**TYPES["bert"][2], "num_hidden_layers": 1, "num_labels": 3}
    return filled(BertForSequenceClassification(BertConfig(**sizes)))


def column(table: pd.DataFrame, name: str, rtol: float = 1e-9) -> Close:
    return digest_of(torch.tensor(table[name].to_numpy(dtype=float)), rtol=rtol)


@case("answers/profile")
def _profile() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    answer = hs.profile(language_model(), token_ids(6, 40), rtol=1e-6)
    for row in answer.table.itertuples():
        where = f"layer {row.layer}" if row.scope == "attention" else f"layer {row.layer}, head {row.head}"
        found[where] = Interval(row.lower, row.value, row.upper)
    for share in ("input_share", "output_share"):
        found[share] = column(answer.tokens, share, 1e-5)
    return found


@case("answers/depth_profile")
def _depth() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    table = hs.depth_profile(language_model(), token_ids(6, 40), rtol=1e-6).table
    for row in table.to_dict("records"):
        for kind in ("own", "until", "beyond"):
            ends = (float(row[f"{kind}_lower"]), float(row[kind]), float(row[f"{kind}_upper"]))
            if all(math.isfinite(end) for end in ends):
                found[f"{row['stage']}, {kind}"] = Interval(*ends)
    found["product"] = column(table, "product", 1e-8)
    return found


@case("answers/influence")
def _influence() -> Mapping[str, Number]:
    site = hs.capture(language_model(), token_ids(6, 40), layers=[1])[0]
    answer = hs.influence(site, rtol=1e-8)
    i, j = divmod(int(answer.value.argmax()), 6)
    largest = (float(getattr(answer, name)[i, j]) for name in ("lower", "value", "upper"))
    wise = answer.token_wise
    return {
        "all blocks": digest_of(answer.value, rtol=1e-8),
        "the largest block": Interval(*largest, 1e-8),
        "which": float(6 * i + j),
        "token-wise": Interval(wise.lower, wise.lower, wise.upper, 1e-6, 0.3),
    }


@case("answers/precision")
def _precision() -> Mapping[str, Number]:
    answer = hs.precision(language_model(), token_ids(6, 40), bits=(8, 4), quantisers=("token", "channel"))
    found: dict[str, Number] = {
        name: column(answer.table, name, 1e-7)
        for name in ("predicted", "change", "bound", "predicted_kl", "kl")
    }
    for row in answer.together.itertuples():
        found[f"together, {row.quantiser}, {row.bits} bits"] = Close(row.kl, 1e-6)
    return found


def _radius(answer: Any) -> dict[str, Number]:
    """The radius ends a search with a tolerance of its own, below the smallest attack."""
    most = math.inf if answer.attack is None else float(answer.attack)
    return {"radius": AtLeast(answer.radius, most, 5e-3), "margin": answer.margin}


@case("answers/robust_radius")
def _robust() -> Mapping[str, Number]:
    robust_radius = getattr(hs, "robust_radius", None) or hs.bounds.robust_radius
    model, ids, found = classifier(), {"input_ids": token_ids(6, 40)}, {}
    asked: dict[str, dict[str, Any]] = {
        "one token": {"tokens": [2], "order": 2},
        "all tokens": {"order": 2, "norm": math.inf, "attack": False},
        "third order": {"tokens": [2], "order": 3, "attack": False},
    }
    for words, options in asked.items():
        for name, number in _radius(robust_radius(model, ids, **options)).items():
            found[f"{words}, {name}"] = number
    return found


@case("answers/word_radii")
def _words() -> Mapping[str, Number]:
    table = hs.word_radii(classifier(), token_ids(6, 40), positions=[0, 3], attack=False).table
    return {f"token {row.position}": AtLeast(row.radius, math.inf, 5e-3) for row in table.itertuples()}


@case("study/exponents")
def _exponents() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    n = np.repeat([4, 8, 16, 32, 64], 3)
    for words, slope in (("a root", 0.5), ("falling", -0.2)):
        fit = hs.fit_exponent(n, n**slope * (1 + 0.1 * numbers(800, len(n)).numpy()))
        for name in ("slope", "low", "high", "quarter", "intercept", "spread"):
            found[f"{words}, {name}"] = float(getattr(fit, name))
    return found


@case("study/measure")
def _study() -> Mapping[str, Number]:
    """What ``howsmooth measure`` keeps, and what ``read`` gives back."""
    from howsmooth.cli import main

    found: dict[str, Number] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "ids.npy"), Path(folder, "out")
        np.save(file, [(7 * i) % 2000 + 5 for i in range(100)])
        options = "--lengths 4,8,16 --samples 2 --layers 0 --scope attention --bounds none -q"
        options += " --dtype float64 --rtol 1e-6"
        command = ["measure", "builtin-decoder", "--tokens", str(file), "--out", str(out), *options.split()]
        assert main(command) == 0
        tables = hs.read(out)
    for row in tables["measurements"].itertuples():
        where = f"{row.n} tokens, sample {row.sample}"
        found[where] = Interval(row.lower, row.lipschitz, row.upper)
        found[f"{where}, radius"] = Close(row.radius_max, 1e-9)
    for name in ("slope", "low", "high"):
        found[name] = Close(float(tables["exponents"][name].iloc[0]), 1e-7)
    return found
