"""
Sensitive tokens
================

Which tokens of a sentence matter? The leading singular directions say where a small change has most effect,
and where the effect appears.
"""

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

model = hs.load_model("builtin-decoder")
sentence = "The default is None, which means that the name of the file is the name of the module."
ids = torch.tensor([model.tokenizer.encode(sentence)])
site = hs.capture(model, ids, layers=[1], scope="attention")[0]
est = hs.local_lipschitz(site.map, site.x[0])
print(f"{site.name}, {site.masking}: {est.value:.3f} in [{est.lower:.3f}, {est.upper:.3f}]")

# %%
# Both directions have one row a token, and the squares of all their entries sum to one. So each token has a
# share:

inputs = est.input_direction.square().sum(1)
outputs = est.output_direction.square().sum(1)
n = ids.shape[1]

fig, ax = plt.subplots(figsize=(8, 3.2))
ax.bar(torch.arange(n) - 0.2, inputs, width=0.4, label="input: change here")
ax.bar(torch.arange(n) + 0.2, outputs, width=0.4, hatch="//", label="output: effect here")
ax.set(xlabel="place of the token", ylabel="share of the energy", xticks=range(n))
ax.legend()
plt.show()

# %%
# The mask is causal, so a change has effects at its own token and later ones, never before. All others see
# the first token, and it is the most sensitive one here.

assert site.causal
assert int(inputs.argmax()) == 0
