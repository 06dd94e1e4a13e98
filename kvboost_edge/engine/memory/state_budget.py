"""The memory budget for recurrent state, which determines its slots and the running sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.config import DEFAULT_DRAFT_TOKENS, EngineConfig
from kvboost_edge.engine.memory.pool_size import (
    LEAST_STATES,
    STATES_PER_SEQUENCE,
    most_sequences,
    planned_blocks,
    pool_bytes,
)
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes, TableStates
from kvboost_edge.runners.base import RunnerInfo

__all__ = [
    "asks_for_drafts",
    "check_options",
    "drafts_shortage",
    "most_draft_tokens",
    "plan_states",
    "planned_states",
    "speculation_refusal",
    "state_bytes",
    "states_refusal",
]

_POOL_SHARE = 4  # by default recurrent state gets 1/4 of the KV pool's size
_WANTED_SEQUENCES = 4  # default minimum of running sequences, if memory allows
_ANY = 1 << 60  # bytes; more than any machine has
_SMALL = 2  # states no larger than this many blocks are kept after every block


def plan_states(
    config: EngineConfig, info: RunnerInfo, num_blocks: int, available: int
) -> tuple[StateSizes | None, int]:
    """Plan the slots of recurrent state and the number of sequences that run at once.

    Slots and draft token rows together use max_state_bytes. By default the slots get a quarter of
    the pool's size, but at least 4 + 2 x max_num_seqs slots, and draft token rows are added. The
    number of rows shrinks to fit, down to 0, unless the config asks for draft tokens.

    Args:
        config: Options of the engine.
        info: The runner's description.
        num_blocks: Number of blocks in the pool.
        available: Memory for pool and recurrent state, in bytes.

    Returns:
        The sizes, or None for a model without recurrent state, and the number of sequences.

    Raises:
        ConfigError: max_state_bytes is set for a model without recurrent state.
        CapacityError: The slots are too few for the sequences, or do not fit.
    """
    check_options(config, info)
    if not info.kv_spec.states:
        return None, most_sequences(config, num_blocks, info.kv_spec.block_size)
    room = _Room(config, info.kv_spec, num_blocks, available)
    refusal = ""
    for num_draft_rows in _draft_rows(config):
        sizes, num_seqs = room.shared_out(num_draft_rows)
        refusal = room.refusal(sizes, num_seqs)
        if not refusal:
            return sizes, num_seqs
    raise CapacityError(refusal)


def _draft_rows(config: EngineConfig) -> Iterable[int]:
    """Return the numbers of draft token rows to try, largest first."""
    if config.speculation == "off":
        return (0,)
    if asks_for_drafts(config):
        return (config.max_draft_tokens or DEFAULT_DRAFT_TOKENS,)
    least = 0 if config.draft_model is None else 1  # a draft model without rows would never run
    return range(DEFAULT_DRAFT_TOKENS, least - 1, -1)


def asks_for_drafts(config: EngineConfig) -> bool:
    """Return whether the config asks for draft tokens, whose number must then not shrink."""
    return config.speculation == "on" or (
        config.speculation != "off" and config.max_draft_tokens is not None
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """The memory for recurrent state next to a pool of `num_blocks` blocks."""

    config: EngineConfig
    spec: KVSpec
    num_blocks: int
    available: int

    @property
    def pool_bytes(self) -> int:
        return pool_bytes(self.config, self.spec, self.num_blocks)

    def shared_out(self, num_draft_rows: int) -> tuple[StateSizes, int]:
        """Return slots and sequences for a number of draft rows, without checking that they fit."""
        config = self.config
        size = self.spec.bytes_per_state
        draft_bytes = num_draft_rows * self.spec.bytes_per_draft
        most = most_sequences(config, self.num_blocks, self.spec.block_size)
        if config.max_state_bytes is not None:
            num_slots = max(0, config.max_state_bytes - draft_bytes) // size
            num_seqs = config.max_num_seqs or max(1, min(most, num_slots // STATES_PER_SEQUENCE))
        else:
            share = self.pool_bytes // _POOL_SHARE // size
            fitting = (self.available - self.pool_bytes - draft_bytes) // size
            wanted = max(_WANTED_SEQUENCES, (share - LEAST_STATES) // STATES_PER_SEQUENCE)
            num_seqs = config.max_num_seqs or max(
                1, min(most, wanted, (fitting - LEAST_STATES) // STATES_PER_SEQUENCE)
            )
            num_slots = max(
                min(share, self.num_blocks, max(0, fitting)),
                LEAST_STATES + STATES_PER_SEQUENCE * num_seqs,
            )
        every_block = size <= _SMALL * self.spec.bytes_per_block
        return StateSizes(
            num_slots, every_block=every_block, num_draft_rows=num_draft_rows
        ), num_seqs

    def refusal(self, sizes: StateSizes, num_seqs: int) -> str:
        """Return why the slots are too few or do not fit, or "" if they fit."""
        given = self.config.max_state_bytes
        size = self.spec.bytes_per_state
        num_slots = sizes.num_slots
        num_draft_rows = sizes.num_draft_rows
        draft_bytes = num_draft_rows * self.spec.bytes_per_draft
        fewer = "max_draft_tokens" if num_draft_rows else ""
        if given is not None and num_slots < num_seqs + 1:
            drafts = (
                f" and {_mib(draft_bytes)} for {num_draft_rows} draft tokens"
                if num_draft_rows
                else ""
            )
            return (
                f"max_state_bytes={given} holds {num_slots} states of {_mib(size)}, but "
                f"{num_seqs} sequences need {num_seqs + 1} states{drafts}: "
                f"{(num_seqs + 1) * size + draft_bytes} bytes; raise max_state_bytes or lower "
                f"max_num_seqs{fewer and f' or {fewer}'}"
            )
        if self.pool_bytes + num_slots * size + draft_bytes > self.available:
            drafts = f", draft tokens of {_mib(draft_bytes)}" if num_draft_rows else ""
            return (
                f"{num_slots} recurrent states of {_mib(size)} ({num_seqs} sequences need "
                f"{num_seqs} x {_mib(size)}){drafts} and a pool of {_mib(self.pool_bytes)} "
                f"exceed memory: only {_mib(self.available)} is available after the weights; "
                f"lower max_num_seqs, max_state_bytes, {fewer and f'{fewer}, '}max_cache_bytes "
                "or num_blocks"
            )
        return ""


def planned_states(config: EngineConfig, info: RunnerInfo, available: int) -> StateSizes | None:
    """Return the sizes that `plan_states` would choose with this much available memory.

    A lack of memory raises no error, because another model may be unloaded first.
    """
    num_blocks = planned_blocks(config, info.kv_spec, info.max_context, available)
    try:
        return plan_states(config, info, num_blocks, available)[0]
    except CapacityError:
        return plan_states(config, info, num_blocks, _ANY)[0]


def state_bytes(info: RunnerInfo, sizes: StateSizes) -> int:
    """Return the size of the slots and the draft token rows, in bytes."""
    return (
        sizes.num_slots * info.kv_spec.bytes_per_state
        + sizes.num_draft_rows * info.kv_spec.bytes_per_draft
    )


def most_draft_tokens(config: EngineConfig, states: StateSizes | TableStates | None) -> int:
    """Return the default maximum number of draft tokens per step.

    With recurrent state, all requests together share this number. It is 0 if memory does not
    suffice.
    """
    return (
        (config.max_draft_tokens or DEFAULT_DRAFT_TOKENS)
        if states is None
        else states.num_draft_rows
    )


def drafts_shortage(config: EngineConfig, info: RunnerInfo, sizes: StateSizes | None) -> str:
    """Return a message if memory limits the number of draft tokens, else ""."""
    wanted = max(_draft_rows(config))
    if sizes is None or sizes.num_draft_rows == wanted:
        return ""
    return (
        f"room for {sizes.num_draft_rows} draft tokens of {_mib(info.kv_spec.bytes_per_draft)} "
        f"each in a step instead of {wanted}: {_more_room(config)}"
    )


def states_refusal(info: RunnerInfo) -> str | None:
    """Return why recurrent state prevents KV reuse at other positions, or None if it does not."""
    if not info.kv_spec.states:
        return None
    return (
        f"the model is recurrent: {len(info.kv_spec.states)} of its layers have a state that "
        "depends on all tokens before it, so nothing can be reused at another position; use "
        "mode='prefix_cache'"
    )


def _more_room(config: EngineConfig) -> str:
    lower = "lower max_num_seqs, max_cache_bytes or num_blocks"
    return (
        lower
        if config.max_state_bytes is None
        else f"raise max_state_bytes if memory allows, or {lower}"
    )


def speculation_refusal(config: EngineConfig, states: TableStates | None) -> str | None:
    """Return why requests cannot use speculative decoding, or None if they can."""
    if states is None or states.num_draft_rows:
        return None
    if config.speculation == "off":
        why = "the engine was started with speculation='off'"
        remedy = "start it with 'auto'"
    else:
        why = "recurrent state leaves no room for them"
        remedy = _more_room(config)
    return (
        "draft tokens of this hybrid model need memory that is reserved at the start, but "
        f"{why}; {remedy}"
    )


def check_options(config: EngineConfig, info: RunnerInfo) -> None:
    """Check options that apply only to models with recurrent state.

    Raises:
        ConfigError: Such an option is set for a model without recurrent state.
    """
    if config.max_state_bytes is not None and not info.kv_spec.states:
        raise ConfigError(
            f"max_state_bytes={config.max_state_bytes} has no effect: the model has no recurrent "
            "state; remove max_state_bytes"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"
