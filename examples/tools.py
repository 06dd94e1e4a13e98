"""Let a model call a function over HTTP and answer from the result (extra [server]).

A call always names one of the tools, and its arguments match their schema. The bundled model was
not trained with tools, so it may choose the wrong arguments. For real use, pass another model, such
as --model Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M.
"""

import argparse
import json
import subprocess
import sys

import httpx

COLOURS = {"Teamar boat": "blue", "Zorgo lamp": "red"}
FUNCTION = {
    "name": "colour_of",
    "description": "Look up the colour of a thing.",
    "parameters": {
        "type": "object",
        "properties": {"thing": {"enum": list(COLOURS)}},
        "required": ["thing"],
    },
}


def read_url(log):
    """Return the server's URL from its log, or exit with the last line of the log."""
    line = "the server wrote no log"
    for line in log:
        if '"listening"' in line:
            return json.loads(line)["url"]
    sys.exit(line.strip())


def post(url, messages, **fields):
    body = {"messages": messages, "max_tokens": 100, "temperature": 0, **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]


def answer(url, question):
    messages = [{"role": "user", "content": question}]
    tools = [{"type": "function", "function": FUNCTION}]
    message = post(url, messages, tools=tools, tool_choice="required")
    messages.append(message)
    for call in message["tool_calls"]:
        thing = json.loads(call["function"]["arguments"])["thing"]
        print(f"call: {call['function']['name']}({thing!r})")
        result = f"The colour of {thing} is {COLOURS[thing]}."
        print("result:", result)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return post(url, messages)["content"]  # no tools here, because a small model would call again


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    question = "What is the colour of Zorgo lamp?"
    parser.add_argument("question", nargs="?", default=question, help="default: %(default)s")
    parser.add_argument(
        "--model",
        default="kvboost-edge/demo",
        help="directory, GGUF file or hub id (default: %(default)s)",
    )
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "kvboost_edge", "serve", "-m", arguments.model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            print("answer:", answer(read_url(server.stderr), arguments.question).strip())
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
