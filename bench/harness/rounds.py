"""Contestants take turns, round by round, so that all of them meet the same machine."""
import dataclasses

from harness.cli import say
from harness.processes import Failure


@dataclasses.dataclass
class Entry:
    """What became of one contestant. Without `results` there is a reason why not."""
    name: str
    command: list = dataclasses.field(default_factory=list)
    results: dict = dataclasses.field(default_factory=dict)  # by round
    skipped: str = ""
    failed: str = ""

    def series(self, figure) -> dict:
        """One figure by round; none of a contestant that failed later."""
        return {} if self.failed else {number: figure(result) for number, result in self.results.items()}

    def as_json(self) -> dict:
        known = dataclasses.asdict(self)
        known["command"] = [str(part) for part in self.command]
        known["results"] = [{"round": number, **result} for number, result in self.results.items()]
        return {key: value for key, value in known.items() if value}


def take_turns(what: str, turns: list, rounds: int) -> None:
    """`turns`: pairs of an Entry and a function that measures once. Who fails is out; the others go on."""
    out = set()
    for number in range(1, rounds + 1):
        say(f"{what}: round {number} of {rounds}")
        for entry, measure in turns:
            if entry.name in out:
                continue
            try:
                entry.results[number] = measure()
            except Failure as failure:
                fail(entry, failure)
                out.add(entry.name)


def fail(entry: Entry, failure: Failure) -> None:
    entry.failed = str(failure)
    say(f"failed: {failure}")
