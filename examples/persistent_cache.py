"""Load a prompt's KV cache from disk after a restart instead of recomputing it."""

import argparse
import tempfile
from importlib import resources
from pathlib import Path

from kvboost_edge import CPUPagedEngine

DOCUMENT = resources.files("kvboost_edge") / "assets/demo_document.txt"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default="kvboost-edge/demo",
        help="directory, GGUF file or hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--document", type=Path, default=DOCUMENT, help="text file (default: the demo's document)"
    )
    question = "What is the mine of Lake Brilo?"
    parser.add_argument("--question", default=question, help="default: %(default)s")
    parser.add_argument(
        "--cache-dir", type=Path, help="directory that keeps KV blocks (default: a temporary one)"
    )
    arguments = parser.parse_args()

    messages = [
        {"role": "system", "content": arguments.document.read_text(encoding="utf-8").strip()},
        {"role": "user", "content": arguments.question},
    ]
    with tempfile.TemporaryDirectory() as temporary:
        directory = (arguments.cache_dir or Path(temporary)).absolute()
        for run in ("first start", "after a restart"):
            with CPUPagedEngine.from_pretrained(
                arguments.model, disk_cache_dir=directory, max_disk_bytes=1e9
            ) as engine:
                result = engine.generate(messages, max_new_tokens=24, temperature=0.0)
            found = f"{result.hit_tokens.get('disk', 0)} of {result.prompt_tokens}"
            print(f"{run}: {found} tokens from disk, first token after {result.ttft_ms:.0f} ms")
    print(result.output_text.strip())


if __name__ == "__main__":
    main()
