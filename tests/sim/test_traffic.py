"""Traces are read as they are or refused by line and field; made-up traffic is what was asked for."""

from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pstdev

import pytest

from evenflow.sim.traffic import (
    Flood,
    Lengths,
    TraceError,
    TrafficError,
    generate,
    read_trace,
    scale,
    weibull_shape,
)

TRACES = Path(__file__).parents[3] / "shared" / "traces"

HEAD = "arrival_s,tenant,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def shared(name: str) -> Path:
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ----------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize(
    ("name", "requests", "tenants"),
    [
        ("azure/AzureLLMInferenceTrace_code.csv", 8819, 10),
        ("azure/AzureLLMInferenceTrace_conv.csv", 19366, 10),
        ("mooncake/conversation_trace.jsonl", 12031, 10),
        ("mooncake/synthetic_trace.jsonl", 3993, 10),
        ("vtc_arena/arena_27tenants.csv", 1500, 27),
        ("servegen/mmid_20min_10rps.csv", 12141, 30),
    ],
)
def test_the_shared_traces_are_read(name: str, requests: int, tenants: int) -> None:
    traffic = read_trace(shared(name))
    times = [one.time_s for one in traffic.arrivals]
    assert len(times) == requests
    assert times[0] == 0.0 and times == sorted(times)
    assert {one.tenant for one in traffic.arrivals} == {tenant.name for tenant in traffic.tenants}
    assert len(traffic.tenants) == tenants


def test_what_a_file_holds_is_told_from_its_content(tmp_path: Path) -> None:
    traffic = read_trace(
        written(
            tmp_path,
            "\ufeffoutput_tokens,tenant, colour,arrival_s,input_tokens,max_tokens\r\n"
            "7,b,red,2.5,100,20\r\n\r\n8.0,a,blue,3,200,\r\n",
        )
    )
    first, second = traffic.arrivals
    assert (first.time_s, first.tenant, first.input_tokens, first.output_tokens) == (0.0, "b", 100, 7)
    assert (second.time_s, second.tenant, second.output_tokens) == (0.5, "a", 8)
    assert (first.max_tokens, second.max_tokens) == (20, None)
    assert [tenant.name for tenant in traffic.tenants] == ["a", "b"]


def test_azure_times_begin_with_the_first_request(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE + "2023-11-16 23:59:59.9799600,10,1\n2023-11-17 00:00:01.0000000,10,1\n")
    assert [one.time_s for one in read_trace(path).arrivals] == pytest.approx([0.0, 1.02004], abs=1e-6)


def test_chains_stay_with_one_tenant(tmp_path: Path) -> None:
    rows = [
        f'{{"timestamp": {i}, "input_length": 9, "output_length": 9, "hash_ids": [0, {1 + i % 7}, {i}]}}\n'
        for i in range(300)
    ]
    traffic = read_trace(written(tmp_path, "".join(rows)), tenants=5, seed=1)
    owners = {(one.prefix[1], one.tenant) for one in traffic.arrivals}
    assert len(owners) == 7
    assert len({tenant for _, tenant in owners}) > 1


def test_assigned_tenants_are_skewed_and_seeded() -> None:
    path = shared("azure/AzureLLMInferenceTrace_code.csv")
    counts = [0] * 10
    owners = [one.tenant for one in read_trace(path, seed=3).arrivals]
    for owner in owners:
        counts[int(owner.removeprefix("tenant-"))] += 1
    # Zipf 1.2 over ten: 1 of 2.468, and the last 0.0631 of it.
    assert counts[0] / len(owners) == pytest.approx(0.405, abs=0.02)
    assert counts[9] / len(owners) == pytest.approx(0.0256, abs=0.006)
    assert owners == [one.tenant for one in read_trace(path, seed=3).arrivals]
    assert owners != [one.tenant for one in read_trace(path, seed=4).arrivals]


# ----------------------------------------------------------------------------------------------------
# Bad input

GOOD_JSON = '{"timestamp": 0, "input_length": 5, "output_length": 5}\n'


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("", 1, "file"),
        (" \n\n", 1, "file"),
        (b"PK\x03\x04\0\0", 1, "file"),
        (HEAD.encode() + b"0,\xff,1,1\n", 2, "text"),
        ("a,b,c\n1,2,3\n", 1, "header"),
        ("arrival_s,tenant,input_tokens\n0,a,1\n", 1, "header"),
        (HEAD, 1, "file"),
        (HEAD + "0,a,1\n", 2, "row"),
        (HEAD + "0,a,1,1\n1,a,-1,1\n", 3, "input_tokens"),
        (HEAD + "0,a,1,1.5\n", 2, "output_tokens"),
        (HEAD + "0,a,nan,1\n", 2, "input_tokens"),
        (HEAD + "0,a,1e400,1\n", 2, "input_tokens"),
        (HEAD + "0,a,1_0,1\n", 2, "input_tokens"),
        (HEAD + f"0,a,{'9' * 5000},1\n", 2, "input_tokens"),
        (HEAD + "0,a,,1\n", 2, "input_tokens"),
        (HEAD + "0, ,1,1\n", 2, "tenant"),
        (HEAD + "-1,a,1,1\n", 2, "arrival_s"),
        (HEAD + "inf,a,1,1\n", 2, "arrival_s"),
        (HEAD + "5,a,1,1\n4,a,1,1\n", 3, "time"),
        (HEAD + '0,"a,1,1\n', 2, "row"),
        (HEAD + "0,a\0b,1,1\n", 1, "file"),
        (AZURE + "yesterday,1,1\n", 2, "TIMESTAMP"),
        (AZURE + "2023-11-16 18:17:04,1,1\n2023-11-16 18:17:03,1,1\n", 3, "time"),
        (GOOD_JSON + "{\n", 2, "row"),
        (GOOD_JSON + "[1]\n", 2, "row"),
        ("{" * 100_000 + "\n", 1, "row"),
        ('{"a":' * 100_000 + "\n", 1, "row"),
        ('{"timestamp": 0, "input_length": 5}\n', 1, "output_length"),
        ('{"timestamp": 0, "input_length": "5", "output_length": 5}\n', 1, "input_length"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5}\n', 1, "input_length"),
        ('{"timestamp": 0, "input_length": NaN, "output_length": 5}\n', 1, "input_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": "x"}\n', 1, "hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0.5]}\n', 1, "hash_ids"),
    ],
)
def test_bad_traces_are_refused_by_line_and_field(tmp_path: Path, text: str | bytes, line: int, field: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: {field}: ")
    assert "; " in message and "\n" not in message
    assert len(message) < 400


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(TraceError, match=r":1: file: .*; "):
            read_trace(path)


# ----------------------------------------------------------------------------------------------------
# Made up


def test_equal_seeds_make_equal_traffic() -> None:
    assert generate(seed=1, one_shot=5) == generate(seed=1, one_shot=5)
    assert generate(seed=1) != generate(seed=2)


def test_rate_and_skew_are_as_asked() -> None:
    traffic = generate(tenants=4, requests=20_000, rate=50.0, skew=1.0, seed=5)
    assert traffic.arrivals[-1].time_s == pytest.approx(20_000 / 50.0, rel=0.05)
    counts = [sum(one.tenant == tenant.name for one in traffic.arrivals) for tenant in traffic.tenants]
    for rank, count in enumerate(counts, 1):
        assert count / 20_000 == pytest.approx(12 / 25 / rank, rel=0.06)


@pytest.mark.parametrize("weibull", [False, True])
@pytest.mark.parametrize("burst", [0.5, 1.0, 3.0])
def test_bursts_are_as_asked(burst: float, weibull: bool) -> None:
    traffic = generate(tenants=1, requests=40_000, rate=1.0, burst=burst, weibull=weibull, seed=2)
    gaps = [later.time_s - earlier.time_s for earlier, later in pairwise(traffic.arrivals)]
    assert mean(gaps) == pytest.approx(1.0, rel=0.08)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(burst, rel=0.12)


def test_the_weibull_shape_of_a_poisson_process_is_one() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0)


def test_lengths_have_their_median_and_bound() -> None:
    traffic = generate(requests=5000, input_tokens=Lengths(300.0, 1.5, 1000), seed=9)
    lengths = [one.input_tokens for one in traffic.arrivals]
    assert median(lengths) == pytest.approx(300, rel=0.1)
    assert min(lengths) >= 1 and max(lengths) == 1000


def test_a_flood_multiplies_one_tenant_and_leaves_the_others() -> None:
    flood = Flood(tenant=1, factor=10.0, from_s=100.0, until_s=200.0)
    calm = generate(tenants=3, requests=3000, rate=10.0, skew=0.0, seed=4).arrivals
    flooded = generate(tenants=3, requests=6000, rate=10.0, skew=0.0, seed=4, flood=flood).arrivals

    def sent(arrivals, tenant: int, from_s: float, until_s: float) -> list[float]:  # type: ignore[no-untyped-def]
        return [one.time_s for one in arrivals if one.tenant == f"tenant-{tenant}" and from_s <= one.time_s < until_s]

    assert len(sent(flooded, 1, 100, 200)) == pytest.approx(10 * 100 * 10 / 3, rel=0.1)
    assert len(sent(flooded, 1, 200, 280)) == pytest.approx(80 * 10 / 3, rel=0.2)
    assert sent(flooded, 1, 0, 100) == sent(calm, 1, 0, 100)
    assert sent(flooded, 2, 0, 250) == sent(calm, 2, 0, 250)


def test_one_shot_tenants_send_once() -> None:
    traffic = generate(tenants=2, requests=100, one_shot=30, seed=8)
    assert len(traffic.arrivals) == 100 and len(traffic.tenants) == 32
    for tenant in traffic.tenants[2:]:
        assert sum(one.tenant == tenant.name for one in traffic.arrivals) == 1
    times = [one.time_s for one in traffic.arrivals]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenants", 0),
        ("requests", 0),
        ("rate", 0.0),
        ("rate", float("nan")),
        ("skew", -1.0),
        ("burst", 0.0),
        ("burst", 1e9),
        ("one_shot", 1000),
    ],
)
def test_what_cannot_be_made_is_refused(field: str, value: float) -> None:
    with pytest.raises(TrafficError, match=f"^{field}: .*; give "):
        generate(**{field: value})  # type: ignore[arg-type]


def test_a_steep_skew_still_ends() -> None:
    assert len(generate(tenants=50, skew=100.0, requests=100).arrivals) == 100


# ----------------------------------------------------------------------------------------------------
# Stretched, repeated, cut


def test_cut_repeat_and_rate() -> None:
    traffic = generate(requests=100, seed=6)
    assert list(scale(traffic, limit=10).arrivals) == list(traffic.arrivals)[:10]
    assert scale(traffic, limit=1000).arrivals == traffic.arrivals
    repeated = scale(traffic, repeat=250).arrivals
    times = [one.time_s for one in repeated]
    assert len(repeated) == 250 and times == sorted(times)
    assert [one.input_tokens for one in repeated[100:200]] == [one.input_tokens for one in traffic.arrivals]
    fast = scale(traffic, speed=4.0).arrivals
    assert fast[-1].time_s == pytest.approx(traffic.arrivals[-1].time_s / 4.0)
    span_s = (even := scale(traffic, rate=20.0).arrivals)[-1].time_s - even[0].time_s
    assert 99 / span_s == pytest.approx(20.0)


def test_a_repetition_shares_no_blocks_with_the_one_before(tmp_path: Path) -> None:
    row = '{"timestamp": 5, "input_length": 9, "output_length": 9, "hash_ids": [0, 4]}\n'
    traffic = scale(read_trace(written(tmp_path, row)), repeat=3)
    assert [one.prefix for one in traffic.arrivals] == [(0, 4), (5, 9), (10, 14)]
    assert [one.time_s for one in traffic.arrivals] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("how", [{"rate": 0.0}, {"speed": -1.0}, {"repeat": 0}, {"limit": 0}, {"rate": 1, "speed": 1}])
def test_a_scale_that_means_nothing_is_refused(how: dict[str, float]) -> None:
    with pytest.raises(TrafficError, match=r": .*; give "):
        scale(generate(requests=5), **how)  # type: ignore[arg-type]
