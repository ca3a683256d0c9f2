"""Where √n ends: two Diracs of weights 1/n and 1 − 1/n, for n far beyond any sequence of tokens."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from howsmooth.bounds import n_free, proposition_3_4, theorem_3_3, theorem_a, two_cluster_sharp
from howsmooth.measures import wasserstein_lipschitz
from howsmooth.reproduce.drawing.crossover import draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.kept import Kept, Key
from howsmooth.reproduce.two_dirac import identity_head, two_diracs
from howsmooth.study.plan import derive_seed
from howsmooth.study.tools import Tools

__all__ = ["CROSSOVER"]

# e^{2γR²} as powers of ten: the numbers of tokens at which √n ends.
_POWERS = (4, 20, 40)
_LENGTHS = (2, 3, 5, *(10 ** (power // 2) * (1 if power % 2 == 0 else 3) for power in range(2, 91)))
# As many tokens are measured as tokens too.
_TOKENS = (2, 10, 100, 1000)
_RTOL = 1e-8
_DIMENSION = 2


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    kept = Kept(folder / "units")
    units: list[Key] = [{"power": power, "seed": request.seed} for power in _POWERS]
    for done, key in enumerate(units):
        on_step(Step(float(done), float(len(units)), f"exp(2γR²) = 10^{key['power']}"))
        if not kept.has(key):
            kept.add(key, [_row(key, n, tools) for n in _LENGTHS])
    on_step(Step(float(len(units)), float(len(units)), ""))
    made = [
        ("Measures", "two Diracs in two dimensions, A = −I, V = I; no model and no text."),
        ("Settings", f"seed {request.seed}, float64, relative tolerance {_RTOL:g}, confidence 0.999."),
    ]
    write_note(folder, {"units": [dict(key) for key in units], "made": made})


def _row(key: Key, n: int, tools: Tools) -> dict[str, object]:
    g = int(key["power"] or 0) * math.log(10) / 2
    radius, f = math.sqrt(g), identity_head(-1.0, _DIMENSION)
    logs = torch.tensor([-math.log(n), math.log1p(-1 / n)], dtype=torch.float64)
    measure = two_diracs(radius, -1.0, logs, _DIMENSION)
    start = derive_seed(purpose="crossover", n=str(n), **key)
    found = wasserstein_lipschitz(f, measure, rtol=_RTOL, seed=start)
    tokens = None
    if n in _TOKENS:
        x = measure.points[torch.ones(n, dtype=torch.long).index_fill_(0, torch.tensor([0]), 0)]
        tokens = math.log(float(tools.measure(f, x, rtol=_RTOL, seed=start).value))
    return {
        "log_n": math.log(n),
        "g": g,
        "radius": radius,
        "log_value": math.log(found.value),
        "log_lower": math.log(found.lower),
        "log_upper": math.log(found.upper),
        "converged": found.converged,
        "log_tokens": tokens,
        "log_paper": proposition_3_4(f, n, radius).log_value,
        "log_formula": two_cluster_sharp(f, n, radius).log_value,
        "log_sharp": theorem_a(f, n, radius).log_value,
        "log_theorem": theorem_3_3(f, n, radius).log_value,
        "log_free": n_free(f, radius).log_value,
    }


CROSSOVER = Experiment(
    name="crossover",
    title="Where growth like √n ends: weights that no sequence of tokens has",
    paper="Propositions 3.4 and 3.6",
    about=(
        "One heavy token at Ru against n − 1 at −Ru, A = −I, V = I, as a measure of two atoms with weights "
        "1/n and 1 − 1/n, so that n may be any number: γR² is such that e^(2γR²) is 10^4, 10^20 and 10^40. "
        "The constant grows like √n until one token has no longer the weight of all others; the bound that "
        "holds for every n says that no other tokens do much better. No model and no text is involved."
    ),
    measure=_measure,
    draw=draw,
)
