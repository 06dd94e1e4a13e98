"""Code for ARM processors, compiled on this machine: its assembly can be checked on any machine."""

from types import SimpleNamespace

import pytest
from llvmlite import binding, ir

from kvboost_edge.kernels import integers
from kvboost_edge.kernels.integers import dot_form, emit_load_bytes
from kvboost_edge.kernels.quantized_kv.code_dot import emit_dot
from kvboost_edge.kernels.vectors import I64


def assembly(form, cpu):
    """Compile the dot product of quantized attention for a processor."""
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), "dot")
    b = ir.IRBuilder(function.append_basic_block())
    sums, codes, signs = (emit_load_bytes(b, address) for address in function.args[:3])
    b.store(
        emit_dot(b, form, sums, codes, signs),
        b.inttoptr(function.args[3], ir.PointerType()),
        align=4,
    )
    b.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(module.triple).create_target_machine(cpu=cpu, opt=3)
    return str(machine.emit_assembly(binding.parse_assembly(str(module))))


@pytest.mark.parametrize(
    ("cpu", "instruction"),
    [
        *(("cortex-a72", None), ("cortex-a76", "sdot"), ("apple-m1", "sdot")),
        *(("ampere1", "smmla"), ("neoverse-v1", "smmla"), ("apple-m2", "smmla")),
    ],
)
def test_probes_detect_the_processors_instructions(cpu, instruction):
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=cpu)

    def emits(name, probe):
        return f"\t{name}\t" in machine.emit_assembly(binding.parse_assembly(probe))

    assert emits("sdot", integers._DOT_PROBE) is (instruction is not None)
    assert emits("usdot", integers._MIXED_PROBE) is (instruction == "smmla")


@pytest.mark.parametrize(
    ("machine", "emitted", "flags", "chosen", "form"),
    [
        ("aarch64", {"sdot", "usdot"}, {"i8mm"}, None, "i8mm"),
        ("arm64", {"sdot", "usdot"}, {"i8mm"}, None, "i8mm"),
        ("aarch64", {"sdot", "usdot"}, {"asimddp"}, None, "neon"),  # hidden by the system
        ("aarch64", {"sdot", "usdot"}, set(), "ampere1", "i8mm"),
        ("aarch64", {"sdot"}, {"i8mm"}, "cortex-a76", "neon"),  # turned off
        ("aarch64", set(), {"i8mm"}, None, "plain"),
    ],
)
def test_i8mm_is_used_if_compiler_and_system_support_it(
    monkeypatch, machine, emitted, flags, chosen, form
):
    class Cpu:
        pass

    Cpu.flags = tuple(flags)
    monkeypatch.setattr(integers, "_features", frozenset)
    monkeypatch.setattr(integers.platform, "machine", lambda: machine)
    monkeypatch.setattr(integers, "_emits", lambda instruction, probe: instruction in emitted)
    monkeypatch.setattr(integers, "describe_cpu", Cpu)
    settings = SimpleNamespace(CPU_NAME=chosen, CPU_FEATURES=None)
    monkeypatch.setattr(integers, "numba_config", settings)
    assert dot_form.__wrapped__() == form


@pytest.mark.parametrize("cpu", ["cortex-a76", "neoverse-n1", "apple-m1"])
def test_attention_uses_dot_products(cpu):
    """Each of four parts takes one sdot for the codes, and two that restore 128 times the signed
    bytes.
    """
    assert assembly("neon", cpu).count("sdot") == 12


def test_attention_without_dot_products_multiplies_vectors():
    """Products are computed 8 bytes at a time, and each vector of them is added in pairs."""
    code = assembly("plain", "cortex-a72")
    assert "sdot" not in code
    assert code.count("mul\t") == code.count("sadalp") == 8
