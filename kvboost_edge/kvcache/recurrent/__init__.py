"""Recurrent state of hybrid models: slots, snapshots, and where snapshots are taken."""

from __future__ import annotations
