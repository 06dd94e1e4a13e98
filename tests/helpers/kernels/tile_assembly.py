"""A linear microkernel as a module of its own: compiled for this machine, or its code for another one as text."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

from kvboost_edge.kernels.linear.tiles import IntTiles, Target, Tile
from kvboost_edge.kernels.vectors import F32, I64

__all__ = ["compiled_tile", "tile_assembly", "tile_module"]


def tile_module(tiles: IntTiles, triple: str) -> str:
    """A module with the function "tile": the fields of `Tile`, the panel's address, the fields of `Target`."""
    module = ir.Module()
    module.triple = triple
    arguments = [I64] * (len(Tile._fields) + 1 + len(Target._fields) - 1) + [F32]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    count = len(Tile._fields)
    tile, panel, target = Tile(*function.args[:count]), function.args[count], Target(*function.args[count + 1 :])
    tiles.emit(builder, tile, panel, target)
    builder.ret_void()
    return str(module)


def compiled_tile(text: str, functions: dict[str, Any]) -> tuple[Callable[..., None], Any]:
    """The function "tile" of a module for this machine, and what must outlive it; functions: what "emulated_<name>" in
    the text calls."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for name, function in functions.items():
        binding.add_symbol(f"emulated_{name}", ctypes.cast(function, ctypes.c_void_p).value)
    target = binding.Target.from_default_triple()
    features = binding.get_host_cpu_features().flatten()
    machine = target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=1)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    engine.finalize_object()
    arguments = [ctypes.c_int64] * (len(Tile._fields) + len(Target._fields)) + [ctypes.c_float]
    return ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address("tile")), engine


def tile_assembly(tiles: IntTiles, triple: str, cpu: str, *, optimize: bool = False) -> str:
    """Assembly of what `tiles` emits; optimize: after the passes that Numba runs, too."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    parsed = binding.parse_assembly(tile_module(tiles, triple))
    if optimize:
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))
