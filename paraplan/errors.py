"""The error tree: everything that a user can mend is a `ParaplanError`."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable

PREEMPTED_EXIT_STATUS = 75
"""A job that was told to end, and saved its state: EX_TEMPFAIL of sysexits.h, which invites to try again."""


class ParaplanError(Exception):
    """Something that the user can mend.

    `message` says what was wrong, the value seen and the limit; `hint` says what to do.
    The command line prints both on stderr and ends with `exit_status`. As text, which is what Python shows of it,
    options are the fields and arguments that Python has for them: `--tp 2` is `tp=2`.
    """

    exit_status = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        from paraplan.python_words import in_python_words

        return in_python_words(self.text)

    @property
    def text(self) -> str:
        """Message and hint, with options as the command line has them."""
        return f"{self.message}; hint: {self.hint}" if self.hint else self.message


class UsageError(ParaplanError):
    """Arguments that contradict each other or lie outside their range."""


class WrongArgumentError(UsageError, TypeError):
    """An argument of a function that is of another type than it takes, lies outside its range, or that it lacks."""


class TopologyError(ParaplanError):
    """A text, XML or JSON that describes no topology."""


class ProfileError(ParaplanError):
    """A hardware profile that does not exist or cannot be read."""


class ModelError(ParaplanError):
    """A model that cannot be read: missing file, missing field, unknown architecture, failing factory."""


class PlanError(ParaplanError):
    """A plan that contradicts itself, its model, or the world in which it is to run."""


class WrongFieldError(PlanError, ValueError):
    """A record that was given a field that it does not have, lacks one, or has a value that it cannot have."""


class UnsupportedPlanError(PlanError):
    """A consistent plan that the runtime cannot execute."""


class NoPlanFitsError(ParaplanError):
    """No plan of the search space fits in memory, or is in time; `is_near` where another option may mend that."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str | None = None, is_near: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.is_near = is_near


class CheckFailedError(ParaplanError):
    """A check that the user asked for does not hold."""

    exit_status = 1


class NoGpuError(ParaplanError):
    """No GPU, or no driver to ask for one, and no profile in its place."""

    exit_status = 3


def require_torch(what: str) -> None:
    """Raise `UsageError` where torch is not installed, which planning does without; `what` needs it."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"{what} needs torch, which is not installed", hint="pip install torch")


MOST_LISTED = 40
"""Names that a hint lists at most: more of them are no help."""


def near_names(name: str, known: Iterable[str], *, count: int = 3, listed: Iterable[str] | None = None) -> str:
    """Return a hint that lists the names of `known` that look like `name`, or all of them (`listed`) if none does.

    Of more than `MOST_LISTED` names it lists the first, and says how many there are beside them.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=count, cutoff=0.6) or [
        candidate for candidate in names if name.lower() in candidate
    ]
    if near:
        return "did you mean " + " or ".join(near[:count]) + "?"
    every = names if listed is None else sorted(listed)
    left = len(every) - MOST_LISTED
    return "known: " + ", ".join(every[:MOST_LISTED]) + (f" and {left} more" if left > 0 else "")
