"""Command lines of the scripts: flags, complaints in one line, exit codes.

0: done; 1: a contestant failed, or nothing could be measured; 2: wrong usage; 3: output that cannot be written;
128 + n: ended by signal n.
"""
import argparse
import os
import pathlib
import sys

from harness.contestants import ROOT, Settings
from harness.processes import Failure, Interrupted, clean_up


class UsageError(Exception):
    pass


class Parser(argparse.ArgumentParser):
    def __init__(self, **more):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)
        self.add_argument("--build", metavar="DIR", type=pathlib.Path, default=ROOT / "build",
                          help="build directory of lockstep; default: build")
        self.add_argument("--peers-dir", metavar="DIR", type=pathlib.Path,
                          help="environments of bench/peers/setup; default: peers in --build")
        self.add_argument("--timeout-seconds", metavar="S", type=positive, default=300,
                          help="longest turn of a contestant, in seconds; default: 300")

    def error(self, message):
        raise UsageError(f"{message} → {self.prog} --help")

    def settings(self, options) -> Settings:
        """Checks that there is something to measure."""
        build = options.build.absolute()
        settings = Settings(build, (options.peers_dir or build / "peers").absolute(), options.timeout_seconds)
        if not os.access(settings.lockstep, os.X_OK):
            raise Failure(f"lockstep is not built: no {settings.lockstep} → cmake -S . -B build -G Ninja && "
                          "cmake --build build, or say --build DIR")
        return settings


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 to {1 << 24}")
    return value


def model(text: str) -> tuple:
    """"mlp" or "mlp:64": a name, and samples per rank or None."""
    name, colon, batch = text.partition(":")
    return word(name), positive(batch) if colon else None


def size(text: str) -> int:
    """Bytes: "8", "64K", "25M", powers of 1024 as lockstep bench takes them; at least one f32."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not digits.isascii() or not digits.isdecimal() or not 4 <= int(digits) * unit <= 1 << 32:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size in bytes from 4 to 4G, such as 4K or 25M")
    return int(digits) * unit // 4 * 4


def list_of(kind):
    def parse(text: str) -> list:
        values = [kind(part) for part in text.split(",")]
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"'{text}' names something twice")
        return values
    return parse


def some_of(names):
    """"A,B": of these names alone."""
    def parse(text: str) -> list:
        values = list_of(word)(text)
        if unknown := [value for value in values if value not in names]:
            raise argparse.ArgumentTypeError(f"there is no '{unknown[0]}', but {', '.join(names)}")
        return values
    return parse


def word(text: str) -> str:
    if not text or text.startswith("-"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a name")
    return text


def check_writable(path: pathlib.Path) -> None:
    """Now, and not after minutes of measuring."""
    try:
        existed = path.exists()
        with open(path, "a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror} → say --out FILE with another place", 3) from None


def say(text: str) -> None:
    """Progress, for who waits."""
    print(text, file=sys.stderr, flush=True)


def main(program: str, run) -> None:
    """Ends the program with what `run()` returns, and ends every process that was started."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # whatever the locale is
    try:
        with clean_up():
            code = run()
            sys.stdout.flush()
    except UsageError as error:
        say(f"{program}: {error}")
        code = 2
    except Failure as failure:
        say(f"{program}: {failure}")
        code = failure.exit_code if failure.exit_code in (2, 3) else 1
    except Interrupted as interrupted:
        say(f"{program}: ended by {interrupted}")
        code = interrupted.exit_code
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.exit(code)
