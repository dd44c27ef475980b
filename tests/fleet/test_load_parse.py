"""What engines tell of their load, from pages as they write them; and that no page can do harm."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.fleet.engines.load import ENGINES, LoadReport, read_load

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m \\"x\\" {y}"} 7.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0 1700000000000
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",num_cpu_blocks="0"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1000",num_cpu_blocks="0"} 1.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 44.0
"""
SGLANG = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 12.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 4.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.31
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 452000.0
"""
LLAMACPP = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 88
llamacpp:requests_processing 4
llamacpp:requests_deferred 9
"""
TGI = b"tgi_queue_size 2\ntgi_batch_current_size 31\ntgi_request_duration_bucket{le=\"1\"} 5\n"
LMDEPLOY = b'lmdeploy:num_requests_running{engine="0"} 6.0\nlmdeploy:num_requests_waiting{engine="0"} 1.0\n'


@pytest.mark.parametrize(
    ("page", "report"),
    [
        (VLLM, LoadReport("vllm", 4.0, 12.0, 0.5, 32_000)),
        (SGLANG, LoadReport("sglang", 4.0, 12.0, 0.31, 452_000)),
        (LLAMACPP, LoadReport("llamacpp", 9.0, 4.0)),
        (TGI, LoadReport("tgi", 2.0, 31.0)),
        (LMDEPLOY, LoadReport("lmdeploy", 1.0, 6.0)),
        (VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc"), LoadReport("vllm", 4.0, 12.0, 0.5, 32_000)),
        (VLLM.replace(b"\n", b"\r\n"), LoadReport("vllm", 4.0, 12.0, 0.5, 32_000)),
    ],
    ids=["vllm", "sglang", "llamacpp", "tgi", "lmdeploy", "older vllm", "crlf"],
)
def test_the_page_of_each_engine(page: bytes, report: LoadReport) -> None:
    assert read_load(page) == report


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
        b"vllm:num_requests_waiting{model=\"m\n",
        b"vllm:num_requests_waiting\n",
        b"vllm:something_else 5\n",
        b"\xff\xfe\x00vllm:\x00",
    ],
)
def test_what_tells_nothing(page: bytes) -> None:
    assert read_load(page) is None


def test_odd_values_are_passed_over_and_the_rest_is_read() -> None:
    page = b"vllm:num_requests_running 1e1\nvllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc 7.5\n"
    page += b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read_load(page) == LoadReport("vllm", None, 10.0, 1.0, None)


@given(st.binary(max_size=300), st.sampled_from([VLLM, SGLANG, LLAMACPP, TGI, LMDEPLOY, b""]), st.integers(0, 600))
def test_no_bytes_raise(noise: bytes, page: bytes, at: int) -> None:
    read_load(page[:at] + noise + page[at:])


def test_a_long_page_costs_little() -> None:
    histogram = b"".join(
        b'vllm:time_per_output_token_seconds_bucket{engine="0",le="%d",model_name="m"} %d\n' % (n, n)
        for n in range(4000)
    )
    page = histogram + VLLM
    began = time.perf_counter()
    assert read_load(page) is not None
    assert time.perf_counter() - began < 0.25
    hostile = b'vllm:a{x="' + b'\\"' * 200_000
    began = time.perf_counter()
    assert read_load(hostile) is None
    assert time.perf_counter() - began < 0.5


def test_every_engine_tells_of_a_queue() -> None:
    for names in ENGINES.values():
        assert names.waiting
        assert names.running
