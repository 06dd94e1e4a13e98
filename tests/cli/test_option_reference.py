"""The reference page of options is current and complete."""

import pytest

from kvboost_edge.cli.option_reference import PAGE, main, option_page
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.options import options_of
from kvboost_edge.server.settings import ServerSettings


def test_the_page_is_what_the_declarations_say(capsys):
    written = PAGE.read_text(encoding="utf-8")
    assert written == option_page(), "run python -m kvboost_edge.cli.option_reference --write"
    main([])
    assert capsys.readouterr().out == written
    with pytest.raises(SystemExit, match="--write"):
        main(["--no-such"])


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams, Terms, ServerSettings])
def test_every_field_is_declared_and_has_a_row(cls):
    assert [*options_of(cls)] == [*cls.__dataclass_fields__]
    page = option_page()
    assert all(f"\n| `{name}` |" in page for name in options_of(cls))
