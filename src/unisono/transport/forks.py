"""Keeps forked children from holding a transport's connections open, which would hide its end from the peers."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Leaves(Protocol):
    """A transport that can be left to the process that made it."""

    def leave_to_parent(self) -> None:
        """In a forked child: hold no connection open, without ending any."""


def close_in_forked_children(transport: Leaves) -> None:
    """See to it that a child forked later keeps no connection open. Free once the transport is gone."""
    reference = weakref.ref(transport)

    def after_in_child() -> None:
        alive = reference()
        if alive is not None:
            alive.leave_to_parent()

    os.register_at_fork(after_in_child=after_in_child)
