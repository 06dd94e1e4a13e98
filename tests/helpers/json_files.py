"""Files of JSON that a test reads, and changes in some keys."""

import json

__all__ = ["change_json", "read_json"]


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def change_json(path, **fields):
    """Set these keys of the object in a file."""
    path.write_text(json.dumps({**read_json(path), **fields}), encoding="utf-8")
