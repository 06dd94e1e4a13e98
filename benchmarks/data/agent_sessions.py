"""Session of a coding agent, as its client sends it.

A long system prompt with tools is followed by turns with calls and their results. The client also
requests a title for what the user says and runs side agents. The server restarts once.

The client also makes the irrelevant changes of real clients. They are the billing line before the
system prompt in each request, the date at midnight, the order of two tools and of the keys in one
tool at some turns, and the thinking of answers, which is never sent back. The shape is that of a
recorded request (number of tools, lengths of their descriptions, fields of each, the date before
the user's first words). The words are invented and always the same.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Generator
from typing import Any

__all__ = [
    "CALL",
    "CONTENT",
    "QUICK",
    "THOUGHT",
    "Answer",
    "Plan",
    "Request",
    "Session",
    "session",
    "texts",
]

Json = dict[str, Any]
BILLING = "x-anthropic-billing-header: cc_version=0.0.0; cch={:05x};\n"
THOUGHT = "They want more of this, so I look at what that module does before it can change"
CONTENT = "I read its code now:"
CALL = ("read_file", '{"path": "src/main.py"}')

# Words in each description and fields of each tool. The words are a tenth of a recorded request's,
# and the fields are its own.
_TOOLS = {
    "start_task": (122, 6),
    "run_command": (119, 5),
    "plan_job": (292, 4),
    "drop_job": (16, 1),
    "list_jobs": (10, 0),
    "edit_file": (36, 4),
    "open_branch": (303, 2),
    "close_branch": (192, 2),
    "edit_cell": (61, 5),
    "read_file": (83, 4),
    "report_faults": (57, 2),
    "wake_later": (280, 3),
    "send_message": (65, 3),
    "use_skill": (171, 2),
    "make_note": (214, 4),
    "get_note": (73, 1),
    "list_notes": (99, 0),
    "read_output": (104, 3),
    "stop_task": (20, 2),
    "change_note": (224, 9),
    "fetch_page": (37, 2),
    "search_pages": (31, 3),
    "run_steps": (1878, 7),
    "write_file": (24, 2),
}
_SIDE_TOOLS = ("run_command", "read_file", "search_pages", "list_jobs")
_FIELDS = ("path", "limit", "offset", "name", "command", "timeout", "text", "kind", "force")
_KINDS = (
    "string",
    "integer",
    "integer",
    "string",
    "string",
    "number",
    "string",
    "string",
    "boolean",
)
_WORDS = """
    the a of to and in is it that for was on are with they be at one have this from by hot but some
    what there we can out other were all your when up use word how said an each she which do their
    time if will way about many then them would write like so these her long make thing see him two
    has look more day could go come did my sound no most number who over know water than call first
    people may down side been now find any new work part take get place made live where after back
    little only round man year came show every good me give our under name very through just form
    much great think say help low line before turn cause same mean differ move right boy old too
    does tell set three want air well also play small end put home read hand port large spell add
    even land here must big high such follow act why ask men change went light kind off need house
    picture try us again animal point mother world near build self earth father module function
    value file test error list index branch commit cache token server answer request result
""".split()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Events of a session by turn (from 1), and lengths of texts in words.

    Attributes:
        speaks: Turns that begin with words of the user and request a title. Other turns begin with
            the result of a call.
        midnight: First turn with the next date.
        swaps: Turns at which two tools are swapped.
        keys: Turns at which the keys of a tool are swapped.
        restart: Turn before which the server restarts.
        sides: Turns after which a side agent works for `side_requests` requests.
        date_in: "context" puts the date before the user's first words, "system" into the last line
            of the system prompt.
    """

    turns: int = 12
    speaks: tuple[int, ...] = (1, 5, 9)
    midnight: int = 4
    swaps: tuple[int, ...] = (3, 4, 8, 11)
    keys: tuple[int, ...] = (4, 10)
    restart: int = 7
    sides: tuple[int, ...] = (3, 6, 10)
    side_requests: int = 4
    system: int = 2450
    tools: float = 1.0
    side_system: int = 700
    said: int = 30
    result: int = 60
    date_in: str = "context"
    billing: bool = True
    max_tokens: int = 64
    title_tokens: int = 6


QUICK = Plan(system=120, tools=0.05, side_system=60, said=12, result=20)
"""The same events with short texts."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a session.

    Attributes:
        kind: "turn", "title" or "side".
        number: Number of the turn.
        changes: Differences from the agent's previous request, apart from new messages.
        restart: Whether the server restarts before the request.
    """

    kind: str
    number: int
    body: Json
    changes: tuple[str, ...] = ()
    restart: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """Parts of an answer that a client keeps: its text, its call and the id of the call.

    The call is a pair of name and arguments as JSON.
    """

    content: str = CONTENT
    call: tuple[str, str] | None = CALL
    call_id: str = ""


Session = Generator[Request, Answer, None]


def session(plan: Plan) -> Session:
    """Yield the requests in order. The caller sends each answer in."""
    agent = _Agent(plan)
    for turn in range(1, plan.turns + 1):
        said = agent.next_words(turn)
        answer = yield agent.request(turn)
        agent.heard(answer)
        if said is not None:
            yield agent.title(turn, said)
        if turn in plan.sides:
            yield from agent.side(turn)


def texts(plan: Plan) -> list[str]:
    """Return all text of a session with default answers, for training a tokenizer."""
    found = []
    running = session(plan)
    request = next(running)
    while True:
        found += [message["content"] for message in request.body["messages"]]
        found += [json.dumps(tool) for tool in request.body.get("tools", ())]
        try:
            request = running.send(Answer())
        except StopIteration:
            return found


class _Agent:
    """A client with its message history."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._writer = _Writer(1)
        self._system = "You are a coding agent. " + self._writer.words(plan.system)
        self._tools = self._writer.tools(plan.tools)
        self._messages: list[Json] = []
        self._sent = 0

    def next_words(self, turn: int) -> str | None:
        """Add the next messages, and return the user's words.

        Returns None if the turn only brings the result of a call.
        """
        if self._messages:
            self._messages.append(self._result(turn, self._messages[-1]))
        if turn not in self._plan.speaks:
            return None
        said = self._writer.words(self._plan.said)
        self._messages.append({"role": "user", "content": said})
        return said

    def heard(self, answer: Answer) -> None:
        self._messages.append(_spoken(answer, f"call{len(self._messages):05d}"))

    def request(self, turn: int) -> Request:
        plan = self._plan
        changes = ["billing"] * (plan.billing and turn > 1) + ["date"] * (turn == plan.midnight)
        # A tool that is moved or reordered in one turn is back in the next.
        changes += ["tools"] * (
            (turn in plan.swaps) != (turn - 1 in plan.swaps) or turn in plan.swaps
        )
        changes += ["keys"] * ((turn in plan.keys) != (turn - 1 in plan.keys))
        # The previous answer contained thinking, which is not sent back.
        changes += ["thinking"] * (turn > 1)
        tools = copy.deepcopy(self._tools)
        if turn in plan.swaps:
            first, second = random.Random(turn).sample(range(len(tools)), 2)
            tools[first], tools[second] = tools[second], tools[first]
        if turn in plan.keys:
            function = tools[2]["function"]
            tools[2]["function"] = {name: function[name] for name in reversed(function)}
        messages = self._with_date(
            [{"role": "system", "content": self._system}, *self._messages], turn
        )
        body = self._body(messages, plan.max_tokens, tools)
        return Request("turn", turn, body, tuple(changes), restart=turn == plan.restart)

    def title(self, turn: int, said: str) -> Request:
        """Return a request for a title, with other instructions and without tools or thinking."""
        instructions = "Give this a title of few words. " + _Writer(2).words(self._plan.said)
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": said}]
        return Request("title", turn, self._body(messages, self._plan.title_tokens, thinks=False))

    def side(self, turn: int) -> Session:
        """Yield the requests of a side agent.

        All side agents share a system prompt, which differs from the main agent's, and have few
        tools.
        """
        plan = self._plan
        tools = [tool for tool in self._tools if tool["function"]["name"] in _SIDE_TOOLS]
        system = "You are an agent with one task. " + _Writer(3).words(plan.side_system)
        task = _Writer(100 + turn).words(plan.said)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        for number in range(plan.side_requests):
            changes = ("billing",) * plan.billing * bool(number)
            answer = yield Request(
                "side", turn, self._body(list(messages), plan.max_tokens, tools), changes
            )
            spoken = _spoken(answer, f"side{turn:02d}{number:03d}")
            messages += [spoken, self._result(1000 * turn + number, spoken)]

    def _result(self, number: int, spoken: Json) -> Json:
        """Return the result of a call, or a message to continue after an answer without a call."""
        text = _Writer(10_000 + number).words(self._plan.result)
        if not spoken.get("tool_calls"):
            return {"role": "user", "content": "Go on. " + text}
        return {"role": "tool", "tool_call_id": spoken["tool_calls"][0]["id"], "content": text}

    def _with_date(self, messages: list[Json], turn: int) -> list[Json]:
        date = (
            "Today is "
            f"{'Sunday, 2026-11-22' if turn < self._plan.midnight else 'Monday, 2026-11-23'}."
        )
        system, first, *others = messages
        if self._plan.date_in == "system":
            return [{**system, "content": f"{system['content']}\n{date}"}, first, *others]
        return [
            system,
            {**first, "content": f"<context>\n{date}\n</context>\n{first['content']}"},
            *others,
        ]

    def _body(
        self,
        messages: list[Json],
        max_tokens: int,
        tools: list[Json] | None = None,
        *,
        thinks: bool = True,
    ) -> Json:
        self._sent += 1
        if self._plan.billing:
            line = BILLING.format(random.Random(self._sent).getrandbits(20))
            messages = [{**messages[0], "content": line + messages[0]["content"]}, *messages[1:]]
        body: Json = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
        if tools is not None:
            body["tools"] = tools
        if not thinks:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body


def _spoken(answer: Answer, call_id: str) -> Json:
    """Return an answer as it is sent back, without its thinking.

    `call_id` is used for a call without an id.
    """
    message: Json = {"role": "assistant", "content": answer.content}
    if answer.call is not None:
        function = dict(zip(("name", "arguments"), answer.call, strict=True))
        message["tool_calls"] = [
            {"id": answer.call_id or call_id, "type": "function", "function": function}
        ]
    return message


class _Writer:
    """Generator of texts and tools, which are the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def words(self, count: int) -> str:
        """Return a number of words in sentences of 6 to 14 words, with three sentences per line."""
        sentences = []
        while count > 0:
            length = min(count, self._random.randint(6, 14))
            text = " ".join(self._random.choices(_WORDS, k=length))
            sentences.append(text.capitalize() + ".")
            count -= length
        return "\n".join(" ".join(sentences[at : at + 3]) for at in range(0, len(sentences), 3))

    def tools(self, share: float) -> list[Json]:
        """Return the tools with a share of their descriptions' words."""
        return [
            self._tool(name, max(3, int(share * words)), fields)
            for name, (words, fields) in _TOOLS.items()
        ]

    def _tool(self, name: str, words: int, fields: int) -> Json:
        # Every tool accepts a path, so that the fixed call is valid for each.
        names = list(dict(zip(_FIELDS[:fields], _KINDS[:fields], strict=True)).items())
        properties = {field: {"type": kind, "description": self.words(4)} for field, kind in names}
        parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        function = {"name": name, "description": self.words(words), "parameters": parameters}
        return {"type": "function", "function": function}
