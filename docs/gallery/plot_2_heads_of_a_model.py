"""
The heads of a model
====================

Which heads of a model are steep on a text? All of them are captured in one pass, each as a map with the
tokens that it was given.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import howsmooth as hs
from howsmooth.texts import load_text

model = hs.load_model("builtin-encoder")
text = load_text("alice")
ids = torch.tensor([model.tokenizer.encode(text.content)[:48]])
sites = hs.capture(model, ids, scope="head")
print(len(sites), "heads;", sites[0].map)

# %%
# A head alone is measured in milliseconds at this length.

constants = np.zeros((model.layers, model.heads))
for site in sites:
    constants[site.layer, site.head] = float(hs.local_lipschitz(site.map, site.x[0]).value)

fig, ax = plt.subplots()
image = ax.imshow(constants, cmap="viridis", norm="log")
for layer, head in np.ndindex(*constants.shape):
    dark = constants[layer, head] < np.sqrt(constants.min() * constants.max())
    color = "white" if dark else "black"
    ax.text(head, layer, f"{constants[layer, head]:.1f}", ha="center", va="center", color=color)
ax.set(xlabel="head", ylabel="layer", xticks=range(model.heads), yticks=range(model.layers))
bar = fig.colorbar(image, label="local Lipschitz constant", shrink=0.6, ticks=[1, 2, 4, 8], format="%g")
bar.minorticks_off()
plt.show()

# %%
# The heads of one layer differ by a factor, and so do layers. What is captured reproduces the model's own
# output, or it is refused: see :doc:`/theory/scopes-and-masks`.
