"""What fails in a run: recorded in the store, and whether to go on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence

from howsmooth.study.names import encodable
from howsmooth.study.records import Failure

__all__ = ["FailureLog"]


class FailureLog:
    """Records what fails, and says whether to go on.

    Parameters
    ----------
    record
        Takes the failures: it writes them into a store, or a worker gathers them.
    keep_going
        Whether to go on after a failure.

    """

    def __init__(self, record: Callable[[list[Failure]], None], *, keep_going: bool) -> None:
        self._record = record
        self._keep_going = keep_going
        self.count = 0
        self.first = ""
        self.unusable: set[str] = set()
        """Models that cannot be loaded: there is no use in trying for every length."""

    def add(
        self,
        error: Exception,
        model: str,
        text: str | None = None,
        *,
        scope: str | None = None,
        n: int | None = None,
        place: tuple[int, int | None] | None = None,
        samples: Sequence[int] = (),
        what: str = "measurement",
    ) -> None:
        """Record a failure of a model, of a text with it, of a layer and head, or of some samples there."""
        words = encodable(" ".join(str(error).split())) or "no reason given"
        layer, head = place or (None, None)
        self._record(
            [
                Failure(
                    model=model,
                    text=text,
                    scope=scope,
                    layer=layer,
                    head=head,
                    n=n,
                    sample=sample,
                    kind=type(error).__name__,
                    error=words,
                    detail=encodable("".join(traceback.format_tb(error.__traceback__))),
                    what=what,
                )
                for sample in samples or (None,)
            ]
        )
        self.count += len(samples) or 1
        self.first = self.first or words
        # Bounds come after the measurements, which are all there: a report is better than none.
        if not self._keep_going and what != "bounds":
            raise error

    def adopt(self, failures: Iterable[Failure], unusable: Iterable[str]) -> None:
        """Record what a worker gathered; that a model cannot be loaded is recorded once."""
        new = [one for one in failures if one.text is not None or one.model not in self.unusable]
        self.unusable.update(unusable)
        if new:
            self._record(new)
            self.count += len(new)
            self.first = self.first or new[0].error
