"""What a request costs: estimates that learn, true costs, and the older meaning."""

import pytest

from evenflow.policy.cost import (
    BYTES_PER_TOKEN,
    BYTES_PER_TOKEN_MAX,
    BYTES_PER_TOKEN_MIN,
    OUTPUT_TOKENS_INHERITED_MAX,
    OUTPUT_TOKENS_UNSEEN,
    CostModel,
)


def test_the_first_estimate_goes_by_bytes() -> None:
    cost = CostModel()
    assert cost.estimate("a", "m", 400, 1, None, True) == 400 / BYTES_PER_TOKEN + 2 * OUTPUT_TOKENS_UNSEEN
    assert cost.estimate("a", "m", 400, 3, 10, True) == 100 + 2 * 10 * 3  # the prompt once, the output three times
    assert cost.estimate("a", "m", 400, 1, 10**9, True) == 100 + 2 * OUTPUT_TOKENS_UNSEEN  # not by max_tokens alone
    assert cost.estimate("a", "m", 400, 1, None, False) == 100  # embeddings
    assert cost.estimate("a", "m", 0, 1, 0, True) == 1  # nothing is for nothing


def test_the_engine_corrects_the_ratio_of_its_model() -> None:
    cost = CostModel()
    cost.learn_ratio("a", "m", 900, 300)
    assert cost.input_tokens("a", "m", 300) == 100
    assert cost.input_tokens("a", "other", 400) == 100
    assert cost.input_tokens("b", "m", 400) == 100  # what one sends says nothing of another's
    for _ in range(500):
        cost.learn_ratio("a", "m", 500, 100)
    assert cost.input_tokens("a", "m", 500) == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    ("prompt_bytes", "tokens", "ratio"), [(10**8, 10, BYTES_PER_TOKEN_MAX), (10, 10**6, BYTES_PER_TOKEN_MIN)]
)
def test_one_odd_prompt_does_not_spoil_the_ratio(prompt_bytes: int, tokens: int, ratio: float) -> None:
    cost = CostModel()
    cost.learn_ratio("a", "m", prompt_bytes, tokens)
    assert cost.input_tokens("a", "m", 1600) == 1600 / ratio


def test_output_averages_by_tenant_then_by_model() -> None:
    cost = CostModel()
    cost.learn("a", "m", 50.0)
    assert cost.output_tokens("a", "m", None) == 50
    assert cost.output_tokens("b", "m", None) == 50  # unseen: as others of the model
    cost.learn("b", "m", 500.0)
    assert cost.output_tokens("b", "m", None) == 500
    assert cost.output_tokens("a", "m", None) == 50
    assert cost.output_tokens("a", "other", None) == OUTPUT_TOKENS_UNSEEN
    assert cost.output_tokens("b", "m", 20) == 20
    for _ in range(200):
        cost.learn("a", "m", 20_000.0)
    assert cost.output_tokens("new", "m", None) == OUTPUT_TOKENS_INHERITED_MAX


def test_true_costs() -> None:
    cost = CostModel()
    assert cost.actual(100, 60, 10, 1) == pytest.approx(40 + 6 + 20)
    assert cost.actual(0, 0, 0, 1) == 0


def test_sequences_alone_count_in_the_older_meaning() -> None:
    cost = CostModel(by_tokens=False)
    assert cost.estimate("a", "m", 10**6, 6, 10**6, True) == 6
    assert cost.actual(10**6, 0, 10**6, 6) == 6


def test_other_weights_keep_what_was_learned() -> None:
    cost = CostModel()
    cost.learn("a", "m", 50.0)
    cost.configure(True, 1.0, 0.0, 3.0)
    assert cost.estimate("a", "m", 400, 1, None, True) == 100 + 3 * 50
    assert cost.actual(100, 100, 1, 1) == 3
