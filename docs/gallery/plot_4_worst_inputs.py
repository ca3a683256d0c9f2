"""
The worst inputs
================

At which tokens is attention steepest? Here in the plane, where they can be seen.
"""

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

A = torch.tensor([[0.8, 0.3], [-0.2, -0.5]], dtype=torch.float64)
eye = torch.eye(2, dtype=torch.float64)
head = hs.SelfAttention(A[None], eye[None], eye[None], scale=1.0)
n, R = 12, 4.0

# %%
# Random tokens, the paper's two clusters, the construction ``two_heavy_tokens``, and what gradient ascent
# finds:

generator = torch.Generator().manual_seed(0)
angles = 6.2832 * torch.rand(n, generator=generator, dtype=torch.float64)
inputs = {
    "random": R * torch.stack([angles.cos(), angles.sin()], 1),
    "two clusters (the paper)": hs.adversarial.two_cluster(head, n, R).x,
    "two_heavy_tokens": hs.adversarial.two_heavy_tokens(head, n, R).x,
    "gradient ascent": hs.adversarial.ascend(head, length=n, radius=R, steps=15, seed=0).x,
}

fig, axes = plt.subplots(1, 4, figsize=(10, 3.2), sharex=True, sharey=True)
for ax, (name, X) in zip(axes, inputs.items(), strict=True):
    est = hs.local_lipschitz(head, X)
    ax.add_patch(plt.Circle((0, 0), R, fill=False, color="0.6"))
    ax.scatter(*X.T, s=60, alpha=0.5)
    arrows = 1.5 * est.input_direction
    ax.quiver(*X.T, *arrows.T, angles="xy", scale_units="xy", scale=1, color="C3", width=0.01)
    ax.set(title=f"{name}\n{est.value:.2f}", aspect="equal", xlim=(-5.5, 5.5), ylim=(-5.5, 5.5))
plt.show()

# %%
# The arrows are the perturbation that moves the output most. The steep inputs have few distinct tokens,
# which are placed so that scores tie: a small step then turns the attention from one to another. No tokens
# in the circle are steeper than the bound:

hs.bounds.best(head, length=n, radius=R)

# %%
# :doc:`/theory/worst-inputs` derives the constructions, and :doc:`/how-to/bound` does the same
# for the heads of a model.
