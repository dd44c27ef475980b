"""The life of a call seen from both ends: leaving at every stage, time limits, retries, back-pressure."""

import asyncio
import time

import pytest
from support.gateway import EngineMaker, GatewayMaker, ProcessMaker, metric, served_at_once, wait_until
from support.http import CHAT, Client, chat, exchange, post, request_bytes
from support.mock_engine import Behaviour, MockEngine, Unconnectable

# Within this time of a caller's leaving, the worker's connection must be closed.
LEAVING_S = 0.05
SILENT = Behaviour(silent=True)
GATED = Behaviour(gated=True)


def aborted(engine: MockEngine, text: str) -> float:
    """When the gateway let go of the request with this text."""
    [received] = wait_until(lambda: engine.find(text), 2, f"{text!r} at the engine")
    when: float = wait_until(lambda: received.aborted_s, 2, f"{text!r} aborted")
    return when


# ---- the caller leaves (report 1, S30) ----


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("leave", [Client.close, Client.reset], ids=["closes", "resets"])
def test_leaving_before_the_first_byte_closes_the_worker(
    engine: MockEngine, gateways: GatewayMaker, stream: bool, leave: object
) -> None:
    engine.behaviour = SILENT
    gateway = gateways(engine)
    client = Client(gateway.port)
    client.send(request_bytes("POST", CHAT, chat("going", stream=stream, max_tokens=100000)))
    wait_until(lambda: engine.find("going"))
    left_s = leave(client)  # type: ignore[operator]
    assert aborted(engine, "going") - left_s < LEAVING_S
    gateway.wait_at_rest()
    engine.behaviour = Behaviour()
    served_at_once(gateway)


def test_leaving_a_stream_closes_the_worker(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(tokens=100000, chunk_delay_s=0.005)
    gateway = gateways(engine)
    client = Client(gateway.port)
    client.send(request_bytes("POST", CHAT, chat("going", stream=True)))
    events = client.events(client.read_head())
    for _ in range(5):
        next(events)
    left_s = client.close()
    assert aborted(engine, "going") - left_s < LEAVING_S
    gateway.wait_at_rest()


def test_leaving_amid_a_large_answer_closes_the_worker(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(body=b'{"text":"' + b"x" * 50_000_000 + b'"}')
    engine.send_buffer = 65536
    gateway = gateways(engine)
    client = Client(gateway.port, receive_buffer=65536)
    client.send(request_bytes("POST", CHAT, chat("going")))
    assert client.read_head().status == 200
    left_s = client.close()
    assert aborted(engine, "going") - left_s < 0.5
    gateway.wait_at_rest()


def test_leaving_while_queued_never_reaches_a_worker(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.named["hold"] = GATED
    gateway = gateways(engine, slots=1)
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        wait_until(lambda: engine.running == 1)
        client = Client(gateway.port)
        client.send(request_bytes("POST", CHAT, chat("going")))
        gateway.wait_for(queued=1)
        client.close()
        gateway.wait_for(0.5, queued=0, in_flight=1)
        engine.open_gate()
        assert holder.read_answer().status == 200
    gateway.wait_at_rest()
    served_at_once(gateway)
    assert not engine.find("going")


def test_half_closing_after_the_request_is_still_answered(engine: MockEngine, gateways: GatewayMaker) -> None:
    """A caller that says that it has nothing more to send (nc, HTTP/1.0 clients) may still be reading."""
    engine.behaviour = Behaviour(head_delay_s=0.1)
    gateway = gateways(engine)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat()))
        client.half_close()
        # Either reading is served, or the closing is taken as leaving; never a hang.
        data = client.read_to_end()
    assert data == b"" or data.startswith(b"HTTP/1.1 200")
    gateway.wait_at_rest()
    engine.behaviour = Behaviour()
    served_at_once(gateway)


# ---- time limits (report 10, S54) ----


def test_first_byte_limit_gives_504(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = SILENT
    gateway = gateways(engine, timeouts={"first_byte_s": 0.3})
    started = time.monotonic()
    answer = post(gateway.port, chat("slow"))
    assert 0.25 < time.monotonic() - started < 2.5
    assert answer.status == 504
    assert answer.error["code"] == "upstream_timeout"
    assert aborted(engine, "slow")
    gateway.wait_at_rest()


def test_first_byte_limit_of_a_stream_gives_504(engine: MockEngine, gateways: GatewayMaker) -> None:
    """The head alone is no answer: a stream whose first event never comes is late too."""
    engine.behaviour = Behaviour(stall_after=0)
    gateway = gateways(engine, timeouts={"first_byte_s": 0.3, "idle_s": 0.4})
    answer = post(gateway.port, chat(stream=True))
    if answer.status == 200:  # a head that was already passed on
        assert b"error" in answer.payloads[-1]
    else:
        assert answer.status == 504
        assert answer.error["code"] == "upstream_timeout"
    gateway.wait_at_rest()


def test_idle_limit_ends_a_stream_with_one_error_event(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(tokens=8, stall_after=4)
    gateway = gateways(engine, timeouts={"idle_s": 0.3})
    started = time.monotonic()
    answer = post(gateway.port, chat("stalls", stream=True))
    assert 0.25 < time.monotonic() - started < 2.5
    assert answer.status == 200
    errors = [payload for payload in answer.payloads if b'"error"' in payload]
    assert errors == answer.payloads[-1:]
    assert b"upstream_timeout" in errors[0]
    assert b"[DONE]" not in answer.payloads
    assert aborted(engine, "stalls")
    gateway.wait_at_rest()


def test_a_stream_that_keeps_talking_meets_the_total_limit(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(tokens=100000, chunk_delay_s=0.02)
    gateway = gateways(engine, timeouts={"total_s": 0.5, "idle_s": 5})
    started = time.monotonic()
    answer = post(gateway.port, chat("endless", stream=True))
    assert 0.4 < time.monotonic() - started < 3
    assert b'"error"' in answer.payloads[-1]
    assert aborted(engine, "endless")
    gateway.wait_at_rest()


def test_total_limit_of_a_whole_answer_gives_504(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = SILENT
    gateway = gateways(engine, timeouts={"total_s": 0.3})
    answer = post(gateway.port, chat())
    assert answer.status == 504
    assert answer.error["code"] == "upstream_timeout"


def test_connect_limit_ends_the_wait_for_a_worker_that_neither_accepts_nor_refuses(
    engine: MockEngine, gateways: GatewayMaker
) -> None:
    nowhere = Unconnectable()
    try:
        workers = [{"url": nowhere.start(), "models": ["lost"]}, {"url": engine.url, "models": ["m"]}]
        gateway = gateways(engine, workers=workers, timeouts={"connect_s": 0.3})
        started = time.monotonic()
        answer = post(gateway.port, chat() | {"model": "lost"})
        assert time.monotonic() - started < 2
        assert answer.status in (502, 503, 504)
        assert answer.error
        served_at_once(gateway)
        gateway.wait_at_rest()
    finally:
        nowhere.stop()


def test_one_hung_worker_delays_nothing_else(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """Report 10: A accepts and says nothing, B is fine."""
    silent, fine = engines(SILENT, models=("a",)), engines(models=("b",))
    workers = [{"url": silent.url, "models": ["a"]}, {"url": fine.url, "models": ["b"]}]
    gateway = gateways(silent, fine, workers=workers, timeouts={"first_byte_s": 20})
    clients = [Client(gateway.port) for _ in range(50)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, {**chat(), "model": "a"}))
    gateway.wait_for(calls=50)
    started = time.monotonic()
    for _ in range(20):
        assert post(gateway.port, {**chat(), "model": "b"}).status == 200
    assert time.monotonic() - started < 1
    for client in clients:
        client.close()
    gateway.wait_at_rest()


# ---- the queue's time limit (report 55) ----


def test_a_queue_timeout_is_told_and_leaves_nothing_behind(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.named["hold"] = GATED
    gateway = gateways(engine, slots=1, limits={"queue_timeout_s": 0.3})
    with Client(gateway.port) as holder:
        holder.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        wait_until(lambda: engine.running == 1)
        waiting = [Client(gateway.port) for _ in range(5)]
        for client in waiting:
            client.send(request_bytes("POST", CHAT, chat("late")))
        for client in waiting:
            answer = client.read_answer()
            assert answer.status in (429, 503)
            assert answer.error["code"] in ("overloaded", "queue_full", "queue_timeout")
            assert int(answer.header("retry-after") or 0) >= 1
            client.close()
        gateway.wait_for(queued=0, in_flight=1)
        engine.open_gate()
        assert holder.read_answer().status == 200
    gateway.wait_at_rest()
    served_at_once(gateway)
    assert not engine.find("late")


def test_the_queues_limit_ends_with_the_waiting(engine: MockEngine, gateways: GatewayMaker) -> None:
    """A call that had to wait may then run for as long as its worker's limits say."""
    engine.named["hold"] = Behaviour(head_delay_s=0.3)
    gateway = gateways(engine, slots=1, limits={"queue_timeout_s": 0.6})
    for slow in (Behaviour(head_delay_s=1.0), Behaviour(tokens=20, chunk_delay_s=0.06)):
        engine.named["slow"] = slow
        with Client(gateway.port) as holder, Client(gateway.port) as client:
            holder.send(request_bytes("POST", CHAT, chat("<<hold>>")))
            wait_until(lambda: engine.running == 1)
            client.send(request_bytes("POST", CHAT, chat("<<slow>>", stream=True)))
            answer = client.read_answer()
            assert answer.status == 200
            assert answer.payloads[-1] == b"[DONE]"
            assert holder.read_answer().status == 200
    gateway.wait_at_rest()


# ---- retries (S26, S53) ----


def test_a_refused_connection_is_retried_on_another_worker(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(), engines()
    # No probe comes between the death and the requests.
    gateway = gateways(first, second, fleet={"probe_interval_s": 60})
    first.stop()
    for number in range(10):
        answer = post(gateway.port, chat(f"try {number}"))
        assert answer.status == 200
    assert len(second.received) == 10
    gateway.wait_at_rest()


def test_a_request_given_back_is_counted_once(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(), engines()
    gateway = gateways(first, second, fleet={"probe_interval_s": 60}, scheduling={"placement": "round_robin"}, slots=4)
    first.stop()
    for _ in range(4):
        assert post(gateway.port, chat("two words", max_tokens=3)).status == 200
    assert metric(gateway, "evenflow_tokens_total", kind="output") == 12
    assert metric(gateway, "evenflow_tokens_total", kind="input") == 8
    assert metric(gateway, "evenflow_requests_total", model="m") == 4
    assert metric(gateway, "evenflow_retries_total") >= 1
    gateway.wait_at_rest()


def test_all_workers_refusing_gives_a_5xx_that_says_when_to_come_back(
    engine: MockEngine, gateways: GatewayMaker
) -> None:
    """Reports 53, 14: an error is never a 200, and no worker is no fault of the caller."""
    gateway = gateways(engine, fleet={"probe_interval_s": 60})
    engine.stop()
    answer = post(gateway.port, chat())
    assert answer.status in (502, 503)
    assert answer.error["code"] in ("upstream_error", "no_worker")
    answer = post(gateway.port, chat())
    assert answer.status in (502, 503)
    gateway.wait_at_rest()


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_a_worker_that_closes_before_answering_gives_502_or_another_worker(
    engines: EngineMaker, gateways: GatewayMaker, reset: bool
) -> None:
    """Report 53: a request that may have begun is not silently run twice, and never becomes an empty 200."""
    engine = engines(Behaviour(close_at_once=True, reset=reset))
    gateway = gateways(engine)
    for stream in (False, True):
        answer = post(gateway.port, chat(stream=stream))
        assert answer.status in (502, 503)
        assert answer.error["code"] in ("upstream_error", "no_worker")
    gateway.wait_at_rest()


def test_an_error_of_the_caller_is_never_retried(engines: EngineMaker, gateways: GatewayMaker) -> None:
    for status in (400, 404, 422):
        first, second = engines(Behaviour(status=status)), engines(Behaviour(status=status))
        gateway = gateways(first, second)
        assert post(gateway.port, chat()).status == status
        assert len(first.received) + len(second.received) == 1


def test_retries_are_bounded_by_a_budget(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """A fleet that fails as a whole is not hit several times as hard."""
    fleet = [engines(Behaviour(close_at_once=True)) for _ in range(3)]
    gateway = gateways(*fleet, fleet={"probe_interval_s": 60})
    calls = 300
    data = request_bytes("POST", CHAT, chat(), close=True)

    async def run() -> None:
        answers = await asyncio.gather(*(exchange(gateway.port, data) for _ in range(calls)))
        assert {answer.status for answer in answers} <= {502, 503}

    asyncio.run(run())
    tries = sum(len(engine.received) for engine in fleet)
    assert tries <= calls * 1.2 + 101
    gateway.wait_at_rest()


# ---- the worker's kept connections ----


def test_connections_to_a_worker_are_kept(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, fleet={"probe_interval_s": 60})
    opened = engine.connections_opened
    for _ in range(20):
        served_at_once(gateway)
    assert engine.connections_opened - opened <= 1


def test_a_worker_that_closes_idle_connections_is_survived(engines: EngineMaker, gateways: GatewayMaker) -> None:
    engine = engines(idle_close_s=0.05)
    gateway = gateways(engine, fleet={"probe_interval_s": 60})
    for pause_s in (0.0, 0.04, 0.045, 0.05, 0.055, 0.06, 0.1, 0.049, 0.051, 0.0):
        time.sleep(pause_s)
        served_at_once(gateway)
    gateway.wait_at_rest()


def test_a_worker_that_closes_just_as_a_request_comes_is_survived(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """The race that no check can win: the kept connection ends without a byte, so a fresh one is tried."""
    engine = engines(close_on_reuse=True)
    gateway = gateways(engine, fleet={"probe_interval_s": 60})
    for number in range(10):
        answer = post(gateway.port, chat(f"number {number}", stream=bool(number % 2)))
        assert answer.status == 200
        assert len(engine.find(f"number {number}")) == 1
    gateway.wait_at_rest()
    # It says nothing of the worker, and is no retry.
    assert metric(gateway, "evenflow_retries_total") == 0
    assert metric(gateway, "evenflow_worker_up") == 1


def test_a_connection_with_an_unfinished_answer_is_not_used_again(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """What is left of an answer must not become the next caller's answer."""
    engine = engines(Behaviour(tokens=200, chunk_delay_s=0.005))
    gateway = gateways(engine, fleet={"probe_interval_s": 60})
    client = Client(gateway.port)
    client.send(request_bytes("POST", CHAT, chat("left", stream=True)))
    client.read_head()
    client.close()
    aborted(engine, "left")
    engine.behaviour = Behaviour(tokens=1)
    assert post(gateway.port, chat("next")).json["choices"][0]["message"]["content"] == "word0"
    assert engine.find("left")[0].connection != engine.find("next")[0].connection


@pytest.mark.parametrize(
    "extra", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad"], ids=["byte", "second answer"]
)
def test_bytes_after_an_answer_never_reach_the_next_caller(
    engines: EngineMaker, gateways: GatewayMaker, extra: bytes
) -> None:
    engine = engines()
    engine.named["extra"] = Behaviour(body=b"{}", extra=extra)
    gateway = gateways(engine, fleet={"probe_interval_s": 60})
    for number in range(3):
        assert post(gateway.port, chat("<<extra>>")).body == b"{}"
        assert post(gateway.port, chat(f"next {number}")).json["usage"]
        # Such a connection is not to be trusted.
        assert engine.received[-1].connection != engine.received[-2].connection
    gateway.wait_at_rest()


# ---- back-pressure ----


def test_a_caller_that_stops_reading_stops_its_worker(engines: EngineMaker, processes: ProcessMaker) -> None:
    event = b"data: " + b"x" * 4000 + b"\n\n"
    done = b"data: [DONE]\n\n"
    engine = engines(Behaviour(events=(*(event,) * 20000, done)), send_buffer=65536)  # 80 MB
    gateway = processes(engine, timeouts={"idle_s": 30})
    served_at_once(gateway)
    before = gateway.resident_bytes()
    with Client(gateway.port, receive_buffer=65536) as client:
        client.send(request_bytes("POST", CHAT, chat("slow reader", stream=True)))
        answer = client.read_head()
        [received] = engine.find("slow reader")

        def stands_still() -> bool:
            sent = received.sent_bytes
            time.sleep(0.3)
            return received.sent_bytes == sent

        wait_until(stands_still, 10)
        assert received.sent_bytes < 24_000_000
        assert gateway.resident_bytes() - before < 16_000_000
        # Others are served meanwhile, and the reader gets everything once it reads.
        engine.behaviour = Behaviour()
        served_at_once(gateway)
        assert sum(len(piece) for piece in client.pieces(answer)) == 20000 * len(event) + len(done)
        assert answer.complete


def test_a_worker_that_reads_slowly_stops_its_caller(engines: EngineMaker, processes: ProcessMaker) -> None:
    """Back-pressure the other way: at the most one body of the limit is held, and it gets through whole."""
    engine = engines(Behaviour(read_rate=20_000_000))
    gateway = processes(engine)
    text = "y" * 8_000_000
    answer = post(gateway.port, chat(text), timeout_s=20)
    assert answer.status == 200
    assert engine.received[0].json["messages"][0]["content"] == text


def test_600_streams_to_one_worker_at_once(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 63: no pool is smaller than the slots; none waits for a connection."""
    engine.behaviour = Behaviour(tokens=3, gated_after=1)
    gateway = gateways(engine, slots=600)
    data = request_bytes("POST", CHAT, chat(stream=True), close=True)

    async def run() -> list[int]:
        calls = [asyncio.create_task(exchange(gateway.port, data)) for _ in range(600)]
        async with asyncio.timeout(15):
            while engine.running < 600:
                await asyncio.sleep(0.02)
        engine.open_gate()
        answers = await asyncio.gather(*calls)
        assert all(answer.payloads[-1] == b"[DONE]" for answer in answers)
        return [answer.status for answer in answers]

    assert asyncio.run(run()) == [200] * 600
    assert engine.running_max == 600
    gateway.wait_at_rest()


# ---- slots (S28, report 34) ----


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_slot_is_held_until_the_last_byte(engine: MockEngine, gateways: GatewayMaker, stream: bool) -> None:
    engine.behaviour = Behaviour(tokens=5, chunk_delay_s=0.005, head_delay_s=0.005)
    gateway = gateways(engine, slots=2)
    data = request_bytes("POST", CHAT, chat(stream=stream), close=True)

    async def run() -> None:
        answers = await asyncio.gather(*(exchange(gateway.port, data) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}

    asyncio.run(run())
    assert engine.running_max == 2
    gateway.wait_at_rest()


@pytest.mark.parametrize(
    "fields", [{"prompt": "one", "n": 2}, {"prompt": ["one", "two"]}, {"prompt": "one", "best_of": 2}],
    ids=["n", "prompts", "best_of"],
)  # fmt: skip
def test_a_slot_is_one_running_sequence(engine: MockEngine, gateways: GatewayMaker, fields: dict[str, object]) -> None:
    engine.behaviour = Behaviour(head_delay_s=0.02, logprobs=(-1.0,))
    gateway = gateways(engine, slots=4)
    data = request_bytes("POST", "/v1/completions", {"model": "m", **fields}, close=True)

    async def run() -> None:
        answers = await asyncio.gather(*(exchange(gateway.port, data) for _ in range(10)))
        assert {answer.status for answer in answers} == {200}

    asyncio.run(run())
    assert engine.running_max == 2
    gateway.wait_at_rest()


def test_a_call_with_more_sequences_than_slots_is_served(engine: MockEngine, gateways: GatewayMaker) -> None:
    """It takes the whole worker rather than waiting for ever."""
    gateway = gateways(engine, slots=2)
    answer = post(gateway.port, chat(n=5))
    assert answer.status == 200
    assert len(answer.json["choices"]) == 5
    gateway.wait_at_rest()
    served_at_once(gateway)
