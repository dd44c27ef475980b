"""Configurations of Alpa and LMDeploy, read unchanged (S4)."""

import gc
import json
import time

import pytest

from evenflow.config import ConfigErrors, Settings, TenantSettings, key_digest, load
from evenflow.config.older import from_alpa, from_lmdeploy, recognise

# The form that Alpa's launch_model_worker.py reads.
KEYS = """{
  "RECAPTCHA_SITE_KEY": "site-hunter2",
  "RECAPTCHA_SECRET_KEY": "secret-hunter2",
  "allowed_api_keys": [
    "sk-first",
    "sk-second",
    "a key: ${HOME} \\u00e9"
  ],
  "api_key_weights": {
    "sk-second": 30
  }
}
"""

# LMDeploy's own template, but for its line ends.
QOS = """{
  "enable_user_qos": 1,
  "user_groups": ["Platinum", "Gold", "Silver", "Bronze"],
  "user_group_map": {
    "Platinum": [{"id": "user_id0", "quota_pct": 100}, {"id": "default", "quota_pct": 0}],
    "Gold": [{"id": "user_id1", "quota_pct": 50}, {"id": "user_id2", "quota_pct": 50}],
    "Silver": [{"id": "user_id3", "quota_pct": 5},
               {"id": "default", "quota_pct": 95}],
    "Bronze": [{"id": "user_id4", "quota_pct": 30}, {"id": "user_id5", "quota_pct": 30},
               {"id": "user_id6", "quota_pct": 40}, {"id": "default", "quota_pct": 0}]
  }
}
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Settings of a text or value, read as old.json in the current folder."""
    monkeypatch.chdir(tmp_path)

    def of(text, environ=None, **overrides):
        (tmp_path / "old.json").write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        return load("old.json", environ=environ or {}, overrides=overrides)

    return of


@pytest.fixture
def told(read):
    """The problems of a text, one line each."""

    def of(text, environ=None):
        with pytest.raises(ConfigErrors) as caught:
            read(text, environ)
        return str(caught.value).splitlines()

    return of


@pytest.fixture
def warned(read):
    """The warnings of a text, but for those that every file without workers and with users has."""

    def of(text, environ=None):
        return [
            warning
            for warning in read(text, environ).warnings
            if not warning.startswith(("no worker", "auth.trust_user_id"))
        ]

    return of


def alpa(*keys, **weights):
    return {"allowed_api_keys": list(keys), **({"api_key_weights": weights} if weights else {})}


def lmdeploy(**groups):
    users = {
        group: [{"id": name, "quota_pct": quota} for name, quota in entries] for group, entries in groups.items()
    }
    return {"enable_user_qos": True, "user_groups": list(groups), "user_group_map": users}


def shares(settings):
    return {tenant.name: (tenant.group, tenant.weight) for tenant in settings.tenants}


# Which is which


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (json.loads(KEYS), "alpa"),
        (json.loads(QOS), "lmdeploy"),
        ({"allowed_api_keys": 1}, "alpa"),
        ({"RECAPTCHA_SECRET_KEY": "x"}, "alpa"),
        ({"enable_user_qos": False}, "lmdeploy"),
        ({"user_groups": []}, "lmdeploy"),
        ({"workers": []}, None),
        ({}, None),
        ([], None),
        ("allowed_api_keys", None),
        (None, None),
    ],
)
def test_a_form_is_recognised_by_its_fields(value, kind):
    assert recognise(value) == kind


def test_json_of_ours_is_read_as_ever(read):
    settings = read('{"tenants": [{"name": "user_groups", "keys": ["${K}"]}], "log": {"level": "debug"}}', {"K": "k"})
    assert settings.tenants[0].keys == (key_digest("k"),)
    assert settings.log.level == "debug"


def test_a_name_inside_is_no_form_by_itself(told):
    assert told('{"log": {"user_groups": 1}}')[0].startswith("old.json:1: log.user_groups: unknown option")


@pytest.mark.parametrize("text", ["\ufeff" + KEYS, KEYS.replace("  ", "\t"), KEYS.replace("\n", "\r\n"), " \n" + KEYS])
def test_marks_tabs_and_line_ends_are_no_matter(read, text):
    assert len(read(text).tenants) == 3


# Alpa


def test_each_key_is_a_tenant_of_the_group_of_keys(read):
    settings = read(KEYS)
    assert [(tenant.group, tenant.weight) for tenant in settings.tenants] == [
        ("keys", 10.0),  # S3
        ("keys", 30.0),
        ("keys", 10.0),
    ]
    keys = ["sk-first", "sk-second", "a key: ${HOME} \u00e9"]
    assert [tenant.keys for tenant in settings.tenants] == [(key_digest(key),) for key in keys]
    groups = [(group.name, group.weight) for group in settings.scheduling.tiers[0].groups]
    assert groups == [("web", 300), ("keys", 10), ("anonymous", 1)]  # S9
    assert settings.auth.anonymous is True
    assert settings.auth.trust_user_id is False


def test_the_name_of_a_key_stays_when_the_file_is_put_in_another_order(read):
    name = read(alpa("sk-a", "sk-b")).tenants[1].name
    assert name == f"key-{key_digest('sk-b').hex()[:12]}"
    assert read(alpa("sk-b", "sk-c", "sk-a")).tenants[0].name == name


def test_no_key_and_no_captcha_secret_is_shown(read, told):
    settings = read(KEYS)
    shown = [repr(settings), *settings.warnings]
    wrong = KEYS.replace("30", '"30"').replace('"sk-first"', "1")
    wrong = wrong.replace('"sk-second":', '"sk-second": 1, "sk-second":')
    shown += told(wrong)
    assert len(shown) > 5
    assert not [text for text in shown if "hunter2" in text or "sk-" in text]


def test_whether_requests_without_a_key_are_served_can_be_set_and_is_told(read, warned):
    (warning,) = warned(alpa("k"))
    assert warning.startswith("old.json: requests without a key are served too")
    assert "EVENFLOW_AUTH_ANONYMOUS=false" in warning
    for value in ("true", "false"):
        environ = {"EVENFLOW_AUTH_ANONYMOUS": value}
        assert warned(alpa("k"), environ) == []
        assert read(alpa("k"), environ).auth.anonymous is (value == "true")


def test_workers_and_options_come_by_flags_and_the_environment(read):
    settings = read(KEYS, {"EVENFLOW_SCHEDULING_COST": "sequences"}, workers=["http://h:1"])
    assert settings.workers[0].url == "http://h:1"
    assert settings.scheduling.cost == "sequences"


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        ("0", "must be at least 0.000001, is 0"),  # crashed Alpa at the first request of the key
        ("-1", "must be at least 0.000001, is -1"),
        ("Infinity", "must be a finite number, is inf"),
        ("-Infinity", "must be a finite number, is -inf"),
        ("NaN", "must be a finite number, is nan"),
        ("1e999", "must be a finite number, is inf"),
        ('"10"', "must be a number; take the quotes off"),
        ('"many"', "must be a number, is text"),
        ("1e-300", "must be at least 0.000001, is "),
        ("1e300", "must be at most 1000000, is "),
        ("9" * 5000, "must be a finite number, is inf"),
        ("true", "must be a number, is true"),
        ("null", "must be a number, is empty"),
        ("[1]", "must be a number, is a list"),
    ],
)
def test_a_weight_that_is_none_is_told_with_its_line(told, weight, words):  # S3
    (problem,) = told(KEYS.replace("30", weight))
    assert problem.startswith(f"old.json:10: api_key_weights (entry 1): {words}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"api_key_weights": {}}', "old.json: allowed_api_keys: is required: the keys that may call"),
        ('{\n"allowed_api_keys": null}', "old.json:2: allowed_api_keys: must be a list: the keys that may call"),
        ('{"allowed_api_keys":\n[1]}', "old.json:2: allowed_api_keys[0]: must be text; put it in quotes"),
        ('{"allowed_api_keys": ["a",\n""]}', "old.json:2: allowed_api_keys[1]: must not be empty"),
        (
            '{"allowed_api_keys": ["a"],\n"api_key_weights": [30]}',
            'old.json:2: api_key_weights: must be a mapping of keys to weights, such as {"KEY": 30}',
        ),
        (
            '{"allowed_api_keys": ["a"], "api_key_weights": {"a": 1,\n"a": 2}}',
            "old.json:2: api_key_weights (entry 1): is given twice, first in line 1",
        ),
        (
            '{"allowed_api_keys": ["a"],\n"allowed_api_keys": ["b"]}',
            "old.json:2: allowed_api_keys: is given twice, first in line 1",
        ),
        (
            '{"allowed_api_keys": ["a"],\n"workers": []}',
            "old.json:2: workers: is an option of Evenflow, but this is a keys file of Alpa; print its equivalent by "
            "`evenflow import alpa` and add the option to that",
        ),
        ('{"allowed_api_keys": ["a"]\n"b": 1}', "old.json:2: is not JSON here: expecting ',' delimiter (column 1)"),
        ('{"allowed_api_keys": ["\\ud800"]}', "old.json: holds half of a surrogate pair"),
    ],
)
def test_what_is_wrong_with_a_keys_file_is_told_with_its_line(told, text, problem):
    (line,) = told(text)
    assert line.startswith(problem)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"allowed_api_keys": ["sk-a",\n"sk-a"]}',
            "old.json:2: allowed_api_keys[1]: is given before (allowed_api_keys[0]); keep one of each",
        ),
        (
            '{"allowed_api_keys": ["sk-a", "sk-b",\n"sk-b", "sk-a", "sk-b"]}',
            "old.json:2: allowed_api_keys[2]: is given before (allowed_api_keys[1]), and so are 2 others; keep one",
        ),
        (
            '{"allowed_api_keys": ["a"], "api_key_weights": {"a": 1,\n"b": 0}}',
            "old.json:2: api_key_weights (entry 2): is the weight of a key that is not in allowed_api_keys",
        ),
        (
            '{"allowed_api_keys": ["a"], "api_key_weights":\n{"b": 1, "c": 2}}',
            "old.json:2: api_key_weights (entry 1): is the weight of 2 keys that are not in allowed_api_keys",
        ),
        (
            '{"allowed_api_keys": ["a"],\n"allowed_keys": 1}',
            "old.json:2: allowed_keys: is not read: a keys file of Alpa has no such field, did you mean "
            "'allowed_api_keys'?",
        ),
        ('{"allowed_api_keys": ["a"],\n"sk-x": 1}', "old.json:2: sk-…: is not read"),
        (
            '{"allowed_api_keys": ["a"],\n"RECAPTCHA_SECRET_KEY": 1}',
            "old.json:2: RECAPTCHA_SECRET_KEY: is not used: captchas are not verified here",
        ),
    ],
)
def test_what_has_no_effect_in_a_keys_file_is_a_warning(warned, text, words):
    (warning,) = warned(text, {"EVENFLOW_AUTH_ANONYMOUS": "true"})
    assert warning.startswith(words)


def test_every_problem_of_a_keys_file_is_told_at_once(told):  # S65
    problems = told(
        '{"allowed_api_keys": [\n1,\n"a",\n"b"],\n"api_key_weights": {\n"a": 0,\n"b": "1"}}', {"EVENFLOW_LIMITS_N": "x"}
    )
    assert [problem.split(": ")[0] for problem in problems] == ["environment", "old.json:2", "old.json:6", "old.json:7"]


def test_a_field_that_is_given_twice_hides_nothing(told):
    text = '{"api_key_weights": {"a": 1,\n"a": 2}, "allowed_api_keys": ["a"],\n"api_key_weights": {}}'
    assert told(text) == [
        "old.json:2: api_key_weights: is given twice, first in line 1",
        "old.json:3: api_key_weights: is given twice, first in line 1",
    ]


def test_names_of_keys_grow_until_they_differ(monkeypatch):
    monkeypatch.setattr("evenflow.config.older._DIGITS", 1)
    names = [tenant["name"] for tenant in from_alpa(alpa(*map(str, range(100)))).options["tenants"]]
    assert len(set(names)) == 100
    assert len(names[0]) == len("key-") + 1


def test_keys_can_be_kept_plain_where_they_stay_the_same():
    keys = ["sk-1", "a key", "\u00e9", "sha256:x"]
    tenants = from_alpa(alpa(*keys), plain_keys=True).options["tenants"]
    written = [tenant["keys"][0] for tenant in tenants]
    assert written[0] == "sk-1"
    assert written[1:] == [f"sha256:{key_digest(key).hex()}" for key in keys[1:]]


# LMDeploy


def test_groups_are_strict_tiers_and_quotas_are_weights(read):
    settings = read(QOS)
    tiers = [(tier.name, tier.min_share, [group.name for group in tier.groups]) for tier in settings.scheduling.tiers]
    assert tiers == [(name, 0, [name]) for name in ("Platinum", "Gold", "Silver", "Bronze")]
    assert shares(settings) == {
        "user_id0": ("Platinum", 100),
        "user_id1": ("Gold", 50),
        "user_id2": ("Gold", 50),
        "user_id3": ("Silver", 5),
        # Where LMDeploy puts users that are not listed: the third group.
        "default": ("Silver", 95),
        "user_id4": ("Bronze", 30),
        "user_id5": ("Bronze", 30),
        "user_id6": ("Bronze", 40),
    }
    assert (settings.auth.anonymous, settings.auth.trust_user_id) == (True, True)
    assert settings.auth.default_user == "default"  # S20


def test_the_order_of_tiers_is_that_of_the_groups_and_not_of_the_map(read):
    value = lmdeploy(a=[("x", 100)], b=[("y", 100)])
    value["user_groups"].reverse()
    assert [tier.name for tier in read(value).scheduling.tiers] == ["b", "a"]


def test_anyone_may_claim_any_user_and_that_is_told_at_start(read):
    warnings = [warning for warning in read(QOS).warnings if "trust_user_id" in warning]
    assert len(warnings) == 1
    assert "anyone who reaches the gateway can claim any user_id" in warnings[0]
    assert "keys" in warnings[0]
    assert not [warning for warning in read(QOS).warnings if "has no keys" in warning]


def test_quota_0_is_the_background(read):  # S19
    settings = read(lmdeploy(g=[("a", 100), ("b", 0), ("c", 0.0), ("d", -0.0), ("default", 0)]))
    assert [(tenant.weight, tenant.background) for tenant in settings.tenants] == [(100, False), *4 * [(0, True)]]


def test_quotas_may_be_fractions(read, warned):
    value = lmdeploy(g=[("a", 33.3), ("b", 33.3), ("default", 33.4)])
    assert [tenant.weight for tenant in read(value).tenants] == [33.3, 33.3, 33.4]
    assert warned(value) == []


@pytest.mark.parametrize("groups", ["a", "ab", "abc", "abcd"])
@pytest.mark.parametrize("has_default", [True, False])
def test_users_that_are_not_listed_share_one_bucket_of_one_group(read, groups, has_default):  # S20
    entries = [("default", 20)] if has_default else []
    value = lmdeploy(**{group: [(f"user-{group}", 80), *entries] for group in groups})
    settings = read(value)
    # LMDeploy takes the third group, and failed where there was none, or no entry in it.
    group = groups[2] if len(groups) > 2 else groups[-1]
    assert shares(settings)["default"] == (group, 20 if has_default else 0)
    assert len(settings.tenants) == len(groups) + 1


def test_the_third_group_is_that_of_the_map(read):
    value = lmdeploy(a=[], b=[], c=[("default", 100)])
    value["user_groups"] = ["c", "b", "a"]
    assert shares(read(value)) == {"default": ("c", 100)}


def test_a_default_group_without_a_default_entry_is_told(warned):
    (warning,) = warned(lmdeploy(a=[("x", 100)]))
    assert warning.startswith("old.json:1: user_group_map.a: has no entry 'default', so users that are not listed")


def test_a_default_entry_that_nobody_reaches_is_told_when_it_had_a_quota(warned):
    (warning,) = warned(lmdeploy(a=[("x", 40), ("default", 60)], b=[("default", 100)]))
    assert warning.startswith("old.json:1: user_group_map.a[1]: has no effect: users that are not listed are in")
    assert "'b'" in warning
    assert warned(lmdeploy(a=[("x", 100), ("default", 0)], b=[("default", 100)])) == []


@pytest.mark.parametrize("enabled", ["false", "0", None])
def test_a_file_that_is_switched_off_means_nothing(read, warned, enabled):
    text = QOS.replace('"enable_user_qos": 1,', f'"enable_user_qos": {enabled},' if enabled else "")
    settings = read(text.replace("30", '"wrong"'))
    assert settings.tenants == ()
    assert settings.auth.anonymous is True
    assert settings.auth.trust_user_id is False
    assert settings.scheduling == Settings().scheduling
    (warning,) = warned(text)
    assert "all requests are equal, as in LMDeploy; set it to true" in warning


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        ("-1", "must be a number from 0 to 100, is -1"),
        ("-1e-9", "must be a number from 0 to 100, is -1e-09"),
        ("101", "must be a number from 0 to 100, is 101"),
        ("Infinity", "must be a number from 0 to 100, is inf"),
        ("NaN", "must be a number from 0 to 100, is nan"),
        ("9" * 3000, "must be a number from 0 to 100"),
        ('"30"', "must be a number from 0 to 100, is text"),
        ("true", "must be a number from 0 to 100"),
        ("null", "must be a number from 0 to 100"),
        ("[]", "must be a number from 0 to 100"),
        ("1e-300", "must be at least 0.000001, is "),
    ],
)
def test_a_quota_that_is_none_is_told_with_its_line(told, quota, words):
    (problem,) = told(QOS.replace('"quota_pct": 5}', f'"quota_pct": {quota}}}'))
    assert problem.startswith(f"old.json:7: user_group_map.Silver[0].quota_pct: {words}")


@pytest.mark.parametrize(
    ("was", "becomes", "problem"),
    [
        (": 1,", ': "yes",', "old.json:2: enable_user_qos: must be true or false"),
        (": 1,", ": 2,", "old.json:2: enable_user_qos: must be true or false"),
        ('"quota_pct": 50}]', '"quota_pct": 60}]', "old.json:6: user_group_map.Gold: its quotas add up to 110 per"),
        (
            '"user_id2"',
            '"user_id0"',
            "old.json:6: user_group_map.Gold[1].id: is given before (user_group_map.Platinum[0]); a user is in one",
        ),
        (
            '"user_id6"',
            '"user_id5"',
            "old.json:10: user_group_map.Bronze[2].id: is given before (user_group_map.Bronze[1])",
        ),
        (
            '"user_id1"',
            '"default", "quota_pct": 0}, {"id": "default"',
            "old.json:6: user_group_map.Gold[1].id: is given before in this group; give 'default' one quota",
        ),
        (
            '"user_id3"',
            '"default"',
            "old.json:8: user_group_map.Silver[1].id: is given before",
        ),
        (
            '"Silver", ',
            "",
            "old.json:7: user_group_map.Silver: is not in user_groups, so it has no place in their order",
        ),
        (
            '"Bronze"]',
            '"Bronze", "Iron"]',
            "old.json:3: user_groups[4]: 'Iron' is not in user_group_map; add it there",
        ),
        ('"Bronze"]', '"Bronze", "Gold"]', "old.json:3: user_groups[4]: is given before (user_groups[1]); remove one"),
        ('"Bronze"]', '"Bronze", 5]', "old.json:3: user_groups[4]: must be text; put it in quotes"),
        ('"id": "user_id1"', '"id": 7', "old.json:6: user_group_map.Gold[0].id: must be text; put it in quotes"),
        ('"id": "user_id1", ', "", "old.json:6: user_group_map.Gold[0].id: is required"),
        ('"user_id1"', '""', "old.json:6: user_group_map.Gold[0].id: must have 1 to 128 characters"),
        ('"user_id1"', '" x"', "old.json:6: user_group_map.Gold[0].id: must have 1 to 128 characters"),
        (
            '"user_id1"',
            '"anonymous"',
            "old.json:6: user_group_map.Gold[0].id: is what requests without a key are called",
        ),
        (
            '"user_id0", "quota_pct": 100}',
            '"user_id0"}',
            "old.json:5: user_group_map.Platinum[0].quota_pct: is required: the user's part of its group in per cent",
        ),
        ('{"id": "default", "quota_pct": 0}]\n', '"x"]\n', "old.json:10: user_group_map.Bronze[3]: must be a user"),
        ("\n}\n", ',\n"limits": {}}\n', "old.json:12: limits: is an option of Evenflow, but this is a QoS file"),
        (
            '"Gold": [',
            '"Gold": [], "Gold": [',
            "old.json:6: user_group_map.Gold: is given twice, first in line 6",
        ),
    ],
)
def test_what_is_wrong_with_a_qos_file_is_told_with_its_line(told, was, becomes, problem):
    assert was in QOS
    problems = told(QOS.replace(was, becomes, 1))
    (line,) = problems
    assert line.startswith(problem)


def test_a_list_of_groups_that_is_none_makes_every_group_a_mistake(told):
    problems = told(QOS.replace('"user_groups": [', '"user_groups": "x", "user_grups": ['))
    assert problems[0].startswith("old.json:3: user_groups: must be a list")
    assert len(problems) == 5


def test_groups_that_do_not_match_are_told_with_the_nearest_name(told):
    assert told(QOS.replace('"Gold": [', '"Gld": [')) == [
        "old.json:3: user_groups[1]: 'Gold' is not in user_group_map, did you mean 'Gld'?",
        "old.json:6: user_group_map.Gld: is not in user_groups, so it has no place in their order, did you mean "
        "'Gold'?",
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"enable_user_qos": True}, "user_groups: is required: the groups in the order of their priority"),
        ({"enable_user_qos": True, "user_groups": []}, "user_group_map: is required: each group with the list"),
        (
            {"enable_user_qos": True, "user_groups": [], "user_group_map": []},
            "user_group_map: must be a mapping: each group with the list of its users",
        ),
        (
            {"enable_user_qos": True, "user_groups": [], "user_group_map": {}},
            "user_groups: must not be empty; set enable_user_qos to false",
        ),
        (
            {"enable_user_qos": True, "user_groups": ["a"], "user_group_map": {"a": {}}},
            "user_group_map.a: must be a list of users, such as",
        ),
        (
            {"enable_user_qos": True, "user_groups": ["a\nb"], "user_group_map": {"a\nb": []}},
            "user_groups[0]: must have 1 to 128 characters",
        ),
    ],
)
def test_shapes_that_are_not_lmdeploys_are_told(told, value, problem):
    assert any(line.partition(": ")[2].startswith(problem) for line in told(value)), told(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            lmdeploy(g=[("a", 50), ("default", 40)]),
            "user_group_map.g: its quotas add up to 90 per cent, not 100; shares go by their ratio",
        ),
        (
            lmdeploy(g=[("a", 0), ("default", 0)]),
            "user_group_map.g: has no quota but 0, so its users are served in the order of their requests",
        ),
        ({**lmdeploy(g=[("default", 100)]), "user_grops": []}, "user_grops: is not read: a QoS file of LMDeploy"),
    ],
)
def test_what_is_odd_in_a_qos_file_is_a_warning(warned, value, words):
    (warning,) = warned(value)
    assert warning.startswith(f"old.json:1: {words}")


def test_an_unknown_field_of_users_is_told_once(warned):
    value = lmdeploy(g=[("a", 50), ("default", 50)])
    for entry in value["user_group_map"]["g"]:
        entry["quota"] = 5
    (warning,) = warned(value)
    assert warning == (
        "old.json:1: user_group_map.g[0].quota: is not read: a user has id and quota_pct, did you mean 'quota_pct'?"
    )


def test_a_bad_default_group_is_not_told_twice(told):
    value = lmdeploy(a=[("x", 100)])
    value["user_groups"] = []
    assert told(value) == [
        "old.json:1: user_group_map.a: is not in user_groups, so it has no place in their order; add it there"
    ]


# Both


def test_a_reload_of_a_file_gone_bad_is_an_error_and_nothing_else(read, told):
    read(QOS)
    assert told(QOS[:-40])[0].startswith("old.json:")


def test_options_are_what_a_user_would_have_typed():
    assert from_lmdeploy(lmdeploy(g=[("a", 100), ("default", 0)])).options == {
        "auth": {"anonymous": True, "trust_user_id": True, "default_user": "default"},
        "scheduling": {"tiers": ({"name": "g", "groups": ({"name": "g"},)},)},
        "tenants": (
            {"name": "a", "group": "g", "weight": 100},
            {"name": "default", "group": "g", "background": True},
        ),
    }


def big_keys():
    keys = [f"sk-{n}" for n in range(100_000)]
    return {"allowed_api_keys": keys, "api_key_weights": {key: n % 50 + 1 for n, key in enumerate(keys) if n % 2}}


def big_qos():
    groups = {f"g{n}": [(f"u{n}-{m}", 0.004) for m in range(25_000)] for n in range(3)}
    return lmdeploy(**groups, last=[("default", 100)])


@pytest.mark.parametrize(("value", "tenants"), [(big_keys(), 100_000), (big_qos(), 75_001)])
def test_large_files_load_in_about_a_second(read, value, tenants):
    text = json.dumps(value)
    started = time.process_time()
    settings = read(text)
    took_s = time.process_time() - started
    assert len(settings.tenants) == tenants
    assert gc.isenabled()
    # About 1 s on an idle machine; the bound is for a busy one, and far below what a scan for each would take.
    assert took_s < 5


def test_the_background_is_the_only_way_to_weight_0():
    assert TenantSettings(name="a", background=True).weight == 0
    with pytest.raises(ValueError, match="weight"):
        TenantSettings(name="a", weight=0)
