"""Reading and changing JSON files."""

import json

LEFT_OUT = object()


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def change_json(path, **fields):
    """Set these keys of the object in a file, and remove those that are LEFT_OUT."""
    changed = {
        key: value for key, value in {**read_json(path), **fields}.items() if value is not LEFT_OUT
    }
    path.write_text(json.dumps(changed), encoding="utf-8")
