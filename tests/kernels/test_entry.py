"""Kernels called by address."""

import importlib
import pkgutil

import numpy as np
import pytest

import kvboost_edge.kernels
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels import entry
from kvboost_edge.kernels.entry import KernelEntry, caller, entry_named
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.weight_tiles import Tile
from kvboost_edge.kernels.signature import FLOAT64
from kvboost_edge.kernels.tuples import numbers_kind
from kvboost_edge.kernels.vectors import store_f32


@kernel
def store_groups(tile, factor):
    store_f32(tile.weights, np.float32(factor * tile.groups))


@kernel
def store_runs(tile, factor):
    store_f32(tile.weights, np.float32(factor * tile.runs))


ARGUMENTS = (numbers_kind(Tile), FLOAT64)
ENTRIES = [KernelEntry(store_groups, *ARGUMENTS), KernelEntry(store_runs, *ARGUMENTS)]
store = caller(*ARGUMENTS)


@kernel
def call_both(addresses, out, number):
    for index in range(addresses.size):
        where = Tile(out + 4 * index, 0, 0, 0, 0, 0, number, 2 * number, 0)
        store(addresses[index], (where, 0.5))


def test_entries_are_called_by_address_with_unchanged_arguments():
    out = np.zeros(3, dtype=np.float32)
    first, second = (one.address for one in ENTRIES)
    call_both(np.array([second, first, second]), out.ctypes.data, 7)
    assert out.tolist() == [7.0, 3.5, 7.0]


def test_every_entry_is_found_by_its_name():
    for info in pkgutil.walk_packages(kvboost_edge.kernels.__path__, "kvboost_edge.kernels."):
        importlib.import_module(info.name)
    found = {name: one for name, one in entry._ENTRIES.items() if name.startswith("kvboost_edge.")}
    assert len(found) > 10
    assert all(entry_named(name) is one and one.name == name for name, one in found.items())


@pytest.mark.parametrize("name", ["kvboost_edge.kernels.team:nothing", "os:system", "nothing", ""])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match="is not the name of a kernel"):
        entry_named(name)
