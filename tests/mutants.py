"""The mutation gate, `make mutants`: plants one fault at a time in a copy of the tree; the tests must turn red.

It guards against tests that cannot fail. A fault is one or more replacements in one file, and the tests that have to
notice it. The gate fails if a fault survives, if its text is no longer in the file, or if the unchanged tests fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from faults.cuda import CUDA_FAULTS
from faults.layers import LAYER_FAULTS
from faults.recurrent import STATE_FAULTS
from faults.reuse import REUSE_FAULTS
from faults.weight_tables import TABLE_FAULTS

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900
PASSED, FAILED = 0, 1  # what pytest returns; anything else means that the tests did not run


@dataclasses.dataclass(frozen=True)
class Fault:
    """`old` becomes `new` (pairs), once each, in `file`; `tests` are pytest's arguments."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    """A fault of one replacement in a file of the package."""
    return Fault(name, f"kvboost_edge/{file}", ((old, new),), tests)


KERNELS = ("tests/kernels", "tests/backends")
CONTRACT, KVCACHE, MODELS = ("tests/backends",), ("tests/kvcache",), ("tests/models",)
SAMPLING = ("tests/engine/test_sampling.py", "tests/engine/test_schedules.py")
LIFECYCLE, PER_REQUEST = ("tests/engine/test_lifecycle.py",), ("tests/engine/test_per_request.py",)

FAULTS = (
    # The kernels.
    fault(
        "causal mask shows one token too many",
        "kernels/attention/attend.py",
        "// shape.heads_per_kv + 1 - start",
        "// shape.heads_per_kv + 2 - start",
        *KERNELS,
    ),
    fault(
        "window off by one",
        "kernels/attention/attend.py",
        "low = end - shape.window if",
        "low = end - shape.window + 1 if",
        *KERNELS,
    ),
    fault(
        "softcap dropped", "kernels/attention/attend.py", "if shape.softcap > 0:", "if shape.softcap > 1e9:", *KERNELS
    ),
    fault(
        "attention sinks dropped", "kernels/attention/units.py", "if job.sinks != 0:", "if job.sinks == -1:", *KERNELS
    ),
    fault(
        "merging partitions forgets the earlier ones' weight",
        "kernels/attention/units.py",
        "dim, keep, add)",
        "dim, np.float32(1.0), add)",
        *KERNELS,
    ),
    fault(
        "bfloat16 cut off instead of rounded",
        "kernels/attention/storage.py",
        "rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))",
        "rounded = bits",
        *KERNELS,
    ),
    fault(
        "the last byte of a copied block is forgotten",
        "kernels/attention/storage.py",
        "for at in range(pool.shape[1]):",
        "for at in range(pool.shape[1] - 1):",
        *KERNELS,
    ),
    # The torch backend.
    fault(
        "torch: causal mask off by one",
        "backends/torch/attend.py",
        "(keys <= queries)",
        "(keys <= queries + 1)",
        *CONTRACT,
    ),
    fault(
        "torch: window off by one",
        "backends/torch/attend.py",
        "(keys > queries - window)",
        "(keys >= queries - window)",
        *CONTRACT,
    ),
    # The block pool.
    fault(
        "copy-on-write skipped",
        "kvcache/manager.py",
        "if self._pool.ref_count(block_id) == 1:",
        "if self._pool.ref_count(block_id) >= 1:",
        *KVCACHE,
    ),
    fault(
        "a hash is trusted without comparing tokens",
        "kvcache/prefix_index.py",
        " and entry.tokens == tokens",
        "",
        *KVCACHE,
    ),
    fault(
        "the parent's identity is not compared",
        "kvcache/prefix_index.py",
        " and entry.parent_serial == parent_serial",
        "",
        *KVCACHE,
    ),
    Fault(
        "hash cut to 8 bits and trusted",
        "kvboost_edge/kvcache/prefix_index.py",
        (
            (
                "for block_id in self._buckets.get(prefix_hash, ()):",
                "for block_id in [b for h, ids in self._buckets.items() if h[:1] == prefix_hash[:1] for b in ids]:",
            ),
            ("entry.parent_serial == parent_serial and entry.tokens == tokens", "True"),
        ),
        KVCACHE,
    ),
    fault(
        "a reference is not released",
        "kvcache/manager.py",
        "for index in range(len(table.block_ids) - 1, -1, -1):",
        "for index in range(len(table.block_ids) - 2, -1, -1):",
        *KVCACHE,
    ),
    fault(
        "blocks are freed head first",
        "kvcache/manager.py",
        "for index in range(len(table.block_ids) - 1, -1, -1):",
        "for index in range(len(table.block_ids)):",
        *KVCACHE,
    ),
    fault(
        "what is used once has no share",
        "kvcache/eviction/order.py",
        "len(once) > self.once_share or once.first < again.first",
        "once.first < again.first",
        *KVCACHE,
    ),
    fault("retained is never too much", "kvcache/eviction/order.py", "len(queue) > self._floor:", "False:", *KVCACHE),
    fault(
        "a second choice counts as a second call",
        "engine/retention.py",
        "known.began == began:",
        "False:",
        "tests/engine/test_retention.py",
    ),
    fault("a pin's time is never over", "kvcache/eviction/pins.py", "pin.until <= now]", "pin.until < 0]", *KVCACHE),
    fault(
        "what two pins share goes with the first",
        "kvcache/eviction/pins.py",
        "            if not self._counts[block_id]:\n",
        "            if self._counts[block_id] >= 0:\n",
        *KVCACHE,
    ),
    fault(
        "a half-filled block is published",
        "kvcache/block_table.py",
        "return whole // block_size",
        "return -(-whole // block_size)",
        *KVCACHE,
    ),
    fault(
        "the model is not part of the root hash",
        "kvcache/hashing.py",
        '"model_fingerprint": model_fingerprint,',
        '"model_fingerprint": "",',
        *KVCACHE,
    ),
    # The engine.
    fault(
        "rope positions off by one after a cut",
        "engine/batch.py",
        "positions += range(one.start, one.stop)",
        "positions += range(one.start + (one.start > 0), one.stop + (one.start > 0))",
        "tests/engine/test_end_to_end.py",
    ),
    fault("temperature ignored", "engine/sampling.py", "/ temperature)", "/ 1.0)", *SAMPLING),
    fault(
        "in a batch the first request's sampling counts for all",
        "engine/intake.py",
        "[resolve_sampling(item, options) for item in sampling]",
        "[resolve_sampling(sampling[0], options) for item in sampling]",
        *PER_REQUEST,
    ),
    fault(
        "random numbers do not depend on the position",
        "engine/sampling.py",
        "np.array([seed, position], dtype=np.uint64)",
        "np.array([seed, 0], dtype=np.uint64)",
        *SAMPLING,
    ),
    fault("top_p keeps one token too many", "engine/sampling.py", 'side="left")) + 1', 'side="left")) + 2', *SAMPLING),
    fault(
        "cancel is not heard",
        "engine/core.py",
        'reason="cancelled")',
        'reason="cancelled") if self._closing else None',
        *LIFECYCLE,
    ),
    fault(
        "equal prefixes in flight are computed twice",
        "engine/scheduler.py",
        "sequence.awaited_hash = awaited",
        "sequence.awaited_hash = None",
        "tests/engine/test_schedules.py",
    ),
    fault("NaN in the logits goes unseen", "engine/core.py", "if not all(map(", "if False and all(map(", *LIFECYCLE),
    fault(
        "only one EOS token is known",
        "engine/build.py",
        "eos = frozenset(defaults.eos_token_ids)",
        "eos = frozenset(defaults.eos_token_ids[:1])",
        *PER_REQUEST,
    ),
    fault(
        "tenants share a root",
        "kvcache/hashing.py",
        '(("tenant", tenant), ("cache_salt", cache_salt))',
        '(("cache_salt", cache_salt),)',
        "tests/engine/test_terms.py",
    ),
    fault("deadlines are not kept", "engine/core.py", "        self._expire()\n", "", "tests/engine/test_terms.py"),
    fault(
        "quantized blocks are written into again",
        "kvcache/lookup.py",
        "if self.whole_blocks and found.block_ids and covers_all",
        "if found.block_ids and not covers_all and covers_all",
        "tests/kvcache/test_lookup.py",
    ),
    fault(
        "blocks freed while they were open keep their buffers",
        "engine/core.py",
        "self._backend.release_blocks([block for block in self._kept if block not in wanted])",
        "pass",
        "tests/engine/test_native_schedules.py",
    ),
    # Tiers and other systems' interfaces.
    fault(
        "a sealed value is believed without its MAC",
        "tiers/redis/values.py",
        " or not hmac.compare_digest(self._mac(view[:end]), view[end:])",
        "",
        "tests/tiers/redis/test_values.py",
    ),
    fault(
        "a value of another block is opened",
        "tiers/redis/values.py",
        " or header.address != address",
        "",
        "tests/tiers/redis/test_values.py",
    ),
    fault(
        "a partial hit of LMCache counts no misses",
        "compat/lmcache/engine.py",
        "self.miss_tokens_count += num_tokens - end",
        "self.miss_tokens_count += 0 if kv else num_tokens - end",
        "tests/compat/lmcache/test_engine.py",
    ),
    fault(
        "LMCache's memory forgets heads first",
        "compat/lmcache/stores.py",
        "for address in reversed(addresses):",
        "for address in addresses:",
        "tests/compat/lmcache/test_stores.py",
    ),
    # Text and files.
    fault(
        "half a character is shown",
        "text/detokenizer.py",
        'codecs.utf_8_decode(data, "replace", False)',
        'codecs.utf_8_decode(data, "replace", True)',
        "tests/text",
    ),
    fault(
        "the beginning of a stop string is shown",
        "text/stop_strings.py",
        "keep = max(m.matched for m in self._matchers)",
        "keep = 0",
        "tests/text",
    ),
    fault(
        "NaN weights are accepted",
        "models/weights/safetensors_check.py",
        "    if check_finite:",
        "    if False:",
        *MODELS,
    ),
    *(fault(*row) for row in (*LAYER_FAULTS, *REUSE_FAULTS, *STATE_FAULTS, *TABLE_FAULTS)),
    *(Fault(name, file, ((old, new),), (test,)) for name, file, old, new, test in CUDA_FAULTS),
)


def planted(text: str, fault: Fault) -> str:
    """The file's text with the fault in it; ValueError unless each `old` is there exactly once."""
    for old, new in fault.edits:
        if text.count(old) != 1:
            raise ValueError(f"{fault.file} holds {text.count(old)} times, not once: {old!r}")
        text = text.replace(old, new)
    return text


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's exit status (None: it hung) and the end of its output. The copy of the package is the one imported."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no end after {TIMEOUT_S} s"
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def copied_tree(parent: Path) -> Path:
    """A copy of what the tests need, with modification times kept, so that compiled kernels stay valid."""
    tree = parent / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv*", ".redis", ".hypothesis", ".*_cache", "*.egg-info", "*-Q*.gguf")
    shutil.copytree(ROOT, tree, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-c", "import kvboost_edge; print(kvboost_edge.__file__)"],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not Path(done.stdout.strip()).is_relative_to(tree):
        raise RuntimeError(f"the tests would import {done.stdout.strip()}, not the copy in {tree}")
    return tree


def try_fault(tree: Path, fault: Fault) -> str:
    """Plant, test, take back. Returns "killed" or what is wrong."""
    path = tree / fault.file
    original, stat = path.read_text(encoding="utf-8"), path.stat()
    try:
        path.write_text(planted(original, fault), encoding="utf-8")
    except ValueError as error:
        return f"NOT PLANTED: {error}"
    try:
        status, output = run_tests(tree, fault.tests)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if status in (FAILED, None):
        return "killed"
    return "SURVIVED" if status == PASSED else f"TESTS DID NOT RUN (status {status})\n{output}"


def main() -> int:
    """Run the gate; 0 if every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose name contains one of these")
    words = parser.parse_args().words
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = copied_tree(Path(directory))
        selection = sorted({test for f in chosen for test in f.tests})
        status, output = run_tests(tree, selection)
        if status != PASSED:
            print(f"the unchanged tests do not pass:\n{output}")
            return 1
        width = max(len(f.name) for f in chosen)
        for chosen_fault in chosen:
            started = time.monotonic()
            verdict = try_fault(tree, chosen_fault)
            verdicts.append(verdict)
            print(f"{chosen_fault.name:<{width}}  {time.monotonic() - started:6.1f} s  {verdict}", flush=True)
    found = verdicts.count("killed")
    print(f"{found} of {len(chosen)} faults found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
