"""The same numbers as `additive`, with fewer operations.

Nothing here knows Pyro, models or files. Only `additive`, `prediction.freeze` and `training.loop`
import it, and each fast function has a plain twin that a test holds it to.
"""
