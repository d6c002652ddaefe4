"""The board of models for tables: one file each, with `build(input_dim, ...)` in it.

`models.build("dak_cf", input_dim=8)`; the name of a file is the name of the choice, and a new file
is a new choice. `names()` lists them. `dak` and `additive_gp` build a bare `DAK`; all others build
a `Baseline` with `fit(x, y)` and `predict(x)` (see `models/shared/baseline.py`). The image
classifiers have a board of their own, `models.images`.
"""

from pyro_dak.boards import Board

_BOARD = Board(__name__, __path__)
names = _BOARD.names
build = _BOARD.build
