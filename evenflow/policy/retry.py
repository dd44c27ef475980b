"""Whether a request may be tried on another worker: a few times each, and only a share of all traffic.

The budget is that of Finagle and linkerd: each request deposits a fraction of a retry, each retry withdraws one, so a
fleet that fails as a whole is not hit twice as hard. Pure: no clock, no socket.
"""

# Tries of one request, the first included.
ATTEMPTS_MAX = 3
# Retries earned by each request.
DEPOSIT = 0.2
# Retries that can be saved up; also what a gateway starts with.
BALANCE_MAX = 100.0


class RetryBudget:
    """A balance of retries, shared by all traffic of one gateway."""

    __slots__ = ("balance",)

    def __init__(self) -> None:
        self.balance = BALANCE_MAX

    def deposit(self) -> None:
        balance = self.balance + DEPOSIT
        self.balance = balance if balance < BALANCE_MAX else BALANCE_MAX

    def withdraw(self, attempts: int) -> bool:
        """True, and one retry poorer, when a request with so many attempts behind it may be tried again."""
        if attempts >= ATTEMPTS_MAX or self.balance < 1.0:
            return False
        self.balance -= 1.0
        return True
