#!/bin/sh
# Start an image of the server, wait until it is healthy, ask it for an answer, and stop it:
#   docs/deploy/try-image.sh docker kvboost-edge
# The first argument is a program with Docker's command line, and further arguments are passed to its `run`.
set -eu
engine="${1:?give the program, such as docker}" image="${2:?give the image}"
shift 2
container="$("$engine" run --detach --cap-drop ALL --security-opt no-new-privileges \
    --env KVBOOST_API_KEY=0123456789abcdef0123456789abcdef "$@" "$image")"
trap '"$engine" logs "$container"; "$engine" rm --force "$container" >/dev/null' EXIT

# inside CODE: run Python in the container.
inside() { "$engine" exec "$container" python -c "$1"; }

inside 'import os; assert os.getuid() == 10001, os.getuid()'
inside '
import time, urllib.request
for attempt in range(120):
    try:
        urllib.request.urlopen("http://127.0.0.1:8000/ready", timeout=2)
        break
    except OSError:
        time.sleep(1)
else:
    raise SystemExit("the server is not ready after 120 s")
'
inside '
import json, urllib.request
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}).encode(),
    {"Authorization": "Bearer 0123456789abcdef0123456789abcdef", "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as answer:
    print(json.load(answer)["usage"])
'
if "$engine" logs "$container" 2>&1 | sed '/"listening"/q' | grep '"compiling kernels'; then
    echo "the server compiled kernels before it listened: those of the image were not used" >&2
    exit 1
fi
"$engine" stop --time 45 "$container" >/dev/null
test "$("$engine" inspect --format '{{.State.ExitCode}}' "$container")" = 0
echo "the image answers and stops"
