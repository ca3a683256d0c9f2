"""
A Gaussian through depth
========================

Of infinitely many Gaussian tokens attention makes Gaussian tokens. So mean and covariance say all.
"""

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

A = torch.tensor([[0.6, 0.9], [-0.4, 0.3]], dtype=torch.float64)
V = torch.tensor([[-0.3, -1.5], [1.5, -0.3]], dtype=torch.float64)
eye = torch.eye(2, dtype=torch.float64)
attention = hs.SelfAttention(A[None], eye[None], V[None], scale=1.0)

start = hs.measures.Gaussian(
    torch.tensor([3.0, 0.0], dtype=torch.float64),
    torch.tensor([[0.3, 0.1], [0.1, 0.1]], dtype=torch.float64),
)

# %%
# :func:`~howsmooth.dynamics.flow` takes the Gaussian as it takes tokens: it then integrates an equation for
# the mean and the covariance. Beside it go 2000 tokens drawn from the same Gaussian.

times = torch.linspace(0, 3, 6)
gaussian = hs.dynamics.flow(attention, start, times)
particles = hs.dynamics.flow(attention, start.sample(2000, 0).points, times, rtol=1e-5)

angles = torch.linspace(0, 6.2832, 100, dtype=torch.float64)
circle = torch.stack([angles.cos(), angles.sin()])
colours = plt.get_cmap("viridis")(torch.linspace(0, 0.92, len(times)).numpy())

fig, ax = plt.subplots(figsize=(7, 5))
for colour, t, state, cloud in zip(colours, times, gaussian.states, particles.states, strict=True):
    values, vectors = torch.linalg.eigh(state.covariance)
    ellipse = state.mean[:, None] + 2 * (vectors * values.sqrt()) @ circle
    ax.scatter(*cloud[::4].T, s=2, color=colour, alpha=0.35)
    ax.plot(*ellipse, color=colour, label=f"t = {t:g}")
ax.set(aspect="equal", xlabel="coordinate 1", ylabel="coordinate 2")
fig.legend(title="two standard\ndeviations", loc="outside right center")
plt.show()

# %%
# How far the moments of the tokens are from those of the Gaussian, at the start and at the end. It is the
# error of drawing finitely many:

for place in (0, -1):
    state, cloud = gaussian.states[place], particles.states[place]
    off = (cloud.mean(dim=0) - state.mean).norm(), (cloud.T.cov() - state.covariance).norm()
    print(f"t = {times[place]:g}: mean {off[0]:.3f}, covariance {off[1]:.3f}")

# %%
# :doc:`/theory/flows` has the equation and its proof.
