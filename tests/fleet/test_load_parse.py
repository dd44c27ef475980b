"""What engines tell of their load, from pages as they write them; and that no page can do harm."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from evenflow.fleet.engines.load import COUNT_MAX, ENGINES, SERIES_MAX, LoadReport, is_metrics, read_load, read_once

# vLLM, engine V1, two data-parallel ranks. The name of the model is chosen by whoever started it.
VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m \\"x\\" {y}"} 7.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0 1700000000000
# HELP vllm:num_requests_waiting_by_reason Number of requests waiting, by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 8.128902e+06
vllm:prompt_tokens_total{engine="1",model_name="m"} 98.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="1",model_name="m"} 24.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="16",engine="0",hash_block_size="None",mamba_block_size="None",num_cpu_blocks="0",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{_block_size_resolved="True",block_size="16",engine="1",hash_block_size="None",mamba_block_size="None",num_cpu_blocks="0",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 44.0
"""  # noqa: E501
# vLLM before V1: requests that were swapped out wait as well.
VLLM_0 = b"""vllm:num_requests_running{model_name="m"} 24.0
vllm:num_requests_swapped{model_name="m"} 2.0
vllm:num_requests_waiting{model_name="m"} 3.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.97
vllm:cpu_cache_usage_perc{model_name="m"} 0.01
vllm:cache_config_info{block_size="16",cache_dtype="auto",gpu_memory_utilization="0.9",num_cpu_blocks="7281",num_gpu_blocks="24188",sliding_window="None",swap_space_bytes="4294967296"} 1.0
"""  # noqa: E501
SGLANG = b"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 12.0
sglang:num_used_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 140120.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.31
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 9.0
sglang:max_total_num_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 452000.0
sglang:prompt_tokens_total{model_name="m"} 7.0
sglang:generation_tokens_total{model_name="m"} 8.0
"""
# Two data-parallel ranks of two tensor-parallel ones, which all count the requests of theirs.
BY_RANK = {b"num_running_reqs": (7, 5), b"num_queue_reqs": (3, 1), b"max_total_num_tokens": (50, 50)}
SGLANG_RANKS = b"".join(
    b'sglang:%s{dp_rank="%d",model_name="m",tp_rank="%d"} %d\n' % (name, data, tensor, count)
    for name, counts in BY_RANK.items()
    for data, count in enumerate(counts)
    for tensor in (0, 1)
)
# As the server of llama.cpp in xllamacpp 2026.10 writes it, without help lines.
LLAMACPP = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 88
llamacpp:prompt_tokens_cached_total 5
llamacpp:prompt_seconds_total 0.5
llamacpp:tokens_predicted_total 71
llamacpp:tokens_predicted_seconds_total 2
llamacpp:n_decode_total 9
llamacpp:prompt_tokens_seconds 11
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 9
llamacpp:n_busy_slots_per_decode 1.5
"""
TGI = b"""# TYPE tgi_queue_size gauge
tgi_queue_size 2
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 31
tgi_batch_current_max_tokens 9000
# TYPE tgi_request_input_length histogram
tgi_request_input_length_bucket{le="1"} 5
tgi_request_input_length_sum 640
tgi_request_input_length_count 9
tgi_request_generated_tokens_sum 1200
"""
# What finds no handle in LMDeploy's server waits as well, and its engine does not see it.
LMDEPLOY = b"""lmdeploy:num_requests_succeeded{engine="0",model_name="m"} 40.0
lmdeploy:num_api_requests_routed{engine="0",model_name="m"} 7.0
lmdeploy:num_api_requests_waiting{engine="0",model_name="m"} 5.0
lmdeploy:num_requests_running{engine="0",model_name="m"} 6.0
lmdeploy:num_requests_waiting{engine="0",model_name="m"} 1.0
lmdeploy:gpu_cache_usage_perc{engine="0",model_name="m"} 0.125
lmdeploy:prompt_tokens_total{engine="0",model_name="m"} 100.0
lmdeploy:generation_tokens_total{engine="0",model_name="m"} 300.0
"""
VLLM_REPORT = LoadReport("vllm", 4.0, 12.0, 0.5, 32_000, None, 8_129_000, 1024)
SGLANG_REPORT = LoadReport("sglang", 4.0, 12.0, 0.31, 452_000, None, 7, 8)
PAGES = {
    "vllm": (VLLM, VLLM_REPORT),
    "vllm with older names": (VLLM.replace(b":kv_cache_usage_perc", b":gpu_cache_usage_perc"), VLLM_REPORT),
    "vllm before V1": (VLLM_0, LoadReport("vllm", 5.0, 24.0, 0.97, 16 * 24_188)),
    "sglang": (SGLANG, SGLANG_REPORT),
    "sglang with ranks": (SGLANG_RANKS, LoadReport("sglang", 4.0, 12.0, None, 100)),
    "sglang with the other prefix": (SGLANG.replace(b"sglang:", b"sglang_"), SGLANG_REPORT),
    "llamacpp": (LLAMACPP, LoadReport("llamacpp", 9.0, 4.0, None, None, None, 88, 71)),
    "tgi": (TGI, LoadReport("tgi", 2.0, 31.0, None, None, None, 640, 1200)),
    "lmdeploy": (LMDEPLOY, LoadReport("lmdeploy", 6.0, 6.0, 0.125, None, None, 100, 300)),
}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_each_engine(name: str, line_end: bytes) -> None:
    page, report = PAGES[name]
    page = page.replace(b"\n", line_end)
    assert read_load(page) == report
    assert read_load(page.rstrip()) == report  # no end of line at the end
    assert is_metrics(page) == (b"# TYPE" in page)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html><body>vllm:num_requests_waiting 5</body></html>",
        b'{"detail":"Not Found"}',
        b"python_gc_objects_collected_total 5\nprocess_open_fds 3\n",
        b"vllm:num_requests_waiting NaN\n",
        b"vllm:num_requests_waiting -1\n",
        b"vllm:num_requests_waiting +Inf\n",
        b"vllm:num_requests_waiting 1e300\n",
        b"vllm:num_requests_waiting 5" + b"0" * 100 + b"\n",
        b"vllm:num_requests_waiting 5,0\n",
        b"vllm:num_requests_waiting5\n",
        b"vllm:num_requests_waiting{model=\"m\n",
        b'vllm:num_requests_waiting{model="m} 5\n',
        b'vllm:num_requests_waiting{model="m"\n} 5\n',
        b"vllm:num_requests_waiting\n",
        b"vllm:num_requests_waiting\n5\n",
        b"vllm:num_requests_waiting_by_reason 5\n",
        b" vllm_num_requests_waiting 5\n",
        b"# vllm:num_requests_waiting 5\n",
        b"vllm:something_else 5\n",
        b"\xff\xfe\x00vllm:\x00",
    ],
)
def test_what_tells_nothing(page: bytes) -> None:
    assert read_load(page) is None


@pytest.mark.parametrize(
    ("line", "waiting"),
    [
        (b"vllm:num_requests_waiting 1e1", 10.0),
        (b"vllm:num_requests_waiting\t3", 3.0),
        (b"vllm:num_requests_waiting{} 3", 3.0),
        (b"vllm:num_requests_waiting {a=\"b\"} 3", 3.0),
        (b'vllm:num_requests_waiting{a="}",b="{",c="\\"} 9",d="\\\\"} 3', 3.0),
        (b'vllm:num_requests_waiting{a="b",} 3 1700000000000', 3.0),
        (b'vllm:num_requests_waiting{a="\xff\xc3"} 3.0  ', 3.0),
    ],
)
def test_how_a_line_may_be_written(line: bytes, waiting: float) -> None:
    report = read_load(line)
    assert report is not None
    assert report.waiting == waiting


def test_odd_values_are_passed_over_and_the_rest_is_read() -> None:
    page = b"vllm:num_requests_running 1e1\nvllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc 7.5\n"
    page += b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read_load(page) == LoadReport("vllm", None, 10.0, 1.0, None)


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (b'block_size="16",num_gpu_blocks="10"', 160),
        (b'block_size="16",num_gpu_blocks="10",kv_cache_size_tokens="None",mamba_block_size="None"', 160),
        (b'block_size="8",num_gpu_blocks="320",kv_cache_size_tokens="463459",mamba_block_size="16"', 463_459),
        (b'block_size="16",num_gpu_blocks="10",mamba_block_size="4096"', None),  # blocks of several sizes
        (b'hash_block_size="16",num_gpu_blocks="10"', None),
        (b'note="block_size=\\"16\\",",num_gpu_blocks="10"', None),
        (b'block_size="16",num_gpu_blocks="99999999999999999999"', None),
        (b'block_size="16",num_gpu_blocks="0"', None),
    ],
)
def test_the_size_of_the_cache(labels: bytes, tokens: int | None) -> None:
    report = read_load(b"vllm:num_requests_running 1\nvllm:cache_config_info{%s} 1.0\n" % labels)
    assert report is not None
    assert report.kv_tokens == tokens


def test_a_rank_that_does_not_tell_its_cache_leaves_the_sum_unknown() -> None:
    report = read_load(VLLM.replace(b'num_gpu_blocks="1000"', b'num_gpu_blocks="None"', 1))
    assert report is not None
    assert report.kv_tokens is None


SERVER_INFO = {
    "max_running_requests": 512,
    "max_total_num_tokens": 20_480,
    "internal_states": [
        {"effective_max_running_requests_per_dp": 128, "memory_usage": {"token_capacity": 20_480, "weight": 0.98}},
        {"effective_max_running_requests_per_dp": 128, "memory_usage": {"token_capacity": 20_480, "weight": 0.98}},
    ],
}


@pytest.mark.parametrize(
    ("kind", "document", "told"),
    [
        ("sglang", SERVER_INFO, {"sequences_max": 256, "kv_tokens": 40_960}),
        ("sglang", {"max_running_requests": 7}, {"sequences_max": 7}),
        ("sglang", {**SERVER_INFO, "internal_states": []}, {"sequences_max": 512, "kv_tokens": 20_480}),
        ("sglang", {"max_running_requests": None, "internal_states": [{}]}, {}),
        ("llamacpp", {"total_slots": 4, "default_generation_settings": {"n_ctx": 8192}}, {"sequences_max": 4}),
        ("llamacpp", {"total_slots": True}, {}),
        ("llamacpp", {"total_slots": -1}, {}),
        ("llamacpp", {"total_slots": 4.0}, {}),
        ("llamacpp", {"total_slots": 10**15}, {}),
        ("llamacpp", ["total_slots"], {}),
        ("tgi", {"max_batch_size": None, "max_batch_total_tokens": 32_000}, {"kv_tokens": 32_000}),
        ("tgi", {"max_concurrent_requests": 128, "max_total_tokens": 2048}, {}),  # of later versions
        ("vllm", {"total_slots": 4}, {}),
    ],
)
def test_what_is_told_once(kind: str, document: object, told: dict[str, int]) -> None:
    assert read_once(kind, json.dumps(document).encode()) == told


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"total_slots":' + b"9" * 10_000 + b"}"])
def test_what_is_no_json_tells_nothing(text: bytes) -> None:
    assert read_once("llamacpp", text) == {}


@pytest.mark.parametrize(
    ("page", "metrics"),
    [
        (b"", True),
        (b"\n", True),
        (b"# HELP a b\n", True),
        (b"a 1\n# TYPE b gauge\n", True),
        (b"# A heading\n", False),
        (b"<html>", False),
        (b"{}", False),
    ],
)
def test_whether_it_is_a_page_of_metrics(page: bytes, metrics: bool) -> None:
    assert is_metrics(page) is metrics


noise = st.binary(max_size=300) | st.text('vlm:num_requests_waiting{}"\\=,1 \n\r', max_size=300).map(str.encode)


@given(noise, st.sampled_from([*(page for page, _ in PAGES.values()), b""]), st.integers(0, 1500), st.integers(0, 40))
def test_no_bytes_raise(noise: bytes, page: bytes, at: int, gap: int) -> None:
    report = read_load(page[:at] + noise + page[at + gap :])
    if report is not None:
        for value in (report.waiting, report.running):
            assert value is None or 0.0 <= value <= 2 * SERIES_MAX * COUNT_MAX
        assert report.kv_use is None or 0.0 <= report.kv_use <= 1.0
    for kind in ENGINES:
        read_once(kind, noise)


values = st.floats(0, 1e6) | st.integers(0, 10**6)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=60)
@given(st.lists(st.tuples(labels, values, values), min_size=1, max_size=5, unique_by=lambda rank: rank[0]), labels)
def test_what_the_usual_library_writes_is_read(ranks: list[tuple[str, float, float]], model: str) -> None:
    """Whatever models and ranks are called."""
    registry = CollectorRegistry()
    names = ["model_name", "engine"]
    waiting = Gauge("vllm:num_requests_waiting", "Waiting.", names, registry=registry)
    running = Gauge("vllm:num_requests_running", "Running.", names, registry=registry)
    tokens = Counter("vllm:generation_tokens", "Tokens.", names, registry=registry)
    took = Histogram("vllm:num_requests_waiting_seconds", "Not what is asked for.", names, registry=registry)
    for engine, first, second in ranks:
        waiting.labels(model, engine).set(first)
        running.labels(model, engine).set(second)
        tokens.labels(model, engine).inc(first)
        took.labels(model, engine).observe(first)
    report = read_load(generate_latest(registry))
    assert report is not None
    assert report.waiting == pytest.approx(sum(first for _, first, _ in ranks))
    assert report.running == pytest.approx(sum(second for _, _, second in ranks))
    assert report.generated_tokens_total == int(sum(float(first) for _, first, _ in ranks))


def fastest_s(page: bytes, times: int) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        read_load(page)
        took.append(time.perf_counter() - began)
    return min(took)


def test_a_long_page_costs_little() -> None:
    histogram = b"".join(
        b'vllm:time_per_output_token_seconds_bucket{engine="0",le="%d",model_name="a/model"} %d\n' % (n, n)
        for n in range(2700)
    )
    assert len(histogram) > 200_000
    assert read_load(histogram + VLLM) == VLLM_REPORT
    assert fastest_s(histogram + VLLM, 30) < 0.001


@pytest.mark.parametrize(
    "page",
    [
        b'vllm:num_requests_waiting{x="' + b'\\"' * 500_000,
        b'vllm:num_requests_waiting{x="\n' * 40_000,
        b"vllm:num_requests_waiting{\n" * 40_000,
        b'vllm:num_requests_waiting{x="y"\n' * 40_000,
        b"vllm:num_requests_waiting NaN\n" * 40_000,
        b"vllm:num_requests_waiting " + b"9" * 1_000_000,
        b"vllm:num_requests_waiting" + b" " * 1_000_000,
        b"vllm:" * 200_000,
        b"\nvllm:" * 200_000,
        b"\n" * 1_000_000,
    ],
    ids=range(10),
)
def test_no_page_costs_much(page: bytes) -> None:
    """A megabyte of whatever holds up nothing for long: the time grows with the length, and no faster."""
    assert fastest_s(page, 3) < 0.1


def test_every_engine_tells_of_a_queue() -> None:
    for names in ENGINES.values():
        assert names.prefixes
        assert names.waiting
        assert names.running
