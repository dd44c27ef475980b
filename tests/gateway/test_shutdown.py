"""Stopping: what runs is finished within its time, nothing new is taken, the rest is told (report 31)."""

import json
import signal
import time

import pytest
from support.gateway import GatewayMaker, GatewayProcess, ProcessMaker, served_at_once, status_of, wait_until
from support.http import CHAT, Client, ClosedEarlyError, chat, request_bytes
from support.mock_engine import Behaviour, MockEngine


def refuses(gateway: GatewayProcess) -> bool:
    """Tells whether new callers are refused: no connection, or at most a 503."""
    if status_of(gateway, "/readiness") == 200:
        return False
    try:
        with Client(gateway.port) as client:
            return client.request("POST", CHAT, chat("new")).status == 503
    except (ConnectionError, ClosedEarlyError):
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_running_streams_finish_and_nothing_new_is_taken(
    engine: MockEngine, processes: ProcessMaker, number: int
) -> None:
    engine.behaviour = Behaviour(tokens=6, gated_after=3)
    gateway = processes(engine)
    clients = [Client(gateway.port) for _ in range(3)]
    for client in clients:
        client.send(request_bytes("POST", CHAT, chat("running", stream=True)))
    answers = [client.read_head() for client in clients]
    gateway.signal(number)
    wait_until(lambda: refuses(gateway), 3, "new ones refused")
    assert status_of(gateway, "/readiness") in (0, 503)
    time.sleep(0.2)
    assert gateway.process.poll() is None
    engine.open_gate()
    for client, answer in zip(clients, answers, strict=True):
        assert list(client.events(answer))[-1] == b"[DONE]"
        assert answer.complete
        assert client.closed_within(2)
        client.close()
    assert gateway.wait(5) == 0
    assert not engine.find('"new"')


def test_the_drain_is_bounded_and_the_rest_is_told(engine: MockEngine, processes: ProcessMaker) -> None:
    engine.behaviour = Behaviour(tokens=100000, chunk_delay_s=0.02)
    engine.named["silent"] = Behaviour(silent=True)
    gateway = processes(engine, listen={"drain_s": 0.7})
    with Client(gateway.port) as streaming, Client(gateway.port) as waiting:
        streaming.send(request_bytes("POST", CHAT, chat("stream", stream=True)))
        waiting.send(request_bytes("POST", CHAT, chat("<<silent>>")))
        answer = streaming.read_head()
        wait_until(lambda: engine.running == 2)
        sent_s = gateway.signal()
        payloads = list(streaming.events(answer))
        assert json.loads(payloads[-1])["error"]["message"]
        assert b"[DONE]" not in payloads
        whole = waiting.read_answer()
        assert whole.status in (502, 503)
        assert whole.error
    assert gateway.wait(5) == 0
    assert 0.5 < time.monotonic() - sent_s < 4
    wait_until(lambda: all(received.aborted_s for received in engine.received), 1)


def test_what_waits_is_served_or_told_within_the_drain(engine: MockEngine, processes: ProcessMaker) -> None:
    engine.named["hold"] = Behaviour(gated=True)
    gateway = processes(engine, slots=1, listen={"drain_s": 3})
    clients = [Client(gateway.port) for _ in range(4)]
    clients[0].send(request_bytes("POST", CHAT, chat("<<hold>>")))
    wait_until(lambda: engine.running == 1)
    for client in clients[1:]:
        client.send(request_bytes("POST", CHAT, chat("waits")))
    time.sleep(0.2)
    gateway.signal()
    time.sleep(0.2)
    engine.open_gate()
    assert clients[0].read_answer().status == 200
    for client in clients[1:]:
        answer = client.read_answer()
        assert answer.status in (200, 503)
        if answer.status == 503:
            assert answer.header("retry-after")
        client.close()
    clients[0].close()
    assert gateway.wait(6) == 0


def test_idle_gateways_stop_at_once(engine: MockEngine, processes: ProcessMaker) -> None:
    """Kept connections of callers are closed; they hold up nothing."""
    gateway = processes(engine)
    clients = [Client(gateway.port) for _ in range(5)]
    for client in clients[:3]:
        assert client.request("POST", CHAT, chat()).status == 200
    sent_s = gateway.signal()
    assert gateway.wait(5) == 0
    assert time.monotonic() - sent_s < 2
    for client in clients:
        assert client.closed_within(1)
        client.close()
    assert "Traceback" not in gateway.stderr
    assert "Error" not in gateway.stderr


def test_idle_connections_are_closed_while_others_still_run(engine: MockEngine, processes: ProcessMaker) -> None:
    engine.named["hold"] = Behaviour(gated=True)
    gateway = processes(engine)
    with Client(gateway.port) as running, Client(gateway.port) as idle, Client(gateway.port) as unused:
        running.send(request_bytes("POST", CHAT, chat("<<hold>>")))
        assert idle.request("POST", CHAT, chat()).status == 200
        wait_until(lambda: engine.running == 1)
        gateway.signal()
        assert idle.closed_within(2)
        assert unused.closed_within(2)
        assert gateway.process.poll() is None
        engine.open_gate()
        assert running.read_answer().status == 200
    assert gateway.wait(5) == 0


def test_a_second_signal_ends_the_drain(engine: MockEngine, processes: ProcessMaker) -> None:
    engine.behaviour = Behaviour(silent=True)
    gateway = processes(engine, listen={"drain_s": 60})
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat()))
        wait_until(lambda: engine.running == 1)
        gateway.signal()
        time.sleep(0.3)
        assert gateway.process.poll() is None
        gateway.signal()
        gateway.wait(4)
        client.read_to_end()


def test_a_callers_kept_connection_is_told_to_close(engine: MockEngine, processes: ProcessMaker) -> None:
    engine.behaviour = Behaviour(gated=True)
    gateway = processes(engine)
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat()))
        wait_until(lambda: engine.running == 1)
        gateway.signal()
        wait_until(lambda: refuses(gateway), 3)
        engine.open_gate()
        answer = client.read_answer()
        assert answer.status == 200
        assert (answer.header("connection") or "").lower() == "close"
        assert client.closed_within(2)
    assert gateway.wait(5) == 0


def test_stopping_in_process_closes_everything(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    served_at_once(gateway)
    client = Client(gateway.port)
    client.send(request_bytes("POST", CHAT, chat()))
    assert client.read_answer().status == 200
    gateway.stop()
    assert client.closed_within(1)
    client.close()
    wait_until(lambda: engine.connections == 0, 2, "worker connections closed")
    with pytest.raises(ConnectionRefusedError):
        Client(gateway.port)
