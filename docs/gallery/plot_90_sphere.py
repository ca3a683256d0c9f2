"""
Clusters on a sphere
====================

Norm layers keep tokens on a sphere. There they gather, first in several groups.
"""

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

eye = torch.eye(3, dtype=torch.float64)
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
X = X / X.norm(dim=1, keepdim=True)

# %%
# The larger the factor β of the scores, the more a token listens to those near it. With values V = I the
# interaction energy :math:`\frac{1}{2\beta n^2}\sum_{i,j} e^{\beta\langle x_i, x_j\rangle}` can only rise.
# With a small β all tokens become one; with a large β groups form early and stay apart for long.

times = torch.linspace(0, 30, 121)
flows = {}
for beta in (1.0, 9.0):
    attention = hs.SelfAttention(eye[None], eye[None], eye[None], scale=beta)
    flows[beta] = hs.dynamics.flow(hs.dynamics.Sphere(attention), X, times, rtol=1e-5)

fig = plt.figure(figsize=(10, 4))
for place, (beta, trajectory) in enumerate(flows.items()):
    ax = fig.add_subplot(1, 3, place + 1, projection="3d")
    for way in trajectory.states.numpy().transpose(1, 2, 0):
        ax.plot(*way, color="C0", linewidth=0.7, alpha=0.6)
    ax.scatter(*trajectory.states[-1].T, s=30, color="C3", depthshade=False)
    ax.set(
        title=f"β = {beta:g}, until t = 30", box_aspect=(1, 1, 1), xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1)
    )
    ax.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1], zticks=[-1, 0, 1])
ax = fig.add_subplot(1, 3, 3)
for (beta, trajectory), style in zip(flows.items(), ("C0--", "C3-"), strict=True):
    counts = [hs.dynamics.number_of_clusters(x, 0.1) for x in trajectory.states]
    ax.step(times, counts, style, where="post", label=f"β = {beta:g}")
ax.set(xlabel="time t", ylabel="clusters", yscale="log")
ax.set_yticks([1, 3, 10, 30, 60], ["1", "3", "10", "30", "60"])
ax.minorticks_off()
ax.legend()
plt.show()

# %%
# The energy never falls, and how far the integrator left the sphere before it was put back:

for beta, trajectory in flows.items():
    energies = torch.tensor([hs.dynamics.log_interaction_energy(x, beta=beta) for x in trajectory.states])
    falls = int((energies.diff() < -1e-9).sum())
    print(f"β = {beta:g}: the energy falls {falls} times, drift {trajectory.drift:.0e}")
