"""The board of image classifiers: one file each, with `build(features, feature_dim, ...)` in it.

`models.images.build("dak_mc", features, 128, 10)`; the name of a file is the name of the choice.
Every choice is a `Baseline` with `fit(x, y)` and `predict(x)` (see `models/shared/baseline.py`).
What all `build` functions take:

    features: network from images to features `(N, D_w)`.
    feature_dim: D_w.
    num_classes: C.
    recipe: the settings of the training.
"""

from pyro_dak.boards import Board

_BOARD = Board(__name__, __path__)
names = _BOARD.names
build = _BOARD.build
