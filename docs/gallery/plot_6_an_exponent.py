"""
An exponent, with its interval
==============================

Does the constant grow like a power of the length? A study measures it at disjoint sequences of a text, and
fits.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from howsmooth.study.measurement_outputs import write_outputs
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import Plan

plan = Plan(
    models="builtin-encoder",
    texts="alice",
    lengths=(8, 12, 16, 24, 32, 48, 64),
    samples=8,
    layers=0,
)
with tempfile.TemporaryDirectory() as folder:
    run(plan, Path(folder))
    published = write_outputs(Path(folder))

# %%
# ``howsmooth measure`` does the same from the command line. The store keeps one row a measurement:

rows = published.contents.measurements
rows[["layer", "n", "sample", "radius_mean", "lipschitz", "lower", "upper", "converged"]].head()

# %%
# The fit has an interval that allows for more spread at short lengths, and a test of the exponent 1/4:

(fit,) = published.exponents.to_dict("records")
print(f"exponent {fit['slope']:.3f}, 95 % interval [{fit['low']:.3f}, {fit['high']:.3f}]")
print(f"p-value of the exponent 1/4: {fit['quarter']:.2g}")

fig, ax = plt.subplots()
ax.scatter(rows["n"], rows["lipschitz"], alpha=0.6)
n = np.array(plan.lengths)
ax.plot(n, np.exp(fit["intercept"]) * n ** fit["slope"], color="C3", label=f"fit, n^{fit['slope']:.2f}")
quarter = np.exp(np.mean(np.log(rows["lipschitz"]) - np.log(rows["n"]) / 4))
ax.plot(n, quarter * n**0.25, ":", color="0.3", label="fit with exponent 1/4")
ax.set(xscale="log", yscale="log", xlabel="sequence length n (tokens)", ylabel="local Lipschitz constant")
ax.set_xticks(n, [str(value) for value in n])
ax.set_yticks([4, 6, 8, 12], ["4", "6", "8", "12"])
ax.minorticks_off()
ax.legend()
plt.show()

# %%
# What such a number means, and what it does not, is in :doc:`/theory/statistics`.
