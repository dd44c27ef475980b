"""S35-S44: m prompts with n choices each over workers that make one choice at a time, as if they made all."""

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from support.gateway import EngineMaker, GatewayMaker, GatewayThread, metric, wait_until
from support.http import CHAT, Answer, Client, chat, fetch, post, request_bytes
from support.mock_engine import Behaviour, MockEngine

COMPLETIONS = "/v1/completions"


def alone(*engines: MockEngine, slots: int = 4) -> list[dict[str, Any]]:
    """Workers that make one choice of a request."""
    return [{"url": engine.url, "models": ["m"], "slots": slots, "n_max": 1} for engine in engines]


def asked(engine: MockEngine) -> list[dict[str, Any]]:
    return [received.json for received in engine.received]


def streamed(answer: Answer) -> tuple[dict[int, str], dict[int, list[str]], list[dict[str, Any]]]:
    """Texts and finish reasons by index, and all events but the last."""
    texts: dict[int, str] = defaultdict(str)
    finishes: dict[int, list[str]] = defaultdict(list)
    events = [json.loads(data) for data in answer.payloads if data != b"[DONE]"]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice.get("finish_reason"):
                finishes[choice["index"]].append(choice["finish_reason"])
    return dict(texts), dict(finishes), events


def test_a_chat_with_n(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S35, S37, S44, report 48: never silently fewer; the prompt is counted once, the choices all."""
    engine.behaviour = Behaviour(input_tokens=7, tokens=5)
    gateway = gateways(engine, workers=alone(engine))
    answer = post(gateway.port, chat(n=3)).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"word0 word1 word2 word3 word4 "}
    assert answer["object"] == "chat.completion"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 15, 22)
    assert len(asked(engine)) == 3
    assert all("n" not in body and body["stream"] for body in asked(engine))
    gateway.wait_at_rest()


def test_prompts_come_first_and_each_is_answered_by_itself(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S35, S36: index = i·n + j, prompt-major."""
    gateway = gateways(engine, workers=alone(engine))
    for number in range(3):
        engine.named[f"p{number}"] = Behaviour(token=f"t{number}-", tokens=2, input_tokens=3)
    body = {"model": "m", "prompt": [f"<<p{number}>>" for number in range(3)], "n": 2}
    answer = post(gateway.port, body, path=COMPLETIONS).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text[:2] for text in texts] == ["t0", "t0", "t1", "t1", "t2", "t2"]
    assert answer["usage"]["prompt_tokens"] == 9
    assert answer["object"] == "text_completion"


def test_token_ids_are_prompts_too(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine, workers=alone(engine))
    post(gateway.port, {"model": "m", "prompt": [[1, 2], [3]], "n": 1}, path=COMPLETIONS)
    assert sorted(json.dumps(body["prompt"]) for body in asked(engine)) == ["[1, 2]", "[3]"]
    engine.received.clear()
    post(gateway.port, {"model": "m", "prompt": [1, 2, 3], "n": 2}, path=COMPLETIONS)
    assert [body["prompt"] for body in asked(engine)] == [[1, 2, 3]] * 2


def test_each_copy_has_its_own_seed(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S40: seed + j for choice j of each prompt."""
    gateway = gateways(engine, workers=alone(engine))
    post(gateway.port, {"model": "m", "prompt": ["a", "b"], "n": 3, "seed": 40}, path=COMPLETIONS)
    seeds = defaultdict(list)
    for body in asked(engine):
        seeds[body["prompt"]].append(body["seed"])
    assert {prompt: sorted(found) for prompt, found in seeds.items()} == {"a": [40, 41, 42], "b": [40, 41, 42]}
    engine.received.clear()
    post(gateway.port, chat(n=2))
    assert all("seed" not in body for body in asked(engine))


def test_a_stream_of_several_choices(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S39, report 11: every chunk names its index, one finish per index, one usage, one end, one id."""
    engine.behaviour = Behaviour(tokens=4, input_tokens=5, chunk_delay_s=0.002)
    gateway = gateways(engine, workers=alone(engine))
    answer = post(gateway.port, chat(n=4, stream=True, stream_options={"include_usage": True}))
    texts, finishes, events = streamed(answer)
    assert texts == dict.fromkeys(range(4), "word0 word1 word2 word3 ")
    assert finishes == {index: ["stop"] for index in range(4)} or all(len(x) == 1 for x in finishes.values())
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    assert answer.payloads.count(b"[DONE]") == 1
    assert answer.payloads[-1] == b"[DONE]"
    usages = [event["usage"] for event in events if event.get("usage")]
    assert [usage["completion_tokens"] for usage in usages] == [16]
    assert usages[0]["prompt_tokens"] == 5
    assert events[-1]["choices"] == []
    roles = [c for event in events for c in event["choices"] if c.get("delta", {}).get("role")]
    assert len(roles) == 4
    # And without asking for usage there is none.
    _, _, events = streamed(post(gateway.port, chat(n=2, stream=True)))
    assert not any("usage" in event for event in events)


def test_copies_follow_the_first_to_its_worker(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """S43: the first copy goes ahead, the others go where its prompt is cached, and not before its first token."""
    first, second = engines(), engines()
    for engine in (first, second):
        engine.behaviour = Behaviour(gated=True, tokens=2)
    gateway = gateways(first, second, workers=alone(first, second))
    with Client(gateway.port) as client:
        client.send(request_bytes("POST", CHAT, chat(n=4)))
        wait_until(lambda: first.running + second.running == 1)
        assert gateway.counter("queued") == 0
        for engine in (first, second):
            engine.open_gate()
        assert len(client.read_answer().json["choices"]) == 4
    assert sorted((len(first.received), len(second.received))) == [0, 4]
    gateway.wait_at_rest()


def test_different_prompts_spread_over_workers(engines: EngineMaker, gateways: GatewayMaker) -> None:
    first, second = engines(), engines()
    for engine in (first, second):
        engine.behaviour = Behaviour(head_delay_s=0.05)
    gateway = gateways(first, second, workers=alone(first, second))
    post(gateway.port, {"model": "m", "prompt": ["a", "b", "c", "d"]}, path=COMPLETIONS)
    assert len(first.received) == len(second.received) == 2


def test_more_choices_than_slots(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S28: never more at once than the worker has slots, and all in the end."""
    engine.behaviour = Behaviour(head_delay_s=0.01)
    gateway = gateways(engine, workers=alone(engine, slots=3))
    answer = post(gateway.port, chat(n=16)).json
    assert len(answer["choices"]) == 16
    assert engine.running_max <= 3


def test_a_worker_that_does_it_itself_is_used_for_it(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S44: and its answer keeps its bytes."""
    gateway = gateways(engine)
    body = {"model": "m", "prompt": ["a", "b"], "n": 2}
    answer = post(gateway.port, body, path=COMPLETIONS)
    assert len(answer.json["choices"]) == 4
    (received,) = engine.received
    assert received.json == body


def test_a_cap_is_kept(engine: MockEngine, gateways: GatewayMaker) -> None:
    workers = alone(engine)
    workers[0]["n_max"] = 4
    gateway = gateways(engine, workers=workers)
    assert len(post(gateway.port, chat(n=4)).json["choices"]) == 4
    assert [body["n"] for body in asked(engine)] == [4]
    assert len(post(gateway.port, chat(n=5, seed=10)).json["choices"]) == 5
    assert [(body.get("n"), body["seed"]) for body in asked(engine)[1:]] == [(4, 10), (None, 14)]


def test_an_engine_that_ignores_n_is_noticed(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S44: it makes one where several were asked for; the others are asked for alone, now and from then on."""
    event = b'data: {"id":"x","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    end = b'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    engine.behaviour = Behaviour(events=(event, end))
    workers = alone(engine)
    workers[0]["n_max"] = 4
    gateway = gateways(engine, workers=workers)
    for stream in (False, True):
        answer = post(gateway.port, chat(n=6, stream=stream))
        if stream:
            texts, finishes, _ = streamed(answer)
            assert texts == dict.fromkeys(range(6), "a")
            assert finishes == {index: ["stop"] for index in range(6)}
        else:
            assert [choice["message"]["content"] for choice in answer.json["choices"]] == ["a"] * 6
    assert [body.get("n") for body in asked(engine)[-6:]] == [None] * 6
    gateway.wait_at_rest()


def test_a_second_call_of_an_engine_with_a_cap_is_split_the_same(engine: MockEngine, gateways: GatewayMaker) -> None:
    """All choices came: nothing was missing, and nothing is held against the engine."""
    workers = alone(engine)
    workers[0]["n_max"] = 4
    gateway = gateways(engine, workers=workers)
    for _ in range(2):
        engine.received.clear()
        assert len(post(gateway.port, chat(n=5)).json["choices"]) == 5
        assert [body.get("n") for body in asked(engine)] == [4, None]


def test_an_engine_of_an_unknown_kind_that_ignores_n_is_noticed(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S44: nobody said what it can do; its first answer does, and the caller gets all choices of that call too."""
    engine.behaviour = Behaviour(ignores_n=True, tokens=2, input_tokens=3)
    gateway = gateways(engine)
    answer = post(gateway.port, chat(n=3)).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 6
    assert [body.get("n") for body in asked(engine)] == [3, None, None, None]
    engine.received.clear()
    assert len(post(gateway.port, chat(n=2)).json["choices"]) == 2
    assert [body.get("n") for body in asked(engine)] == [None, None]
    gateway.wait_at_rest()


def test_an_engine_that_ignores_n_is_noticed_in_a_stream(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(ignores_n=True, tokens=2)
    gateway = gateways(engine)
    texts, finishes, _ = streamed(post(gateway.port, chat(n=3, stream=True)))
    assert texts == dict.fromkeys(range(3), "word0 word1 ")
    assert all(len(finishes[index]) == 1 for index in range(3))
    gateway.wait_at_rest()


def test_an_engine_that_makes_n_keeps_its_bytes_from_the_first_call_on(
    engine: MockEngine, gateways: GatewayMaker
) -> None:
    """Also in many pieces, and also when it was not known that it does."""
    engine.behaviour = Behaviour(tokens=3, write_bytes=50, own_tokens=True)
    gateway = gateways(engine)
    shown = [post(gateway.port, chat(n=2)).body for _ in range(2)]
    with Client(engine.port) as straight:
        straight.send(request_bytes("POST", CHAT, chat(n=2)))
        assert shown == [straight.read_answer().body] * 2
    # From then on a stream of it is passed through, too.
    first = post(gateway.port, chat(n=2, stream=True)).payloads
    assert json.loads(first[0])["id"] == "chatcmpl-1"


def test_the_best_of_several(engines: EngineMaker, gateways: GatewayMaker) -> None:
    """The likeliest for each token, best first; all that were made are counted; log-probabilities only if asked for."""
    for n_max in (1, 3, None):
        engine = engines()
        engine.behaviour = Behaviour(own_tokens=True, tokens=2, input_tokens=3, logprobs=(-1.0, -0.25, -3.0, -0.5))
        worker = {"url": engine.url, "models": ["m"], "slots": 8, **({"n_max": n_max} if n_max else {})}
        gateway = gateways(engine, workers=[worker])
        body = {"model": "m", "prompt": ["a", "b"], "n": 2, "best_of": 4, "seed": 4}
        answer = post(gateway.port, body, path=COMPLETIONS).json
        texts = [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]]
        likeliest = ["word5.0 word5.1 ", "word7.0 word7.1 "]
        assert texts == [(index, text, None) for index, text in enumerate(likeliest * 2)]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 16)
        assert all("best_of" not in sent for sent in asked(engine))
        shown = post(gateway.port, {**body, "logprobs": 2}, path=COMPLETIONS).json["choices"][0]["logprobs"]
        assert shown["token_logprobs"] == [-0.25, -0.25]
        gateway.wait_at_rest()


def test_the_best_are_not_to_be_had_without_log_probabilities(engine: MockEngine, gateways: GatewayMaker) -> None:
    gateway = gateways(engine)
    answer = post(gateway.port, {"model": "m", "prompt": "a", "best_of": 3}, path=COMPLETIONS)
    assert (answer.status, answer.error["param"]) == (400, "best_of")
    gateway.wait_at_rest()


def llama(engine: MockEngine, slots: int = 4) -> dict[str, Any]:
    """A worker that is found to be llama.cpp by its metrics."""
    engine.metrics = lambda: b"llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"
    return {"url": engine.url, "models": ["m"], "slots": slots}


def known(gateway: GatewayThread) -> GatewayThread:
    (worker,) = gateway.gateway._registry.workers.values()
    wait_until(lambda: worker.kind == "llamacpp", 5)
    return gateway


def test_what_llama_cpp_does_otherwise_on_completions_is_healed(engine: MockEngine, gateways: GatewayMaker) -> None:
    """Report 50, and: no echo, a token when none was asked for, null for `logprobs: 0`."""
    engine.behaviour = Behaviour(logprobs=(-0.5,), logprobs_of_chat=True, tokens=1)
    gateway = known(gateways(engine, workers=[llama(engine)]))
    ask = {"model": "m", "prompt": "Once"}
    for stream in (False, True):
        for fields, text, logprobs in (
            ({"echo": True}, "Onceword0 ", None),
            ({"max_tokens": 0}, "", None),
            ({"max_tokens": 0, "echo": True}, "Once", None),
            ({"logprobs": 0}, "word0 ", {"word0 ": -0.5}),
            ({"logprobs": 2}, "word0 ", {"word0 ": -0.5}),
        ):
            answer = post(gateway.port, {**ask, **fields, "stream": stream}, path=COMPLETIONS)
            if stream:
                texts, finishes, events = streamed(answer)
                assert texts == {0: text}, fields
                shown = next((c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]), None)
                finish = finishes[0]
            else:
                (choice,) = answer.json["choices"]
                assert choice["text"] == text, fields
                shown, finish = choice["logprobs"], [choice["finish_reason"]]
                assert answer.json["usage"]["completion_tokens"] == (0 if "max_tokens" in fields else 1)
            assert len(finish) == 1
            assert finish == ["length"] or "max_tokens" not in fields
            assert (shown and shown["top_logprobs"][0]) == logprobs, fields
    for prompt, fields in (([1, 2], {"echo": True}), ("Once", {"echo": True, "logprobs": 1})):
        answer = post(gateway.port, {**ask, "prompt": prompt, **fields}, path=COMPLETIONS)
        assert (answer.status, answer.error["param"]) == (400, "echo")
    gateway.wait_at_rest()


def test_an_engine_makes_as_many_choices_as_it_has_slots(engine: MockEngine, gateways: GatewayMaker) -> None:
    """llama.cpp computes the prompt of such a group once, and takes no more choices than it has slots."""
    engine.pages["/props"] = json.dumps({"total_slots": 4}).encode()
    gateway = known(gateways(engine, workers=[llama(engine)]))
    (worker,) = gateway.gateway._registry.workers.values()
    wait_until(lambda: worker.n_max == 4, 5)
    assert len(post(gateway.port, chat(n=10, seed=5)).json["choices"]) == 10
    assert sorted((body["seed"], body["n"], body["stream"]) for body in asked(engine)) == [
        (5, 4, True),
        (9, 4, True),
        (13, 2, True),
    ]
    assert engine.sequences_max <= 4
    gateway.wait_at_rest()


@pytest.mark.parametrize("seed", [2**64 - 1, 2**64 - 2, -(2**63)])
def test_seeds_stay_within_their_bounds(engine: MockEngine, gateways: GatewayMaker, seed: int) -> None:
    gateway = gateways(engine, workers=alone(engine))
    assert post(gateway.port, chat(n=3, seed=seed)).status == 200
    seeds = {body["seed"] for body in asked(engine)}
    assert len(seeds) == 3
    assert all(-(2**63) <= one < 2**64 for one in seeds)


FAILURES = {
    "refused": (Behaviour(status=400, body=b'{"error":{"message":"too long","code":"context_length_exceeded"}}'), 400),
    "failed": (Behaviour(status=500, body=b'{"error":{"message":"oh"}}'), 502),
    "closed": (Behaviour(close_at_once=True), 502),
    "cut": (Behaviour(tokens=5, close_after=2), 502),
    "error event": (Behaviour(error_after=0), 502),
    "stalled": (Behaviour(tokens=5, stall_after=2), 504),
    "silent": (Behaviour(silent=True), 504),
    "garbage": (Behaviour(raw=b"garbage\r\n\r\n"), 502),
    "no event": (Behaviour(events=(b"data: what\n\n",)), 502),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_one_part_that_fails_ends_all(
    engine: MockEngine, gateways: GatewayMaker, failure: str, stream: bool
) -> None:
    """S42: one error, and no other part goes on or keeps a slot."""
    behaviour, status = FAILURES[failure]
    engine.named["bad"] = behaviour
    engine.behaviour = Behaviour(tokens=50, chunk_delay_s=0.05)
    timeouts = {"first_byte_s": 0.5, "idle_s": 0.5}
    gateway = gateways(engine, workers=alone(engine), timeouts=timeouts)
    body = {"model": "m", "prompt": ["good", "<<bad>>", "good"], "stream": stream}
    answer = post(gateway.port, body, path=COMPLETIONS)
    if stream and answer.status == 200:
        assert b"[DONE]" not in answer.payloads
        last = json.loads(answer.payloads[-1])
        assert "error" in last
        assert sum(b'"error"' in data for data in answer.payloads) == 1
    else:
        assert answer.status in (status, 503), answer
        assert answer.error["message"]
    gateway.wait_at_rest(2)
    wait_until(lambda: engine.running == 0 or failure in ("silent", "stalled"), 2)


def test_a_caller_that_leaves_cancels_all(engine: MockEngine, gateways: GatewayMaker) -> None:
    """S30: those that run, those that wait, and those that have not begun."""
    engine.behaviour = Behaviour(tokens=1000, chunk_delay_s=0.01)
    gateway = gateways(engine, workers=alone(engine, slots=2))
    for stream in (False, True):
        client = Client(gateway.port)
        client.send(request_bytes("POST", CHAT, chat(n=6, stream=stream, max_tokens=1000)))
        wait_until(lambda: engine.running == 2)
        client.close()
        gateway.wait_at_rest(1)
        wait_until(lambda: engine.running == 0, 1)


def test_a_refused_connection_is_retried_elsewhere(engines: EngineMaker, gateways: GatewayMaker) -> None:
    good, gone = engines(), engines()
    gateway = gateways(good, gone, workers=alone(good, gone))
    gone.stop()
    for _ in range(3):
        answer = post(gateway.port, {"model": "m", "prompt": ["a", "b", "c"], "n": 2}, path=COMPLETIONS)
        assert len(answer.json["choices"]) == 6
    gateway.wait_at_rest()


def test_one_admission_one_line_one_usage(engine: MockEngine, gateways: GatewayMaker, tmp_path: Any) -> None:
    log = tmp_path / "access.log"
    engine.behaviour = Behaviour(input_tokens=10, tokens=5)
    tenants = [{"name": "a", "keys": ["sk-a"], "limits": {"requests_per_minute": 2, "tokens_per_minute": 100_000}}]
    gateway = gateways(
        engine, workers=alone(engine), tenants=tenants, log={"access": str(log)}, auth={"admin_keys": ["sk-admin"]}
    )
    assert post(gateway.port, chat(n=4, max_tokens=5), key="sk-a").status == 200
    assert post(gateway.port, chat(n=4, max_tokens=5), key="sk-a").status == 200
    assert post(gateway.port, chat(n=4, max_tokens=5), key="sk-a").status == 429
    wait_until(lambda: log.exists() and log.read_text().count("\n") == 3)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["status"], line.get("input_tokens"), line.get("output_tokens")) for line in lines] == [
        (200, 10, 20),
        (200, 10, 20),
        (429, None, None),
    ]
    assert lines[0]["worker"]
    assert metric(gateway, "evenflow_tokens_total", key="sk-admin", kind="output") == 40
    told = fetch(gateway.port, "GET", f"/admin/v1/requests/{lines[0]['request_id']}", key="sk-admin").json
    assert told["output_tokens"] == 20


def test_a_reader_that_does_not_read_stops_all_parts(engine: MockEngine, gateways: GatewayMaker) -> None:
    engine.behaviour = Behaviour(tokens=200_000, token="x" * 200)
    gateway = gateways(engine, workers=alone(engine))
    client = Client(gateway.port, receive_buffer=8192)
    client.send(request_bytes("POST", CHAT, chat(n=3, stream=True, max_tokens=200_000)))
    wait_until(lambda: engine.running == 3)

    def paused() -> bool:
        (worker,) = gateway.gateway._registry.workers.values()
        return bool(worker.busy) and all(connection._paused for connection in worker.busy)

    wait_until(paused, 5)
    client.close()
    gateway.wait_at_rest()


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_is_put_together_as_it_was(engines: EngineMaker, gateways: GatewayMaker, seed: int) -> None:
    """Random m, n, slots, splits of bytes and speeds: each index has exactly its text, and one finish."""
    rng = random.Random(seed)
    made = [engines() for _ in range(rng.randint(1, 3))]
    prompts, n = rng.choice([(1, 2), (1, 4), (2, 1), (3, 1), (2, 3), (4, 2), (3, 4)])
    tokens = [rng.randint(1, 12) for _ in range(prompts)]
    for engine in made:
        for number in range(prompts):
            engine.named[f"p{number}"] = Behaviour(
                token=f"[{number}ü\\n]",
                tokens=tokens[number],
                chunk_delay_s=rng.choice([0.0, 0.001]),
                write_bytes=rng.choice([None, 1, 7, 50]),
                usage=rng.choice(["asked", "always", "never"]),
            )
    gateway = gateways(*made, workers=alone(*made, slots=rng.randint(1, 4)))
    body = {"model": "m", "prompt": [f"<<p{number}>>" for number in range(prompts)], "n": n}
    texts_of = ["".join(f"[{number}ü\\n]{token} " for token in range(tokens[number])) for number in range(prompts)]
    expected = [text for text in texts_of for _ in range(n)]
    whole = post(gateway.port, body, path=COMPLETIONS).json
    assert [choice["text"] for choice in whole["choices"]] == expected, f"seed {seed}"
    texts, finishes, _ = streamed(post(gateway.port, {**body, "stream": True}, path=COMPLETIONS))
    assert [texts[index] for index in range(prompts * n)] == expected, f"seed {seed}"
    assert all(len(finishes[index]) == 1 for index in range(prompts * n)), f"seed {seed}"
    gateway.wait_at_rest()
    assert isinstance(gateway, GatewayThread)
