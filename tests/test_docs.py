"""What exists is documented, and what is documented exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "REFERENCE.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "evenflow").rglob("*.py")}
PAGES = [path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def found(pattern: str, *, under: str = "evenflow") -> set[str]:
    return {
        match
        for path, text in SOURCES.items()
        if path.is_relative_to(ROOT / under)
        for match in re.findall(pattern, text)
    }


def test_every_metric_is_in_the_reference() -> None:
    names = found(r'"(evenflow_[a-z_]+)"')
    assert len(names) > 8
    assert {name for name in names if name not in REFERENCE} == set()


def test_every_error_code_is_in_the_reference() -> None:
    codes = found(r'code(?:: str)? ?= ?"([a-z_]+)"')
    assert {"model_not_found", "queue_full", "upstream_timeout"} <= codes
    assert {code for code in codes if code not in REFERENCE} == set()


def test_every_route_is_in_the_reference() -> None:
    from evenflow.wire.openai import ROUTES

    paths = {path.decode() for path in ROUTES} | found(r'b"(/[a-z_0-9/]+)": LocalRoute')
    assert len(paths) > 14
    assert {path for path in paths if path not in REFERENCE} == set()


def test_every_field_of_a_log_line_is_in_the_reference() -> None:
    fields = set(re.findall(r'"([a-z_]+)":["%\x27]', SOURCES[ROOT / "evenflow" / "observe" / "access_log.py"]))
    assert "ttft_ms" in fields
    assert {field for field in fields if field not in REFERENCE} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_of_the_readme_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^ +)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"demo", "test", "bench"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    from evenflow.cli import COMMANDS

    assert set(re.findall(r"evenflow (serve|demo|engine|config|bench)\b", readme)) <= set(COMMANDS)
