"""The calls that parallel sampling is for, through the OpenAI SDK on two real engines of four slots each."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from support.gateway import GatewayProcess, wait_ready, wait_until
from support.http import fetch, post

from evenflow.fleet.engines.embedded import ALIAS_DEFAULT, EngineError, EngineProcess, find_weights

ENGINES, SLOTS = 2, 4
LONG = "The river carries boats and birds and trains along its banks. " * 60


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineProcess]]:
    try:
        find_weights()
    except EngineError as error:
        pytest.skip(str(error))
    made = [EngineProcess("--instances", str(ENGINES), "--slots", str(SLOTS)) for _ in range(ENGINES)]
    try:
        for engine in made:
            engine.wait_ready()
        yield made
    finally:
        for engine in made:
            engine.stop()


@pytest.fixture(scope="module")
def gateway(engines: list[EngineProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    path: Path = tmp_path_factory.mktemp("sampling") / "evenflow.yaml"
    settings = {
        "listen": {"port": 0},
        "workers": [{"url": engine.url} for engine in engines],
        "timeouts": {"first_byte_s": 100},
        "log": {"access": "off"},
    }
    gateway = GatewayProcess(path, settings)
    try:
        wait_ready(gateway)
        # Which engines these are is learned from what they report.
        wait_until(lambda: {w["slots"] for w in workers(gateway)} == {SLOTS}, 10, "the engines' reports")
        yield gateway
    finally:
        gateway.stop()


def workers(gateway: GatewayProcess) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = fetch(gateway.port, "GET", "/list_workers").json["workers"]
    return listed


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="x", max_retries=0, timeout=120) as made:
        yield made


@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (1, 3), (2, 1), (2, 3), (1, 16)])
def test_completions(client: openai.OpenAI, prompts: int, n: int) -> None:
    asked = ["Tell me about rivers.", "Count: one two three"][:prompts]
    request = {"model": ALIAS_DEFAULT, "prompt": asked if prompts > 1 else asked[0], "n": n, "max_tokens": 8}
    answer = client.completions.create(**request, seed=7, temperature=1.0)  # type: ignore[call-overload]
    assert [choice.index for choice in answer.choices] == list(range(prompts * n))
    alone = [client.completions.create(model=ALIAS_DEFAULT, prompt=prompt, max_tokens=8) for prompt in asked]
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    assert 0 < answer.usage.completion_tokens <= 8 * prompts * n
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    if n > 1:
        assert len({choice.text for choice in answer.choices[:n]}) > 1
        again = client.completions.create(**request, seed=7, temperature=1.0)  # type: ignore[call-overload]
        assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]


@pytest.mark.parametrize("n", [4, 16])
def test_chat_with_logprobs(client: openai.OpenAI, n: int) -> None:
    answer, again = (
        client.chat.completions.create(
            model=ALIAS_DEFAULT,
            messages=[{"role": "user", "content": "Say something."}],
            n=n,
            max_tokens=6,
            logprobs=True,
            top_logprobs=2,
            temperature=1.0,
            seed=1,
        )
        for _ in range(2)
    )
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens < 60
    assert [choice.index for choice in answer.choices] == list(range(n))
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_completions_have_log_probabilities_in_their_own_shape(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=ALIAS_DEFAULT, prompt="Once upon", n=2, max_tokens=4, logprobs=2)
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) > 0
        assert "".join(choice.logprobs.tokens) == choice.text


def test_the_best_are_the_likeliest(client: openai.OpenAI) -> None:
    request = {"model": ALIAS_DEFAULT, "prompt": "Tell me", "max_tokens": 4, "seed": 3, "temperature": 1.0}
    made = client.completions.create(**request, n=5, logprobs=1)  # type: ignore[call-overload]
    by_score = sorted(made.choices, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    best = client.completions.create(**request, n=2, best_of=5)  # type: ignore[call-overload]
    assert [choice.text for choice in best.choices] == [choice.text for choice in by_score[:2]]
    assert best.usage.completion_tokens == made.usage.completion_tokens
    assert best.choices[0].logprobs is None


def test_echo_and_no_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=ALIAS_DEFAULT, prompt=["One", "Two"], echo=True, max_tokens=0)
    assert [choice.text for choice in answer.choices] == ["One", "Two"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_stream_of_three(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    finishes: list[int] = []
    ids = set()
    for event in client.chat.completions.create(
        model=ALIAS_DEFAULT,
        messages=[{"role": "user", "content": "Hello"}],
        n=3,
        max_tokens=6,
        stream=True,
        temperature=1.0,
    ):
        ids.add(event.id)
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                finishes.append(choice.index)
    assert sorted(finishes) == sorted(texts) == [0, 1, 2]
    assert len(ids) == 1


def computed(engine: EngineProcess) -> int:
    with urlopen(f"{engine.url}/metrics", timeout=5) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("llamacpp:prompt_tokens_total"):
                return int(float(line.split()[-1]))
    raise AssertionError("no count of prompt tokens")


def test_a_long_prompt_is_computed_once(client: openai.OpenAI, engines: list[EngineProcess]) -> None:
    """S43: eight choices of a prompt of some 800 tokens cost the prompt once, by the engines' own count."""
    before = sum(map(computed, engines))
    began = time.monotonic()
    answer = client.completions.create(
        model=ALIAS_DEFAULT, prompt=f"{began} {LONG}", n=8, max_tokens=4, temperature=1.0
    )
    assert answer.usage is not None
    tokens = answer.usage.prompt_tokens
    assert tokens > 600
    assert len(answer.choices) == 8
    assert sum(map(computed, engines)) - before <= 1.1 * tokens


def test_whoever_does_not_stream_can_leave_too(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    """An engine that goes on with a whole answer whose caller has left is asked for a stream instead."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).completions.create(
            model=ALIAS_DEFAULT, prompt="Once upon a time", max_tokens=1000, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: all(worker["in_flight"] == 0 for worker in workers(gateway)), 2)
    began = time.monotonic()
    client.completions.create(model=ALIAS_DEFAULT, prompt="Hi", n=4, max_tokens=2)
    assert time.monotonic() - began < 15


# ---- routes of older services, which are made of these ----


def test_logprobs_of_the_next_token(gateway: GatewayProcess) -> None:
    body = {"model": ALIAS_DEFAULT, "prompt": ["The capital of France is", "One, two,"], "top_k": 5}
    first = post(gateway.port, body, path="/logprobs", timeout_s=60).json
    for logprobs, indices in zip(first["logprobs"], first["indices"], strict=True):
        assert len(logprobs) == len(set(indices)) == 5
        assert logprobs == sorted(logprobs, reverse=True)
        assert 0.05 < sum(map(math.exp, logprobs)) <= 1.0001
    again = post(gateway.port, body | {"cache_id": first["cache_id"]}, path="/logprobs", timeout_s=60).json
    assert again["cache_id"] == first["cache_id"]
    assert [row[0] for row in again["indices"]] == [row[0] for row in first["indices"]]
    assert again["logprobs"][0] == pytest.approx(first["logprobs"][0], abs=0.3)


def test_a_session_remembers(gateway: GatewayProcess) -> None:
    body = {"model": ALIAS_DEFAULT, "session_id": 3, "interactive_mode": True, "request_output_len": 8}

    def talk(prompt: str) -> dict[str, Any]:
        answer = post(gateway.port, body | {"prompt": prompt}, path="/v1/chat/interactive_qos", timeout_s=60).json
        return dict(answer)

    first, second = talk("My name is Ada."), talk("What is my name?")
    assert first["history_tokens"] == 0
    assert second["history_tokens"] == first["input_tokens"] + first["tokens"]
    assert second["text"]
