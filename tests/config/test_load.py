"""From what the user wrote to settings, or to every reason why not."""

import hashlib
import pickle

import pytest
from pydantic import ValidationError

from evenflow.config import ConfigErrors, Secret, Settings, TenantSettings, WorkerSettings, key_digest, load


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """Settings of a text, read as evenflow.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def of(text, environ=None, **overrides):
        (tmp_path / "evenflow.yaml").write_text(text)
        by_key = {name.replace("__", "."): value for name, value in overrides.items()}
        return load("evenflow.yaml", environ=environ or {}, overrides=by_key)

    return of


@pytest.fixture
def problems(configuration):
    """The problems of a text, one line each."""

    def of(text, environ=None, **overrides):
        with pytest.raises(ConfigErrors) as caught:
            configuration(text, environ, **overrides)
        return str(caught.value).splitlines()

    return of


def digest(text):
    return hashlib.sha256(text.encode()).digest()


# What is right


def test_nothing_written_is_every_default():
    settings = load(None, environ={})
    assert settings.model_dump() == Settings().model_dump()
    assert settings.listen.port == 8000
    assert settings.auth.anonymous is True
    groups = [(group.name, group.weight) for group in settings.scheduling.tiers[0].groups]
    assert groups == [("web", 300), ("keys", 10), ("anonymous", 1)]  # S9
    assert settings.limits.queue_timeout_s == 60
    assert settings.log.access == "-"


def test_the_documented_form_is_read_whole(configuration):
    settings = configuration(
        """
listen: {host: 0.0.0.0, port: 9000}
auth:
  anonymous: true
  admin_keys: [sk-admin]
  worker_token: secret
workers:
  - {url: "http://127.0.0.1:9001", models: [m], slots: 8, speed: 1.5, api_key: sk-w, aliases: {gpt-x: m}}
  - {url: "HTTPS://Engine.example.org/v1/", slots: auto}
scheduling:
  cost: sequences
  placement: round_robin
  tiers:
    - name: standard
      min_share: 0
      groups:
        - {name: web, weight: 300}
        - {name: keys, weight: 10}
        - {name: anonymous, weight: 1}
tenants:
  - {name: alice, group: keys, weight: 30, keys: [sk-alice],
     limits: {requests_per_minute: 600, tokens_per_minute: 100000, concurrency: 8, queued: 100}}
  - {name: bob, group: web, keys: ["${BOB}"]}
limits: {queued: 10000, queue_timeout_s: 60, body_bytes: 33554432, n: 128}
timeouts: {connect_s: 2, first_byte_s: 300, idle_s: 60, total_s: 600}
database: "sqlite:///evenflow.db"
log: {level: debug, access: off}
""",
        {"BOB": f"sha256:{digest('sk-bob').hex().upper()}"},
    )
    assert settings.auth.anonymous is True
    assert settings.auth.admin_keys == (digest("sk-admin"),)
    assert settings.auth.worker_token == digest("secret")
    first, second = settings.workers
    assert (first.url, first.name, first.models, first.slots, first.speed) == (
        "http://127.0.0.1:9001",
        "127.0.0.1:9001",
        ("m",),
        8,
        1.5,
    )
    assert first.api_key.reveal() == "sk-w"
    assert first.aliases == {"gpt-x": "m"}
    assert (second.url, second.name, second.models, second.slots) == (
        "https://engine.example.org",
        "engine.example.org:443",
        None,
        "auto",
    )
    alice, bob = settings.tenants
    assert alice.keys == (key_digest("sk-alice"),) == (key_digest(b"sk-alice"),)
    assert (alice.limits.requests_per_minute, alice.limits.concurrency, alice.limits.queued) == (600, 8, 100)
    assert bob.keys == (digest("sk-bob"),)
    assert (bob.group, bob.weight, bob.limits.concurrency) == ("web", 10.0, None)  # S3
    assert settings.log.access == "off"


@pytest.mark.parametrize(
    ("text", "anonymous"),
    [
        ("workers: []", True),
        ("tenants: [{name: a, keys: [k]}]", False),
        ("tenants: [{name: a, keys: [k]}]\nauth: {anonymous: true}", True),
        ("auth: {anonymous: false}", False),
        ("auth: {admin_keys: [x]}\ntenants: [{name: a, keys: [k]}]", False),
    ],
)
def test_callers_without_a_key_are_served_only_while_no_tenant_is_configured(configuration, text, anonymous):
    assert configuration(text).auth.anonymous is anonymous


def test_an_empty_group_or_list_is_the_same_as_none(configuration):
    assert configuration("limits:\nworkers:\ntenants:\nlisten: {port: 1}").limits == Settings().limits


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        Settings().limits.queued = 1


def test_settings_can_be_built_in_code():
    settings = Settings(
        workers=(WorkerSettings(url="http://h:1"),), tenants=(TenantSettings(name="a", keys=(digest("k"),)),)
    )
    assert settings.workers[0].name == "h:1"
    assert settings.workers[0].parts.port == 1
    assert settings.tenants[0].keys == (digest("k"),)
    assert settings.auth.anonymous is False


# Overlays


def test_flags_win_over_the_environment_and_that_over_the_file(configuration):
    text = "listen: {host: file, port: 1, drain_s: 5}"
    environ = {"EVENFLOW_LISTEN_HOST": "environment", "EVENFLOW_LISTEN_PORT": "2"}
    listen = configuration(text, environ, listen__port="3").listen
    assert (listen.host, listen.port, listen.drain_s) == ("environment", 3, 5)


def test_text_of_the_environment_is_read_as_the_option_needs_it():
    environ = {
        "EVENFLOW_AUTH_ANONYMOUS": "false",
        "EVENFLOW_AUTH_ADMIN_KEYS": "sk-1, sk-2",
        "EVENFLOW_AUTH_WORKER_TOKEN": "12345",
        "EVENFLOW_LISTEN_HOST": "10",
        "EVENFLOW_TIMEOUTS_CONNECT_S": "0.5",
        "EVENFLOW_LIMITS_QUEUED": "7",
        "EVENFLOW_LISTEN_CORS_ORIGINS": "https://a.example,https://b.example",
        "EVENFLOW_WORKERS": "http://h:1,http://h:2",
        "EVENFLOW_DATABASE": "",
    }
    settings = load(None, environ=environ)
    assert settings.auth.anonymous is False
    assert settings.auth.admin_keys == (digest("sk-1"), digest("sk-2"))
    assert settings.auth.worker_token == digest("12345")
    assert settings.listen.host == "10"
    assert settings.listen.cors_origins == ("https://a.example", "https://b.example")
    assert settings.timeouts.connect_s == 0.5
    assert settings.limits.queued == 7
    assert [worker.url for worker in settings.workers] == ["http://h:1", "http://h:2"]
    assert settings.database is None


def test_workers_of_flags_come_on_top_of_those_in_the_file(configuration):
    settings = configuration("workers: [{url: 'http://h:1'}]", workers=["http://h:2", "http://h:3"])
    assert [worker.name for worker in settings.workers] == ["h:1", "h:2", "h:3"]


def test_the_older_variables_of_heartbeats_hold_unless_ours_are_set():
    older = {"FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION": "30", "FASTCHAT_WORKER_HEART_BEAT_INTERVAL": "15"}
    fleet = load(None, environ=older).fleet
    assert (fleet.heartbeat_expiry_s, fleet.heartbeat_interval_s) == (30, 15)
    fleet = load(None, environ={**older, "EVENFLOW_FLEET_HEARTBEAT_EXPIRY_S": "40"}).fleet
    assert fleet.heartbeat_expiry_s == 40


def test_an_unquoted_reference_is_a_number_where_one_is_needed(configuration):
    settings = configuration(
        "listen:\n  port: ${PORT}\nauth:\n  worker_token: ${PORT}\n", {"PORT": "9", "EVENFLOW_CONFIG": "x"}
    )
    assert settings.listen.port == 9
    assert settings.auth.worker_token == digest("9")


def test_a_variable_that_sets_no_option_is_told(problems):
    told = problems("listen: {port: 1}", {"EVENFLOW_LISTEN_PROT": "2", "EVENFLOW_LIMITS_WHATEVER": "3"})
    assert told == [
        "environment: EVENFLOW_LIMITS_WHATEVER: sets no option; `evenflow config reference` lists them",
        "environment: EVENFLOW_LISTEN_PROT: sets no option, did you mean EVENFLOW_LISTEN_PORT?",
    ]


def test_variables_that_others_set_are_no_mistake(configuration):
    environ = {
        "EVENFLOW_PORT": "tcp://10.0.0.1:8000",
        "EVENFLOW_PORT_8000_TCP_ADDR": "10.0.0.1",
        "EVENFLOW_SERVICE_HOST": "10.0.0.1",
        "EVENFLOW_SERVICE_PORT": "8000",
        "EVENFLOW_LISTEN_TOKEN": "t",
        "HOME": "/",
    }
    configuration("auth: {worker_token: '${EVENFLOW_LISTEN_TOKEN}'}", environ)


def test_problems_of_the_environment_and_of_flags_name_what_was_set(problems):
    told = problems(
        "listen: {port: 1}", {"EVENFLOW_LIMITS_QUEUED": "many"}, listen__port="x", workers=["h:1"]
    )
    assert told == [
        "command line: --port (listen.port): must be a whole number, is text",
        "command line: --worker (workers[0].url): must start with http:// or https://, such as "
        "http://127.0.0.1:9001",
        "environment: EVENFLOW_LIMITS_QUEUED (limits.queued): must be a whole number, is text",
    ]


# What is wrong: one at a time


def worker(rest):
    return "workers: [{url: 'http://h:1', " + rest + "}]"


def tenant(rest):
    return "tenants: [{name: a, " + rest + "}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limts: {queued: 1}", "limts: unknown option, did you mean 'limits'?"),
        (worker("slotz: 8"), "workers[0].slotz: unknown option, did you mean 'slots'?"),
        (
            tenant("limits: {concurency: 8}"),
            "tenants[0].limits.concurency: unknown option, did you mean 'concurrency'?",
        ),
        ("listen: 8000", "listen: must be a mapping of options, is 8000"),
        ("listen: {port: '8000'}", "listen.port: must be a whole number; take the quotes off"),
        ("listen: {port: 80.5}", "listen.port: must be a whole number, is 80.5"),
        ("listen: {port: 65536}", "listen.port: must be at most 65535, is 65536"),
        ("listen: {port: true}", "listen.port: must be a whole number, is true"),
        ("listen: {port: }", "listen.port: must be a whole number, is empty"),
        ("listen: {host: 127}", "listen.host: must be text; put it in quotes"),
        ("listen: {host: ''}", "listen.host: must not be empty"),
        ("auth: {anonymous: yes}", "auth.anonymous: must be true or false, is text"),
        ("auth: {anonymous: 1}", "auth.anonymous: must be true or false, is 1"),
        ("auth: {admin_keys: sk-admin}", "auth.admin_keys: must be a list, is text"),
        ("workers: {url: x}", "workers: must be a list"),
        ("workers: ['http://h:1']", "workers[0]: must be a mapping of options, is text"),
        ("workers: [{slots: 1}]", "workers[0].url: is required"),
        (worker("models: []"), "workers[0].models: must not be empty; leave it out for its default"),
        (worker("models: m"), "workers[0].models: must be a list, is text"),
        (worker("slots: 0"), "workers[0].slots: must be a whole number from 1 to 100,000, or auto"),
        (worker("slots: Auto"), "workers[0].slots: must be a whole number from 1 to 100,000, or auto"),
        (worker("aliases: [a]"), "workers[0].aliases: must be a mapping, such as {name: value}, is a list"),
        (
            worker("name: 'a b'"),
            "workers[0].name: must have 1 to 128 visible ASCII characters without spaces",
        ),
        (tenant("name: ''").replace("name: a, ", ""), "tenants[0].name: must have 1 to 128 characters"),
        (tenant("group: [web, keys]"), "tenants[0].group: must be text, is a list"),
        (tenant("groups: [web]"), "tenants[0].groups: unknown option, did you mean 'group'?"),
        (tenant("background: 1"), "tenants[0].background: must be true or false, is 1"),
        ("auth: {trust_user_id: yes}", "auth.trust_user_id: must be true or false, is text"),
        ("auth: {default_user: ''}", "auth.default_user: must have 1 to 128 characters"),
        (
            "scheduling: {tiers: [{name: t, groups: [{name: anonymous}, web]}]}",
            "scheduling.tiers[0].groups[1]: must be a mapping of options, is text",
        ),
        (
            "scheduling: {tiers: [{name: t, min_share: 1, groups: [{name: anonymous}]}]}",
            "scheduling.tiers[0].min_share: must be less than 1, is 1",
        ),
        (
            "scheduling: {cost: token}",
            "scheduling.cost: must be one of tokens, sequences, did you mean 'tokens'?",
        ),
        ("scheduling: {placement: best}", "scheduling.placement: must be one of least_work, shortest_queue,"),
        (
            "scheduling: {placement: latery}",
            "scheduling.placement: must be one of least_work, shortest_queue, round_robin, lottery, least_latency, "
            "power_of_two, sticky, or package.module:Class of your own, did you mean 'lottery'?",
        ),
        ("scheduling: {placement: 3}", "scheduling.placement: must be text"),
        ("scheduling: {placement: 'no_such_module:A'}", "scheduling.placement: there is no module 'no_such_module'"),
        ("scheduling: {placement: 'a b:A'}", "scheduling.placement: must name a class of your own"),
        ("scheduling: {tiers: []}", "scheduling.tiers: must not be empty"),
        ("limits: {queued: -1}", "limits.queued: must be at least 1, is -1"),
        ("limits: {queue_timeout_s: 0}", "limits.queue_timeout_s: must be more than 0, is 0"),
        ("timeouts: {idle_s: .inf}", "timeouts.idle_s: must be a finite number, is inf"),
        ("timeouts: {idle_s: .nan}", "timeouts.idle_s: must be a finite number, is nan"),
        (
            "log: {level: warn}",
            "log.level: must be one of debug, info, warning, error, did you mean 'warning'?",
        ),
        ("database: mysql://h/d", "database: must start with sqlite:// or postgresql://"),
        ("listen: {cors_origins: [example.org]}", "listen.cors_origins[0]: must be '*' or an origin such as"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_key(problems, text, message):
    (told,) = problems("\n" + text)
    assert told.startswith(f"evenflow.yaml:2: {message}")


@pytest.mark.parametrize(
    "weight", ["0", "-1", ".inf", "-.inf", ".nan", '"10"', "1e-300", "1e300", "true", "null", "[1]"]
)
@pytest.mark.parametrize(
    "field", ["tenants[0].weight", "scheduling.tiers[0].groups[0].weight", "workers[0].speed"]
)
def test_weights_are_finite_and_above_0(problems, weight, field):  # S3
    text = {
        "t": f"tenants:\n  - name: a\n    weight: {weight}",
        "s": f"scheduling:\n  tiers: [{{name: t, groups: [{{name: anonymous,\n weight: {weight}}}]}}]",
        "w": f"workers:\n  - url: http://h:1\n    speed: {weight}",
    }[field[0]]
    (told,) = problems(text)
    assert told.startswith(f"evenflow.yaml:3: {field}: must be ")


@pytest.mark.parametrize("weight", ["0.000001", "1000000", "1e-3", "0.1", "30"])
def test_small_and_large_weights_are_allowed(configuration, weight):
    assert configuration(tenant(f"weight: {weight}")).tenants[0].weight == float(weight)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:9001", "must start with http://"),
        ("localhost", "must start with http://"),
        ("ftp://h:1", "must start with http://"),
        ("http://", "is no valid URL"),
        ("http://h:x", "is no valid URL"),
        ("http://h:0", "is no valid URL"),
        ("http://h:99999", "is no valid URL"),
        ("http://[::1", "is no valid URL"),
        ("http://h h:1", "is no valid URL"),
        ("http://user:hunter2@h:1", "put the worker's credential in api_key"),
        ("http://h:1/?key=hunter2", "may not have a query"),
        ("http://h:1/some/hunter2", "may not have a path"),
    ],
)
def test_urls_that_cannot_be_called_are_told_without_their_text(problems, url, words):
    (told,) = problems(f'workers: [{{url: "{url}"}}]')
    assert told.startswith("evenflow.yaml:1: workers[0].url: ")
    assert words in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    "url", ["http://[::1]:9001", "https://h", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"]
)
def test_urls_that_can_be_called(configuration, url):
    (settings,) = configuration(f'workers: [{{url: "{url}"}}]').workers
    assert settings.url == url.removesuffix("/").removesuffix("/v1")


# What is wrong: between options

TIER = "scheduling:\n tiers:\n - {name: t, groups: [{name: anonymous}]}"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "workers:\n- url: http://h:1\n- url: http://H:1/v1",
            3,
            "workers[1].url: is the url of another worker too (workers[0].url, first in line 2)",
        ),
        (
            "workers:\n- {url: 'http://h', name: a}\n- {url: 'http://h:80', name: b}",
            3,
            "workers[1].url: is the url of another worker too",
        ),
        (
            "workers:\n- {url: 'http://h:1', name: a}\n- {url: 'http://h:2', name: a}",
            3,
            "workers[1].name: is the name of another worker too",
        ),
        (
            "workers:\n- {url: 'http://h:1'}\n- {url: 'http://h:2', name: 'h:1'}",
            3,
            "workers[1].name: is the name of another worker too",
        ),
        (
            "workers:\n- url: http://h:1\n  models: [model]\n  aliases: {x: modle}",
            4,
            "workers[0].aliases.x: points at 'modle', which is not in this worker's models, did you mean",
        ),
        (
            "workers:\n- url: http://h:1\n  models: [a, b]\n  aliases: {a: b}",
            4,
            "workers[0].aliases.a: is a model of this worker already",
        ),
        (
            "tenants:\n- {name: a, keys: [k1]}\n- {name: a, keys: [k2]}",
            3,
            "tenants[1].name: is the name of another tenant too",
        ),
        (
            "tenants:\n- {name: a, keys: [k1]}\n- {name: b, keys: [k2, k1]}",
            3,
            "tenants[1].keys[1]: is given before; a key belongs to one tenant",
        ),
        (
            f"tenants:\n- {{name: a, keys: [k1]}}\n- {{name: b, keys: ['sha256:{digest('k1').hex()}']}}",
            3,
            "tenants[1].keys[0]: is given before",
        ),
        (
            "auth: {admin_keys: [k1]}\ntenants: [{name: a, keys: [k1]}]",
            2,
            "tenants[0].keys[0]: is given before",
        ),
        (
            "tenants:\n- name: a\n  group: kyes",
            3,
            "tenants[0].group: no tier has a group 'kyes', did you mean 'keys'?",
        ),
        (
            "tenants:\n- name: a\nscheduling: {tiers: [{name: t, groups: [{name: x}]}]}",
            2,
            "tenants[0].group: no tier has a group 'keys' (the default)",
        ),
        ("tenants: [{name: anonymous}]", 1, "tenants[0].name: is what requests without a key are called"),
        (
            f"{TIER}\n - {{name: t, groups: [{{name: x}}]}}",
            4,
            "scheduling.tiers[1].name: is the name of another tier too",
        ),
        (
            f"{TIER}\n - {{name: u, groups: [{{name: anonymous}}]}}",
            4,
            "scheduling.tiers[1].groups[0].name: is a group already; a group belongs to one tier only",
        ),
        (
            "scheduling:\n tiers:\n - {name: t, groups: [{name: x}]}",
            2,
            "scheduling.tiers: no tier has a group 'anonymous', but requests without a key are served",
        ),
        (
            "scheduling:\n tiers:\n - {name: t, min_share: 0.5, groups: [{name: anonymous}]}\n"
            " - {name: u, min_share: 0.5, groups: [{name: x}]}",
            2,
            "scheduling.tiers: all min_share together are 1; they must be less than 1",
        ),
        (
            f"{TIER}\n - {{name: u, groups: [{{name: x}}, {{name: y}},\n   {{name: x}}]}}",
            5,
            "scheduling.tiers[1].groups[2].name: is a group already",
        ),
        (
            # ten times 0.1 is a little less than 1 when it is added naively
            "scheduling:\n tiers:\n - {name: t, groups: [{name: anonymous}]}\n"
            + "".join(f" - {{name: u{n}, min_share: 0.1, groups: [{{name: x{n}}}]}}\n" for n in range(10)),
            2,
            "scheduling.tiers: all min_share together are 1; they must be less than 1",
        ),
        (
            "scheduling:\n tiers:\n - {name: t, groups: [{name: anonymous}]}\n"
            " - {name: u, min_share: 0.7, groups: [{name: x}]}\n - {name: v, min_share: 0.8, groups: [{name: y}]}",
            2,
            "scheduling.tiers: all min_share together are 1.5; they must be less than 1",
        ),
        (
            "tenants:\n- {name: a, group: keys, keys: [k1]}\n- {name: a, group: web, keys: [k3]}",
            3,
            "tenants[1].name: is the name of another tenant too (tenants[0].name, first in line 2)",
        ),
        (
            "tenants:\n- name: a\n  background: true\n  weight: 3",
            4,
            "tenants[0].weight: is not for a tenant in the background; remove it, or `background`",
        ),
        (
            "auth:\n  anonymous: false\n  trust_user_id: true",
            3,
            "auth.trust_user_id: has no effect while requests without a key are refused",
        ),
        (
            "auth:\n  trust_user_id: true\ntenants: [{name: a}]",
            2,
            "auth.trust_user_id: has no effect while requests without a key are refused; set auth.anonymous: true",
        ),
        (
            "auth:\n  default_user: a\ntenants: [{name: a}]",
            2,
            "auth.default_user: has no effect without auth.trust_user_id: true",
        ),
        (
            "auth:\n  {anonymous: true, trust_user_id: true,\n  default_user: alcie}\ntenants: [{name: alice}]",
            3,
            "auth.default_user: no tenant is called 'alcie', did you mean 'alice'?",
        ),
        (
            "auth: {anonymous: true, trust_user_id: true, default_user: a}",
            1,
            "auth.default_user: no tenant is called 'a'; add it under `tenants`",
        ),
        (
            "fleet: {heartbeat_expiry_s: 45}",
            1,
            "fleet.heartbeat_expiry_s: heartbeat_expiry_s (45) must be",
        ),
        (
            "fleet: {heartbeat_interval_s: 90}",
            1,
            "fleet.heartbeat_interval_s: heartbeat_expiry_s (90) must be more",
        ),
    ],
)
def test_options_that_contradict_are_told_at_the_later_one(problems, text, line, message):
    (told,) = problems(text)
    assert told.startswith(f"evenflow.yaml:{line}: {message}")


def test_groups_of_ones_own_need_no_anonymous_when_a_key_is_needed(configuration):
    text = "scheduling: {tiers: [{name: t, groups: [{name: x}]}]}\ntenants: [{name: a, group: x, keys: [k]}]"
    assert configuration(text).tenants[0].group == "x"


def test_every_problem_is_told_at_once_in_the_order_of_the_file(problems):  # S65
    told = problems(
        """listen: {port: "1"}
workers:
  - {url: "http://h:1", slotz: 8}
  - {url: "http://h:1"}
  - {url: "h:2", name: a}
tenants:
  - {name: a, weight: 0, keys: [k, 5]}
  - {name: a, group: nobody, keys: [k, "${NOT_SET}"]}
listen: {port: 2}
log: {level: loud}
"""
    )
    keys = [line.split(": ")[:2] for line in told]
    assert keys == [
        ["evenflow.yaml:1", "listen.port"],
        ["evenflow.yaml:3", "workers[0].slotz"],
        ["evenflow.yaml:4", "workers[1].url"],
        ["evenflow.yaml:5", "workers[2].url"],
        ["evenflow.yaml:7", "tenants[0].keys[1]"],
        ["evenflow.yaml:7", "tenants[0].weight"],
        ["evenflow.yaml:8", "tenants[1].group"],
        ["evenflow.yaml:8", "tenants[1].keys[0]"],
        ["evenflow.yaml:8", "tenants[1].keys[1]"],
        ["evenflow.yaml:8", "tenants[1].name"],
        ["evenflow.yaml:9", "listen"],
        ["evenflow.yaml:10", "log.level"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "workers: 1\ntenants: x",
        "tenants: [1, [2]]\nworkers: [[]]",
        "scheduling: {tiers: [1, {groups: x}]}",
        "fleet: x",
    ],
)
def test_wrong_shapes_do_not_hide_behind_a_crash(problems, text):
    assert problems(text)


# Secrets (S7, and error texts that held credentials)

SECRET = "hunter2-correct-horse"


@pytest.mark.parametrize(
    "text",
    [
        f"auth: {{admin_keys: ['{SECRET} x']}}",
        f"auth: {{admin_keys: {SECRET}}}",
        f"auth: {{admin_keys: {{{SECRET}: 1}}}}",
        f"auth: {{sk-{SECRET}: 1}}",
        f"auth: {{worker_token: 'sha256:{SECRET}'}}",
        f"auth: {{worker_token: [{SECRET}]}}",
        f"tenants: [{{name: a, keys: [{SECRET}, {SECRET}]}}]",
        f"tenants: [{{name: a, keys: {SECRET}}}]",
        f"tenants: [{{name: a, keys: [k], weight: {SECRET}}}]",
        f"workers: [{{url: 'http://h:1', api_key: [{SECRET}]}}]",
        f"workers: [{{url: 'http://h:1', api_key: '{SECRET}\\nx: y', slots: x}}]",
        f"workers: [{{url: '{SECRET}'}}]",
        f"database: mysql://root:{SECRET}@h/d",
        f"listen: {{port: {SECRET}}}",
    ],
)
def test_no_problem_shows_a_secret(problems, text):
    assert SECRET not in "\n".join(problems(text))


@pytest.mark.parametrize(
    "text",
    [
        "tenants: [{name: a, keys: [73510]}]",
        "tenants: [{name: a, keys: 73510}]",
        "auth: {worker_token: 73510}",
        "auth: {admin_keys: 73510}",
        "workers: [{url: 'http://h:1', api_key: 73510}]",
    ],
)
def test_numbers_in_place_of_keys_are_not_shown(problems, text):
    (told,) = problems(text)
    assert "73510" not in told


def test_a_key_in_place_of_a_name_is_cut_short(problems):
    assert problems("auth: {sk-secret: 1}")[0].startswith("evenflow.yaml:1: auth.sk-…: unknown option")


def test_settings_show_no_secret_and_keep_no_plain_key(configuration):
    settings = configuration(
        f"auth: {{admin_keys: [{SECRET}-1], worker_token: {SECRET}-2}}\n"
        f"workers: [{{url: 'http://h:1', api_key: {SECRET}-3}}]\n"
        f"tenants: [{{name: a, keys: [{SECRET}-4]}}]\n"
        f"database: postgresql://u:{SECRET}@h/d\n"
    )
    for part in (settings, settings.auth, *settings.workers, *settings.tenants):
        for shown in (repr(part), str(part), f"{part}"):
            assert SECRET not in shown
            assert digest(f"{SECRET}-4").hex() not in shown
            assert repr(digest(f"{SECRET}-4")) not in shown
    assert SECRET not in repr(settings.auth.admin_keys)
    assert SECRET not in repr(settings.tenants[0].keys)


def test_a_secret_is_shown_by_reveal_alone():
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2")
    assert secret != Secret("other")
    assert secret != "hunter2"
    assert len({secret, Secret("hunter2")}) == 1
    with pytest.raises(TypeError):
        pickle.dumps(secret)


# What is allowed but worth a word


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("database: sqlite:///x.db\nworkers: [{url: 'http://h:1'}]", "usage is not stored"),
        ("listen: {port: 1}", "no worker is configured"),
        ("auth: {anonymous: false}\nworkers: [{url: 'http://h:1'}]", "every request gets 401"),
        ("tenants: [{name: a}]\nworkers: [{url: 'http://h:1'}]", "tenant 'a' has no keys"),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(configuration, text, words):
    (warning,) = configuration(text).warnings
    assert words in warning


def test_user_ids_that_are_trusted_are_a_warning_until_every_tenant_has_keys(configuration):
    text = "auth: {anonymous: true, trust_user_id: true}\nworkers: [{url: 'http://h:1'}]\ntenants: [{name: a%s}]"
    (warning,) = configuration(text % "").warnings
    assert "anyone who reaches the gateway can claim any user_id" in warning
    assert configuration(text % ", keys: [k]").warnings == ()


def test_user_ids_are_not_trusted_unless_it_is_set(configuration):
    assert configuration("auth: {anonymous: true}").auth.trust_user_id is False
    environ = {"EVENFLOW_AUTH_TRUST_USER_ID": "true", "EVENFLOW_AUTH_DEFAULT_USER": "a"}
    auth = configuration("auth: {anonymous: true}\ntenants: [{name: a}]", environ).auth
    assert (auth.trust_user_id, auth.default_user) == (True, "a")


def test_groups_of_ones_own_need_no_anonymous_where_a_default_user_takes_its_place(configuration):
    text = "scheduling: {tiers: [{name: t, groups: [{name: x}]}]}\ntenants: [{name: a, group: x}]\n"
    auth = "auth: {anonymous: true, trust_user_id: true, default_user: a}"
    assert configuration(text + auth).auth.default_user == "a"


def test_a_tenant_in_the_background_has_no_weight(configuration):
    text = "tenants: [{name: a, background: true, keys: [k]}, {name: b, background: false, weight: 3, keys: [l]}]"
    assert [tenant.weight for tenant in configuration(text).tenants] == [0, 3]


def test_a_usual_configuration_has_no_warning(configuration):
    assert configuration("workers: [{url: 'http://h:1'}]\ntenants: [{name: a, keys: [k]}]").warnings == ()


def test_ten_thousand_tenants_load_in_a_few_seconds(configuration):
    lines = [
        f"- {{name: t{n}, weight: {n % 50 + 1}, keys: [sk-{n}], limits: {{queued: 9}}}}"
        for n in range(10_000)
    ]
    settings = configuration("tenants:\n" + "\n".join(lines))
    assert len({tenant.keys for tenant in settings.tenants}) == 10_000
