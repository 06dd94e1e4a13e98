"""What a person types to run this program: its name where the shell finds it, else the path of this
environment's.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

__all__ = ["command_name"]

_NAME = "kvboost-edge"


def command_name() -> str:
    """For hints such as "to chat with it: ..."; a path is relative where the environment is below
    this directory.
    """
    own = Path(sysconfig.get_path("scripts")) / _NAME
    found = shutil.which(_NAME)
    if not own.is_file() or (found is not None and own.samefile(found)):
        return _NAME
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)
