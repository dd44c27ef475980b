"""What a request costs: guessed when it is dispatched, known when it has ended.

Cost = uncached prompt tokens + 0.1 x cached prompt tokens + 2 x output tokens. An output token counts double since a
decode step yields one token of a sequence where a prefill step yields hundreds; that ratio of 1 : 2 is the one of
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Before the engine has told its counts, the
prompt is taken to have as many tokens for its bytes as this tenant's prompts had lately, and the output is the smaller
of the caller's limit and what this tenant's requests to this model made lately. Never reads a clock, never sees a
prompt.
"""

# Until a model's engine has told how many tokens its prompts had.
BYTES_PER_TOKEN = 4.0
# One request may claim a ratio between these: base64 of a picture says little of text.
BYTES_PER_TOKEN_MIN, BYTES_PER_TOKEN_MAX = 1.0, 16.0
OUTPUT_TOKENS_UNSEEN = 128.0
# What a tenant of which nothing is known is thought to ask for, whatever long answers others had.
OUTPUT_TOKENS_INHERITED_MAX = 512.0
# The weight of the newest answer in a moving average of output lengths, and of ratios.
AVERAGE_STEP = 0.1
RATIO_STEP = 0.05
# Pairs of tenant and model whose average is kept; both come from bounded sets, this is the backstop.
AVERAGES_MAX = 100_000


class CostModel:
    """Costs in tokens (`by_tokens`), or one for each running sequence as older services count."""

    __slots__ = ("_average", "_ratio", "by_tokens", "cached_weight", "input_weight", "output_weight")

    def __init__(
        self,
        *,
        by_tokens: bool = True,
        input_weight: float = 1.0,
        cached_weight: float = 0.1,
        output_weight: float = 2.0,
    ) -> None:
        self.configure(by_tokens, input_weight, cached_weight, output_weight)
        # Mean output tokens of a sequence, by (tenant, model) and by model alone.
        self._average: dict[tuple[str, str] | str, float] = {}
        # Bytes of a body for each token of its prompt, by (tenant, model): what one sends says nothing of another's.
        self._ratio: dict[tuple[str, str], float] = {}

    def configure(
        self, by_tokens: bool, input_weight: float, cached_weight: float, output_weight: float
    ) -> None:
        """Takes other weights; what was learned stays."""
        self.by_tokens = by_tokens
        self.input_weight = input_weight
        self.cached_weight = cached_weight
        self.output_weight = output_weight

    def input_tokens(self, tenant: str, model: str, prompt_bytes: int) -> float:
        """Tokens that a prompt of so many bytes is thought to have."""
        return prompt_bytes / (self._ratio.get((tenant, model)) or BYTES_PER_TOKEN)

    def output_tokens(self, tenant: str, model: str, max_tokens: int | None) -> float:
        """Tokens that a sequence is thought to produce."""
        average = self._average
        output = average.get((tenant, model)) or 0.0
        if not output:
            output = average.get(model) or OUTPUT_TOKENS_UNSEEN
            if output > OUTPUT_TOKENS_INHERITED_MAX:
                output = OUTPUT_TOKENS_INHERITED_MAX
        return float(max_tokens) if max_tokens is not None and max_tokens < output else output

    def estimate(
        self, tenant: str, model: str, prompt_bytes: int, sequences: int, max_tokens: int | None, generates: bool
    ) -> float:
        """The cost to charge at dispatch. The prompt counts once, the output for each of the `sequences`."""
        output = self.output_tokens(tenant, model, max_tokens) * sequences if generates else 0.0
        return self.charge(self.input_tokens(tenant, model, prompt_bytes), output, sequences)

    def charge(self, input_tokens: float, output_tokens: float, sequences: int) -> float:
        """The cost of what is expected; at least 1, so that nobody gets anything for nothing."""
        if not self.by_tokens:
            return float(sequences)
        cost = self.input_weight * input_tokens + self.output_weight * output_tokens
        return cost if cost > 1.0 else 1.0

    def prompt_work(self, input_tokens: float) -> float:
        """The part of a charge that the prompt makes; 0 where tokens are not counted."""
        return self.input_weight * input_tokens if self.by_tokens else 0.0

    def cached_saves(self) -> float:
        """The part of a prompt's cost that is saved where it is in a cache."""
        return 1.0 - self.cached_weight / self.input_weight if self.input_weight > self.cached_weight else 0.0

    def actual(self, input_tokens: int, cached_tokens: int, output_tokens: int, sequences: int) -> float:
        """The true cost of what was computed."""
        if not self.by_tokens:
            return float(sequences)
        return (
            self.input_weight * (input_tokens - cached_tokens)
            + self.cached_weight * cached_tokens
            + self.output_weight * output_tokens
        )

    def learn(self, tenant: str, model: str, output_tokens_each: float) -> None:
        """Takes the output length of a sequence that ended by itself into the averages."""
        average = self._average
        if len(average) > AVERAGES_MAX:
            average.clear()
        mine = (tenant, model)
        old = average.get(mine)
        average[mine] = output_tokens_each if old is None else old + AVERAGE_STEP * (output_tokens_each - old)
        old = average.get(model)
        average[model] = output_tokens_each if old is None else old + AVERAGE_STEP * (output_tokens_each - old)

    def learn_ratio(self, tenant: str, model: str, prompt_bytes: int, input_tokens: int) -> None:
        """Takes what the engine told of a prompt into the bytes per token of this tenant's prompts to this model."""
        ratio = prompt_bytes / input_tokens
        if ratio < BYTES_PER_TOKEN_MIN:
            ratio = BYTES_PER_TOKEN_MIN
        elif ratio > BYTES_PER_TOKEN_MAX:
            ratio = BYTES_PER_TOKEN_MAX
        ratios = self._ratio
        mine = (tenant, model)
        old = ratios.get(mine)
        if old is not None:
            ratio = old + RATIO_STEP * (ratio - old)
        elif len(ratios) > AVERAGES_MAX:
            ratios.clear()
        ratios[mine] = ratio
