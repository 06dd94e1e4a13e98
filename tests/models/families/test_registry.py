"""Family modules: each model_type belongs to one of them, and none imports the registry's users."""

import pkgutil
import re
from pathlib import Path

import grimp
import pytest

from kvboost_edge.models import families
from kvboost_edge.models.families import registry
from kvboost_edge.models.families.registry import (
    ARCHITECTURES,
    ASSISTANTS,
    FAMILIES,
    MODEL_TYPES,
    WRAPPERS,
)

PACKAGE = Path(families.__file__).parent
FILES = sorted(
    path.stem
    for path in PACKAGE.glob("*.py")
    if re.search("^MODEL_TYPES: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
)


def test_every_model_type_belongs_to_one_file():
    modules = {found.__name__.rpartition(".")[2]: found for found in registry._files()}
    said = [name for file in FILES if file != "registry" for name in modules[file].MODEL_TYPES]
    assert len(said) == len(set(said))
    assert set(said) == set(MODEL_TYPES)
    assert {"granite", "llama", "dense"} <= set(FILES)


def test_every_gguf_architecture_has_a_family():
    assert {known.model_type for known in ARCHITECTURES.values()} <= {*FAMILIES, *ASSISTANTS}
    assert {text for wrapper in WRAPPERS.values() for text in wrapper.texts} <= set(FAMILIES)
    for known in MODEL_TYPES.values():
        assert known.tested or known.family is None
        assert known.family is None or known.wrapper is None


def test_a_duplicate_name_is_refused(monkeypatch):
    double = [*registry._files()]
    monkeypatch.setattr(registry, "_files", lambda: iter([*double, double[0], double[1]]))
    with pytest.raises(ValueError, match="redefines"):
        registry._collected("MODEL_TYPES")


def test_families_do_not_import_the_registrys_users():
    """The registry imports families at run time, invisible to the search for import cycles."""
    graph = grimp.build_graph("kvboost_edge", cache_dir=None)
    readers = {f"{families.__name__}.{name}" for name in registry._READERS}
    for found in pkgutil.iter_modules([str(PACKAGE)]):
        if found.name not in registry._READERS:
            above = graph.find_upstream_modules(f"{families.__name__}.{found.name}")
            assert not above & readers, found.name
