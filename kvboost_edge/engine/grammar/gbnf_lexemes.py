"""Conversion of GBNF to Lark, which keeps the language of the grammar.

llguidance matches lexemes with a lexer, which takes the longest match, while llama.cpp matches
single characters. The largest parts without recursion become lexemes. If the longest match of one
could be wrong, because it or another lexeme may go on where the text that follows it begins, a
lexeme is split into smaller ones. Lexemes of one character are always right, but each takes a
parser step. If the analysis takes too much work, all lexemes are split.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvboost_edge.engine.grammar.gbnf import (
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Seq,
    Text,
    read_gbnf,
)

__all__ = ["LarkGrammar", "lark_of_gbnf"]

# The work of an analysis is counted in steps of 0.1 to 0.4 microseconds. A step on a large set of
# bits counts as several, which also limits the memory that the sets take.
_MOST_WORK = 5_000_000
_STEP_BITS = 11  # binary logarithm of the number of bits that add one to the count
_STORED = 8  # a set that stays in memory counts as so many times its size
# Limits of the analysis. Above them, lexemes count as ambiguous.
_MOST_POSITIONS = 400
_MOST_COPIES = 40  # of a counted repetition; above, it counts as unbounded
_MOST_DEPTH = 100
_MOST_STATES = 4_000
_MOST_LEXEMES = 1_500
_FEW_CHARS = 8  # a lexeme of one of so few characters makes no mask slow
_ANY_BYTE = (1 << 256) - 1


class LarkGrammar(NamedTuple):
    """A grammar for llguidance.

    Attributes:
        text: the grammar in Lark.
        is_slow: True if a lexeme is one character of a class, which makes the masks slower.
    """

    text: str
    is_slow: bool


@functools.lru_cache(maxsize=8)  # a client often repeats its grammar
def lark_of_gbnf(text: str) -> LarkGrammar:
    """Convert a grammar to Lark.

    Raises:
        RequestError: The grammar is invalid.
    """
    grammar = _Lexemes(read_gbnf(text))
    try:
        while wrong := _Units(grammar).wrong_lexemes():
            for node in wrong:
                grammar.split(node)
    except _WorkSpent:
        grammar.split_all()
    return _lark(grammar)


class _WorkSpent(Exception):
    """An analysis needs more work than allowed."""


class _Work:
    """A limit on the work of an analysis."""

    def __init__(self) -> None:
        self._left = _MOST_WORK

    def add(self, num_steps: int, num_bits: int = 0) -> None:
        """Count steps.

        Args:
            num_bits: size of the sets that each step handles, in bits.

        Raises:
            _WorkSpent: There are too many steps.
        """
        self._left -= num_steps * (1 + (num_bits >> _STEP_BITS))
        if self._left < 0:
            raise _WorkSpent


class _Size(NamedTuple):
    """The size of a part without recursion.

    Attributes:
        positions: number of its characters' positions, where a large repetition counts once.
        depth: number of levels of its rules and groups.
        may_be_empty: whether it matches the empty text.
    """

    positions: int
    depth: int
    may_be_empty: bool


_ONE_CHAR = _Size(1, 1, False)


def _copies(node: Repeat) -> int:
    """Return how many copies of a repeated part an automaton has."""
    if node.most is None or node.most > _MOST_COPIES:
        return min(max(node.least, 1), 2)
    return node.most


def _walk(node: Node) -> Iterator[Node]:
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        todo += _parts(node)


def _parts(node: Node) -> Sequence[Node]:
    if isinstance(node, (Seq, Alt)):
        return node.parts
    return [node.part] if isinstance(node, Repeat) else []


class _Lexemes:
    """The rules and which of their parts are lexemes.

    Attributes:
        rules: the rules. Their parts that are not split are lexemes.
        work: limit on the work of the analysis.
    """

    def __init__(self, rules: Sequence[Node]) -> None:
        self.rules = rules
        self.work = _Work()
        self._sizes: dict[Node, _Size] = {}  # of the parts that contain no recursion
        self._automata: dict[Node, _Automaton] = {}
        self._known: dict[tuple[Node, int], bool] = {}
        self._measure_rules()
        self.rules = [self._grouped(rule) for rule in rules]

    def _measure_rules(self) -> None:
        """Measure the parts that neither contain nor refer to a recursion."""
        refs = [{node.rule for node in _walk(rule) if isinstance(node, Ref)} for rule in self.rules]
        users: list[list[int]] = [[] for _ in refs]
        for number, each in enumerate(refs):
            for used in each:
                users[used].append(number)
        left = [len(each) for each in refs]
        ready = [number for number, count in enumerate(left) if not count]
        while ready:
            number = ready.pop()
            self._measure(self.rules[number])
            for user in users[number]:
                left[user] -= 1
                if not left[user]:
                    ready.append(user)
        for number, count in enumerate(left):
            if count:
                self._measure(self.rules[number])

    def _measure(self, node: Node) -> bool:
        """Measure a node and its parts, and return whether the node contains no recursion."""
        known = [self._measure(part) for part in _parts(node)]
        if all(known) and not (isinstance(node, Ref) and self.rules[node.rule] not in self._sizes):
            self._set_size(node)
        return node in self._sizes

    def _set_size(self, node: Node) -> None:
        """Derive a node's size from those of its parts."""
        if isinstance(node, Ref):
            size = self._sizes[self.rules[node.rule]]
            self._sizes[node] = size._replace(depth=size.depth + 1)
            return
        if isinstance(node, Text):
            self._sizes[node] = _Size(len(node.text), 1, not node.text)
            return
        if isinstance(node, Chars):
            self._sizes[node] = _ONE_CHAR
            return
        parts = [self._sizes[part] for part in _parts(node)]
        is_empty = [part.may_be_empty for part in parts]
        copies = 1
        if isinstance(node, Repeat):
            is_empty.append(node.least == 0)
            copies = _copies(node)
        self._sizes[node] = _Size(
            min(copies * sum(part.positions for part in parts), _MOST_POSITIONS + 1),
            1 + max((part.depth for part in parts), default=0),
            any(is_empty) if isinstance(node, (Alt, Repeat)) else all(is_empty),
        )

    def _grouped(self, node: Node) -> Node:
        """Put parts without recursion that belong together into one node, and split the others."""
        if node in self._sizes:
            return node
        if isinstance(node, Repeat):
            return Repeat(self._grouped(node.part), node.least, node.most, is_split=True)
        if isinstance(node, Alt):
            kept = [part for part in node.parts if part in self._sizes]
            others = [self._grouped(part) for part in node.parts if part not in self._sizes]
            return Alt([*([self._group(Alt, kept)] if kept else []), *others], is_split=True)
        if isinstance(node, Seq):
            parts: list[Node] = []
            for is_kept, run in itertools.groupby(node.parts, self._sizes.__contains__):
                each = list(run)
                parts += [self._group(Seq, each)] if is_kept else map(self._grouped, each)
            return Seq(parts, is_split=True)
        node.is_split = True
        return node

    def _group(self, kind: type[Seq | Alt], parts: list[Node]) -> Node:
        if len(parts) == 1:
            return parts[0]
        node = kind(parts)
        self._set_size(node)
        return node

    def split_all(self) -> None:
        """Leave only lexemes of one character."""
        for rule in self.rules:
            for node in _walk(rule):
                node.is_split = not isinstance(node, Chars)

    def split(self, node: Node) -> None:
        """Turn a lexeme into a rule of smaller lexemes."""
        while not node.is_split and not isinstance(node, Chars):
            node.is_split = True
            if isinstance(node, Seq):
                self._peel(node)
            if not isinstance(node, Ref):
                break
            node = self.rules[node.rule]

    def _peel(self, node: Seq) -> None:
        """Separate parts that may be empty, such as white space, from the ends of a sequence."""
        first, last = 0, len(node.parts)
        while last > first and self._may_be_empty(node.parts[last - 1]):
            last -= 1
        while first < last and self._may_be_empty(node.parts[first]):
            first += 1
        if 1 < last - first < len(node.parts):
            node.parts[first:last] = [self._group(Seq, node.parts[first:last])]

    def _may_be_empty(self, node: Node) -> bool:
        return self._sizes[node].may_be_empty

    def automaton(self, node: Node) -> _Automaton:
        if node not in self._automata:
            # The characters of a split literal have no size yet.
            size = self._sizes.get(node, _ONE_CHAR)
            self._automata[node] = _Automaton(self.rules, node, size, self.work)
        return self._automata[node]

    def larger(self, a: Node, b: Node) -> list[Node]:
        """Return the larger one of two lexemes, or both."""
        sizes = [self.automaton(node).size for node in (a, b)]
        return [node for node, size in zip((a, b), sizes, strict=True) if size == max(sizes)]

    def may_go_on(self, node: Node, follow: int) -> bool:
        """Return whether a match may go on with a byte that may also follow it."""
        key = (node, follow)
        if key not in self._known:
            scan = _Scan([self.automaton(node)], self.work)
            found = any(True for _ in scan.ambiguous(1, [follow]))
            self._known[key] = found or scan.is_exhausted
        return self._known[key]

    def is_run(self, node: Node) -> bool:
        """Return whether two matches in a row are always also one match."""
        while isinstance(node, Ref):
            node = self.rules[node.rule]
        return isinstance(node, Repeat) and node.least <= 1 and node.most is None


class _Spots(NamedTuple):
    """The lexemes of a part of a rule, as sets of bits.

    Attributes:
        may_be_empty: whether the part matches the empty text.
        first: lexemes that may begin it.
        last: lexemes that may end it.
    """

    may_be_empty: bool
    first: int
    last: int


_NOTHING = _Spots(False, 0, 0)


class _Units:
    """The lexemes at their places in the rules, and which may follow which."""

    def __init__(self, grammar: _Lexemes) -> None:
        self._grammar = grammar
        self._work = grammar.work
        self._places: dict[Node, int] = {}
        self._rules: dict[int, _Spots] = {}
        self._users: dict[int, set[int]] = {0: set()}
        self._follows: list[int] = []
        self._find_places()
        if len(self._places) <= _MOST_LEXEMES:
            self._find_spots()

    def wrong_lexemes(self) -> list[Node]:
        """Return lexemes to split because the longest match could be wrong."""
        nodes = list(self._places)
        if len(nodes) > _MOST_LEXEMES:
            return [node for node in nodes if not isinstance(node, Chars)]
        automata = [self._grammar.automaton(node) for node in nodes]
        self._work.add(sum(map(int.bit_count, self._follows)))
        follow = [_union(automata[i].first_bytes for i in _bits(mask)) for mask in self._follows]
        alive = self._alive(automata)
        self._work.add(sum(map(int.bit_count, alive)))
        suspects = [
            place
            for place, others in enumerate(alive)
            if any(
                follow[place] & automata[other].later_bytes
                and automata[place].first_bytes & automata[other].first_bytes
                for other in _bits(others)
            )
        ]
        if not suspects:
            return []
        compared = _bits(_union(alive[place] for place in suspects))
        incomplete = [nodes[place] for place in compared if not automata[place].is_complete]
        if incomplete:
            return incomplete
        wrong: dict[Node, None] = {}
        for place in suspects:
            if self._grammar.may_go_on(nodes[place], follow[place]):
                wrong[nodes[place]] = None
        joint = _Scan(automata, self._work)
        for others in {alive[place] for place in suspects}:
            for a, b in joint.ambiguous(others, follow):
                if alive[a] >> b & 1:
                    wrong.update(dict.fromkeys(self._grammar.larger(nodes[a], nodes[b])))
            if joint.is_exhausted:
                wrong.update(dict.fromkeys(nodes[place] for place in suspects))
        return [node for node in wrong if not isinstance(node, Chars)]

    def _find_places(self) -> None:
        """Assign numbers to the lexemes of all rules that the first rule needs."""
        todo = [0]
        while todo:
            rule = todo.pop()
            if rule in self._rules:
                continue
            self._rules[rule] = _NOTHING
            stack = [self._grammar.rules[rule]]
            while stack:
                node = stack.pop()
                self._work.add(1)
                if not node.is_split:
                    self._places.setdefault(node, len(self._places))
                elif isinstance(node, Ref):
                    todo.append(node.rule)
                    self._users.setdefault(node.rule, set()).add(rule)
                else:
                    stack += node.chars if isinstance(node, Text) else _parts(node)

    def _find_spots(self) -> None:
        """Find the first and last lexemes of all rules, and then the lexemes that follow each."""
        todo = dict.fromkeys(self._rules)
        while todo:
            rule, _ = todo.popitem()
            spots = self._spots(self._grammar.rules[rule], None)
            if spots != self._rules[rule]:
                self._rules[rule] = spots
                self._work.add(len(self._users[rule]))
                todo.update(dict.fromkeys(self._users[rule]))
        pairs: dict[tuple[int, int], None] = {}
        for rule in self._rules:
            self._spots(self._grammar.rules[rule], pairs)
        self._follows = [0] * len(self._places)
        for last, first in pairs:
            self._work.add(last.bit_count())
            for place in _bits(last):
                self._follows[place] |= first

    def _spots(self, node: Node, pairs: dict[tuple[int, int], None] | None) -> _Spots:
        """Return a node's first and last lexemes.

        Args:
            pairs: receives sets of lexemes and the sets that may follow them.
        """
        self._work.add(1)
        if not node.is_split:
            bit = 1 << self._places[node]
            return _Spots(self._grammar.automaton(node).may_be_empty, bit, bit)
        if isinstance(node, Ref):
            return self._rules[node.rule]
        if isinstance(node, Repeat):
            return self._loop(node, pairs)
        if isinstance(node, Alt):
            each = [self._spots(part, pairs) for part in node.parts]
            return _Spots(
                any(spots.may_be_empty for spots in each),
                _union(spots.first for spots in each),
                _union(spots.last for spots in each),
            )
        whole = _Spots(True, 0, 0)
        for part in node.chars if isinstance(node, Text) else _parts(node):
            spots = self._spots(part, pairs)
            if pairs is not None:
                pairs[whole.last, spots.first] = None
            whole = _Spots(
                whole.may_be_empty and spots.may_be_empty,
                whole.first | spots.first if whole.may_be_empty else whole.first,
                whole.last | spots.last if spots.may_be_empty else spots.last,
            )
        return whole

    def _loop(self, node: Repeat, pairs: dict[tuple[int, int], None] | None) -> _Spots:
        spots = self._spots(node.part, pairs)
        if pairs is not None and node.most != 1:
            # In (a+ | b)*, two matches of a+ in a row are also one match.
            merged = 0
            if node.most is None and node.least <= 1:
                of_parts = isinstance(node.part, Alt) and node.part.is_split
                for part in _parts(node.part) if of_parts else [node.part]:
                    if not part.is_split and self._grammar.is_run(part):
                        bit = 1 << self._places[part]
                        merged |= bit
                        pairs[bit, spots.first & ~bit] = None
            pairs[spots.last & ~merged, spots.first] = None
        return spots._replace(may_be_empty=spots.may_be_empty or node.least == 0)

    def _alive(self, automata: Sequence[_Automaton]) -> list[int]:
        """Return for each lexeme those that the lexer may match at the same time."""
        alive = [0] * len(automata)
        start = self._rules[0].first
        for place in _bits(start):
            alive[place] = start
        todo = set(_bits(start))
        while todo:
            place = todo.pop()
            # Both lexemes may match the same text, so those that follow either are alive together.
            self._work.add(alive[place].bit_count() + self._follows[place].bit_count())
            after = 0
            for other in _bits(alive[place]):
                if automata[place].first_bytes & automata[other].first_bytes:
                    after |= self._follows[other]
            self._work.add(after.bit_count())
            for one in _bits(self._follows[place]):
                if after & ~alive[one]:
                    alive[one] |= after
                    todo.add(one)
            for one in _bits(after):
                if self._follows[place] & ~alive[one]:
                    alive[one] |= self._follows[place]
                    todo.add(one)
        return alive


class _Automaton:
    """The positions of a lexeme's characters (a Glushkov automaton).

    It may match more than the lexeme, because large repetitions count as unbounded.

    Attributes:
        size: number of positions.
        first_bytes: set of bytes that begin its matches.
        later_bytes: set of bytes that begin its characters after the first.
    """

    def __init__(self, rules: Sequence[Node], node: Node, size: _Size, work: _Work) -> None:
        self.chars: list[Chars] = []
        self.follows: list[int] = []
        self._rules = rules
        self._work = work
        self.size, depth, self.may_be_empty = size
        self.is_complete = self.size <= _MOST_POSITIONS and depth <= _MOST_DEPTH
        self.first_bytes = self.later_bytes = _ANY_BYTE
        if self.is_complete:
            _, self.first, self.last = self._add(node)
            self.first_bytes = self.bytes_of(self.first)
            self.later_bytes = self.bytes_of(_union(self.follows))

    def bytes_of(self, positions: int) -> int:
        return _union(self.chars[i].first_bytes for i in _bits(positions))

    def after(self, positions: int) -> int:
        """Return the positions that may follow any of these."""
        return _union(self.follows[i] for i in _bits(positions))

    def _add(self, node: Node) -> tuple[bool, int, int]:
        """Add a node's positions and return whether it may be empty, its first and last ones."""
        self._work.add(5)
        while isinstance(node, Ref):
            node = self._rules[node.rule]
        if isinstance(node, Chars):
            return self._position(node)
        if isinstance(node, Text):
            return self._sequence(map(self._position, node.chars))
        if isinstance(node, Seq):
            return self._sequence(self._add(part) for part in node.parts)
        if isinstance(node, Alt):
            each = [self._add(part) for part in node.parts]
            return (
                any(empty for empty, _, _ in each),
                _union(first for _, first, _ in each),
                _union(last for _, _, last in each),
            )
        part, most = node.part, node.most
        if most is None or most > _MOST_COPIES:
            copies = [self._copy(part, loops=i == 0) for i in range(_copies(node))]
            found = self._sequence(reversed(copies))
            return found[0] or node.least == 0, found[1], found[2]
        least = node.least
        return self._sequence(
            (empty or i >= least, first, last)
            for i, (empty, first, last) in ((i, self._add(part)) for i in range(most))
        )

    def _copy(self, node: Node, *, loops: bool) -> tuple[bool, int, int]:
        found = self._add(node)
        if loops:
            self._connect(found[2], found[1])
        return found

    def _position(self, char: Chars) -> tuple[bool, int, int]:
        self._work.add(1)
        bit = 1 << len(self.chars)
        self.chars.append(char)
        self.follows.append(0)
        return False, bit, bit

    def _sequence(self, parts: Iterable[tuple[bool, int, int]]) -> tuple[bool, int, int]:
        is_empty, first, last = True, 0, 0
        for empty, begins, ends in parts:
            self._connect(last, begins)
            first |= begins if is_empty else 0
            last = last | ends if empty else ends
            is_empty &= empty
        return is_empty, first, last

    def _connect(self, last: int, first: int) -> None:
        self._work.add(last.bit_count())
        for i in _bits(last):
            self.follows[i] |= first


class _Scan:
    """A simulation of a lexer that matches several lexemes at once.

    Attributes:
        is_exhausted: True if there were too many states to visit them all.
    """

    def __init__(self, automata: Sequence[_Automaton], work: _Work) -> None:
        self.is_exhausted = False
        self._automata = automata
        self._work = work
        self._starts = [0, *itertools.accumulate(len(each.chars) for each in automata)]
        masks: dict[Chars, int] = {}
        num_bits = self._starts[-1]
        work.add(num_bits, num_bits)
        for start, automaton in zip(self._starts, automata, strict=False):
            for i, char in enumerate(automaton.chars, start):
                masks[char] = masks.get(char, 0) | 1 << i
        work.add(2 * sum(len(char.ranges) for char in masks), _STORED * num_bits)
        ends = [
            (end, mask)
            for char, mask in masks.items()
            for low, high in char.ranges
            for end in (low, high + 1)
        ]
        ends.sort(key=operator.itemgetter(0))
        # The positions of each class of characters that the positions do not tell apart.
        classes: set[int] = set()
        positions = 0
        for _, changes in itertools.groupby(ends, operator.itemgetter(0)):
            for _, mask in changes:
                positions ^= mask
            classes.add(positions)
        self._classes = classes
        self._seen: set[int] = set()

    def ambiguous(self, lexemes: int, follow: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Return pairs of lexemes where the second may go on after a match of the first.

        Args:
            lexemes: the lexemes that the lexer matches at once.
            follow: for each lexeme, the bytes that may follow it.
        """
        is_single = len(self._automata) == 1
        todo = [_union(self._automata[i].first << self._starts[i] for i in _bits(lexemes))]
        while todo:
            into = todo.pop()
            self._work.add(len(self._classes), into.bit_length())
            for each in self._classes:
                state = into & each
                if not state or state in self._seen:
                    continue
                if len(self._seen) >= _MOST_STATES:
                    self.is_exhausted = True
                    return
                self._work.add(1, _STORED * state.bit_length())
                self._seen.add(state)
                parts = dict(self._parts(state))
                # One lexeme alone is checked by a scan of its own.
                if len(parts) == 1 and not is_single:
                    continue
                self._work.add(state.bit_count())
                after = {i: self._automata[i].after(part) for i, part in parts.items()}
                following = _union(part << self._starts[i] for i, part in after.items())
                self._work.add(following.bit_count())
                begins = {i: self._automata[i].bytes_of(part) for i, part in after.items()}
                for a, part in parts.items():
                    if part & self._automata[a].last:
                        self._work.add(len(begins))
                        for b, found in begins.items():
                            if follow[a] & found:
                                yield a, b
                todo.append(following)

    def _parts(self, state: int) -> Iterator[tuple[int, int]]:
        """Return the lexemes in a state, each with its own positions."""
        while state:
            self._work.add(1, state.bit_length())
            place = (state & -state).bit_length() - 1
            i = bisect.bisect_right(self._starts, place) - 1
            part = state >> self._starts[i] & (1 << self._starts[i + 1] - self._starts[i]) - 1
            yield i, part
            state ^= part << self._starts[i]


def _is_wide(node: Node) -> bool:
    """Return whether the node is one of more than a few characters."""
    if not isinstance(node, Chars):
        return False
    return sum(high - low + 1 for low, high in node.ranges) > _FEW_CHARS


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(int.__or__, masks, 0)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _lark(grammar: _Lexemes) -> LarkGrammar:
    """Write the grammar in Lark."""
    is_slow = False
    lines: list[str] = []
    names: dict[str, str] = {}
    needed: dict[str, None] = {"r0": None}

    def name(node: Node) -> str:
        """Return the name of a lexeme's terminal."""
        nonlocal is_slow
        is_slow = is_slow or _is_wide(node)
        text = written(node, is_inside=True)
        if text not in names:
            names[text] = f"L{len(names)}"
            lines.append(f"{names[text]}: {text}")
        return names[text]

    def written(node: Node, *, is_inside: bool = False) -> str:
        """Write a node, either inside a lexeme or as a rule's part."""
        if not is_inside and not node.is_split:
            return name(node)
        if isinstance(node, Chars):
            return f"/[{''.join(map(_range, node.ranges))}]/"
        if isinstance(node, Text):
            if is_inside:
                return f"/{''.join(map(_quoted, map(ord, node.text)))}/" if node.text else '""'
            return " ".join(map(written, node.chars)) or '""'
        if isinstance(node, Ref):
            found = f"{'T' if is_inside else 'r'}{node.rule}"
            needed[found] = None
            return found
        if isinstance(node, Repeat):
            most = "" if node.most is None else node.most
            return f"({written(node.part, is_inside=is_inside)}){{{node.least},{most}}}"
        sign = " " if isinstance(node, Seq) else " | "
        return f"({sign.join(written(part, is_inside=is_inside) for part in node.parts)})"

    done: set[str] = set()
    while waiting := [each for each in needed if each not in done]:
        for each in waiting:
            done.add(each)
            node = grammar.rules[int(each[1:])]
            lines.append(f"{each}: {written(node, is_inside=each[0] == 'T')}")
    return LarkGrammar("\n".join(["start: r0", *lines]), is_slow)


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return _quoted(low) if low == high else f"{_quoted(low)}-{_quoted(high)}"


def _quoted(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char == " ") else f"\\x{{{code:x}}}"
