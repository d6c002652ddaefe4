"""# Classes, and inputs that are none

A classifier has to answer, whatever it is shown. It should say two things more: that it cannot
decide between classes, and that it has never seen anything like this. They are different, and so
are their numbers: the *entropy* of the probabilities and the *novelty* of the input.
"""

# %%
# The classifier learns handwritten digits of 8 x 8 pixels. A part of the rows is held out, so
# that the novelty of new images can be compared with theirs.

import torch
from sklearn.datasets import load_digits
from torch import nn

from pyro_dak import DAK, CategoricalLikelihood, NaturalGuide, fit, predict

EPOCHS = 25
images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
x = images.float() / 16
torch.manual_seed(0)
order = torch.randperm(len(x))
train, test = order[:1300], order[1300:]

network = nn.Sequential(
    nn.Unflatten(1, (1, 8, 8)),
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 64),
    nn.ReLU(),
)
model = DAK(network, 64, num_outputs=10, likelihood=CategoricalLikelihood())
guide = NaturalGuide(model, "shared")
data = (x[train], labels[train])
fit(model, guide, data, epochs=EPOCHS, batch_size=100, validation=0.2, seed=0, progress=False)

known = predict(model, guide, x[test])
accuracy = (known.label == labels[test]).float().mean()
nll = -known.log_prob(labels[test]).mean()
print(f"accuracy {accuracy:.1%}, NLL {nll:.3f} on {len(test)} new digits")

# %%
# Now three kinds of images that the classifier should not be sure of: two digits laid over one
# another, photographic negatives, and pixels in random places.

pairs = x[test], x[test].roll(1, 0)
strange = {
    "two digits": torch.maximum(*pairs),
    "negatives": 1 - x[test],
    "shuffled pixels": x[test][:, torch.randperm(64)],
}
seen = {"new digits": known} | {name: predict(model, guide, x) for name, x in strange.items()}

# %% [figure] Rows of digits: sure ones, those with large entropy, two in one, and negatives.

import matplotlib.pyplot as plt

different = (labels[test] != labels[test].roll(1)).nonzero()[:8, 0]
of_class = [known.entropy.where(labels[test] == c, torch.inf).argmin() for c in range(8)]
rows = {
    "the surest\nof a class": (x[test], known, torch.stack(of_class)),
    "the least\nsure": (x[test], known, known.entropy.argsort(descending=True)[:8]),
    "two digits": (strange["two digits"], seen["two digits"], different),
    "negatives": (strange["negatives"], seen["negatives"], torch.arange(8)),
}
figure, axes = plt.subplots(len(rows), 8, figsize=(9, 5.4))
for line, (name, (pictures, p, chosen)) in zip(axes, rows.items(), strict=True):
    for ax, i in zip(line, chosen, strict=True):
        ax.imshow(pictures[i].reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        said = f"{p.label[i]}: {p.probs[i].max():.0%}\nH {p.entropy[i]:.1f}, N {p.novelty[i]:.2f}"
        ax.set_title(said, fontsize=7.5, loc="center", pad=3)
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")

# %%
# Over each picture stand the class and its probability, the entropy H in nats, and the novelty N:
# the share of held-out digits that are at least as strange. What is strange is seen by two
# things, the entropy and the *leverage*, which says how far the features lie from those of
# training.

# %% [figure] Entropy against leverage, and how many images of each kind have a novelty below 0.05.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), width_ratios=(1.6, 1))
shares = {name: float((p.novelty < 0.05).float().mean()) for name, p in seen.items()}
for (name, p), color in zip(seen.items(), ("C0", "C3", "C1", "C2"), strict=True):
    leverage = p.strangeness("leverage")
    left.plot(p.entropy, leverage, ".", color=color, ms=3.5, alpha=0.5, label=name)
    right.barh(name, shares[name], color=color, alpha=0.85)
    right.text(shares[name] + 0.02, name, f"{shares[name]:.0%}", va="center")
left.set(xscale="log", yscale="log", xlabel="entropy", ylabel="leverage")
left.legend(markerscale=3, loc="lower right")
right.set(title="novelty below 0.05", xlim=(0, 1.15), xticks=[])
right.invert_yaxis()

# %% [check]

flagged, two_digits, negatives, shuffled = shares.values()
assert accuracy > 0.96
assert flagged < 0.1
assert two_digits > 0.3
assert negatives > 0.9
assert shuffled > 0.8

# %%
# Who sets aside what has a novelty below 0.05 looks again at {{flagged:.0%}} of the new digits,
# and finds {{negatives:.0%}} of the negatives, {{shuffled:.0%}} of the shuffled images and
# {{two_digits:.0%}} of the pairs, of which some do look like a digit.
#
# **Read next:** [what novelty is](../mathematics.md#novelty), the [tutorial on
# classes](../tutorial.md#6-classes), and [the results on images](../results.md), where a plain
# network with normalised features is sometimes the better judge of what is strange.
