"""Source for the start of a process that lists the kernels it compiles itself."""

from __future__ import annotations

LIST_OWN = """
from numba.core import event
own = []
class Listener(event.Listener):
    def on_start(self, one):
        own.append(one.data["dispatcher"].__name__)
    def on_end(self, one):
        pass
event.register("numba:compile", Listener())
"""
