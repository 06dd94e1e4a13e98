"""Tests of the output formats against the field names of llama-bench."""

import csv
import io
import json

import pytest

from kvboost_edge.cli.bench.cases import Case, CaseResult
from kvboost_edge.cli.bench.result_writers import FORMATS, Subject, open_writer

# Fields of llama-bench's CSV, except those for GPUs or for options that this engine lacks.
LLAMA_BENCH = """cpu_info,backends,model_filename,model_type,model_size,model_n_params,n_batch,
n_threads,type_k,type_v,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts"""
SUBJECT = Subject(
    build_version="0.1.0",
    cpu_info='A "fast" CPU, new',
    backends="native",
    model_filename="model.gguf",
    model_type="llama q4_0",
    model_size=3_000_000_000,
    model_n_params=494_000_000,
    n_batch=512,
    n_threads=2,
    type_k="f16",
    type_v="int8",
)
FIGURES = (
    CaseResult(Case("pp", 512, 0, 0), (1.0, 2.0), 1_700_000_000.0),
    CaseResult(Case("shared", 64, 128, 8192, 8), (4.0,), 1_700_000_001.0),
)


def written(form):
    parts = []
    writer = open_writer(form, SUBJECT, parts.append)
    for figures in FIGURES:
        writer.row(figures)
    writer.end()
    return "".join(parts)


def rows(form):
    text = written(form)
    if form == "csv":
        return list(csv.DictReader(io.StringIO(text)))
    if form == "jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def test_markdown_has_llama_benchs_columns():
    head, rule, first, second, *end = written("md").splitlines()
    assert [name.strip() for name in head.strip("|").split("|")] == [
        *("model", "size", "params", "backend", "threads", "type_k", "type_v", "test", "t/s"),
        "ms",
    ]
    assert len({len(line) for line in (head, rule, first, second)}) == 1
    assert [cell.strip() for cell in first.strip("|").split("|")] == [
        *("llama q4_0", "2.79 GiB", "494.00 M", "native", "2", "f16", "int8", "pp512"),
        *("384.00 ± 181.02", "1500.0"),
    ]
    assert "shared x8 @ d8192" in second
    assert "256.00 ± 0.00" in second
    assert end == ["", "build: kvboost-edge 0.1.0", 'cpu: A "fast" CPU, new']


@pytest.mark.parametrize("form", FORMATS[1:])
def test_fields_have_llama_benchs_names(form):
    first, second = rows(form)
    assert {*"".join(LLAMA_BENCH.split()).split(",")} <= set(first) == set(second)
    assert first["cpu_info"] == SUBJECT.cpu_info
    assert str(first["n_prompt"]) == "512"
    assert str(first["avg_ns"]) == "1500000000"
    assert float(first["avg_ts"]) == 384
    assert float(first["stddev_ts"]) == pytest.approx(181.019336)
    assert first["test_time"] == "2023-11-14T22:13:20Z"
    assert (second["test"], str(second["n_requests"])) == ("shared x8 @ d8192", "8")
    if form != "csv":
        assert first["samples_ns"] == [1_000_000_000, 2_000_000_000]
        assert first["samples_ts"] == [512, 256]


def test_rows_appear_one_by_one():
    for form in ("md", "csv", "jsonl"):
        parts = []
        writer = open_writer(form, SUBJECT, parts.append)
        writer.row(FIGURES[0])
        assert "pp512" in "".join(parts)
