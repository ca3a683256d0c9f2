"""
Measure a map
=============

How steep is one attention head at given tokens? Two random matrices are enough to ask.
"""

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

generator = torch.Generator().manual_seed(0)
d = 16
query, key, value = (torch.randn(1, d, d, generator=generator) / d**0.5 for _ in range(3))
head = hs.SelfAttention(query, key, value)
head

# %%
# At tokens :math:`X` of shape (n, d), :func:`howsmooth.local_lipschitz` gives the norm of the derivative,
# :math:`\|D_X f\|_2`, with an interval that holds with the probability ``confidence``. Many sequences are
# measured together when they are stacked.

lengths = [4, 8, 16, 32, 64, 128]
directions = [torch.randn(12, n, d, generator=generator) for n in lengths]
small = [hs.local_lipschitz(head, 0.3 * X) for X in directions]
large = [hs.local_lipschitz(head, 2.0 * X) for X in directions]
for n, a, b in zip(lengths, small, large, strict=True):
    assert a.converged.all()
    assert b.converged.all()
    print(f"n = {n:3d}: median {a.value.median():.2f} at small tokens, {b.value.median():.2f} at large ones")

# %%
# Every point has an interval, too narrow to be seen. At small tokens attention is nearly an average, and
# its constant does not depend on the length; at tokens that are seven times as long it grows. So a constant
# means something only together with the tokens at which it was measured.

fig, ax = plt.subplots()
for name, color, estimates in (("small tokens", "C0", small), ("large tokens", "C1", large)):
    for n, est in zip(lengths, estimates, strict=True):
        half = (est.upper - est.lower) / 2
        label = name if n == lengths[0] else None
        ax.errorbar([n] * 12, est.lower + half, half, fmt="o", color=color, alpha=0.6, label=label)
ax.set(xscale="log", yscale="log", xlabel="sequence length n (tokens)", ylabel="local Lipschitz constant")
ax.set_xticks(lengths, [str(n) for n in lengths])
ax.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
ax.minorticks_off()
ax.legend()
plt.show()
