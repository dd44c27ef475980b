"""YAML text to plain values and their places."""

import math

import pytest

from evenflow.config.document import (
    Document,
    Place,
    Written,
    dotted,
    parse_document,
    plain_value,
    read_document,
)


def parsed(text, environ=None):
    return parse_document(Document("f.yaml"), text, environ or {})


def told(text, environ=None):
    return [str(problem) for problem in parsed(text, environ).problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-3", -3),
        ("1e3", 1000.0),
        ("1e-300", 1e-300),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("'10'", "10"),
        ('"true"', "true"),
    ],
)
def test_types_are_those_of_yaml_1_2(text, value):
    got = parsed(f"a: {text}").values["a"]
    assert got == value
    assert type(got) is type(value)
    if not text.startswith(("'", '"')):
        assert plain_value(text) == value


def test_nan_is_a_number():
    assert math.isnan(parsed("a: .NaN").values["a"])


def test_an_integer_beyond_every_limit_is_no_crash():
    assert parsed("a: " + "9" * 5000).values["a"] == math.inf


def test_lists_are_tuples_and_places_are_lines():
    document = parsed("a:\n  - b: 1\n    c:\n      2\n  - d\ne: {f: 1,\n g: 2}\n")
    assert document.values == {"a": ({"b": 1, "c": 2}, "d"), "e": {"f": 1, "g": 2}}
    lines = {dotted(location): place.line for location, place in document.places.items()}
    assert lines == {
        "": 1,
        "a": 1,
        "a[0]": 2,
        "a[0].b": 2,
        "a[0].c": 3,
        "a[1]": 5,
        "e": 6,
        "e.f": 6,
        "e.g": 7,
    }
    assert document.places["a",] == Place("f.yaml", 1)


def test_references_are_taken_from_the_environment():
    document = parsed('a: ${X}\nb: "${X}"\nc: "x-${X}-$${X}-$X"\n', {"X": "12"})
    assert document.values == {"a": "12", "b": "12", "c": "x-12-${X}-$X"}
    assert isinstance(document.values["a"], Written)
    assert not isinstance(document.values["b"], Written)
    assert document.referenced == {"X"}
    assert not document.problems


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 0, "is empty"),
        ("# only a comment\n", 0, "is empty"),
        ("- a\n", 1, "must be a mapping"),
        ("\njust text\n", 2, "must be a mapping"),
        ("a: 1\n\tb: 2\n", 2, "a tab is used to indent"),
        ("a:\n  - 1\n \t - 2\n", 3, "a tab is used to indent"),
        ("a: [1\nb: 2\n", 2, "is not YAML here"),
        ("a: 1\n--- \nb: 2\n", 2, "is not YAML here"),
        ("a: {b: ${X}}\n", 1, 'write references in quotes: "${NAME}"'),
        ("a: 1\nb: 2\na: 3\n", 3, "a: is given twice, first in line 1"),
        ("w:\n  - u: 1\n    u: 2\n", 3, "w[0].u: is given twice, first in line 2"),
        ("? [a]\n: 1\n", 1, "must be text"),
        ("a: !!python/object:os.system x\n", 1, "has the tag"),
        ("a:\n  b: ${NOT_SET}\n", 2, "a.b: the environment variable NOT_SET is not set"),
        ("a: '${not a name}'\n", 1, "no variable name"),
        ("a: &a [*a]\n", 0, "nested too deeply"),
        ("a: \x00\n", 0, "is not YAML"),
    ],
)
def test_what_is_wrong_with_a_text_names_its_line(text, line, words):
    problems = told(text, {"X": "1"})
    assert len(problems) == 1
    assert problems[0].startswith(f"f.yaml:{line}: " if line else "f.yaml: ")
    assert words in problems[0]


def test_every_tab_is_told():
    assert len(told("a:\n\tb: 1\n\tc: 2\n")) == 2


def test_a_tab_inside_a_value_or_a_comment_is_allowed():
    assert not told("a: 'x\ty'\t# a\tcomment\nb: |\n  1\n  \t2\n")


def test_the_nearest_variable_is_named_but_not_its_value():
    (problem,) = told("a: ${TOKN}\n", {"TOKEN": "hunter2"})
    assert "did you mean TOKEN?" in problem
    assert "hunter2" not in problem


def test_aliases_that_multiply_end_at_a_bound():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12)]
    assert "too large" in told("\n".join(lines))[0]


def test_deep_nesting_is_told():
    assert "nested too deeply" in told("a: " + "[" * 60 + "]" * 60)[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"a: \xff\xfe\n", "is not UTF-8"), (None, "there is no such file")],
)
def test_files_that_cannot_be_read(tmp_path, content, words):
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    (problem,) = read_document(str(path), {}).problems
    assert str(problem).startswith(f"{path}: {words}")


def test_a_folder_is_no_file(tmp_path):
    (problem,) = read_document(str(tmp_path), {}).problems
    assert "cannot be read" in str(problem)


def test_a_byte_order_mark_is_no_part_of_the_first_option(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(str(path), {}).values == {"a": 1}
