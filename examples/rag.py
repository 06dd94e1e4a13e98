"""Answer a question from the most similar facts (retrieval-augmented generation).

The bundled model was not trained for embeddings, so each text gets an ending that asks for its
subject. The right fact is then among the first three for 7 of 10 questions. For real use, pass an
embedding model, such as --embedding-model Qwen/Qwen3-Embedding-0.6B-GGUF:Q8_0. Such models were
trained with a prefix before questions. --query-prefix sets that of other models.
"""

import argparse
import re
from importlib import resources
from pathlib import Path

from kvboost_edge import CPUPagedEngine

DOCUMENT = resources.files("kvboost_edge") / "assets/demo_document.txt"
ENDING = " The name of"  # makes a generative model name the subject next
QUERY_PREFIX = "Instruct: Given a question, retrieve facts that answer it\nQuery:"


def most_similar(engine, facts, question, prefix="", ending=""):
    """Return the facts with their similarity to the question, the most similar first.

    The prefix precedes only the question, and the ending follows all texts.
    """
    vectors = engine.embed([fact + ending for fact in facts])  # float32, each of length 1
    [vector] = engine.embed([prefix + question + ending])
    return sorted(zip(vectors @ vector, facts, strict=True), reverse=True)


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    question = "What is the metal of Worr camera?"
    parser.add_argument("question", nargs="?", default=question, help="default: %(default)s")
    parser.add_argument(
        "--model",
        default="kvboost-edge/demo",
        help="model that answers: directory, GGUF file or hub id (default: %(default)s)",
    )
    parser.add_argument("--embedding-model", help="model that embeds (default: --model)")
    parser.add_argument(
        "--query-prefix",
        default=QUERY_PREFIX,
        help="text before the question for --embedding-model (default: that of Qwen3-Embedding)",
    )
    parser.add_argument(
        "--document", type=Path, default=DOCUMENT, help="text file (default: the demo's document)"
    )
    parser.add_argument("--top", type=int, default=3, help="facts to use (default: %(default)s)")
    arguments = parser.parse_args()

    sentences = re.findall(r"[^.\n]+\.", arguments.document.read_text(encoding="utf-8"))
    facts = [sentence.strip() for sentence in sentences if len(sentence.split()) > 2]
    with CPUPagedEngine.from_pretrained(arguments.model) as engine:
        if arguments.embedding_model:
            with CPUPagedEngine.from_pretrained(arguments.embedding_model) as embedder:
                found = most_similar(
                    embedder, facts, arguments.question, prefix=arguments.query_prefix
                )
        else:
            found = most_similar(engine, facts, arguments.question, ending=ENDING)
        for similarity, fact in found[: arguments.top]:
            print(f"{similarity:.3f} {fact}")
        context = " ".join(fact for _, fact in found[: arguments.top])
        messages = [
            {"role": "system", "content": context},
            {"role": "user", "content": arguments.question},
        ]
        result = engine.generate(messages, max_new_tokens=32, temperature=0.0)
    print(f"{result.output_text.strip()} [{result.prompt_tokens} prompt tokens]")


if __name__ == "__main__":
    main()
