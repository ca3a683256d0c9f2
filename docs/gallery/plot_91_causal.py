"""
Causal attention through depth
==============================

With a causal mask the first token sees itself alone, and those behind it follow.
"""

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

n = 48
angles = 6.2832 * torch.rand(n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
X = torch.stack([angles.cos(), angles.sin()], 1)
eye = torch.eye(2, dtype=torch.float64)
times = torch.linspace(0, 12, 121)

flows = {}
for name, causal in (("unmasked", False), ("causal", True)):
    attention = hs.SelfAttention(eye[None], eye[None], eye[None], scale=4.0, causal=causal)
    flows[name] = hs.dynamics.flow(hs.dynamics.Sphere(attention), X, times)

# %%
# On the circle a token is its angle; angles that differ by 2π are one place. Colours go from the first token,
# dark, to the last:

fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
colours = plt.get_cmap("viridis")(torch.linspace(0, 0.92, n).numpy())
for ax, (name, trajectory) in zip(axes, flows.items(), strict=True):
    turned = torch.atan2(trajectory.states[..., 1], trajectory.states[..., 0])
    # An angle is drawn without jumps where it passes from π to −π.
    steps = torch.remainder(turned.diff(dim=0) + torch.pi, 2 * torch.pi) - torch.pi
    turned = torch.cat([turned[:1], turned[0] + steps.cumsum(dim=0)])
    for i in range(n):
        ax.plot(times, turned[:, i], color=colours[i], linewidth=1.0, zorder=n - i)
    ax.set(title=name, xlabel="time t")
axes[0].set_ylabel("angle of the token")
plt.show()

# %%
# Under the mask the first token does not move at all, whatever comes behind it:

first = flows["causal"].states[:, 0]
print(f"causal: token 1 moves by {float((first - first[0]).norm(dim=1).max()):.1e}")
first = flows["unmasked"].states[:, 0]
print(f"unmasked: token 1 moves by {float((first - first[0]).norm(dim=1).max()):.2f}")
