"""Answers to the questions of `kvboost_edge.engine.retrieval`, from the text of the prompt."""

import re
from collections import Counter


def solve(prompt):
    """Return the answer to the question at the end of a prompt."""
    if asked := re.search(r"What is the magic number of the (\w+) in", prompt):
        return re.search(rf"The magic number of the {asked[1]} is (\d+)\.", prompt)[1]
    if asked := re.search(r"have the value (\d+), directly", prompt):
        values = {}
        for name, source, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", prompt):
            values[name] = number or values[source]
        return ", ".join(name for name, value in values.items() if value == asked[1])
    assert "Which three words are the most frequent" in prompt
    words = prompt.split("\n\n")[0].split(">")[-1].split()
    return ", ".join(word for word, _ in Counter(words).most_common(3))
