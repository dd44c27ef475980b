"""Bodies and answers: tables of bad input, real answers of engines, and slow references on random JSON."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenflow.wire import openai
from evenflow.wire.faults import CallerError
from evenflow.wire.openai import (
    ROUTES,
    Request,
    Usage,
    ask_for_usage,
    error_in_event,
    has_content,
    is_usage_only,
    parse_request,
    rename_model,
    splice,
    usage_in_event,
    usage_of,
)

CHAT = ROUTES[b"/v1/chat/completions"]
COMPLETIONS = ROUTES[b"/v1/completions"]
EMBEDDINGS = ROUTES[b"/v1/embeddings"]
RESPONSES = ROUTES[b"/v1/responses"]
MESSAGES = ROUTES[b"/v1/messages"]
TOKENIZE = ROUTES[b"/tokenize"]
N_MAX = 128

HELLO = b'"messages":[{"role":"user","content":"hello"}]'


def chat(more: bytes) -> bytes:
    return b'{"model":"m",' + HELLO + b"," + more + b"}"


def completion(prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"m","prompt":' + prompt + (b"," + more if more else b"") + b"}"


def refusal(body: bytes, route: openai.Route = CHAT, n_max: int = N_MAX) -> CallerError:
    with pytest.raises(CallerError) as caught:
        parse_request(route, body, n_max)
    fault = caught.value
    assert fault.status == 400
    assert fault.code == fault.type == "invalid_request_error"
    assert fault.message.endswith((".", "}"))
    return fault


# --- what is read


def test_a_chat_of_which_every_field_is_read() -> None:
    body = chat(
        b'"stream":true,"n":2,"best_of":null,"max_tokens":9,"max_completion_tokens":7,"user":"u","api_key":"k",'
        b'"stream_options":{"include_usage":true,"x":1},"unknown":{"n":5}'
    )
    assert parse_request(CHAT, body, N_MAX) == Request(
        model="m",
        stream=True,
        sequences=2,
        n=2,
        prompts=1,
        prompt_bytes=len(body),
        max_tokens=7,
        include_usage=True,
        stream_options_present=True,
        user="u",
        api_key="k",
    )


def test_null_is_absent() -> None:
    names = (
        "stream n best_of max_tokens max_completion_tokens seed temperature user api_key logit_bias logprobs"
    )
    body = chat(b",".join(b'"%b":null' % name.encode() for name in [*names.split(), "stream_options"]))
    request = parse_request(CHAT, body, N_MAX)
    assert (request.stream, request.n, request.sequences, request.max_tokens) == (False, 1, 1, None)
    assert (request.include_usage, request.user, request.api_key) == (False, None, None)
    assert request.stream_options_present


@pytest.mark.parametrize(
    ("prompt", "prompts", "tokens"),
    [
        (b'"text"', 1, 0),
        (b'["a"]', 1, 0),
        (b'[ "a" , "b","c"]', 3, 0),
        (b'["[1]", "[2]"]', 2, 0),
        (b"[0]", 1, 1),
        (b"[1,22, 333 ]", 1, 3),
        (b"[4294967295]", 1, 1),
        (b"[[1,2],[3]]", 2, 3),
        (b"[ [ 1 ] ,\n [4294967295, 0] ]", 2, 3),
    ],
)
def test_forms_of_a_prompt(prompt: bytes, prompts: int, tokens: int) -> None:
    body = completion(prompt, b'"n":2')
    request = parse_request(COMPLETIONS, body, N_MAX)
    assert (request.prompts, request.sequences, request.n) == (prompts, prompts * 2, 2)
    assert request.prompt_bytes == (tokens * 4 or len(body))
    body = body.replace(b'"prompt"', b'"input"')
    assert parse_request(EMBEDDINGS, body, N_MAX).prompts == prompts


def test_a_completion_may_bring_embeddings_instead_of_a_prompt() -> None:
    assert parse_request(COMPLETIONS, b'{"model":"m","prompt_embeds":"AAAA"}', N_MAX).prompts == 1
    assert (
        parse_request(COMPLETIONS, b'{"model":"m","prompt":null,"prompt_embeds":"AAAA"}', N_MAX).prompts == 1
    )


def test_embeddings_of_many_texts_hold_one_sequence() -> None:
    body = json.dumps({"model": "m", "input": ["text"] * 2000}).encode()
    request = parse_request(EMBEDDINGS, body, N_MAX)
    assert (request.prompts, request.sequences) == (2000, 1)
    assert parse_request(EMBEDDINGS, b'{"model":"m",' + HELLO + b"}", N_MAX).prompts == 1
    assert (
        parse_request(EMBEDDINGS, b'{"model":"m","input":[{"image":"x"},{"text":"y"}]}', N_MAX).prompts == 2
    )


OLDER = {
    b"/completions": b"/v1/completions",
    b"/v1/completions_qos": b"/v1/completions",
    b"/v1/chat/completions_qos": b"/v1/chat/completions",
    b"/logprobs": b"/v1/completions",
    b"/v1/chat/interactive_qos": b"/v1/chat/completions",
}


def test_other_routes() -> None:
    assert parse_request(TOKENIZE, b'{"prompt":"x"}', N_MAX).model == ""
    assert parse_request(TOKENIZE, b'{"model":"m","prompt":"x"}', N_MAX).model == "m"
    assert parse_request(RESPONSES, b'{"model":"m","input":"x","max_output_tokens":5}', N_MAX).max_tokens == 5
    assert parse_request(MESSAGES, b'{"model":"m",' + HELLO + b',"max_tokens":6}', N_MAX).max_tokens == 6
    for path, route in ROUTES.items():
        assert route.path == OLDER.get(path, path)
        assert path.removesuffix(b"_qos").endswith(route.name.encode())
        assert route.usage_option == (route.kind in ("chat", "completions"))
        if not route.model_optional:
            assert refusal(b'{"messages":[{}],"prompt":"x","input":"x"}', route).param == "model"


def test_fields_that_are_not_known_are_not_judged() -> None:
    parse_request(
        CHAT,
        chat(
            b'"return_token_ids":true,"vllm_xargs":{"a":[1e400]},"chat_template_kwargs":{},"x":1,"x":2,'
            b'"seed":9007199254740993,"big":123456789012345678901234567890'
        ),
        N_MAX,
    )


@pytest.mark.parametrize("seed", [0, -1, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63)])
def test_seeds_of_64_bits_pass(seed: int) -> None:
    parse_request(CHAT, chat(b'"seed":%d' % seed), N_MAX)


# --- what is refused


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b" \r\n", "empty"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b"{", "too early"),
        (b"garbage", "not valid JSON"),
        (b"\x00\x01\x02", "not valid JSON"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (chat(b'"x":1')[:-1], "too early"),
        (chat(b'"x":1') + b"x", "not valid JSON"),
        (chat(b'"x":1') + b"{}", "not valid JSON"),
        (chat(b'"x":1') + b"\x00", "not valid JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (chat(b'"x":' + b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
        (b'{"sk-key":NaN}', "finite"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes, says: str) -> None:
    fault = refusal(body)
    assert says in fault.message
    assert fault.param is not None


@pytest.mark.parametrize(
    "value",
    [
        b"NaN", b"Infinity", b"-Infinity", b"nan", b"tru", b"nulll", b"True", b"undefined", b"", b"01",
        b"+1", b".5",
        b"1.", b"1e", b"-", b"0x10", b"1_000", b"[1,]", b"[,1]", b"[1 2]", b"[1}", b'{"a"}', b'{"a":1,}',
        b"{a:1}",
        b"{1:2}", b"'a'", b"1/*c*/", b'"\\q"', b'"\\u12"', b'"\\uZZZZ"', b'"a\nb"', b'"a\x00b"', b'"\x1f"',
        b'"\\ud800"', b'"\\udc00"', b'"\\ud800 and more text behind it"', b'"\\ud800\\u0041"',
        b'"\\ud800\\ud800"',
        b'"\\udc00\\ud800"', b'["\\ud83d"]', b'{"\\ud800":1}', b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"',
        b'"\xe2\x82"', b'"\xf4\x90\x80\x80"', b'{"\xff":1}', b'"\xc3\xa4 and then \xe4"',
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [b"stop", b"temperature", b"chat_template_kwargs", b"messages"])
def test_broken_values_name_the_field_wherever_they_are(name: bytes, value: bytes) -> None:
    body = b'{"model":"m","%b":%b,"prompt":"x","user":"u"}' % (name, value)
    fault = refusal(body, COMPLETIONS)
    # The field, or the one behind it when only that shows that something is missing.
    assert fault.param in (name.decode(), "prompt", "body")
    if value in (b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"', b'"\xff"', b"tru", b'"a\nb"'):
        assert fault.param == name.decode()


def test_nan_and_lone_surrogates_are_called_by_their_names() -> None:
    assert "NaN" in refusal(chat(b'"temperature":NaN')).message
    assert "NaN" in refusal(chat(b'"temperature":-Infinity')).message
    assert "surrogate" in refusal(chat(b'"stop":"\\ud800"')).message
    assert "surrogate" in refusal(chat(b'"stop":"\\ud800 and more text behind it"')).message
    assert "surrogate" in refusal(chat(b'"stop":"\\udfff"')).message
    assert "surrogate" not in refusal(chat(b'"stop":"\\q"')).message


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (b'"stream":"true"', "stream"),
        (b'"stream":1', "stream"),
        (b'"stream":[]', "stream"),
        (b'"n":0', "n"),
        (b'"n":-1', "n"),
        (b'"n":1.5', "n"),
        (b'"n":1e0', "n"),
        (b'"n":"3"', "n"),
        (b'"n":true', "n"),
        (b'"n":[1]', "n"),
        (b'"n":129', "n"),
        (b'"n":' + b"9" * 30, "n"),
        (b'"n":' + b"9" * 5000, "n"),
        (b'"n":1e999', "n"),
        (b'"best_of":0', "best_of"),
        (b'"best_of":129', "best_of"),
        (b'"best_of":"2"', "best_of"),
        (b'"max_tokens":-1', "max_tokens"),
        (b'"max_tokens":1.5', "max_tokens"),
        (b'"max_tokens":"16"', "max_tokens"),
        (b'"max_tokens":true', "max_tokens"),
        (b'"max_tokens":{}', "max_tokens"),
        (b'"max_completion_tokens":-1', "max_completion_tokens"),
        (b'"max_completion_tokens":"5"', "max_completion_tokens"),
        (b'"stream_options":[]', "stream_options"),
        (b'"stream_options":true', "stream_options"),
        (b'"stream_options":{"include_usage":"yes"}', "stream_options.include_usage"),
        (b'"user":5', "user"),
        (b'"user":{}', "user"),
        (b'"api_key":5', "api_key"),
        (b'"api_key":["k"]', "api_key"),
        (b'"seed":18446744073709551616', "seed"),
        (b'"seed":-9223372036854775809', "seed"),
        (b'"seed":' + b"1" * 5000, "seed"),
        (b'"seed":1.5', "seed"),
        (b'"seed":"1"', "seed"),
        (b'"temperature":1e999', "temperature"),
        (b'"temperature":-1e400', "temperature"),
        (b'"temperature":1' + b"0" * 400, "temperature"),
        (b'"temperature":"hot"', "temperature"),
        (b'"top_p":1e309', "top_p"),
        (b'"top_k":1e309', "top_k"),
        (b'"min_p":1e309', "min_p"),
        (b'"presence_penalty":1e309', "presence_penalty"),
        (b'"frequency_penalty":1e309', "frequency_penalty"),
        (b'"repetition_penalty":1e309', "repetition_penalty"),
        (b'"length_penalty":1e309', "length_penalty"),
        (b'"logprobs":1e309', "logprobs"),
        (b'"logit_bias":{"50256":1e309}', "logit_bias"),
        (b'"logit_bias":[1]', "logit_bias"),
        (b'"model":"other"', "model"),
        (b'"m\\u006fdel":"other"', "model"),
        (b'"\\u006d\\u006F\\u0064\\u0065\\u006C":null', "model"),
        (b'"n":1,"n":1', "n"),
        (b'"stream":true,"\\u0073tream":false', "stream"),
        (b'"max_tokens":1,"x":{"max_tokens":1},"max_tokens":1', "max_tokens"),
        (b'"stream_options":null,"stream_options":null', "stream_options"),
        (b'"api_key":"a","api\\u005fkey":"b"', "api_key"),
        (b'"user":"a","user":"b"', "user"),
        (HELLO, "messages"),
    ],
)
def test_fields_with_a_wrong_value(more: bytes, param: str) -> None:
    fault = refusal(chat(more))
    assert fault.param == param
    assert param in fault.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "model"),
        (b'{"model":"",' + HELLO + b"}", "model"),
        (b'{"model":null,' + HELLO + b"}", "model"),
        (b'{"model":5,' + HELLO + b"}", "model"),
        (b'{"model":["m"],' + HELLO + b"}", "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":null}', "messages"),
        (b'{"model":"m","messages":"hello"}', "messages"),
        (b'{"model":"m","messages":{"role":"user"}}', "messages"),
        (b'{"model":"m","messages":["hello"]}', "messages"),
        (b'{"model":"m","messages":[[{}]]}', "messages"),
    ],
)
def test_chats_without_model_or_messages(body: bytes, param: str) -> None:
    assert refusal(body).param == param
    assert refusal(body, MESSAGES).param == param


@pytest.mark.parametrize(
    "prompt",
    [
        b'""', b"[]", b"[[]]", b'[""]', b'["a",""]', b"[[1],[]]", b"[[],[1]]", b"null", b"5", b"true",
        b"{}", b"1.5",
        b'["a",1]', b'[1,"a"]', b"[1,[2]]", b"[[1],2]", b'[["a"]]', b"[[[1]]]", b"[1.0]", b"[1e2]",
        b"[true]", b"[null]",
        b"[1,null]", b"[-1]", b"[1,-1]", b"[[1],[-1]]", b"[4294967296]", b"[[4294967296]]",
        b"[99999999999999999999999]",
        b"[{}]", b'["a",{}]', b"[-0.5]",
    ],
)  # fmt: skip
def test_prompts_that_are_none(prompt: bytes) -> None:
    assert refusal(completion(prompt), COMPLETIONS).param == "prompt"
    if prompt not in (b"[{}]",):
        body = b'{"model":"m","input":' + prompt + b"}"
        assert refusal(body, EMBEDDINGS).param == "input"


def test_prompts_and_choices_are_bounded_together() -> None:
    prompts = json.dumps(["x"] * 64).encode()
    assert parse_request(COMPLETIONS, completion(prompts, b'"n":2'), N_MAX).sequences == 128
    fault = refusal(completion(prompts, b'"n":3'), COMPLETIONS)
    assert fault.param == "n"
    assert "64 prompts" in fault.message
    assert "192" in fault.message
    assert refusal(completion(prompts, b'"n":1,"best_of":3'), COMPLETIONS).param == "n"
    assert refusal(completion(json.dumps(["x"] * 129).encode()), COMPLETIONS).param == "prompt"
    assert refusal(completion(json.dumps([[1]] * 129).encode()), COMPLETIONS).param == "prompt"
    assert refusal(chat(b'"n":5'), n_max=4).message == "'n' must be a whole number from 1 to 4; it is 5."


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, b'{"model":"m",' + b'"a":1,' * 4_000_000 + HELLO + b"}", "body"),
        (CHAT, b'{"model":"m","messages":[' + b"{}," * 8_000_000 + b"{}]}", None),
        (CHAT, chat(b'"logit_bias":{' + b'"1":1,' * 4_000_000 + b'"2":1e999}'), None),
        (COMPLETIONS, completion(b"[" + b"1," * 12_000_000 + b"-1]"), "prompt"),
        (COMPLETIONS, completion(b"[" + b"12345," * 4_000_000 + b"1]"), None),
        (COMPLETIONS, completion(b"[" + b"[1]," * 6_000_000 + b"[1]]"), "prompt"),
        (CHAT, b'{"model":"m","x":' + b"[" * 24_000_000, "body"),
    ],
    ids=["fields", "messages", "logit_bias", "bad ids", "ids", "lists", "depth"],
)
def test_large_bodies_are_read_in_a_moment(route: openai.Route, body: bytes, param: str | None) -> None:
    started = time.process_time()
    fault = refused_by(parse_request, route, body, N_MAX)
    assert time.process_time() - started < 1.5
    assert (fault and fault.param) == param


def test_long_lists_with_odd_ids_are_not_searched_for_them() -> None:
    odd = b"4294967295"
    assert parse_request(COMPLETIONS, completion(b"[" + odd + b",1" * 1000 + b"]"), N_MAX).prompts == 1
    fault = refusal(completion(b"[" + odd + b",1" * 1_000_000 + b"]"), COMPLETIONS)
    assert fault.param == "prompt"
    assert "long list" in fault.message


def test_no_wrong_field_is_blamed_for_what_is_far_behind() -> None:
    assert refusal(b'{"model":"m","stop":"' + b"x" * 1000 + b'","user":nul}').param == "user"
    assert refusal(b'{"model":"m","stop":"' + b"x" * 100_000 + b'","user":nul}').param == "body"


def test_bad_bytes_are_found_at_any_place_of_a_long_body() -> None:
    for bad_at in (0, 1, 262_143, 262_144, 262_145, 600_000):
        text = bytearray("€ä😀".encode() * 70_000)
        parse_request(COMPLETIONS, completion(b'"' + bytes(text) + b'"'), N_MAX)
        text[bad_at] = 0xFF
        assert "UTF-8" in refusal(completion(b'"' + bytes(text) + b'"'), COMPLETIONS).message
    for length in range(262_100, 262_150):
        parse_request(COMPLETIONS, completion(b'"' + b"x" * length + "😀€".encode() * 9 + b'"'), N_MAX)


SECRET = "sk-SECRETSECRET"
TEXT_BODY = json.dumps(
    {
        "model": SECRET,
        "api_key": SECRET,
        "messages": [{"role": "user", "content": SECRET + ' "quoted" \\ é'}],
        SECRET: [SECRET, {SECRET: SECRET}],
        "user": SECRET,
        "logit_bias": {SECRET: 1.5},
        "stream_options": {"include_usage": True},
    }
).encode()


@given(st.integers(0, len(TEXT_BODY) - 1), st.binary(max_size=3), st.integers(0, 40))
def test_no_damage_makes_anything_but_a_refusal_without_secrets(
    place: int, bytes_in: bytes, gone: int
) -> None:
    body = TEXT_BODY[:place] + bytes_in + TEXT_BODY[place + gone :]
    refusals = [refused_by(parse_request, route, body, N_MAX) for route in ROUTES.values()]
    refusals.append(refused_by(splice, body, {"api_key": None, "model": b'"x"'}))
    assert not any("SECRET" in f"{fault.message} {fault.param}" for fault in refusals if fault)


def refused_by(function: Callable[..., object], *arguments: object) -> CallerError | None:
    try:
        function(*arguments)
    except CallerError as fault:
        return fault
    return None


@given(st.integers(0, len(TEXT_BODY) - 1))
def test_every_cut_body_is_refused(length: int) -> None:
    refusal(TEXT_BODY[:length])


# --- parse_request against a slow reference

texts = st.sampled_from(["m", "", "é", "€", "😀", 'a"b', "\\", '{"model":"x"}', "\u0000", "x" * 300])
scalars = st.none() | st.booleans() | st.integers(-3, 200) | st.sampled_from([1.5, 2.0, 10**25]) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
prompts = (
    st.lists(texts, max_size=4)
    | st.lists(st.integers(0, 2**32 - 1), max_size=5)
    | st.lists(st.lists(st.integers(0, 99999), min_size=1, max_size=3), max_size=3)
    | st.lists(st.integers(-2, 2**32 + 1) | st.lists(st.integers(0, 9), max_size=2), max_size=3)
    | texts
)
fields = {
    "model": texts,
    "messages": st.lists(st.just({"role": "user", "content": "x"}), max_size=2),
    "prompt": prompts,
    "input": prompts,
    "stream": st.booleans(),
    "n": st.integers(0, 12),
    "best_of": st.integers(0, 12),
    "max_tokens": st.integers(-1, 50),
    "max_completion_tokens": st.integers(-1, 50),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans() | st.none()}),
    "user": texts,
    "api_key": texts,
    "seed": st.integers(-(2**64), 2**65),
    "unknown": values,
    "tools": values,
}
Pairs = list[tuple[str, Any]]


@st.composite
def bodies(draw: st.DrawFn) -> Pairs:
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=6))
    for usual in ("model", draw(st.sampled_from(["messages", "prompt", "input"]))):
        if draw(st.integers(0, 9)):
            names.insert(draw(st.integers(0, len(names))), usual)
    if draw(st.integers(0, 3)):
        names = list(dict.fromkeys(names))
    pairs = []
    for name in names:
        odd = draw(st.integers(0, 11)) == 0
        value = draw(values if odd else st.none() if draw(st.integers(0, 11)) == 0 else fields[name])
        if name == "model" and value == "":
            value = draw(st.sampled_from(["", "m"]))
        pairs.append((name, value))
    return pairs


def write(pairs: Pairs, chance: random.Random) -> tuple[bytes, list[tuple[bytes, bytes, bytes, bytes]]]:
    """JSON with odd spacing and escapes; and its members as (before, key, colon, value)."""

    def space() -> bytes:
        return chance.choice([b"", b"", b" ", b"\n", b"\t ", b"\r\n"])

    members = []
    for i, (name, value) in enumerate(pairs):
        key = json.dumps(name, ensure_ascii=chance.random() < 0.5).encode()
        if chance.random() < 0.2:
            key = b'"' + b"".join(b"\\u%04x" % ord(c) if ord(c) < 0xD800 else c.encode() for c in name) + b'"'
        text = json.dumps(
            value,
            ensure_ascii=chance.random() < 0.5,
            indent=chance.choice([None, None, 1]),
            separators=chance.choice([(",", ":"), (", ", ": "), (" ,", " :")]),
        ).encode()
        before = (b"" if i == 0 else space() + b",") + space()
        members.append((before, key, space() + b":" + space(), text))
    return space() + b"{" + b"".join(map(b"".join, members)) + space() + b"}" + space(), members


def wrong_fields(route: openai.Route, pairs: Pairs, n_max: int) -> set[str]:
    """The fields for which a body must be refused, by slow and plain rules."""
    body = dict(pairs)
    wrong = set()
    kind = route.kind

    def need(name: str, good: bool) -> None:
        if body.get(name) is not None and not good:
            wrong.add(name)

    def whole(name: str, low: int, high: int | None) -> None:
        value = body.get(name)
        need(name, type(value) is int and value >= low and (high is None or value <= high))

    names = [name for name, _ in pairs]
    wrong |= {name for name in names if names.count(name) > 1 and name not in ("unknown", "tools")}
    if not isinstance(body.get("model"), str) or not body["model"]:
        wrong.add("model")
    for name in ("user", "api_key"):
        need(name, isinstance(body.get(name), str))
    need("stream", isinstance(body.get("stream"), bool))
    whole("seed", -(2**63), 2**64 - 1)
    if kind in ("chat", "completions"):
        whole("n", 1, n_max)
        whole("best_of", 1, n_max)
        n, best_of = body.get("n") or 1, body.get("best_of")
        if type(n) is type(best_of) is int and (best_of < n or (best_of > 1 and body.get("stream"))):
            wrong.add("best_of")
        whole("max_completion_tokens", 0, None)
        options = body.get("stream_options")
        need("stream_options", isinstance(options, dict))
        if isinstance(options, dict) and not isinstance(options.get("include_usage"), bool | None):
            wrong.add("stream_options.include_usage")
    if kind in ("chat", "completions", "messages"):
        whole("max_tokens", 0, None)
    if kind in ("chat", "messages", "embeddings"):
        messages = body.get("messages")
        sound = isinstance(messages, list) and messages and isinstance(messages[0], dict)
        if not sound and (kind != "embeddings" or (messages is not None and body.get("input") is None)):
            wrong.add("messages")
    if kind == "completions" and not reference_prompts(body.get("prompt")):
        wrong.add("prompt")
    if kind == "embeddings":
        items = body.get("input")
        if items is not None:
            objects = isinstance(items, list) and items and all(isinstance(item, dict) for item in items)
            if not objects and not reference_prompts(items):
                wrong.add("input")
        elif body.get("messages") is None:
            wrong.add("input")
    return wrong


def reference_prompts(prompt: Any) -> list[Any]:
    """The prompts in a field, [] when it is not a good one."""

    def ids(items: Any) -> bool:
        good = isinstance(items, list) and items and all(type(i) is int and 0 <= i < 2**32 for i in items)
        return bool(good)

    if isinstance(prompt, str) or ids(prompt):
        return [prompt] if prompt else []
    if not isinstance(prompt, list):
        return []
    good = all(isinstance(item, str) and item for item in prompt) or all(map(ids, prompt))
    return prompt if good else []


@given(bodies(), st.sampled_from(sorted(ROUTES)), st.integers(0, 2**32))
def test_requests_are_read_as_by_a_slow_reader(pairs: Pairs, path: bytes, chance: int) -> None:
    route = ROUTES[path]
    assume(not route.model_optional)
    n_max = 12
    body, _ = write(pairs, random.Random(chance))
    values = dict(pairs)
    wrong = wrong_fields(route, pairs, n_max)
    if not wrong and route.usage_option:
        prompts = len(reference_prompts(values["prompt"])) if route.kind == "completions" else 1
        n = values.get("n") or 1
        sequences = prompts * max(n, values.get("best_of") or 1)
        if sequences > n_max:
            wrong = {"n", "prompt"}
    if wrong:
        assert refusal(body, route, n_max).param in wrong
        return
    request = parse_request(route, body, n_max)
    assert request.model == values["model"]
    assert request.stream == bool(values.get("stream"))
    assert request.user == values.get("user")
    assert request.api_key == values.get("api_key")
    if route.usage_option:
        limit = values.get("max_completion_tokens")
        assert request.max_tokens == (values.get("max_tokens") if limit is None else limit)
        assert (request.n, request.prompts, request.sequences) == (n, prompts, sequences)
        assert request.stream_options_present == ("stream_options" in values)
        assert request.include_usage == bool((values.get("stream_options") or {}).get("include_usage"))


# --- edits

names = st.sampled_from(["model", "n", "seed", "api_key", "é", 'a"b', "", "stream_options", "😀", "\\"])


def pairs_of(body: bytes) -> Pairs:
    found = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    assert isinstance(found, list)
    return found


@given(
    st.lists(st.tuples(names, values), max_size=7),
    st.dictionaries(names, st.none() | values.map(lambda v: json.dumps(v).encode()), max_size=4),
    st.integers(0, 2**32),
)
def test_edits_change_their_fields_and_nothing_else(
    pairs: Pairs, edits: dict[str, bytes | None], chance: int
) -> None:
    body, members = write(pairs, random.Random(chance))
    present = [name for name, _ in pairs]
    if any(present.count(name) > 1 for name in edits):
        with pytest.raises(CallerError) as caught:
            splice(body, edits)
        assert caught.value.param in edits
        return
    edited = splice(body, edits)
    texts = [
        (name, json.loads(edits.get(name) or members[i][3], object_pairs_hook=list))
        for i, (name, _) in enumerate(pairs)
        if edits.get(name, b"") is not None
    ]
    added = [
        (name, json.loads(value, object_pairs_hook=list))
        for name, value in edits.items()
        if value is not None and name not in present
    ]
    assert pairs_of(edited) == texts + added
    # All bytes of the other members are there as they were, in order.
    place = 0
    for (_, key, colon, text), name in zip(members, present, strict=True):
        if name not in edits:
            place = edited.index(key + colon + text, place) + len(key + colon + text)
    # When nothing is removed, the result is known to the byte.
    if None not in edits.values():
        kept = [
            before + key + colon + (edits.get(name) or text)
            for (before, key, colon, text), name in zip(members, present, strict=True)
        ]
        start = body.index(b"{") + 1
        end = body.rindex(b"}")
        space = body[:end].removeprefix(body[:start] + b"".join(map(b"".join, members)))
        new = b",".join(
            json.dumps(name, ensure_ascii=False).encode() + b":" + edits[name] for name, _ in added
        )  # type: ignore[operator]
        comma = b"," if kept and new else b""
        assert edited == body[:start] + b"".join(kept) + space + comma + new + body[end:]


@pytest.mark.parametrize(
    ("body", "edits", "result"),
    [
        (b'{"model":"a","x":1.50}', {"model": b'"b"'}, b'{"model":"b","x":1.50}'),
        (b' { "a" : 1 , "b" : 2 , "c" : 3 } ', {"a": None}, b' { "b" : 2 , "c" : 3 } '),
        (b' { "a" : 1 , "b" : 2 , "c" : 3 } ', {"b": None}, b' { "a" : 1 , "c" : 3 } '),
        (b' { "a" : 1 , "b" : 2 , "c" : 3 } ', {"c": None}, b' { "a" : 1 , "b" : 2 } '),
        (b'{"a":1,"b":2}', {"a": None, "b": None}, b"{}"),
        (b'{"a":1,"b":2}', {"a": None, "b": None, "c": b"3"}, b'{"c":3}'),
        (b'{"a":1,"b":2}', {"a": None, "b": b"3"}, b'{"b":3}'),
        (b"{}", {"a": b"1", "b": None}, b'{"a":1}'),
        (b"{ }\n", {"a": b"1"}, b'{ "a":1}\n'),
        (b'{"api\\u005fkey":"k","a":1}', {"api_key": None}, b'{"a":1}'),
        (b'{"a":{"n":1},"n":2,"b":"\\"n\\":3"}', {"n": b"9"}, b'{"a":{"n":1},"n":9,"b":"\\"n\\":3"}'),
        (b'{"a":"}{][,\\\\","n":2}', {"n": b"9"}, b'{"a":"}{][,\\\\","n":9}'),
        (b'{"x":1,"x":2,"n":3}', {"n": b"4"}, b'{"x":1,"x":2,"n":4}'),
        (b'{"x":1,"x":2}', {}, b'{"x":1,"x":2}'),
    ],
)
def test_edits(body: bytes, edits: dict[str, bytes | None], result: bytes) -> None:
    assert splice(body, edits) == result


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"a":1', b'{"a":' * 9999])
def test_edits_of_what_is_no_object_are_refused(body: bytes) -> None:
    with pytest.raises(CallerError):
        splice(body, {"a": b"1"})


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "filling",
    [b'"' + b"x" * 10**7 + b'"', b"[" + b"[],{}," * 10**6 + b"1]", b'["\\"{", ' + b'"\\\\",' * 10**6 + b"1]"],
)
def test_large_bodies_are_edited_without_a_walk_in_python(filling: bytes) -> None:
    body = b'{"model":"a","x":' + filling + b',"n":1}'
    assert splice(body, {"n": b"2", "model": b'"b"'}) == b'{"model":"b","x":' + filling + b',"n":2}'


@pytest.mark.parametrize(
    ("more", "result"),
    [
        (b"", b',"stream_options":{"include_usage":true}'),
        (b',"stream_options":null', b',"stream_options":{"include_usage":true}'),
        (b',"stream_options":{}', b',"stream_options":{"include_usage":true}'),
        (b',"stream_options": { "include_usage" : false }', b',"stream_options": { "include_usage" : true }'),
        (b',"stream_options":{"x":1}', b',"stream_options":{"x":1,"include_usage":true}'),
        (b',"stream_options":{"include_usage":true}', b',"stream_options":{"include_usage":true}'),
        (
            b',"stream_options":{"continuous_usage_stats":true,"include_usage":false}',
            b',"stream_options":{"include_usage":true}',
        ),
        (
            b',"stream_options":{"continuous_usage_stats":true,"include_usage":true}',
            b',"stream_options":{"continuous_usage_stats":true,"include_usage":true}',
        ),
        (b',"stream_options":{},"x":1.0', b',"stream_options":{"include_usage":true},"x":1.0'),
    ],
)
def test_usage_is_asked_for(more: bytes, result: bytes) -> None:
    start = b'{"model":"m", "stream" : true,' + HELLO
    body = start + more + b" }\n"
    request = parse_request(CHAT, body, N_MAX)
    space = b" " if b"stream_options" in more else b""
    expected = start + result + b" }\n" if space else start + b" " + result + b"}\n"
    assert ask_for_usage(body, request) == expected
    assert parse_request(CHAT, expected, N_MAX).include_usage


# --- answers of engines, as they come

VLLM_ROLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}'
)
VLLM_TEXT = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":"Hi \\"usage\\" \\"error\\""},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
)
VLLM_FINISH = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
)
VLLM_USAGE = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":'
    b'{"prompt_tokens":13,"total_tokens":20,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":8}}}'
)
VLLM_CONTINUOUS = VLLM_TEXT[:-1] + b',"usage":{"prompt_tokens":13,"total_tokens":14,"completion_tokens":1}}'
VLLM_ERROR = b'{"error":{"message":"max_tokens is 0","type":"BadRequestError","param":null,"code":400}}'
VLLM_OLD_ERROR = (
    b'{"object":"error","message":"queue full","type":"ServiceUnavailable","param":null,"code":503}'
)
VLLM_COMPLETION = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" Hi",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}'
)
SGLANG_ROLE = (
    b'{"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":'
    b'"assistant","content":"","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,'
    b'"matched_stop":null}],"usage":null}'
)
SGLANG_TOOL = (
    b'{"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":null,'
    b'"content":null,"reasoning_content":null,"tool_calls":[{"id":"call_1","index":0,"type":"function","function":'
    b'{"name":"f","arguments":""}}]},"logprobs":null,"finish_reason":null}],"usage":null}'
)
SGLANG_USAGE = (
    b'{"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":9,'
    b'"total_tokens":11,"completion_tokens":2,"prompt_tokens_details":null,"reasoning_tokens":0}}'
)
LLAMA_ROLE = (
    b'{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1,"id":"c",'
    b'"model":"m","system_fingerprint":"b1","object":"chat.completion.chunk"}'
)
LLAMA_USAGE = (
    b'{"choices":[],"created":1,"id":"c","model":"m","system_fingerprint":"b1","object":"chat.completion.chunk",'
    b'"usage":{"completion_tokens":5,"prompt_tokens":31,"total_tokens":36,"prompt_tokens_details":'
    b'{"cached_tokens":30}},"timings":{"cache_n":30,"prompt_n":1,"predicted_n":5}}'
)
LLAMA_ERROR = b'{"error":{"code":500,"message":"context shift is disabled","type":"server_error"}}'
OPENAI_USAGE = (
    b'{"id":"chatcmpl-2","object":"chat.completion.chunk","created":1,"model":"gpt","service_tier":"default",'
    b'"choices":[],"usage":{"prompt_tokens":19,"completion_tokens":10,"total_tokens":29,"prompt_tokens_details":'
    b'{"cached_tokens":0,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}},"obfuscation":"x"}'
)
OPENAI_FILTER = (
    b'{"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[{"prompt_index":0}]}'
)
NO_CHOICES_USAGE = b'{"id":"x","usage":{"prompt_tokens":3,"completion_tokens":4}}'
MESSAGE_START = (
    b'{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[],'
    b'"stop_reason":null,"usage":{"input_tokens":25,"cache_creation_input_tokens":5,"cache_read_input_tokens":100,'
    b'"output_tokens":1}}}'
)
BLOCK_DELTA = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}'
MESSAGE_DELTA = b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}'
MESSAGES_ERROR = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
RESPONSE_CREATED = (
    b'{"type":"response.created","sequence_number":0,"response":{"id":"resp_1","object":"response","status":'
    b'"in_progress","error":null,"model":"m","output":[],"usage":null}}'
)
RESPONSE_DELTA = (
    b'{"type":"response.output_text.delta","sequence_number":4,"item_id":"i","output_index":0,"content_index":0,'
    b'"delta":"Hi"}'
)
RESPONSE_COMPLETED = (
    b'{"type":"response.completed","sequence_number":9,"response":{"id":"resp_1","status":"completed","error":null,'
    b'"model":"m","output":[],"usage":{"input_tokens":37,"input_tokens_details":{"cached_tokens":12},'
    b'"output_tokens":11,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":48}}}'
)
RESPONSE_FAILED = (
    b'{"type":"response.failed","response":{"id":"resp_1","status":"failed","error":{"code":"server_error",'
    b'"message":"The model failed"},"usage":null}}'
)
RESPONSE_ERROR = b'{"type":"error","code":"ERR_SOMETHING","message":"Something went wrong","param":null}'
DONE = b"[DONE]"


@pytest.mark.parametrize(
    ("event", "usage", "usage_only", "content"),
    [
        (VLLM_ROLE, None, False, False),
        (VLLM_TEXT, None, False, True),
        (VLLM_FINISH, None, False, True),
        (VLLM_USAGE, Usage(13, 8, 7), True, False),
        (VLLM_CONTINUOUS, Usage(13, 0, 1), False, True),
        (VLLM_COMPLETION, None, False, True),
        (VLLM_COMPLETION.replace(b" Hi", b""), None, False, False),
        (SGLANG_ROLE, None, False, False),
        (SGLANG_TOOL, None, False, True),
        (SGLANG_USAGE, Usage(9, 0, 2), True, False),
        (LLAMA_ROLE, None, False, False),
        (LLAMA_USAGE, Usage(31, 30, 5), True, False),
        (OPENAI_USAGE, Usage(19, 0, 10), True, False),
        (OPENAI_FILTER, None, False, False),
        (NO_CHOICES_USAGE, Usage(3, 0, 4), True, True),
        (MESSAGE_START, Usage(130, 100, 1), False, False),
        (BLOCK_DELTA, None, False, True),
        (MESSAGE_DELTA, Usage(0, 0, 15), False, True),
        (RESPONSE_CREATED, None, False, False),
        (RESPONSE_DELTA, None, False, True),
        (RESPONSE_COMPLETED, Usage(37, 12, 11), False, True),
        (DONE, None, False, True),
    ],
)
def test_events_of_engines(event: bytes, usage: Usage | None, usage_only: bool, content: bool) -> None:
    assert usage_in_event(event) == usage
    assert is_usage_only(event) == usage_only
    assert has_content(event) == content
    assert error_in_event(event) is None
    spaced = json.dumps(json.loads(event)).encode() if event != DONE else DONE
    assert usage_in_event(spaced) == usage
    assert is_usage_only(spaced) == usage_only
    assert has_content(spaced) == content


@pytest.mark.parametrize(
    ("event", "status", "shown"),
    [
        (VLLM_ERROR, 400, VLLM_ERROR[len(b'{"error":') : -1]),
        (VLLM_OLD_ERROR, 503, VLLM_OLD_ERROR),
        (LLAMA_ERROR, 500, LLAMA_ERROR[len(b'{"error":') : -1]),
        (MESSAGES_ERROR, None, b'{"type":"overloaded_error","message":"Overloaded"}'),
        (RESPONSE_FAILED, None, b'{"code":"server_error","message":"The model failed"}'),
        (RESPONSE_ERROR, None, RESPONSE_ERROR),
        (b'{"error":{"message":"x","code":"429"}}', 429, b'{"message":"x","code":"429"}'),
        (b'{"error":{"message":"x"},"status_code":429}', 429, b'{"message":"x"}'),
        (b'{"error":{"message":"x","code":50001}}', None, b'{"message":"x","code":50001}'),
        (
            b'{"error":{"message":"x","code":null,"status":503}}',
            503,
            b'{"message":"x","code":null,"status":503}',
        ),
        (
            b'{"error":"Model is overloaded","error_type":"overloaded"}',
            None,
            b'{"message":"Model is overloaded","type":"upstream_error","param":null,"code":null}',
        ),
        (b'{"error":true}', None, b'{"message":"true","type":"upstream_error","param":null,"code":null}'),
    ],
)
def test_errors_in_events(event: bytes, status: int | None, shown: bytes) -> None:
    assert error_in_event(event) == (status, shown)
    assert not is_usage_only(event)
    assert has_content(event)


@pytest.mark.parametrize("empty", [b"null", b"{}", b'""', b"false"])
def test_empty_errors_are_none(empty: bytes) -> None:
    assert error_in_event(b'{"choices":[],"error":' + empty + b"}") is None


def test_usage_with_an_error_beside_it_is_not_hidden() -> None:
    assert not is_usage_only(b'{"choices":[],"usage":{"prompt_tokens":1},"error":{"message":"x"}}')


@pytest.mark.parametrize(
    "delta",
    [
        b'{"content":"x"}', b'{"reasoning_content":"x"}', b'{"refusal":"x"}', b'{"tool_calls":[{"index":0}]}',
        b'{"role":"assistant","new_kind":1}', b'{"function_call":{"name":"f"}}', b'{"audio":{"id":"a"}}',
    ],
)  # fmt: skip
def test_deltas_with_something_in_them_are_content(delta: bytes) -> None:
    assert has_content(b'{"choices":[{"index":0,"delta":' + delta + b',"finish_reason":null}]}')
    two = b'{"choices":[{"index":0,"delta":{"role":"assistant"}},{"index":1,"delta":' + delta + b"}]}"
    assert has_content(two)


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}', Usage(3, 0, 4)),
        (b'{"data":[],"usage":{"prompt_tokens":3,"total_tokens":3}}', Usage(3, 0, 0)),
        (
            b'{"output":[],"usage":{"input_tokens":3,"output_tokens":4,"input_tokens_details":null}}',
            Usage(3, 0, 4),
        ),
        (
            b'{"content":[],"usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":9}}',
            Usage(12, 9, 4),
        ),
        (b' {\n "usage" : { "prompt_tokens" : 3 } }', Usage(3, 0, 0)),
        (b'{"usage":null}', None),
        (b'{"usage":{}}', None),
        (b'{"usage":[]}', None),
        (b'{"usage":{"prompt_tokens":-3}}', None),
        (b'{"usage":{"prompt_tokens":"3"}}', None),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":3}"}', None),
        (b'{"usage":{"prompt_tokens":3}', None),
        (b"", None),
        (b"usage", None),
        (b'"usage"', None),
        (b'["usage"]', None),
    ],
)
def test_usage_of_an_answer(answer: bytes, usage: Usage | None) -> None:
    assert usage_of(answer) == usage


@pytest.mark.parametrize("behind", [b"", b',"prompt_logprobs":[%b1]' % (b"1," * 50_000), b',"x":"usage"'])
def test_usage_of_a_large_answer_is_found_near_its_end(behind: bytes) -> None:
    text = b'\\"usage\\":{\\"prompt_tokens\\":9} ' * 4000
    answer = (
        b'{"tools":{"usage":{"type":"string"}},"choices":[{"text":"'
        + text
        + b'"}],"usage" : {"prompt_tokens":3,'
        b'"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}' + behind + b"}"
    )
    assert len(answer) > openai.ANSWER_BYTES_DECODED
    json.loads(answer)
    assert usage_of(answer) == Usage(3, 2, 4)
    if not behind:
        assert usage_of(answer[-200:]) == Usage(3, 2, 4)
    assert usage_of(answer.replace(b'"usage" :', b'"none" :')) is None


def test_reports_of_a_message_complete_each_other() -> None:
    start, delta = usage_in_event(MESSAGE_START), usage_in_event(MESSAGE_DELTA)
    assert start is not None
    assert delta is not None
    assert delta.joined(start) == Usage(130, 100, 15)
    assert delta.joined(None) == delta


@given(st.binary(max_size=60) | st.integers(0, len(LLAMA_USAGE)).map(lambda n: LLAMA_USAGE[:n]))
def test_answers_of_any_shape_never_raise(data: bytes) -> None:
    for payload in (data, b'{"usage":' + data, b'{"error":' + data + b"}", b'{"choices":[' + data + b"]}"):
        usage_of(payload)
        usage_in_event(payload)
        is_usage_only(payload)
        error_in_event(payload)
        has_content(payload)
        rename_model(payload, b"m", b"x")


def test_deep_answers_never_raise() -> None:
    deep = b'{"usage":{"error":' + b"[" * 100_000
    for function in (usage_of, usage_in_event, is_usage_only, error_in_event, has_content):
        function(deep)


# --- names


@pytest.mark.parametrize(
    ("data", "worker_name", "shown", "result"),
    [
        (b'{"model":"w","x":1}', "w", "s", b'{"model":"s","x":1}'),
        (b'{"model": "w"}', "w", "s", b'{"model": "s"}'),
        (b'{"model" :\t"w"}', "w", "s", b'{"model" :\t"s"}'),
        (b'{"model":"org\\/w"}', "org/w", "s", b'{"model":"s"}'),
        (b'{"model":"org\\u002fw"}', "org/w", "s", b'{"model":"s"}'),
        (b'{"model":"\\u00e9\\uD83D\\ude00"}', "é😀", "ü", '{"model":"ü"}'.encode()),
        ('{"model":"é😀"}'.encode(), "é😀", "ü", '{"model":"ü"}'.encode()),
        (b'{"model":"w"}', "w", 'a"\\b', b'{"model":"a\\"\\\\b"}'),
        (b'{"model":"a\\"b"}', 'a"b', "s", b'{"model":"s"}'),
        (b'{"model":"w2"}', "w", "s", b'{"model":"w2"}'),
        (b'{"model":"w.x"}', "w_x", "s", b'{"model":"w.x"}'),
        (b'{"text":"\\"model\\":\\"w\\""}', "w", "s", b'{"text":"\\"model\\":\\"w\\""}'),
        (b'{"text":"model", "x":"w"}', "w", "s", b'{"text":"model", "x":"w"}'),
        (
            b'data: {"model":"w"}\n\ndata: {"model":"w"}\n\n',
            "w",
            "s",
            b'data: {"model":"s"}\n\ndata: {"model":"s"}\n\n',
        ),
        (b"data: [DONE]\n\n", "w", "s", b"data: [DONE]\n\n"),
        (b'{"model":"w"}', "w", "\\1", b'{"model":"\\\\1"}'),
        (b'{"model" : "w"}', "w", "\\1", b'{"model" : "\\\\1"}'),
    ],
)
def test_names_in_answers(data: bytes, worker_name: str, shown: str, result: bytes) -> None:
    assert rename_model(data, worker_name.encode(), shown.encode()) == result
