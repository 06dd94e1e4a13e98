"""A linear microkernel as a separate module, compiled for this machine or as assembly for another
one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir

from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, SCALE_BYTES
from kvboost_edge.kernels.linear.weight_tiles import IntTiles, Target, Tile
from kvboost_edge.kernels.reference import linear as reference
from kvboost_edge.kernels.vectors import F32, I64

NAMES = {kind: form.name for kind, form in FORMAT_OF.items()}


def tile_module(tiles: IntTiles, triple: str) -> str:
    """Return a module with the function "tile", whose arguments are the fields of `Tile`, the
    panel's address and the fields of `Target`.
    """
    module = ir.Module()
    module.triple = triple
    arguments = [I64] * (len(Tile._fields) + 1 + len(Target._fields) - 1) + [F32]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    count = len(Tile._fields)
    tile = Tile(*function.args[:count])
    panel = function.args[count]
    target = Target(*function.args[count + 1 :])
    tiles.emit(builder, tile, panel, target)
    builder.ret_void()
    return str(module)


def compiled_tile(text: str, functions: dict[str, Any]) -> tuple[Callable[..., None], Any]:
    """Compile a module for this machine. Return its function "tile" and an object that must outlive
    it.

    Args:
        functions: implementations of the functions "emulated_<name>" that the text calls.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for name, function in functions.items():
        binding.add_symbol(f"emulated_{name}", ctypes.cast(function, ctypes.c_void_p).value)
    target = binding.Target.from_default_triple()
    features = binding.get_host_cpu_features().flatten()
    machine = target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=1
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    engine.finalize_object()
    arguments = [ctypes.c_int64] * (len(Tile._fields) + len(Target._fields)) + [ctypes.c_float]
    return ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address("tile")), engine


def tile_assembly(tiles: IntTiles, triple: str, cpu: str, *, optimize: bool = False) -> str:
    """Return the assembly of the code that `tiles` emits. `optimize` applies the passes that Numba
    runs.
    """
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    parsed = binding.parse_assembly(tile_module(tiles, triple))
    if optimize:
        passes = binding.create_pass_builder(
            machine, binding.create_pipeline_tuning_options(speed_level=3)
        )
        passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def product_of(
    run: Callable[..., None],
    tiles: IntTiles,
    groups: int,
    count: int,
    panels: int = 1,
    *,
    add: bool = False,
) -> npt.NDArray[np.float32]:
    """Multiply `count` tiles of random weights, some of them extreme, by a panel, or one tile by
    several panels. Return float32 [tokens, rows].
    """
    kind = tiles.kind
    rng = np.random.default_rng(tiles.kind)
    form = FORMAT_OF[kind]
    extreme = groups // 15 * form.group_bytes
    minima = max(form.minima_bytes(groups), 2)
    sizes = [groups * form.group_bytes, groups * SCALE_BYTES, minima]
    weights, scales, minima = (
        rng.integers(0, 256, (count, size), dtype=np.uint8) for size in sizes
    )
    weights[:, :extreme] = rng.choice(np.array([0, 255], np.uint8), (count, extreme))
    minima[:] = rng.standard_normal((count, sizes[2] // 2)).astype(np.float16).view(np.uint8)
    if form.float8:
        minima[:] = rng.standard_normal((count, sizes[2] // 4)).astype(np.float32).view(np.uint8)
        scales &= np.uint8(127)
    elif form.name == "q3k":  # scales of 6 bits
        scales[:] = rng.integers(-32, 32, scales.shape).astype(np.int8).view(np.uint8)
        scales[:, ::5] = rng.choice(np.array([-32, 31], np.int8), scales[:, ::5].shape).view(
            np.uint8
        )
    elif not form.block_bytes:
        scales[:] = rng.standard_normal((count, sizes[1] // 2)).astype(np.float16).view(np.uint8)
    tokens = panels * tiles.tokens
    x = rng.standard_normal((tokens, groups * 32)).astype(np.float32)
    x[:, :64] = rng.choice([-1, 1], (tokens, 64))
    panel = reference.pack_panel(x, NAMES[kind], [tiles.tokens] * panels, fine=tiles.fine)
    out = rng.standard_normal((tokens, count * 16)).astype(np.float32)
    bias = rng.standard_normal(count * 16).astype(np.float32)
    where = Tile(
        *(array.ctypes.data for array in (weights, scales, minima)),
        *(array.strides[0] for array in (weights, scales, minima)),
        groups,
        panels if panels > 1 else count // tiles.tiles,
        panel.nbytes // panels if panels > 1 else 0,
    )
    run(
        *where,
        panel.ctypes.data,
        *Target(out.ctypes.data, out.strides[0], 64, bias.ctypes.data, int(add), 0.5),
    )
    assert np.isfinite(out).all()
    return out
