"""Questions for bench_draft_model.py: four kinds, whose answers repeat more and more of the
question.

None of the questions is among the recorded prompts of simulators/speculation.py. Code to edit or to
repeat is that of functions of Python's standard library.
"""

from __future__ import annotations

import base64
import calendar
import colorsys
import fnmatch
import inspect
import shlex
import statistics
import string
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["QUESTIONS"]

_NEW_CODE = (
    "Write a Python function that merges overlapping intervals, with a docstring.",
    "Write a C program that counts the lines, words and bytes of its input.",
    "Write a JavaScript function that debounces another function.",
    "Write a Python class for a bank account with deposits, withdrawals and a history.",
    "Write a bash script that renames all .jpeg files of a directory to .jpg.",
    "Write a Java method that checks whether a string is a palindrome, and JUnit tests for it.",
    "Write a Python script that reads a CSV file and prints the mean of each column.",
    "Write a TypeScript interface and a reducer for a shopping cart.",
    "Write a Python function that converts a Roman numeral to an integer.",
    "Write a C function that reverses a singly linked list in place.",
    "Write a Python generator that yields the prime numbers with a sieve.",
    "Write a SQL schema for a library with books, members and loans.",
    "Write a Go function that reads a file and counts how often each word occurs.",
    "Write a Rust function that returns the longest common prefix of a slice of strings.",
    "Write a JavaScript class for a priority queue based on a binary heap.",
    "Write a Python decorator that retries a function with exponential backoff.",
    "Write a C++ template function that performs a binary search on a sorted vector.",
    "Write a Python function that flattens arbitrarily nested lists.",
    "Write a Dockerfile and a .dockerignore for a small Flask application.",
    "Write an HTML page with a form that adds two numbers with JavaScript.",
    "Write a Python class that implements an LRU cache without functools.",
    "Write a Kotlin data class for a person, and a function that sorts people by age.",
    "Write a Python unittest for a function that validates email addresses.",
    "Write a Java class for a thread-safe counter.",
    "Write a PowerShell script that lists the ten largest files below a folder.",
    "Write a Python function that computes the Levenshtein distance of two strings.",
    "Write a CSS grid layout for a page with a header, a sidebar and a footer.",
    "Write a C# method that groups a list of orders by customer with LINQ.",
    "Write a Python script that downloads a web page and prints its links.",
    "Write a Makefile for a C project with several source files and a test target.",
    "Write a Ruby method that counts the vowels of a sentence.",
    "Write a Python function that parses an ISO 8601 date without libraries.",
    "Write a JavaScript function that deeply compares two objects.",
    "Write a Swift struct for a temperature that converts Celsius and Fahrenheit.",
    "Write a Python class for a matrix with addition, multiplication and transposition.",
    "Write a PHP function that validates the fields of a contact form.",
    "Write an SQL query that returns the second highest salary of each department.",
    "Write a Python command line tool with argparse that resizes images with Pillow.",
    "Write a Haskell function that implements quicksort, and explain it briefly.",
    "Write a Go HTTP handler that returns the current time as JSON.",
)
_FREE_CHAT = (
    "What can I cook with chickpeas, spinach and rice?",
    "Why do cats purr?",
    "How do I prepare for my first marathon?",
    "Explain inflation in simple words.",
    "Write a short poem about the sea in winter.",
    "Which habits help to sleep better?",
    "How do noise-cancelling headphones work?",
    "Suggest names for a small bakery, and say why they fit.",
    "What should I see in Lisbon in two days?",
    "How does a heat pump heat a house in winter?",
    "Write a polite email that declines an invitation to a conference.",
    "What are the advantages of sourdough bread?",
    "Why is the sky red in the evening?",
    "How can I learn to draw faces?",
    "Explain the rules of badminton to a beginner.",
    "What is the difference between a virus and a bacterium?",
    "Give me ideas for a birthday party for a six-year-old.",
    "How do I get coffee stains out of a shirt?",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "Which houseplants survive in a dark room?",
    "How do vaccines work?",
    "What should I ask when I view a flat to rent?",
    "Explain compound interest with an example.",
    "Why did the Roman Empire fall?",
    "How can I speak in front of an audience without fear?",
    "What is a good weekly training plan for swimming?",
    "Describe a sunset in the desert.",
    "How are glaciers formed?",
    "What do I need for a vegetable garden on a balcony?",
    "Write a limerick about a forgetful professor.",
    "How does a bill become a law in a parliament?",
    "What is the best way to store tomatoes, and why?",
    "Explain how a sailing boat can move against the wind.",
    "Which questions help to get to know someone?",
    "How do I choose a bicycle for commuting?",
    "Summarize the story of Romeo and Juliet.",
    "Why do we dream?",
    "What are good reasons to learn a second language?",
    "How do I make a simple budget?",
    "Describe the life of a worker bee.",
)
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    statistics.fmean,
    textwrap.shorten,
    shlex.split,
    shlex.join,
    fnmatch.filter,
    string.capwords,
    colorsys.rgb_to_hls,
    calendar.monthrange,
    base64.b85decode,
    statistics.median_low,
)
_EDITS = (
    "Add type hints to this function and return the whole function:",
    "Rename the parameters of this function to longer names and return the whole function:",
    "Translate the comments and the docstring of this function to German and return it whole:",
    "Raise a ValueError for arguments that are None, and return the whole function:",
)
_REPEATS = (
    "Repeat this code exactly:",
    "Return the following code without changes, in a code block:",
    "Copy this function and add a comment with the word END after it:",
    "Print this code again, word for word:",
)


def _about_code(requests: tuple[str, ...]) -> tuple[str, ...]:
    """Return each request about each function."""
    sources = [inspect.getsource(function) for function in _FUNCTIONS]
    return tuple(
        f"{request}\n\n```python\n{source}```" for source in sources for request in requests
    )


QUESTIONS = {
    "new code": _NEW_CODE,
    "free chat": _FREE_CHAT,
    "code edit": _about_code(_EDITS),
    "echo": _about_code(_REPEATS),
}
"""Forty questions of each kind."""
