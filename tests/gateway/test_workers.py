"""Workers: which are chosen, what passes unchanged to and from them, and what their failures look like."""

import asyncio
import json
import threading
import time
from collections import Counter

import pytest
from support.gateway import EngineMaker, GatewayMaker, Running, served_at_once, status_of, wait_until
from support.http import CHAT, Client, chat, exchange, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

# ---- bytes (S33, S55, report 25) ----

ODD_BODIES = [
    b'{"model":"m","messages":[{"role":"user","content":"hi"}]}',
    b'  {\n\t"messages" : [ {"role":"user"} ] ,\r\n "model" : "m" , "unknown":{"a":[1,2,{"b":null}]} }\n',
    b'{"model":"m","messages":[{"role":"user"}],"big":123456789012345678901234567890,"float":1.10,"exp":1E+2,"neg":-0}',
    '{"model":"m","messages":[{"role":"user","content":"é — 漢字 \\ud83d\\ude00 \\u0000"}]}'.encode(),
    b'{"model":"m","messages":[{"role":"user"}],"extra":1,"extra":2}',
    b'{"model":"m","messages":[{"role":"user"}],"return_token_ids":true,"top_k":5,"vllm_xargs":{"a":"b"}}',
    b'{"model":"m","messages":[{"role":"user"}],"chat_template_kwargs":{"enable_thinking":false},"tools":[{"type":"x"}]}',
    b'{"mod\\u0065l":"m","messages":[{"role":"user"}]}',
    b'{"model":"m","messages":[{"role":"user"}],"n":null,"stream":null,"max_tokens":null,"stream_options":null,"user":null}',
    b'{"model":"m","messages":[{"role":"user"}],"stream":false,"n":1,"max_tokens":5,"max_completion_tokens":6}',
]


@pytest.mark.parametrize("body", ODD_BODIES, ids=range(len(ODD_BODIES)))
def test_a_body_reaches_the_worker_byte_for_byte(engine: MockEngine, gateways: GatewayMaker, body: bytes) -> None:
    gateway = gateways(engine)
    assert post(gateway.port, body).status == 200
    assert engine.received[0].body == body
    assert engine.received[0].header("content-type") == "application/json"


@pytest.mark.parametrize(
    "body",
    [
        b'{ "odd" : 1.10, "big":123456789012345678901234567890 ,"x":"\\u00e9"}',
        b"plain text",
        b"\x00\xff" * 5000,
    ],
    ids=["json", "text", "binary"],
)
@pytest.mark.parametrize("cut", [{}, {"write_bytes": 1}, {"http10": True}], ids=str)
def test_an_answer_comes_back_byte_for_byte(
    engine: MockEngine, gateways: GatewayMaker, body: bytes, cut: dict[str, object]
) -> None:
    if len(body) > 1000 and "write_bytes" in cut:
        cut = {"write_bytes": 100}
    engine.behaviour = Behaviour(
        body=body,
        content_type="application/x-odd; charset=latin-1",
        headers=(
            ("x-engine", "value, with  spaces"),
            ("x-twice", "1"),
            ("x-twice", "2"),
            ("openai-version", "1"),
        ),
        **cut,  # type: ignore[arg-type]
    )
    gateway = gateways(engine)
    answer = post(gateway.port, chat())
    assert answer.status == 200
    assert answer.body == body
    assert answer.complete
    assert answer.header("content-type") == "application/x-odd; charset=latin-1"
    assert answer.header("x-engine") == "value, with  spaces"
    assert answer.header("x-twice") == "1, 2"


@pytest.mark.parametrize(
    "path",
    [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank", "/v1/score"],
)
def test_the_answer_is_the_same_as_without_a_gateway(engine: MockEngine, gateways: GatewayMaker, path: str) -> None:
    """S33: the same bytes as plain proxying."""
    body = {"model": "m", "prompt": "a b", "input": "a b", "messages": [{"role": "user", "content": "a b"}],
            "query": "q", "documents": ["d"], "text_1": "a", "text_2": "b", "max_tokens": 6}  # fmt: skip
    direct = post(engine.port, body, path=path)
    engine.received.clear()
    gateway = gateways(engine)
    through = post(gateway.port, body, path=path)
    assert (through.status, through.body) == (direct.status, direct.body)
    assert engine.received[0].json == body
    assert engine.received[0].path == path


def test_hop_by_hop_headers_of_a_worker_stop_here(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 20."""
    hop = (
        ("connection", "keep-alive, x-hop"), ("x-hop", "1"), ("keep-alive", "timeout=5"), ("te", "trailers"),
        ("trailer", "x"), ("upgrade", "h2c"), ("proxy-authenticate", "Basic"), ("set-cookie", "a=b"),
    )  # fmt: skip
    engine.behaviour = Behaviour(headers=hop)
    gateway = gateways(engine)
    answer = post(gateway.port, chat())
    assert answer.status == 200
    for name in ("x-hop", "keep-alive", "te", "trailer", "upgrade", "proxy-authenticate"):
        assert answer.header(name) is None, name
    assert len([1 for name, _ in answer.headers if name in ("content-length", "transfer-encoding")]) == 1


def test_a_large_answer(engine: MockEngine, gateways: GatewayMaker) -> None:
    body = json.dumps({"text": "x" * 8_000_000, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}).encode()
    engine.behaviour = Behaviour(body=body)
    gateway = gateways(engine)
    assert post(gateway.port, chat()).body == body


def test_answers_say_which_worker_and_how_long_they_waited(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, workers=[{"url": engine.url, "models": ["m"], "name": "first"}])
    for stream in (False, True):
        answer = post(gateway.port, chat(stream=stream), headers=[("x-request-id", "req-7")])
        assert answer.header("x-evenflow-worker") == "first"
        assert float(answer.header("x-evenflow-queue-ms") or -1) >= 0
        assert answer.header("x-request-id") == "req-7"
    ids = {post(gateway.port, chat()).header("x-request-id") for _ in range(5)}
    assert len(ids) == 5
    assert all(ids)


# ---- errors of workers (S48, S53, reports 14, 17, 20, 53) ----


@pytest.mark.parametrize("status", [400, 404, 422])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_callers_error_passes_unchanged(
    engine: MockEngine, gateways: GatewayMaker, status: int, stream: bool
) -> None:
    body = b'{"object":"error", "message":"prompt too long","type":"BadRequestError","param":null,"code":400}'
    engine.behaviour = Behaviour(status=status, body=body)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=stream))
    assert answer.status == status
    assert answer.body == body
    assert answer.header("content-type") == "application/json"


def test_a_workers_429_keeps_its_time(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 14."""
    engine.behaviour = Behaviour(status=429, headers=(("Retry-After", "7"),))
    gateway = gateways(engine)
    answer = post(gateway.port, chat())
    assert answer.status == 429
    assert answer.header("retry-after") == "7"


def test_an_empty_answer_is_a_failure(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 53: no engine means it."""
    engine.behaviour = Behaviour(body=b"")
    gateway = gateways(engine)
    for stream in (False, True):
        answer = post(gateway.port, chat(stream=stream))
        assert answer.status == 502
        assert answer.error["code"] == "upstream_error"


@pytest.mark.parametrize("status", [500, 502, 503])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_workers_failure_is_a_5xx(engine: MockEngine, gateways: GatewayMaker, status: int, stream: bool) -> None:
    page = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
    engine.behaviour = Behaviour(status=status, body=page, content_type="text/html")
    gateway = gateways(engine)
    answer = post(gateway.port, chat(stream=stream))
    assert answer.status in (status, 502)
    assert answer.complete
    if (answer.header("content-type") or "").startswith("application/json"):
        assert answer.error
    else:
        assert answer.body == page
    gateway.wait_at_rest()


def test_errors_of_callers_do_not_eject_a_worker(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 17."""
    engine.named["bad"] = Behaviour(status=400)
    gateway = gateways(engine)
    for _ in range(20):
        assert post(gateway.port, chat("<<bad>>")).status == 400
    served_at_once(gateway)


@pytest.mark.parametrize("kind", ["closes", "garbage", "500"])
def test_failures_leave_a_healthy_worker_usable(engine: MockEngine, gateways: GatewayMaker, kind: str) -> None:
    """A burst of failures may cool a worker down, but never for long while its health is good."""
    bad = {
        "closes": Behaviour(close_at_once=True),
        "garbage": Behaviour(raw=b"x"),
        "500": Behaviour(status=500),
    }
    engine.named["bad"] = bad[kind]
    gateway = gateways(engine)
    for _ in range(20):
        assert post(gateway.port, chat("<<bad>>")).status in (500, 502, 503)
    wait_until(lambda: post(gateway.port, chat()).status == 200, 5, "served again")
    gateway.wait_at_rest()


# ---- models (S47, S48, S49, report 60) ----


def test_an_unknown_model_is_404(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    for path, body in (
        (CHAT, chat()),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        answer = post(gateway.port, {**body, "model": "nothing"}, path=path)
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"
    answer = fetch(gateway.port, "GET", "/v1/models/nothing")
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert not engine.received


def test_a_known_model_without_a_live_worker_is_503(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(models=("a",)), engines(models=("b",))
    workers = [{"url": first.url, "models": ["a"]}, {"url": second.url, "models": ["b"]}]
    gateway = gateways(first, second, workers=workers)
    first.stop()
    wait_until(lambda: post(gateway.port, {**chat(), "model": "a"}).status == 503, 5, "worker found dead")
    started = time.monotonic()
    for _ in range(10):
        answer = post(gateway.port, {**chat(), "model": "a"})
        assert answer.status == 503
        assert answer.error["code"] == "no_worker"
    assert time.monotonic() - started < 0.5  # told at once, not when the queue is looked through
    assert int(answer.header("retry-after") or 0) >= 1
    assert post(gateway.port, {**chat(), "model": "b"}).status == 200
    # It comes back by itself.
    first.start()
    wait_until(lambda: post(gateway.port, {**chat(), "model": "a"}).status == 200, 5, "worker found alive")


def test_readiness_tells_whether_a_worker_lives(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    assert status_of(gateway, "/readiness") == 200
    engine.stop()
    wait_until(lambda: status_of(gateway, "/readiness") == 503, 5)
    assert status_of(gateway, "/health") == 200
    engine.start()
    wait_until(lambda: status_of(gateway, "/readiness") == 200, 5)


def test_a_worker_that_says_it_is_ill_is_not_chosen(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S46 for probed workers."""
    ill, fine = engines(), engines()
    gateway = gateways(ill, fine)
    ill.healthy = False

    def states() -> dict[str, str]:
        return {w["url"]: w["state"] for w in fetch(gateway.port, "GET", "/list_workers").json["workers"]}

    alive = states()[fine.url]
    wait_until(lambda: states()[ill.url] != alive, 5, "found ill")
    count = len(ill.received)
    for _ in range(10):
        served_at_once(gateway)
    assert len(ill.received) == count
    ill.healthy = True
    wait_until(lambda: states()[ill.url] == alive, 5, "found well")


def test_models_are_read_from_the_worker(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(models=("zebra", "shared")), engines(models=("ant", "shared", "adapter-1"))
    gateway = gateways(first, second, models=None)

    def names() -> list[str]:
        return [model["id"] for model in fetch(gateway.port, "GET", "/v1/models").json["data"]]

    wait_until(lambda: names() == ["adapter-1", "ant", "shared", "zebra"], 5)
    for model, engine in (("zebra", first), ("adapter-1", second)):
        for _ in range(5):
            assert post(gateway.port, {**chat(), "model": model}).status == 200
        assert {received.json["model"] for received in engine.received} == {model}
    one = fetch(gateway.port, "GET", "/v1/models/ant").json
    assert (one["id"], one["object"]) == ("ant", "model")
    # A model that the worker loads later is found.
    first.models = ("zebra", "new")
    wait_until(lambda: "new" in names(), 5)


def test_the_model_list_is_sorted_unique_and_never_empty(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S49: while workers come and go and are asked again."""
    fleet = [engines(models=("b", "a", f"own-{i}")) for i in range(3)]
    workers = [
        {"url": fleet[0].url, "aliases": {"alias-x": "a"}}, {"url": fleet[1].url}, {"url": fleet[2].url},
    ]  # fmt: skip
    gateway = gateways(*fleet, workers=workers, fleet={"probe_interval_s": 0.1})
    wait_until(lambda: len(fetch(gateway.port, "GET", "/v1/models").json["data"]) == 6, 5)
    ends = time.monotonic() + 1.5
    toggled = 0
    while time.monotonic() < ends:
        names = [model["id"] for model in fetch(gateway.port, "GET", "/v1/models").json["data"]]
        assert names == sorted(set(names))
        assert {"a", "alias-x", "b"} <= set(names)
        toggled += 1
        if toggled % 50 == 0:
            fleet[2].healthy = not fleet[2].healthy
    listed = fetch(gateway.port, "POST", "/list_models", {})
    assert listed.status == 200
    assert listed.body == fetch(gateway.port, "GET", "/list_models").body


def test_aliases_are_routed_to_the_workers_that_have_them(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S47: the same alias may stand for different names on different workers."""
    first, second = engines(models=("m1",)), engines(models=("m2",))
    workers = [
        {"url": first.url, "models": ["m1"], "aliases": {"gpt-x": "m1"}},
        {"url": second.url, "models": ["m2"], "aliases": {"gpt-x": "m2"}},
    ]
    gateway = gateways(first, second, workers=workers)
    for _ in range(40):
        answer = post(gateway.port, {**chat(), "model": "gpt-x"})
        assert answer.status == 200
        assert answer.json["model"] == "gpt-x"
    assert {received.json["model"] for received in first.received} == {"m1"}
    assert {received.json["model"] for received in second.received} == {"m2"}
    assert post(gateway.port, {**chat(), "model": "m1"}).json["model"] == "m1"


def test_an_alias_keeps_the_other_bytes(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, workers=[{"url": engine.url, "models": ["m"], "aliases": {"gpt-x": "m"}}])
    content = b'"content":"\\"model\\": \\"gpt-x\\""'
    body = b'{ "messages":[{"role":"user",%b}], "model" : "gpt-x" , "big":12345678901234567890 }' % content
    assert post(gateway.port, body).status == 200
    assert engine.received[0].body == body.replace(b'"model" : "gpt-x"', b'"model" : "m"')


# ---- balance (S50, reports 34, 35) ----


@pytest.mark.parametrize("placement", ["least_work", "round_robin"])
def test_idle_equal_workers_get_one_each(engines: EngineMaker, gateways: GatewayMaker, placement: str) -> None:
    fleet = [engines(Behaviour(gated=True)) for _ in range(4)]
    gateway = gateways(*fleet, scheduling={"placement": placement})
    for _ in range(3):
        before = [len(engine.received) for engine in fleet]
        clients = [Client(gateway.port) for _ in fleet]
        for client in clients:
            client.send(request_bytes("POST", CHAT, chat()))
        wait_until(lambda: sum(engine.running for engine in fleet) == 4)
        assert [len(engine.received) - n for engine, n in zip(fleet, before, strict=True)] == [1, 1, 1, 1]
        for engine in fleet:
            engine.open_gate()
        for client in clients:
            assert client.read_answer().status == 200
            client.close()
        gateway.wait_at_rest()
        for engine in fleet:
            engine.close_gate()


def in_flight(gateway: Running) -> dict[str, int]:
    workers = fetch(gateway.port, "GET", "/list_workers").json["workers"]
    return {worker["url"]: worker["in_flight"] for worker in workers}


def test_load_is_held_until_the_stream_ends(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Report 34."""
    fleet = [engines(Behaviour(tokens=5, gated_after=3)) for _ in range(2)]
    gateway = gateways(*fleet)
    clients = [Client(gateway.port) for _ in range(20)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat(stream=True)))
    wait_until(lambda: sum(engine.running for engine in fleet) == 20)
    for client in clients:
        assert client.read_head().status == 200
    assert in_flight(gateway) == {engine.url: 10 for engine in fleet}
    for engine in fleet:
        engine.open_gate()
    wait_until(lambda: set(in_flight(gateway).values()) == {0}, 2)
    for client in clients:
        client.close()


def test_the_fuller_worker_gets_less(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Work is counted in tokens over speed, not in calls."""
    slow, fast = engines(Behaviour(gated=True)), engines(Behaviour(gated=True))
    workers = [
        {"url": slow.url, "models": ["m"], "slots": 64, "speed": 1},
        {"url": fast.url, "models": ["m"], "slots": 64, "speed": 3},
    ]
    gateway = gateways(slow, fast, workers=workers)
    clients = [Client(gateway.port) for _ in range(40)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat()))
    wait_until(lambda: slow.running + fast.running == 40)
    assert 8 <= slow.running <= 12
    for client in clients:
        client.close()
    gateway.wait_at_rest()


def test_a_hot_prompt_spills_over_and_ties_are_spread(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Report 35: one shared system prompt, three workers; and one after another without load."""
    fleet = [engines(Behaviour(head_delay_s=0.01)) for _ in range(3)]
    gateway = gateways(*fleet, slots=8)
    messages = [{"role": "system", "content": "shared " * 500}, {"role": "user", "content": "x"}]
    data = request_bytes("POST", CHAT, {"model": "m", "messages": messages}, close=True)

    async def run() -> None:
        answers = await asyncio.gather(*(exchange(gateway.port, data) for _ in range(60)))
        assert Counter(answer.status for answer in answers) == {200: 60}

    asyncio.run(run())
    assert all(len(engine.received) >= 12 for engine in fleet)
    for engine in fleet:
        engine.received.clear()
    for _ in range(45):
        served_at_once(gateway)
    assert all(len(engine.received) >= 3 for engine in fleet)


def test_a_busy_worker_does_not_hold_up_an_idle_one(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """A model of its own on a full worker waits; another model's calls go on, also in one pool."""
    first, second = engines(Behaviour(gated=True), models=("a", "s")), engines(models=("b", "s"))
    workers = [
        {"url": first.url, "models": ["a", "s"], "slots": 1},
        {"url": second.url, "models": ["b", "s"], "slots": 1},
    ]
    gateway = gateways(first, second, workers=workers)
    clients = [Client(gateway.port) for _ in range(3)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, {**chat(), "model": "a"}))
    gateway.wait_for(queued=2)
    for model in ("b", "s", "b", "s"):
        started = time.monotonic()
        assert post(gateway.port, {**chat(), "model": model}).status == 200
        assert time.monotonic() - started < 1
    first.open_gate()
    for client in clients:
        assert client.read_answer().status == 200
        client.close()
    gateway.wait_at_rest()


def test_waiting_calls_are_told_when_their_worker_dies_and_none_is_left(
    engine: MockEngine, gateways: GatewayMaker
) -> None:
    engine.behaviour = Behaviour(gated=True)
    gateway = gateways(engine, slots=1)
    clients = [Client(gateway.port) for _ in range(5)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat()))
    gateway.wait_for(queued=4)
    engine.stop()
    answers = [client.read_answer() for client in clients]
    assert {answer.status for answer in answers} <= {502, 503}
    assert all(answer.error["code"] in ("upstream_error", "no_worker") for answer in answers)
    for client in clients:
        client.close()
    gateway.wait_at_rest()
    engine.behaviour = Behaviour()
    engine.start()
    wait_until(lambda: status_of(gateway, "/readiness") == 200, 5)
    served_at_once(gateway)


# ---- the fleet's view ----


def test_list_workers(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(), engines()
    workers = [
        {"url": first.url, "models": ["m"], "name": "first", "slots": 3, "speed": 2.0},
        {"url": second.url, "models": ["m"]},
    ]
    gateway = gateways(first, second, workers=workers)
    listed = fetch(gateway.port, "GET", "/list_workers").json["workers"]
    promised = {"name", "url", "state", "models", "in_flight", "queued", "slots", "speed", "last_seen_s"}
    assert [promised - set(worker) for worker in listed] == [set(), set()]
    [one] = [worker for worker in listed if worker["name"] == "first"]
    assert (one["url"], one["slots"], one["speed"], one["models"]) == (first.url, 3, 2.0, ["m"])
    assert one["last_seen_s"] < 5


# ---- the loop stays free (report 18) ----


def test_health_answers_while_large_prompts_pour_in(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, slots=64)
    data = request_bytes("POST", CHAT, chat("word " * 30_000), close=True)
    worst = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal worst
        with Client(gateway.port) as client:
            while not done.is_set():
                started = time.monotonic()
                assert client.request("GET", "/health").status == 200
                worst = max(worst, time.monotonic() - started)
                time.sleep(0.02)

    async def run() -> None:
        limit = asyncio.Semaphore(64)

        async def one() -> None:
            async with limit:
                assert (await exchange(gateway.port, data)).status == 200

        await asyncio.gather(*(one() for _ in range(300)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        asyncio.run(run())
    finally:
        done.set()
        watcher.join()
    assert worst < 1.0


def test_what_a_hung_worker_has_not_begun_goes_elsewhere(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S54: it accepts and never answers, /health included. Its callers wait until that is noticed, and not longer."""
    hung, well = engines(), engines()
    gateway = gateways(hung, well, fleet={"probe_interval_s": 0.2})
    served_at_once(gateway)
    hung.behaviour, hung.probed_as = Behaviour(silent=True), Behaviour(silent=True)
    answers: list[int] = []

    def ask() -> None:
        answers.append(post(gateway.port, chat(), timeout_s=20).status)

    callers = [threading.Thread(target=ask) for _ in range(12)]
    for caller in callers:
        caller.start()
    wait_until(lambda: hung.running >= 3, 5, "some are with the worker that hangs")
    for caller in callers:
        caller.join(20)
    assert answers == [200] * 12
    (row,) = [one for one in fetch(gateway.port, "GET", "/list_workers").json["workers"] if one["url"] == hung.url]
    assert (row["state"], row["reason"]) == ("suspect", "probe failed: no answer in time")
    hung.behaviour, hung.probed_as = Behaviour(), None
    wait_until(lambda: all(one["state"] == "ready" for one in workers_of(gateway)), 10, "back")


def workers_of(gateway: Running) -> list[dict[str, object]]:
    rows = fetch(gateway.port, "GET", "/list_workers").json["workers"]
    assert isinstance(rows, list)
    return rows
