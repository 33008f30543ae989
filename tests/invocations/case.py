"""An invocation that is altered, and what is known of how it ends then."""
import dataclasses
import pathlib

ANYTHING, SAME, MUST_FAIL = "anything documented", "the same, or refused", "refused"


@dataclasses.dataclass
class Case:
    words: list  # bytes where they are not UTF-8
    inputs: tuple
    output: str
    environment: dict
    directory: pathlib.Path
    stdin: object = b""  # bytes, or "closed", "directory"
    stdout: str = ""  # "closed", "full", "gone"
    stderr: str = ""
    limits: list = dataclasses.field(default_factory=list)
    signal: tuple = ()  # a signal, and the seconds after which it comes
    terminal: tuple = (24, 80)  # the size of the terminal
    user: int = 0  # others than 0: whose process it is
    umask: int = 0o022
    work: str = "."
    expects: str = ANYTHING
    done: list = dataclasses.field(default_factory=list)
    flags: dict = dataclasses.field(default_factory=dict)  # of each subcommand: name → placeholder, "" of those without

    def did(self, what, expects=ANYTHING):
        # Of two mutations, one may mend what the other has done.
        self.expects = expects if not self.done or expects == self.expects == SAME else ANYTHING
        self.done.append(what)


def subcommand(case):
    return case.words[0] if case.words and isinstance(case.words[0], str) else ""


def own_flags(case):
    """The flags of its subcommand; of launch, those of the program too come after the launcher's."""
    return case.flags.get(subcommand(case), {})


def places_of_flags(case, with_value=False):
    found = []
    for i, word in enumerate(case.words):
        if isinstance(word, str) and word.startswith("--") and len(word) > 2:
            takes = i + 1 < len(case.words) and not str(case.words[i + 1]).startswith("--")
            if takes or not with_value:
                found.append((i, takes))
    return found
