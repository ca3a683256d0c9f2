"""
Bounds beside measurements
==========================

At given tokens the constant is measured. Over all tokens of a ball it is bounded: from above by theorems,
from below by tokens that are written down from the parameters.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import howsmooth as hs

generator = torch.Generator().manual_seed(1)
d, n = 8, 24
query, key, value = (
    torch.randn(1, d, d, generator=generator, dtype=torch.float64) / d**0.5 for _ in range(3)
)
head = hs.SelfAttention(query, key, value)
directions = torch.randn(n, d, generator=generator, dtype=torch.float64)
directions /= directions.norm(dim=1, keepdim=True)

# %%
# All tokens have norm R, from small to large. :func:`howsmooth.bounds.best` gives the smallest upper bound
# that holds: with ``X`` at these tokens, with ``length`` and ``radius`` at all tokens of the ball.

radii = np.geomspace(0.3, 6, 10)
measured = [float(hs.local_lipschitz(head, R * directions).lower) for R in radii]
certificates = [hs.bounds.best(head, X=R * directions).value for R in radii]
theorems = [hs.bounds.best(head, length=n, radius=float(R)).value for R in radii]
found = [
    float(hs.local_lipschitz(head, hs.adversarial.two_heavy_tokens(head, n, float(R)).x).lower) for R in radii
]

fig, ax = plt.subplots()
ax.fill_between(radii, found, theorems, color="0.88", label="the constant over the ball is in here")
ax.plot(radii, theorems, color="black", label="upper bound on the ball")
ax.plot(radii, found, "s", color="C3", label="at constructed tokens")
ax.plot(radii, certificates, "--", color="C0", label="certificate at the given tokens")
ax.plot(radii, measured, "o", color="C0", label="measured there")
ax.set(xscale="log", yscale="log", xlabel="radius R", ylabel="local Lipschitz constant")
ax.set_xticks([0.3, 1, 3, 6], ["0.3", "1", "3", "6"])
ax.set_yticks([3, 10, 30, 100, 300], ["3", "10", "30", "100", "300"])
ax.minorticks_off()
ax.legend()
plt.show()

# %%
# The order is never another, in whatever way the numbers are computed: each certificate is at least the lower
# end of the measured interval, and the bound on the ball is above everything in it.

assert all(low <= high for low, high in zip(measured, certificates, strict=True))
assert all(low <= high for low, high in zip(found, theorems, strict=True))
assert all(low <= high for low, high in zip(measured, theorems, strict=True))

# %%
# Which theorem it is depends on R. The whole list, with sources and hypotheses, is a table:

hs.bounds.table(head, length=n, radius=6.0)[["name", "side", "value", "holds"]]
