"""Recurrent state of hybrid models: slots, snapshots, and the positions of snapshots."""

from __future__ import annotations
