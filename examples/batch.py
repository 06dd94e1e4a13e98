"""Ask several questions about one document in a batch. The document is computed only once."""

import argparse
import time
from importlib import resources
from pathlib import Path

from kvboost_edge import CPUPagedEngine

DOCUMENT = resources.files("kvboost_edge") / "assets/demo_document.txt"
QUESTIONS = [
    "What is the metal of Worr camera?",
    "What is the festival of Mount Hanol?",
    "What is the hobby of Brot Gorbel?",
    "What is the mine of Lake Brilo?",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "questions", nargs="*", default=QUESTIONS, help="questions to ask (default: four)"
    )
    parser.add_argument(
        "--model",
        default="kvboost-edge/demo",
        help="directory, GGUF file or hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--document", type=Path, default=DOCUMENT, help="text file (default: the demo's document)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=24, help="longest answer, in tokens (default: 24)"
    )
    arguments = parser.parse_args()

    document = arguments.document.read_text(encoding="utf-8").strip()
    prompts = [
        [{"role": "system", "content": document}, {"role": "user", "content": question}]
        for question in arguments.questions
    ]
    with CPUPagedEngine.from_pretrained(arguments.model) as engine:
        for name, mode in (("without cache", "baseline"), ("with prefix cache", "prefix_cache")):
            started = time.perf_counter()
            results = engine.generate_batch(
                prompts, arguments.max_tokens, temperature=0.0, mode=mode
            )
            seconds = time.perf_counter() - started
            computed = sum(result.computed_prompt_tokens for result in results)
            print(f"{name}: {computed} prompt tokens computed, {seconds:.2f} s")
    for question, result in zip(arguments.questions, results, strict=True):
        print(f"{question} {result.output_text.strip()}")


if __name__ == "__main__":
    main()
