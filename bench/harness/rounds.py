"""Contestants alternate, round by round, so that all of them see the same machine."""
import dataclasses
import time

from harness.cli import say
from harness.contestants import words_shown
from harness.processes import Failure


@dataclasses.dataclass
class Entry:
    """What became of one contestant. Without `results` there is a reason why not."""
    name: str
    command: list = dataclasses.field(default_factory=list)
    results: dict = dataclasses.field(default_factory=dict)  # by round
    skipped: str = ""
    failed: str = ""
    peak_tflops: float = 0  # of a rank's large products, in lockstep's own entry; 0: not measured

    def series(self, figure) -> dict:
        """One figure by round; none of a contestant that failed later."""
        return {} if self.failed else {number: figure(result) for number, result in self.results.items()}

    def as_json(self) -> dict:
        known = dataclasses.asdict(self)
        known["command"] = words_shown(self.command)
        known["results"] = [{"round": number, **result} for number, result in self.results.items()]
        return {key: value for key, value in known.items() if value}


class Budget:
    """Minutes that are shared out to parts by weight; what one leaves over, the later ones have. None: no limit."""

    def __init__(self, minutes, weights: list):
        self._end = time.monotonic() + 60 * minutes if minutes else None
        self._weights = list(weights)

    def next_part(self):
        """When the next part shall have ended, by time.monotonic(); None: whenever it likes."""
        if self._end is None:
            return None
        now = time.monotonic()
        share = self._weights[0] / sum(self._weights)
        del self._weights[0]
        return now + max(0.0, self._end - now) * share


def take_turns(what: str, turns: list, rounds: int, end=None) -> None:
    """`turns`: pairs of an Entry and a function that measures once. Who fails is out; the others continue. No round
    begins, but the first, that would not be over at `end` (by time.monotonic()) if it took as long as the one before."""
    out = set()
    took_s = 0.0
    for number in range(1, rounds + 1):
        begin = time.monotonic()
        if end is not None and number > 1 and begin + took_s > end:
            say(f"{what}: time is up after {number - 1} of {rounds} rounds")
            return
        say(f"{what}: round {number} of {rounds}")
        for entry, measure in turns:
            if entry.name in out:
                continue
            try:
                entry.results[number] = measure()
            except Failure as failure:
                fail(entry, failure)
                out.add(entry.name)
        took_s = time.monotonic() - begin


def fail(entry: Entry, failure: Failure) -> None:
    entry.failed = str(failure)
    say(f"failed: {failure}")
