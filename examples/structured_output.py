"""Constrain answers to a list of choices, a regular expression or a JSON schema.

This example needs the extra [structured]. The bundled model was not trained on JSON. Its object
matches the schema, but the values may be wrong. For real use, pass another model, such as
--model Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M.
"""

import argparse
import json

from kvboost_edge import CPUPagedEngine

TEXT = "Doc 7.\nThe colour of Teamar boat is blue. The owner of Teamar boat is Dibel.\n"
COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": COLOURS},
        "owner": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
    },
    "required": ["colour", "owner"],
    "additionalProperties": False,
}


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--model",
        default="kvboost-edge/demo",
        help="directory, GGUF file or hub id (default: %(default)s)",
    )
    arguments = parser.parse_args()

    with CPUPagedEngine.from_pretrained(arguments.model) as engine:

        def ask(question, **constraint):
            messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]
            result = engine.generate(messages, max_new_tokens=256, temperature=0.0, **constraint)
            return result.output_text

        sentences = [f"The colour of Teamar boat is {colour}." for colour in COLOURS]
        print("choice:", ask("What is the colour of Teamar boat?", choice=sentences))
        sentence = r"The owner of Teamar boat is [A-Z][a-z]{1,9}\."
        print("regex:", ask("What is the owner of Teamar boat?", regex=sentence))
        answer = ask("Give the colour and the owner of Teamar boat as JSON.", json_schema=SCHEMA)
        print("JSON schema:", json.loads(answer))


if __name__ == "__main__":
    main()
