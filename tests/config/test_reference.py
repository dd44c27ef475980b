"""The page of all options is current and complete."""

from pathlib import Path

import pytest
import yaml

from evenflow.config import load
from evenflow.config.options import environment_options, is_list, model_in
from evenflow.config.reference import reference, summary
from evenflow.config.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "CONFIGURATION.md"


def options(model=Settings, above=""):
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None:
            yield f"{above}{name}", field
        else:
            yield from options(inner, f"{above}{name}{'[]' if is_list(field) else ''}.")


def test_the_page_is_current():
    assert PAGE.read_text() == reference(), "run: .venv/bin/evenflow config reference > docs/CONFIGURATION.md"


@pytest.mark.parametrize(
    ("name", "field"), [*options()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_option_says_what_it_is_in_its_unit(name, field):
    assert field.description
    assert field.description.endswith(".")
    if name.endswith("_s"):
        assert "econds" in field.description
    if name.endswith("bytes"):
        assert "bytes" in field.description
    assert f"| `{name.rpartition('.')[2]}` |" in reference()
    assert field.description in reference()


def test_every_option_outside_of_lists_has_a_variable_of_its_own():
    variables = [option.variables[-1] for option in environment_options()]
    single = [name for name, _ in options() if "[]" not in name]
    assert len(set(variables)) == len(variables) == len(single) + 1  # and EVENFLOW_WORKERS
    assert "EVENFLOW_LIMITS_QUEUE_TIMEOUT_S" in variables
    assert "EVENFLOW_DATABASE" in variables


def test_the_example_of_the_page_is_right(tmp_path):
    example = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "example.yaml"
    path.write_text(example)
    settings = load(str(path), environ={"ADMIN_KEY": "sk-x"})
    assert len(settings.tenants) == len(yaml.safe_load(example)["tenants"])
    assert settings.warnings == ()


def test_the_summary_is_one_line():
    settings = load(None, environ={"EVENFLOW_WORKERS": "http://h:1"})
    assert summary(settings) == (
        "1 worker, 0 tenants, 1 tier (web 300, keys 10, anonymous 1), requests without a key are served"
    )
