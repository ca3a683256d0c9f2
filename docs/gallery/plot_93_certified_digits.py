"""
Digits that no attack can change
================================

A Vision Transformer that is 1-Lipschitz from image to logits says of each image how far it can be moved
before the answer changes. An ordinary one says nothing, and an attack shows why.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import howsmooth as hs

# The example is not part of the package: it stands in the repository, beside its weights.
ROOT = next(folder for folder in Path.cwd().parents if (folder / "examples" / "digits").is_dir())
sys.path.insert(0, str(ROOT))

from examples.digits.attack import attack  # noqa: E402
from examples.digits.data import load  # noqa: E402
from examples.digits.train import read_model, weights_path  # noqa: E402

DIGITS = ROOT / "examples" / "digits"

# %%
# The images are those of scikit-learn, 8 × 8 pixels in [0, 1], which nothing has to be fetched for. (Without
# scikit-learn, ``load`` stops here and says so.) The weights were trained by ``examples/digits/train.py``.

_, test = load()
plain = read_model(weights_path(DIGITS, "plain", 0), "plain")
lipschitz = read_model(weights_path(DIGITS, "lipschitz", 0), "lipschitz")

# %%
# :func:`howsmooth.nn.certify` multiplies the constants of the layers. Of the radius nothing is asked: the
# model begins by clipping its tokens, so that what follows holds for all inputs.

certificate = hs.nn.certify(lipschitz, length=16, radius=float("inf"))
print(f"Lipschitz constant at most {certificate.constant:.4f}")

with torch.no_grad():
    radii = certificate.certified_radius(lipschitz(test.images), test.labels)
print(f"{(radii > 0).double().mean():.1%} of 500 test images are right,")
print(f"{(radii >= 0.5).double().mean():.1%} stay so whatever is added to them of l2 norm 0.5")

# %%
# Five images, and what an attack of norm 0.5 on the ordinary model makes of them. Above each are the answers.

shown = [int((test.labels == digit).nonzero()[0]) for digit in (0, 3, 4, 7, 8)]
images, labels = test.images[shown], test.labels[shown]
margins, moves = attack(plain, images, labels, [0.5], starts=1)
attacked = images + moves[0]

rows = {"image": images, "attacked": attacked}
fig, axes = plt.subplots(2, 5, figsize=(7, 3.4))
for row, (name, pictures) in zip(axes, rows.items(), strict=True):
    with torch.no_grad():
        answers = {"plain": plain(pictures).argmax(dim=1), "1-Lipschitz": lipschitz(pictures).argmax(dim=1)}
    for column, (ax, picture) in enumerate(zip(row, pictures, strict=True)):
        ax.imshow(picture[0], cmap="gray_r", vmin=0, vmax=1)
        words = [f"{model}: {int(answer[column])}" for model, answer in answers.items()]
        ax.set_title("\n".join(words), fontsize=8)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    row[0].set_ylabel(name)
plt.show()

# %%
# Nothing that was certified can be broken: for each radius the share of certified images (a proof) is at most
# the share that survives an attack (an attempt). The attacked accuracies are those that ``train.py`` found.

results = json.loads((DIGITS / "results.json").read_text())
distances = torch.linspace(0, 1.2, 121)
proved = [float((radii > distance).double().mean()) for distance in distances]

fig, ax = plt.subplots()
ax.plot(distances, proved, color="C0", label="1-Lipschitz, certified")
forms = {"lipschitz": ("1-Lipschitz", "C0"), "penalised": ("penalised", "C2"), "plain": ("plain", "C1")}
for form, (label, colour) in forms.items():
    row = results[f"{form}-0"]
    survived = [row["clean"], *row["attacked"]]
    ax.plot([0, *row["radii"]], survived, "o--", color=colour, label=f"{label}, attacked")
ax.set(xlabel="l2 distance", ylabel="accuracy", ylim=(0, 1))
ax.legend()
plt.show()

# %%
# :ref:`Evidence <certified-digits>` tells how the models were trained, with more seeds, and what all this
# leaves open.
