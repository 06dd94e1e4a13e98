"""Tests of the charts against the recorded results."""

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.bench.charts import IMAGES, Bar, Panel, _source, charts, draw_chart

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", charts())
def test_the_stored_chart_is_drawn_from_the_recorded_results(name):
    stored = (IMAGES / name).read_text(encoding="utf-8")
    assert stored == charts()[name], "run `make docs-images`"
    assert "2026-11-21, AMD EPYC" in stored
    assert "commit 623d870" in stored


def test_the_threads_are_those_of_the_run():
    machine = {"date": "2026-01-02", "cpu": "A", "threads": 8, "isa": "avx2", "commit": "abc"}
    shown = [_source({"machine": machine, **more}) for more in ({}, {"options": {"threads": 2}})]
    assert ["8 threads" in one for one in shown] == [True, False]
    assert ["2 threads" in one for one in shown] == [False, True]


def test_a_bar_is_as_long_as_its_value_and_labelled_with_it():
    bars = [Bar("kvboost_edge", 2.0), Bar("llama.cpp", 8.0), Bar("OpenVINO GenAI", None)]
    chart = draw_chart(
        [Panel("Title <1>", "s", bars, "2026-01-02, commit abc")], "A note.", "A chart"
    )
    root = ElementTree.fromstring(chart)
    widths = [float(rect.get("width")) for rect in root.findall(f"{SVG}rect")][1:]
    assert widths[1] == 4 * widths[0]
    assert widths[2] == 0
    texts = [text.text for text in root.findall(f"{SVG}text")]
    for shown in ("Title <1>", "2 s", "8 s", "not measured", "2026-01-02, commit abc", "A note."):
        assert shown in texts
