"""Compilation of kernels with Numba: options, and inlining into other kernels.

Only `jit.py` and `build.py` import this module, when something must be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering
from numba.core.types import Function
from numba.core.typing.templates import make_intrinsic_template

from kvboost_edge.kernels.code_cache import cache_of

__all__ = ["CompiledKernel", "intrinsic_type", "object_code"]

_OPTIONS = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": None,
    "no_cfunc_wrapper": True,
}


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Unoptimized code of a kernel and its callees, optimized once by the kernel that links it."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]
    """Numba's lowering, with a `_PartLibrary` as its target."""

    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # Callers look a function up by its machine code, so store an empty object in its place.
        found = object()
        state.targetctx.insert_user_function(found, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=found)
        return True


class _PartCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes = PassManager("parts")
        for each, what in pipeline.passes:
            passes.add_pass(_PartLowering if each is NativeLowering else each, what)
        passes.finalize()
        return [passes]


class _Part(CPUDispatcher):  # type: ignore[misc]
    """A kernel as inlined into other kernels: it has no machine code and Python cannot call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        options = {**_OPTIONS, "no_cpython_wrapper": True}
        super().__init__(function, targetoptions=options, pipeline_class=_PartCompiler)

    def add_overload(self, result: Any) -> None:
        self.overloads[tuple(result.signature.args)] = result


class CompiledKernel(CPUDispatcher):  # type: ignore[misc]
    """A kernel that Python can call, with machine code on disk."""

    # Callees are compiled in from their `_Part`s. Numba would optimize, compile and store every
    # kernel along the call chain, so a callee seven calls deep would be compiled seven times. In
    # total this took three times as long.
    def __init__(self, function: Callable[..., Any], *, is_named: bool) -> None:
        super().__init__(function, targetoptions=dict(_OPTIONS))
        self._cache = cache_of(function, is_named=is_named)
        self._part = _Part(function)

    def get_call_template(self, arguments: Any, names: Any) -> Any:
        """Return the signature for a call from another kernel."""
        return self._part.get_call_template(arguments, names)

    def get_overload(self, signature: Any) -> Any:
        """Return the code that a calling kernel links."""
        return self._part.get_overload(signature)

    @property
    def part(self) -> Any:
        """The kernel as inlined into other kernels."""
        return self._part


def intrinsic_type(handle: Any, function: Callable[..., Any]) -> Any:
    """Return Numba's type of an intrinsic, whose handle is the global that kernels refer to."""
    return Function(make_intrinsic_template(handle, function, function.__name__))


def object_code(
    kernel: CompiledKernel, arguments: tuple[Any, ...], symbol: str
) -> tuple[bytes, Any]:
    """Compile a kernel for a kernel library.

    Args:
        kernel: the kernel.
        arguments: Numba types of its arguments.
        symbol: name of its function in the object file. No other name is visible.

    Returns:
        The object file, and the Numba type of the result.

    Raises:
        ValueError: the code contains addresses of this process.
    """
    kernel.part.compile(arguments)
    result = kernel.part.overloads[arguments]
    library = JITCodeLibrary(result.library.codegen, symbol)
    library.add_linking_library(result.library)
    module = result.library._final_module.clone()
    found = result.fndesc.llvm_func_name
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != found and not value.name.startswith("llvm."):
            value.linkage = "internal"
    module.get_function(found).name = symbol
    library._final_module = module
    library._optimize_final_module()
    for value in module.global_variables:
        if value.name.startswith("numba.dynamic.globals"):
            raise ValueError(f"{symbol} uses {value.name}, an address in this process")
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(
        cpu=library.codegen._get_host_cpu_name(),
        features=library.codegen._tm_features,
        opt=config.OPT,
        reloc="pic",
        codemodel="default",
    )
    return machine.emit_object(module), result.signature.return_type
