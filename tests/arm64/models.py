"""Write the models of helpers/engine/native_kinds.py into a folder, which must not exist yet.

    PYTHONPATH=.:tests python tests/arm64/models.py FOLDER

Tests on a machine without torch use them if TEST_MODELS is this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.engine.native_kinds import FORMATS, KINDS, directory_of


def main() -> None:
    folder = Path(sys.argv[1])
    for kind in KINDS:
        for weights in FORMATS:
            if weights != "MXFP4" or kind == "gpt_oss":
                directory_of(kind, weights, folder)


if __name__ == "__main__":
    main()
