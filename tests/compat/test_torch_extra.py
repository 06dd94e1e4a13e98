"""Helpers for transformers models without torch: an error that names the extra, or lists."""

import re
import sys

import pytest

import kvboost_edge
from kvboost_edge import batch
from kvboost_edge.errors import BackendUnavailable, install_extra

CALLS = {
    "pad_and_mask": ([[1], [2]], 0),
    "batched_decode": (None, (), [1], 1, 1, None),
    "install_flash_attention": (None,),
    "uninstall_flash_attention": (None,),
}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (name, package)
        for name in CALLS
        for package in ("torch", "transformers")
        if (name, package) != ("pad_and_mask", "transformers")
    ],
)
def test_a_missing_package_names_the_extra(name, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    wanted = rf"{name} .*needs the {missing} package, .*{re.escape(install_extra('torch'))}"
    with pytest.raises(BackendUnavailable, match=wanted):
        getattr(kvboost_edge, name)(*CALLS[name])


def test_list_functions_need_no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert batch.pad_and_mask([[1, 2], [3]], 0) == ([[1, 2], [3, 0]], [[1, 1], [1, 0]])
    assert batch.find_common_chunk_prefix([[1, 2], [1, 2]], 2) == 2
    assert list(batch.group_by_prefix("ab", [[1], [1]], 2).values()) == [[0, 1]]
    assert kvboost_edge.get_flash_attn_tier() == "vanilla"
