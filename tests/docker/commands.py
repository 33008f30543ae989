"""Commands in files and texts, checked against the program that they call."""
import functools
import pathlib
import re
import shlex
import subprocess


@functools.lru_cache
def flags_of(lockstep: str, subcommand: str) -> frozenset:
    """What `lockstep SUBCOMMAND --help` lists, synonyms included."""
    shown = subprocess.run([lockstep, *subcommand.split(), "--help"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
                           timeout=60).stdout
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", shown)) | {"--help"}


def unknown_flags(lockstep: str, words: list) -> list:
    """Problems of one command line: flags that no `lockstep` in it has, subcommands that there are not. A word after
    another one's `--` is a command of its own."""
    problems = []
    while "lockstep" in words:
        words = words[words.index("lockstep") + 1:]
        if not words or not re.fullmatch(r"[a-z]+", words[0]):
            continue
        subcommand, words = words[0], words[1:]
        if subcommand == "bench" and words and not words[0].startswith("-"):
            subcommand, words = f"bench {words[0]}", words[1:]
        try:
            known = flags_of(lockstep, subcommand)
        except subprocess.CalledProcessError:
            problems.append(f"there is no `lockstep {subcommand}`")
            continue
        own = words[:words.index("--")] if "--" in words else words
        for word in own:
            flag = word.partition("=")[0]
            if re.match(r"--?[a-z]", flag) and flag not in known:
                problems.append(f"`lockstep {subcommand}` has no {flag}")
    return problems


def commands_in(text: str) -> list:
    """The lines of a Markdown text's code blocks, continued lines joined, comments cut off."""
    lines = []
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            line = re.sub(r"(^|\s)#.*", "", line).strip()
            if line:
                lines.append(line)
    return lines


def words_of(line: str) -> list:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


class Dockerfile:
    """Instructions of a Dockerfile as (name, text), continued lines joined and comments left out."""

    def __init__(self, path: pathlib.Path):
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        joined = re.sub(r"\\\n", " ", "\n".join(lines))
        self.instructions = [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]

    def all(self, name: str) -> list:
        return [text for instruction, text in self.instructions if instruction == name]

    def last_stage(self) -> list:
        start = max(i for i, (name, _) in enumerate(self.instructions) if name == "FROM")
        return self.instructions[start:]

    def arguments(self) -> set:
        return {word.partition("=")[0] for text in self.all("ARG") for word in text.split()}
