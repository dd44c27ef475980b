"""`evenflow import`: what is printed means what the file means."""

import json
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow import cli
from evenflow.config import ConfigErrors, key_digest, load
from evenflow.config.importing import equivalent

KEYS = {"allowed_api_keys": ["sk-a", "sk-b"], "api_key_weights": {"sk-b": 2.5, "sk-old": 1}}
QOS = {
    "enable_user_qos": True,
    "user_groups": ["Gold", "Iron"],
    "user_group_map": {
        "Gold": [{"id": "alice", "quota_pct": 70}, {"id": "bob", "quota_pct": 30}],
        "Iron": [{"id": "carol", "quota_pct": 100}, {"id": "default", "quota_pct": 0}],
    },
}


def run(capsys, *arguments):
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def written(tmp_path):
    """The path of a file that holds a text or a value."""

    def of(content, name="old.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1), encoding="utf-8")
        return str(path)

    return of


def same(path, text, folder, environ=None):
    """Whether a file and its printed equivalent load to the same settings."""
    printed = folder / "printed.yaml"
    printed.write_text(text, encoding="utf-8")
    environ = environ or {}
    return load(str(printed), environ=environ).model_dump() == load(path, environ=environ).model_dump()


def test_a_keys_file(capsys, written, tmp_path):
    path = written(KEYS)
    status, out, err = run(capsys, "import", "alpa", path)
    assert status == 0
    assert same(path, out, tmp_path)
    tenants = yaml.safe_load(out)["tenants"]
    assert [tenant["keys"] for tenant in tenants] == [[f"sha256:{key_digest(key).hex()}"] for key in ("sk-a", "sk-b")]
    assert "# allowed_api_keys[1], line 4\n" in out
    assert "sk-" not in out
    assert "sk-" not in err
    assert [line.startswith(f"evenflow: warning: {path}") for line in err.splitlines()] == [True, True]


def test_keys_are_plain_when_asked_for(capsys, written, tmp_path):
    path = written(KEYS)
    status, out, _ = run(capsys, "import", "alpa", "--plain-keys", path)
    assert status == 0
    assert [tenant["keys"] for tenant in yaml.safe_load(out)["tenants"]] == [["sk-a"], ["sk-b"]]
    assert same(path, out, tmp_path)


def test_a_qos_file(capsys, written, tmp_path):
    path = written(QOS)
    status, out, err = run(capsys, "import", "lmdeploy", path)
    assert (status, err) == (0, "")
    assert same(path, out, tmp_path)
    assert yaml.safe_load(out)["tenants"] == [
        {"name": "alice", "group": "Gold", "weight": 70},
        {"name": "bob", "group": "Gold", "weight": 30},
        {"name": "carol", "group": "Iron", "weight": 100},
        {"name": "default", "group": "Iron", "background": True},
    ]
    assert "# user_group_map.Gold[1].id, line 14\n" in out
    assert "# Anyone who reaches the gateway can claim any user_id." in out


def test_a_qos_file_that_is_switched_off(capsys, written, tmp_path):
    path = written({**QOS, "enable_user_qos": False})
    status, out, err = run(capsys, "import", "lmdeploy", path)
    assert status == 0
    assert "is off" in err
    assert same(path, out, tmp_path)


def test_the_environment_does_not_matter(capsys, written, monkeypatch):
    path = written(KEYS)
    before = run(capsys, "import", "alpa", path)
    monkeypatch.setenv("EVENFLOW_AUTH_ANONYMOUS", "false")
    monkeypatch.setenv("EVENFLOW_LIMITS_N", "many")
    assert run(capsys, "import", "alpa", path) == before


@pytest.mark.parametrize(
    ("service", "content", "words"),
    [
        ("alpa", {**KEYS, "api_key_weights": {"sk-a": 0}}, ":7: api_key_weights (entry 1): must be at least"),
        ("lmdeploy", {**QOS, "user_groups": ["Gold"]}, ":17: user_group_map.Iron: is not in user_groups"),
        ("lmdeploy", KEYS, "is a keys file of Alpa; run `evenflow import alpa "),
        ("alpa", QOS, "is a QoS file of LMDeploy; run `evenflow import lmdeploy "),
        ("alpa", {"workers": []}, "is not a keys file of Alpa, which has a field allowed_api_keys"),
        ("lmdeploy", [1], "is not a QoS file of LMDeploy, which has a field user_group_map"),
        ("alpa", "tenants: []\n", ":1: is not JSON here: "),
    ],
)
def test_problems_go_to_the_standard_error_and_nothing_is_printed(capsys, written, service, content, words):
    status, out, err = run(capsys, "import", service, written(content))
    assert (status, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1


def test_every_problem_is_told(capsys, written):
    content = {"allowed_api_keys": ["sk-a", 1, ""], "api_key_weights": {"sk-a": "10"}}
    status, _, err = run(capsys, "import", "alpa", written(content))
    assert status == 1
    assert err.count("\n") == 3
    assert "sk-" not in err


def test_a_file_that_is_not_there(capsys, tmp_path):
    status, out, err = run(capsys, "import", "alpa", str(tmp_path / "none.json"))
    assert (status, out) == (1, "")
    assert "there is no such file" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: SERVICE"),
        (["alpha", "x"], "invalid choice: 'alpha'"),
        (["alpa"], "the following arguments are required: KEYS_FILE"),
        (["lmdeploy"], "the following arguments are required: QOS_FILE"),
        (["lmdeploy", "--plain-keys", "x"], "--plain-keys"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(capsys, arguments, words):
    status, out, err = run(capsys, "import", *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_serve_takes_the_file_itself(capsys, written, tmp_path):
    path = written(QOS)
    status, out, _ = run(capsys, "config", "check", path)
    assert status == 0
    assert "4 tenants, 2 tiers (Gold 10, Iron 10)" in out


# Random files

# Texts that have tripped readers of YAML: its own words, references, signs that end lines, signs beyond 16 bits.
# fmt: off
ODD = st.sampled_from([
    "no", "null", "1", "1e3", "0x1", "${A}", "$${A}", "$$${A}", "${a${b}", "#", "a #b", "a: b", "a:", "- a", "-", "'",
    '"', "\\", "\\U0041", "{", "]", "&a", "*a", "!t", "%", "@", "`", "~", "default", " a", "a\u2028b", "a\u0085b",
    "\U0001f600", "\ufeff", "\u200b",
])
# fmt: on
TEXT = ODD | st.text(min_size=1, max_size=5)
LABEL = ODD.filter(lambda text: text != " a") | st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=5
)
WEIGHT = st.integers(1, 10**6) | st.floats(1e-6, 1e6)


@st.composite
def keys_files(draw):
    keys = draw(st.lists(TEXT, max_size=6))
    weights = draw(st.dictionaries(st.sampled_from(keys), WEIGHT)) if keys else {}
    return {"allowed_api_keys": keys, "api_key_weights": weights}


@st.composite
def qos_files(draw):
    groups = draw(st.lists(LABEL, min_size=1, max_size=4, unique=True))
    users = draw(st.lists(LABEL.filter(lambda name: name != "default"), max_size=8, unique=True))
    group_map = {group: [] for group in draw(st.permutations(groups))}
    for user in users:
        quota = draw(st.integers(0, 12) | st.floats(1e-6, 12))
        group_map[draw(st.sampled_from(groups))].append({"id": user, "quota_pct": quota})
    for group in groups:
        if draw(st.booleans()):
            group_map[group].append({"id": "default", "quota_pct": draw(st.integers(0, 4))})
    return {"enable_user_qos": True, "user_groups": groups, "user_group_map": group_map}


def printed_means_the_same(folder, value, kind, plain, indent, is_ascii):
    path = folder / "old.json"
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=is_ascii), encoding="utf-8")
    text, _ = equivalent(str(path), kind, plain_keys=plain)
    assert same(str(path), text, folder, {"A": "not this"})


@given(keys_files(), st.booleans(), st.sampled_from([None, 1]), st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_keys_file_means_what_is_printed(tmp_path_factory, value, plain, indent, is_ascii):
    printed_means_the_same(tmp_path_factory.getbasetemp(), value, "alpa", plain, indent, is_ascii)


@given(qos_files(), st.sampled_from([None, 1]), st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_qos_file_means_what_is_printed(tmp_path_factory, value, indent, is_ascii):
    printed_means_the_same(tmp_path_factory.getbasetemp(), value, "lmdeploy", False, indent, is_ascii)


JSON = st.recursive(
    st.sampled_from([None, True, 0, 1, -1, 50, 1e400, "10", "", "a", "default", 10**30]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "id", "quota_pct", "default"]), inner, max_size=3),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["allowed_api_keys", "api_key_weights", "enable_user_qos", "user_groups", "user_group_map", "auth", "other"]
)


@given(st.dictionaries(FIELDS, JSON, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_other_shape_loads_or_is_told(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "shape.json"
    path.write_text(json.dumps(value))
    with suppress(ConfigErrors):  # any other error is a defect
        assert load(str(path), environ={}).scheduling.tiers
