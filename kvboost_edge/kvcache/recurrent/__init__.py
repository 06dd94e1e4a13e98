"""Recurrent state of hybrid models: state slots, snapshots, and where snapshots are taken."""

from __future__ import annotations
