"""
Clusters of tokens
==================

Through depth, attention moves each token by an average of all of them. Where do they go?
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.spatial import ConvexHull

import howsmooth as hs

eye = torch.eye(2, dtype=torch.float64)
X = torch.randn(40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

# %%
# Here queries, keys and values are the tokens themselves. They then run away like :math:`e^t`, so the
# rescaled tokens :math:`e^{-tV}x_i(t)` are followed instead, in an equation of their own
# (:class:`~howsmooth.dynamics.Rescaled`). By a theorem of Geshkovski, Letrouit, Polyanskiy and Rigollet
# (2023) they end on the boundary of a convex polygon, or at the origin; mostly that is at the corners.

attention = hs.SelfAttention(eye[None], eye[None], eye[None], scale=1.0)
times = torch.linspace(0, 8, 161)
polygon = hs.dynamics.flow(hs.dynamics.Rescaled(attention), X, times)

# %%
# With values that grow along one direction only, rescaled tokens end on few parallel lines across it:

V = torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64))
along_one = hs.SelfAttention(eye[None], eye[None], V[None], scale=1.0)
lines = hs.dynamics.flow(hs.dynamics.Rescaled(along_one), X, times)

fig, axes = plt.subplots(1, 2, figsize=(10, 4.8))
for ax, trajectory, title in ((axes[0], polygon, "V = I"), (axes[1], lines, "V = diag(1, 0.1)")):
    states = trajectory.states.numpy()
    ax.plot(*states.transpose(2, 0, 1), color="C0", linewidth=0.8, alpha=0.5)
    ax.scatter(*states[0].T, s=14, facecolors="white", edgecolors="C0", zorder=3)
    ax.scatter(*states[-1].T, s=26, color="C3", zorder=4)
    ax.set(title=title, aspect="equal", xlabel="coordinate 1", ylabel="coordinate 2")
corners = polygon.states[-1].numpy()
hull = corners[ConvexHull(corners).vertices]
axes[0].fill(*hull.T, color="C3", alpha=0.1)
for place in np.unique(lines.states[-1, :, 0].numpy().round(2)):
    axes[1].axvline(place, color="C3", linewidth=0.8, alpha=0.5)
plt.show()

# %%
# Tokens nearer to each other than 0.05 count as one cluster:

[hs.dynamics.number_of_clusters(polygon.states[k], 0.05) for k in (0, 40, 60, 80, 160)]

# %%
# More on flows, also through the layers of a model: :doc:`/how-to/measures`.
