"""Which worker takes a request: every policy on the real path, shared beginnings, sessions, classes of one's own."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.gateway import EngineMaker, GatewayMaker, GatewayThread, wait_until
from support.http import CHAT, Answer, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

from evenflow.policy.placement import PLACEMENTS

# Some 5,000 bytes that the prompts of a family have in common.
FAMILIES = {name: f"You are the assistant of {name}. " * 160 for name in ("anna", "bert", "carl", "dora")}


def asked(family: str, question: int, **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": FAMILIES[family]}
    user = {"role": "user", "content": f"question {question}"}
    return {"model": "m", "messages": [system, user], **fields}


@contextmanager
def sent_at_once(gateway: GatewayThread, bodies: list[dict[str, Any]]) -> Iterator[Callable[[], list[Answer]]]:
    """Sends all, each over a connection of its own; what is yielded reads the answers."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(gateway.port, timeout_s=20)) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.send(request_bytes("POST", CHAT, body))
        yield lambda: [client.read_answer() for client in clients]


def worker_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    name = answer.header("x-evenflow-worker")
    assert name is not None
    return name


# ---- long prompts (S51) ----


def test_prompts_with_one_beginning_go_where_it_is_cached(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways(engines(), engines(), engines())
    went: dict[str, set[str]] = {family: set() for family in FAMILIES}
    for question in range(6):
        for family in FAMILIES:
            went[family].add(worker_of(post(gateway.port, asked(family, question))))
    assert all(len(names) == 1 for names in went.values()), went
    # Short ones, which no cache helps, go anywhere.
    assert len({worker_of(post(gateway.port, chat())) for _ in range(40)}) == 3


def test_a_cached_beginning_does_not_bind_to_a_worker_that_is_far_behind(
    engines: EngineMaker, gateways: GatewayMaker
) -> None:
    first, second = engines(), engines()
    gateway = gateways(first, second)
    home = worker_of(post(gateway.port, asked("anna", 0)))
    busy, other = (first, second) if first.url.endswith(home.rsplit(":", 1)[-1]) else (second, first)
    busy.behaviour = Behaviour(gated=True)
    long = asked("anna", 1, max_tokens=4000)
    with sent_at_once(gateway, [long] * 12) as answers:
        wait_until(lambda: busy.running + len(other.received) >= 12, 10)
        assert other.received, "all went to the worker that has the beginning, however much it has to do"
        busy.open_gate()
        assert [answer.status for answer in answers()] == [200] * 12


def test_all_choices_of_a_call_follow_the_beginning_of_its_prompt(
    engines: EngineMaker, gateways: GatewayMaker
) -> None:
    gateway = gateways(engines(), engines(), engines())
    home = {family: worker_of(post(gateway.port, asked(family, 0))) for family in FAMILIES}
    for family, name in home.items():
        assert worker_of(post(gateway.port, asked(family, 1, n=3))) == name


def test_a_worker_that_was_lost_comes_back_without_what_it_held(engines: EngineMaker, gateways: GatewayMaker) -> None:
    made = [engines(), engines()]
    gateway = gateways(*made)
    home = worker_of(post(gateway.port, asked("anna", 0)))
    (lost,) = [engine for engine in made if engine.url.endswith(home.rsplit(":", 1)[-1])]
    lost.stop()
    assert worker_of(post(gateway.port, asked("anna", 1))) != home
    lost.start()
    wait_until(lambda: all(row["state"] == "ready" for row in listed(gateway)), 10)
    # The other one has it, and keeps it.
    assert {worker_of(post(gateway.port, asked("anna", question))) for question in range(2, 8)} != {home}
    assert worker_of(post(gateway.port, asked("anna", 9))) != home


def listed(gateway: GatewayThread) -> list[dict[str, Any]]:
    return list(fetch(gateway.port, "GET", "/list_workers").json["workers"])


def test_why_tells_the_scores_by_which_it_was_chosen(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways(engines(), engines())
    home = worker_of(post(gateway.port, asked("anna", 0)))
    answer = post(gateway.port, asked("anna", 1), headers=[("x-request-id", "ask"), ("x-evenflow-why", "1")])
    assert worker_of(answer) == home
    told = fetch(gateway.port, "GET", "/admin/v1/requests/ask").json["why"]
    scores = {row["name"]: row["score"] for row in told["workers"]}
    assert told["worker"] == home
    # Both are idle: what they differ by is the part of the prompt that one has.
    assert 0 < scores.pop(home) < min(scores.values())


# ---- the policies, one by one (S51) ----


@pytest.mark.parametrize("name", [*PLACEMENTS])
def test_every_policy_serves_and_passes_over_the_dead(
    name: str, engines: EngineMaker, gateways: GatewayMaker
) -> None:
    made = [engines() for _ in range(3)]
    gateway = gateways(*made, scheduling={"placement": name})
    session = [("x-evenflow-session", "s")]
    for number in range(12):
        long = asked("anna", number) if number % 2 else chat()
        assert post(gateway.port, long, headers=session if number % 3 else ()).status == 200
    made[0].stop()
    for number in range(12):
        assert post(gateway.port, chat(str(number))).status == 200
    assert made[1].received
    assert made[2].received


def test_round_robin_gives_each_its_turn(engines: EngineMaker, gateways: GatewayMaker) -> None:
    gateway = gateways(engines(), engines(), engines(), scheduling={"placement": "round_robin"})
    names = [worker_of(post(gateway.port, asked("anna", number))) for number in range(9)]
    assert names[:3] == names[3:6] == names[6:]
    assert len(set(names)) == 3


def test_sessions_stay_with_their_worker(engines: EngineMaker, gateways: GatewayMaker) -> None:
    made = [engines() for _ in range(3)]
    gateway = gateways(*made, scheduling={"placement": "sticky"})
    went: dict[str, set[str]] = {}
    for _ in range(4):
        for number in range(16):
            session = f"user-{number}"
            answer = post(gateway.port, chat(), headers=[("x-evenflow-session", session)])
            went.setdefault(session, set()).add(worker_of(answer))
    assert all(len(names) == 1 for names in went.values()), went
    assert len(set().union(*went.values())) >= 2
    # It is meant for the gateway alone.
    assert all(request.header("x-evenflow-session") is None for engine in made for request in engine.received)


def test_least_latency_leaves_the_slow(engines: EngineMaker, gateways: GatewayMaker) -> None:
    slow, fast = engines(Behaviour(head_delay_s=0.1)), engines()
    gateway = gateways(slow, fast, scheduling={"placement": "least_latency"})
    for _ in range(40):
        assert post(gateway.port, chat()).status == 200
    assert 1 <= len(slow.received) <= 6, "each is tried once, and of the rest only a few go anywhere"


@pytest.mark.parametrize("count", [2, 5])
def test_idle_equal_workers_get_one_each(count: int, engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S50, also for prompts that are long and new."""
    for long in (False, True):
        made = [engines(Behaviour(gated=True)) for _ in range(count)]
        gateway = gateways(*made)
        bodies = [{"model": "m", "messages": [{"role": "user", "content": f"{n} " * (2000 if long else 1)}]}
                  for n in range(count)]  # fmt: skip
        with sent_at_once(gateway, bodies) as answers:
            wait_until(lambda made=made: sum(engine.running for engine in made) == count)
            assert [engine.running for engine in made] == [1] * count
            for engine in made:
                engine.open_gate()
            assert [answer.status for answer in answers()] == [200] * count


# ---- who must beat (S46) ----


def test_a_silent_worker_is_not_chosen_from_its_expiry_on(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Nobody waits for a sweep: the next request after the moment goes elsewhere."""
    configured, joined = engines(), engines()
    gateway = gateways(configured)
    status = {"model_names": ["m"], "speed": 1, "queue_length": 0}
    body = {"worker_name": joined.url, "check_heart_beat": True, "worker_status": status}
    assert fetch(gateway.port, "POST", "/register_worker", body).status == 200
    wait_until(lambda: [row["state"] for row in listed(gateway)] == ["ready", "ready"])

    async def silence() -> None:
        for worker in gateway.gateway._registry.workers.values():
            if worker.url == joined.url:
                worker.expires_s = time.monotonic()

    before = len(joined.received)
    gateway.call(silence())
    names = Counter(worker_of(post(gateway.port, chat())) for _ in range(20))
    assert len(names) == 1
    assert len(joined.received) == before
    assert [row["state"] for row in listed(gateway) if row["url"] == joined.url] == ["suspect"]


# ---- a class of one's own ----

LAST = """
class Last:
    def __init__(self, rng):
        self.told = []

    def choose(self, workers, sequences, ask=None):
        return max(i for i, w in enumerate(workers) if w.live and w.in_flight < w.slots)


class Broken(Last):
    def choose(self, workers, sequences, ask=None):
        raise KeyError("no such worker")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_last.py").write_text(LAST)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_a_class_of_ones_own_places(engines: EngineMaker, gateways: GatewayMaker) -> None:
    made = [engines(), engines()]
    gateway = gateways(*made, scheduling={"placement": "own_last:Last"})
    for _ in range(10):
        assert post(gateway.port, chat()).status == 200
    assert [len(engine.received) for engine in made] == [0, 10]


@pytest.mark.usefixtures("own")
def test_a_broken_one_harms_no_request_and_is_told_of(
    engines: EngineMaker, gateways: GatewayMaker, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateways(engines(), engines(), scheduling={"placement": "own_last:Broken"})
    with caplog.at_level(logging.WARNING, "evenflow"):
        for _ in range(5):
            assert post(gateway.port, chat()).status == 200
        wait_until(lambda: "no such worker" in caplog.text)
    assert "choose of 'own_last:Broken' failed: KeyError" in caplog.text


def test_a_reload_changes_who_places(engine: MockEngine, engines: EngineMaker, gateways: GatewayMaker) -> None:
    other = engines()
    gateway = gateways(engine, other, scheduling={"placement": "sticky"})
    session = [("x-evenflow-session", "one")]
    assert len({worker_of(post(gateway.port, chat(), headers=session)) for _ in range(8)}) == 1
    settings = gateway.gateway.settings
    scheduling = settings.scheduling.model_copy(update={"placement": "round_robin"})

    async def reload() -> None:
        gateway.gateway.reload(settings.model_copy(update={"scheduling": scheduling}))

    gateway.call(reload())
    assert len({worker_of(post(gateway.port, chat(), headers=session)) for _ in range(8)}) == 2
