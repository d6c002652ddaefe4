"""The board of guides: one file each, `build(model, **options) -> guide` in it.

`guides.build("low_rank", model, rank=4)`; the name of a file is the name of the choice, and a new
file is a new choice. `names()` lists them.
"""

from pyro_dak.boards import Board

_BOARD = Board(__name__, __path__)
names = _BOARD.names
build = _BOARD.build
