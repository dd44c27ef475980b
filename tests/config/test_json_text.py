"""JSON text to values, with the line of each."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.config.json_text import NotJson, Twice, read_json

TEXT = """{
  "a": [1,
    {"b": "x, {[\\"}", "c": []},
  [], 2],
  "d": {}, "e":
     null
}"""


def test_values_come_with_the_line_of_each_and_members_with_that_of_their_name():
    parsed = read_json(TEXT)
    assert parsed.value == json.loads(TEXT)
    assert parsed.lines == {
        (): 1,
        ("a",): 2,
        ("a", 0): 2,
        ("a", 1): 3,
        ("a", 1, "b"): 3,
        ("a", 1, "c"): 3,
        ("a", 2): 4,
        ("a", 3): 4,
        ("d",): 5,
        ("e",): 5,
    }
    assert parsed.twice == []


def places(value, here=()):
    yield here
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*here, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*here, index))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, 0, 2]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_value_of_any_text_has_a_line(value, indent, is_ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    parsed = read_json(text)
    assert parsed.value == value
    assert set(parsed.lines) == set(places(value))
    assert all(1 <= line <= text.count("\n") + 1 for line in parsed.lines.values())


def test_a_name_that_is_given_twice_is_found_with_both_lines():
    parsed = read_json('{"a": {"x": 1,\n"x": 2}, "b": 1,\n"b": [{"b": 1}]}')
    assert parsed.twice == [Twice(("a", "x"), 2, 1), Twice(("b",), 3, 2)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"a": [1\n2]}', 2, "is not JSON here"),
        ("", 1, "is not JSON here: expecting value (column 1)"),
        ("[" * 100_000, 0, "is nested too deeply"),
        ('{"a": "\\ud83d"}', 0, "half of a surrogate pair"),
        ('{"\\udc00": 1}', 0, "half of a surrogate pair"),
    ],
)
def test_what_is_no_json_is_told(text, line, words):
    with pytest.raises(NotJson) as caught:
        read_json(text)
    assert caught.value.line == line
    assert words in caught.value.message


def test_a_comma_too_many_is_told():
    with pytest.raises(NotJson, match="is not JSON here"):  # its line depends on the version of Python
        read_json('{"a": 1,\n}')


def test_odd_texts_that_are_json():
    assert read_json('\ufeff{"a": "\\ud83d\\ude00"}').value == {"a": "\U0001f600"}
    assert read_json("9" * 5000).value == float("inf")
    assert read_json("1e999").value == float("inf")
