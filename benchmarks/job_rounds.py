"""Rounds of a job as its learners tell of them: seconds from the last upload until all are aligned."""

from __future__ import annotations


class Rounds:
    """What `learners` learners said, by (fragment, number) of the round."""

    def __init__(self, learners: int) -> None:
        self._learners = learners
        self._uploaded: dict[tuple[int, int], list[float]] = {}
        self._aligned: dict[tuple[int, int], dict[str, float]] = {}
        self._complete: set[tuple[int, int]] = set()
        self._held: dict[tuple[str, int], int] = {}
        self.seconds: list[float] = []
        self.uploads: list[int] = []

    def hear(self, learner: str, what: str, at: float, fragment: int, number: int) -> bool:
        """Takes in one line; whether all learners are aligned with one more round by it."""
        if what == "uploaded":
            if (fragment, number) not in self._complete:
                self._uploaded.setdefault((fragment, number), []).append(at)
            return False
        before = self._held.get((learner, fragment), -1)
        self._held[learner, fragment] = number
        complete = False
        # One who takes over a newer version at once is aligned with those between as well.
        for passed in [key for key in self._uploaded if key[0] == fragment and before < key[1] <= number]:
            aligned = self._aligned.setdefault(passed, {})
            aligned[learner] = at
            if len(aligned) == self._learners:
                times = [each for each in self._uploaded.pop(passed) if each <= min(aligned.values())]
                if times:
                    self.seconds.append(max(aligned.values()) - max(times))
                    self.uploads.append(len(times))
                self._complete.add(passed)
                complete = True
        return complete
