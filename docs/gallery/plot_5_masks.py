"""
The mask is part of the map
===========================

The same weights at the same tokens, with three masks.
"""

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

generator = torch.Generator().manual_seed(3)
d = 16
query, key, value = (torch.randn(1, d, d, generator=generator) / d**0.5 for _ in range(3))


def window(n: int) -> torch.Tensor:
    """Each token sees itself and the three before it."""
    steps = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    return (steps >= 0) & (steps < 4)


lengths = [4, 8, 16, 32, 64]
constants: dict[str, list[float]] = {"unmasked": [], "causal": [], "window of 4": []}
for n in lengths:
    X = 3 * torch.randn(10, n, d, generator=generator)
    for name, options in (
        ("unmasked", {}),
        ("causal", {"causal": True}),
        ("window of 4", {"mask": window(n)}),
    ):
        est = hs.local_lipschitz(hs.SelfAttention(query, key, value, **options), X)
        constants[name].append(float(est.value.median()))

# %%
# To leave the mask out is to measure another map. Here it would be wrong by this factor at each length:

print([round(a / b, 2) for a, b in zip(constants["unmasked"], constants["causal"], strict=True)])

fig, ax = plt.subplots()
for (name, values), marker in zip(constants.items(), "os^", strict=True):
    ax.plot(lengths, values, marker=marker, label=name)
ax.set(xscale="log", xlabel="sequence length n (tokens)", ylabel="median local Lipschitz constant")
ax.set_xticks(lengths, [str(n) for n in lengths])
ax.minorticks_off()
ax.legend()
plt.show()

# %%
# Models build their masks outside the attention layer, so a layer that is called alone may have lost it.
# :func:`howsmooth.models.capture` takes the mask with the map and names it in the result:
# :doc:`/theory/scopes-and-masks`.
