"""The picture and the table of modules in docs/design.md say what the modules' CMakeLists.txt declare.

  floors_test.py [--source DIR] [unittest's arguments]
"""
import argparse
import functools
import pathlib
import re
import sys
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
places, others = parser.parse_known_args()
SOURCE = places.source.absolute()

DECLARED = re.compile(r"^lockstep_module\((\w+)(.*?)\)", re.MULTILINE | re.DOTALL)
SEES = re.compile(r"\bSEES\b(.*?)(?=\b(?:LINKS|SOURCES|APART|CUDA|NO_CUDA)\b|$)", re.DOTALL)


def declared(text):
    """Of each module that a CMakeLists.txt declares, the modules that it sees."""
    text = re.sub(r"#.*", "", text)
    return {name: set(" ".join(SEES.findall(arguments)).split()) for name, arguments in DECLARED.findall(text)}


def floors(sees):
    """Of each module, its floor and the modules that are drawn after its →."""

    @functools.cache
    def floor(name):
        return 1 + max((floor(seen) for seen in sees[name]), default=0)

    @functools.cache
    def below(name):
        return frozenset(sees[name]).union(*(below(seen) for seen in sees[name]))

    def direct(name):
        return {seen for seen in sees[name] if not any(seen in below(other) for other in sees[name])} - {"base"}

    return {name: (floor(name), direct(name)) for name in sees}


def drawn(text):
    """The same, as the picture has it: lines such as ` 4   ddp → comm      session → comm, nn`."""
    found = {}
    for number, line in re.findall(r"^ (\d+)   (\w.*)$", text, re.MULTILINE):
        for name, seen in re.findall(r"(\w+)(?:\s*→ ((?:\w+, )*\w+))?", line):
            found[name] = (int(number), set(seen.split(", ")) if seen else set())
    return found


def listed(text, names):
    """Of each module, what its row of the table says it may include."""
    found = {}
    for name, cell in re.findall(r"^\| \[?`(\w+)`.*\| (.*?) ?\|$", text, re.MULTILINE):
        seen = set(re.findall(r"`(\w+)`", cell))
        found[name] = names - {name} - seen if cell.startswith("all but ") else seen
    return {name: seen for name, seen in found.items() if name in names}


class Floors(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.sees = {}
        for path in sorted(SOURCE.glob("*/CMakeLists.txt")):
            cls.sees.update(declared(path.read_text()))
        section = re.search(r"^## Modules$.*?(?=^## )", (SOURCE / "docs/design.md").read_text(), re.MULTILINE | re.DOTALL)
        cls.text = section[0]

    def test_picture(self):
        self.assertGreater(len(self.sees), 10)
        self.assertEqual(drawn(self.text), floors(self.sees))

    def test_table(self):
        self.assertEqual(listed(self.text, set(self.sees)), self.sees)

    def test_the_checks_find_mistakes(self):
        sees = declared("lockstep_module(c SOURCES c.cpp  # SEES x\n  SEES a b\n  LINKS l)\nlockstep_module(b SEES a)\n"
                        "lockstep_module(a SOURCES a.cpp)\n")
        self.assertEqual(sees, {"c": {"a", "b"}, "b": {"a"}, "a": set()})
        self.assertEqual(floors(sees), {"c": (3, {"b"}), "b": (2, {"a"}), "a": (1, set())})
        self.assertEqual(drawn(" 3   c → b\n 2   b → a\n 1   a\n"), floors(sees))
        self.assertNotEqual(drawn(" 3   c → a, b\n 2   b → a\n 1   a\n"), floors(sees))
        self.assertNotEqual(drawn(" 2   c → b      b → a\n 1   a\n"), floors(sees))
        self.assertEqual(listed("| [`c`](c) | x | all but `d` |\n| [`b`](b) | `z` | `a` |\n| `a` | y | |\n", set("abcd")),
                         {"c": {"a", "b"}, "b": {"a"}, "a": set()})


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
