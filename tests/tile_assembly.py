"""Machine code of a linear microkernel for another processor, as text."""

from __future__ import annotations

from llvmlite import binding, ir

from kvboost_edge.kernels.linear.tiles import IntTiles, Target, Tile
from kvboost_edge.kernels.vectors import F32, I64

__all__ = ["tile_assembly"]


def tile_assembly(tiles: IntTiles, triple: str, cpu: str, *, optimize: bool = False) -> str:
    """Assembly of what `tiles` emits; optimize: after the passes that Numba runs, too."""
    module = ir.Module()
    module.triple = triple
    arguments = [I64] * (len(Tile._fields) + 1 + len(Target._fields) - 1) + [F32]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    count = len(Tile._fields)
    tile, panel, target = Tile(*function.args[:count]), function.args[count], Target(*function.args[count + 1 :])
    tiles.emit(builder, tile, panel, target)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    parsed = binding.parse_assembly(str(module))
    if optimize:
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))
