"""Faults in the batch API, background requests and `kvboost-edge batch`."""

from __future__ import annotations

from faults.fault import fault

_BACKGROUND = "tests/engine/schedule/test_background.py"
_LINES = "tests/server/batches/test_input_lines.py"
_RECORDS = "tests/server/batches/test_answered_lines.py"
_SERVICE = "tests/server/batches/test_service.py"
_SPACE = "tests/server/batches/test_tenant_space.py"

FAULTS = (
    fault(
        "runs idle-only lines next to a stream",
        "engine/schedule/pacing.py",
        "allowed = [one for one in ready if not one.needs_idle]",
        "allowed = ready",
        f"{_BACKGROUND}::test_idle_lines_run_only_without_others",
    ),
    fault(
        "does not count decoding lines as background work",
        "engine/schedule/pacing.py",
        "return allowed, frozenset(one.index for one in allowed if one.is_background)",
        "return allowed, frozenset()",
        f"{_BACKGROUND}::test_background_lines_do_not_slow_down_a_stream",
    ),
    fault(
        "does not preempt lines for a request",
        "engine/schedule/scheduler.py",
        "        if self._is_full(sequence) and (other",
        "        if False and (other",
        f"{_BACKGROUND}::test_a_request_preempts_a_background_sequence",
    ),
    fault(
        "makes a request wait for the prefix of a background line",
        "engine/schedule/scheduler.py",
        "if self.manager.brings(one.blocks, awaited)",
        "if False",
        f"{_BACKGROUND}::test_a_request_does_not_wait_for_a_background_prefix",
    ),
    fault(
        "makes a background line wait for the prefix of an idle line",
        "engine/schedule/scheduler.py",
        "        return other.needs_idle and not all(one.is_background for one in self.running)\n",
        "        return False\n",
        f"{_BACKGROUND}::test_a_line_does_not_wait_for_a_prefix_that_needs_an_idle_engine",
    ),
    fault(
        "runs lines in the order of the file",
        "server/batches/input_lines.py",
        "return sorted(lines, key=lambda line: (line.url, line.prefix, line.number))",
        "return lines",
        f"{_LINES}::test_lines_with_a_common_prefix_are_adjacent",
    ),
    fault(
        "leaves a damaged record in the results file",
        "server/batches/answered_lines.py",
        "            self._file.truncate(self.num_bytes)\n",
        "",
        f"{_RECORDS}::test_a_crash_at_any_byte_keeps_complete_records",
    ),
    fault(
        "truncates a file that is not a results file",
        "server/batches/answered_lines.py",
        'if line.endswith(b"\\n") and b"\\0" not in line:',
        "if False:",
        f"{_RECORDS}::test_other_files_are_refused_and_not_changed",
    ),
    fault(
        "runs answered lines again after a restart",
        "server/batches/service.py",
        "by_prefix([line for line in lines if not records.has(line)])",
        "by_prefix(lines)",
        f"{_SERVICE}::test_a_restart_answers_each_line_once",
    ),
    fault(
        "does not try a batch again after an error",
        "server/batches/service.py",
        "call_later(seconds, self._try_again, batch.id)",
        "call_later(seconds, self._changed.set)",
        f"{_SERVICE}::test_a_batch_continues_after_a_full_disk",
    ),
    fault(
        "a batch that always stops blocks the next",
        "server/batches/service.py",
        "if not one.is_finished and one.id not in self._delayed",
        "if not one.is_finished",
        f"{_SERVICE}::test_a_batch_that_always_stops_blocks_no_other_and_ends[read-cancelled]",
    ),
    fault(
        "lines take places in the request queue",
        "server/work/admission.py",
        "        if self.background is None:\n            queue.enter(",
        "        if True:\n            queue.enter(",
        f"{_SERVICE}::test_batch_lines_do_not_occupy_the_request_queue",
    ),
    fault(
        "does not limit the bytes of batch results",
        "server/batches/tenant_space.py",
        "return self.num_bytes <= self._settings.max_file_bytes",
        "return True",
        f"{_SERVICE}::test_a_batch_stops_at_the_size_limit_of_its_answers",
    ),
    fault(
        "does not limit the number of running batches",
        "server/batches/tenant_space.py",
        "if running >= self._settings.max_batches:",
        "if False:",
        f"{_SPACE}::test_number_of_batches_is_limited",
    ),
    fault(
        "does not limit the number of stored files",
        "server/batches/tenant_space.py",
        "if count >= self._settings.max_files:",
        "if False:",
        f"{_SPACE}::test_number_and_size_of_files_are_limited",
    ),
)
