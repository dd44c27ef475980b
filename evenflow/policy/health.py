"""Whether a worker may be chosen: a small state machine, driven by what was seen of it.

    starting   not heard of yet                      a probe succeeds → ready, or ready on trial
    ready      chosen                                it fails, or falls silent → suspect
    suspect    failed; not chosen                    a probe succeeds, and its back-off is over → ready again
    draining   finishes what it runs                 an operator wants it back → starting
    gone       no more in the fleet

`TABLE` says what each event does in each state; `Health` counts what must happen several times first. Three things are
weighed beyond that:

    back-off   Who fails requests although its probes succeed is left alone for a time that doubles with each time it
               comes to that. So is who goes down again soon after it came back, however that was seen: flapping costs
               a worker more and more of its chances, until it has been well for a while.
    trial      Who comes back after failing requests gets one request at a time until one is answered (a circuit
               breaker that is half open), and is suspect again at its first failure.
    ramp       From then on it is given twice as many each second, until it has all its slots.

Pure: it is told the time, and wakes nobody. The registry is its only user.
"""

from enum import StrEnum
from math import inf


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


class Event(StrEnum):
    PROBE_SUCCEEDED = "probe succeeded"
    PROBE_FAILED = "probe failed"
    # A request that had reached it failed there: a 5xx, a time-out, an answer cut short. Never a 4xx.
    FAILED = "failed"
    # A connection was refused or broke before an answer.
    UNREACHABLE = "unreachable"
    # It must send heartbeats and does not.
    SILENT = "silent"
    DRAIN = "drain"
    RESUME = "resume"
    REMOVE = "remove"


TABLE: dict[State, dict[Event, State]] = {
    State.STARTING: {
        Event.PROBE_SUCCEEDED: State.READY,
        Event.PROBE_FAILED: State.SUSPECT,
        Event.UNREACHABLE: State.SUSPECT,
        Event.DRAIN: State.DRAINING,
        Event.REMOVE: State.GONE,
    },
    State.READY: {
        Event.PROBE_FAILED: State.SUSPECT,
        Event.FAILED: State.SUSPECT,
        Event.UNREACHABLE: State.SUSPECT,
        Event.SILENT: State.SUSPECT,
        Event.DRAIN: State.DRAINING,
        Event.REMOVE: State.GONE,
    },
    State.SUSPECT: {
        Event.PROBE_SUCCEEDED: State.READY,
        Event.DRAIN: State.DRAINING,
        Event.REMOVE: State.GONE,
    },
    State.DRAINING: {Event.RESUME: State.STARTING, Event.REMOVE: State.GONE},
    State.GONE: {},
}
# How often in a row it must happen to a worker that is ready.
TIMES: dict[Event, int] = {Event.PROBE_FAILED: 2, Event.FAILED: 3}
# Seconds that a worker is left alone when it failed requests for the first time, and at most.
BACKOFF_S = 1.0
BACKOFF_MAX_S = 60.0
# Who has been ready for so long begins anew; who goes down sooner is flapping.
STABLE_S = 60.0
# Requests at once on trial.
TRIAL_SLOTS = 1.0


class Health:
    """Of one worker. `slots_max` is what it may be given at once, infinite but for a trial and the ramp behind it."""

    __slots__ = (
        "_ready_s",
        "ejections",
        "failures",
        "on_trial",
        "probe_failures",
        "slots_max",
        "state",
        "until_s",
        "untried",
    )

    def __init__(self) -> None:
        self.state = State.STARTING
        # In a row: failed requests, failed probes.
        self.failures = 0
        self.probe_failures = 0
        # Times that it went down soon after the last; the time until which it is left alone.
        self.ejections = 0
        self.until_s = -inf
        # It failed requests and has not answered one since.
        self.untried = False
        self.on_trial = False
        self.slots_max = inf
        # When it became ready last.
        self._ready_s = -inf

    def on(self, event: Event, now: float) -> bool:
        """Takes the event in; True when the state has changed with it.

        1. Success clears what was counted, failure counts.
        2. What must happen several times has happened often enough; on trial once is enough.
        3. It may not come back yet.
        """
        if event is Event.PROBE_SUCCEEDED:  # (1)
            self.probe_failures = 0
        elif event is Event.PROBE_FAILED:
            self.probe_failures += 1
        elif event is Event.FAILED:
            self.failures += 1
        new = TABLE[self.state].get(event)
        if new is None:
            return False
        if self.state is State.READY and new is State.SUSPECT:
            count = self.failures if event is Event.FAILED else self.probe_failures
            if count < TIMES.get(event, 0) and not (self.on_trial and event is Event.FAILED):  # (2)
                return False
            self._go_down(event, now)
        elif new is State.READY:
            if self.state is State.SUSPECT and now < self.until_s:  # (3)
                return False
            self._come_up(now)
        elif event is Event.RESUME:
            self.until_s = -inf
        self.state = new
        return True

    def answered(self) -> None:
        """A request was answered. The one on trial opens the way for more."""
        self.failures = 0
        if self.on_trial:
            self.on_trial = self.untried = False
            self.slots_max = 2.0 * TRIAL_SLOTS

    def ramp(self, slots: int) -> bool:
        """Once a second; True when it may be given more than before. `slots` is what it has."""
        if self.slots_max == inf or self.on_trial:
            return False
        self.slots_max *= 2.0
        if self.slots_max >= slots:
            self.slots_max = inf
        return True

    def begin_slowly(self) -> None:
        """It is new where others run: it is given more by and by, and no flood of all that is due."""
        self.slots_max = 2.0 * TRIAL_SLOTS

    def _go_down(self, event: Event, now: float) -> None:
        if now - self._ready_s >= STABLE_S:
            self.ejections = 0
        self.ejections += 1
        # Who was just not reachable may come back at once the first time; its probes tell the truth.
        doublings = self.ejections - 1 if event is Event.FAILED else self.ejections - 2
        self.until_s = -inf
        if doublings >= 0:
            self.until_s = now + min(BACKOFF_S * 2.0 ** min(doublings, 30), BACKOFF_MAX_S)
        self.untried |= event is Event.FAILED
        self.on_trial = False
        self.slots_max = inf

    def _come_up(self, now: float) -> None:
        self._ready_s = now
        self.failures = 0
        self.on_trial = self.untried
        if self.on_trial:
            self.slots_max = TRIAL_SLOTS
