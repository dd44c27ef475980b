"""A placement policy of the user's own, named in the configuration as `package.module:Class`.

The class is made with a `random.Random`, as ours are, and has one method: `choose(workers, sequences, ask)`, or
without the `ask`; see `Placement` for what it returns and `Hooks` for what else it may have. What it does wrong harms
nobody's request: where it raises, or chooses a worker that is down or full, the least work decides. How often that
was so and what was the last time stands in `faults` and `problem`.
"""

import importlib
import inspect
import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from .candidate import Ask, Candidate, Hooks, Maker, has_room, hooks_of
from .least_work import LeastWork

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
# Characters of a foreign error that are repeated in a message of ours.
PROBLEM_CHARACTERS_MAX = 200
# In the place of an index: the user's code raised, which was noted.
FAILED = -2


class PlacementError(ValueError):
    """A policy that cannot be had. The message says why, and what to do about it."""


def own_placement(path: str) -> Maker:
    """What makes the policy that is named `package.module:Class`. Runs the module. Raises PlacementError.

    1. The name has not that form.
    2. There is no such module on the path, or it cannot be imported.
    3. There is no such class in it.
    4. It cannot be made with one argument, or has no `choose` that takes two or three.
    """
    if not _PATH.fullmatch(path):  # (1)
        raise PlacementError("must name a class of your own as package.module:Class, such as my_placement:Nearest")
    module_name, _, class_name = path.partition(":")
    module = _imported(module_name)  # (2)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):  # (3)
        what = "has no class" if found is None else "has something that is no class under the name"
        raise PlacementError(f"module '{module_name}' {what} '{class_name}'; correct the name, or add the class to it")
    if not _takes(found, 1):  # (4)
        raise PlacementError(
            f"'{class_name}' cannot be made with one argument; give it __init__(self, rng), with a random.Random"
        )
    choose = getattr(found, "choose", None)
    if not callable(choose) or not (_takes(choose, 4) or _takes(choose, 3)):
        raise PlacementError(f"'{class_name}' has no choose(self, workers, sequences, ask); add that method")
    return lambda rng: OwnPlacement(path, found, rng)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a module of the user's raises as it is run, it is told and goes no further
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (missing == name or name.startswith(missing + ".")):
            raise PlacementError(
                f"there is no module '{missing}'; install its package, or put its folder on PYTHONPATH"
            ) from None
        raise PlacementError(
            f"module '{name}' cannot be imported ({_told(error)}); see that `python -c 'import {name}'` works"
        ) from error


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments; True where it does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


class OwnPlacement:
    """Stands before the user's policy, and between its mistakes and everybody's requests."""

    __slots__ = ("_asks", "_hooks", "_own", "_rest", "faults", "path", "problem", "wants_blocks", "wants_session")

    def __init__(self, path: str, maker: Callable[[random.Random], Any], rng: random.Random) -> None:
        self.path = path
        try:
            self._own = maker(rng)
        except Exception as error:  # the user's code: told, as when it cannot be imported
            raise PlacementError(f"'{path}' cannot be made ({_told(error)}); correct its __init__") from error
        self._asks = _takes(self._own.choose, 3)
        self._hooks: Hooks = hooks_of(self._own)
        self.wants_blocks = self._hooks.blocks
        self.wants_session = self._hooks.session
        self._rest = LeastWork(rng)
        # Calls of its methods that failed, and what the last one was; read for logs.
        self.faults = 0
        self.problem = ""

    def choose(self, workers: Sequence[Candidate], sequences: int, ask: Ask | None = None) -> int:
        """What the user's policy chooses if that can be; -1 only if it is so, since a request might wait for ever."""
        index = self._ask_own(workers, sequences, ask)
        if 0 <= index < len(workers) and has_room(workers[index], sequences):
            return index
        rest = self._rest.choose(workers, sequences)
        if index == -1 and rest >= 0:
            self._fault("choose", "it returned -1 although there is a worker with room")
        elif index >= 0 or index < FAILED:
            self._fault("choose", "it returned the index of no worker with room")
        return rest

    def _ask_own(self, workers: Sequence[Candidate], sequences: int, ask: Ask | None) -> int:
        try:
            if self._asks:
                return operator.index(self._own.choose(workers, sequences, ask))
            return operator.index(self._own.choose(workers, sequences))
        except Exception as error:  # noqa: BLE001 - the user's code, in the middle of everybody's requests
            self._fault("choose", _told(error))
            return FAILED

    def placed(self, worker: Candidate, ask: Ask) -> None:
        self._tell("placed", self._hooks.placed, worker, ask)

    def answered(self, worker: Candidate, took_s: float) -> None:
        self._tell("answered", self._hooks.answered, worker, took_s)

    def reported(self, worker: Candidate, kv_use: float) -> None:
        self._tell("reported", self._hooks.reported, worker, kv_use)

    def forget(self, worker: Candidate) -> None:
        self._tell("forget", self._hooks.forget, worker)

    def _tell(self, name: str, hook: Callable[..., None] | None, *what: object) -> None:
        if hook is not None:
            try:
                hook(*what)
            except Exception as error:  # noqa: BLE001 - as in `choose`
                self._fault(name, _told(error))

    def _fault(self, method: str, problem: str) -> None:
        self.faults += 1
        self.problem = f"{method} of '{self.path}' failed: {problem}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:PROBLEM_CHARACTERS_MAX]
