"""The words of the documents: the field's terms, not private ones, and no phrases that are hard to read.

  prose_test.py [--source DIR] [unittest's arguments]

RETIRED is the one table. A row says what to write instead, and a pattern for each scope in which the word is retired.
Scopes are in SCOPES: the prose of documents, and of the sources identifiers, file names and texts (help, errors). A row
that names a scope is enforced there, so a word is retired in another scope by adding a pattern to its row.
"""
import argparse
import pathlib
import re
import sys
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
places, others = parser.parse_known_args()
SOURCE = places.source.absolute()

PROSE, IDENTIFIERS, FILE_NAMES, TEXTS = "prose", "identifiers", "file names", "texts"

RETIRED = [  # (what to write instead, {scope: pattern}); patterns of prose ignore case and are whole words
    ("module", {PROSE: r"rooms?"}),
    ("dependency, include", {PROSE: r"arrows?"}),
    ("layering, modules", {PROSE: r"houses?"}),
    ("rank or node control block", {PROSE: r"seats?|desks?"}),
    ("wakeup pipes, futex", {PROSE: r"door ?bells?|bells?|lie down|lies down|get up|gets up"}),
    ("intra-host synchronisation", {PROSE: r"rosters?"}),
    ("channel", {PROSE: r"lanes?|lane talk"}),
    ("peer", {PROSE: r"visitors?|strangers? (?:at|in) the door"}),
    ("reject", {PROSE: r"turn(?:s|ed|ing)? away"}),
    ("abort reason, root cause", {PROSE: r"verdicts?"}),
    ("check peers", {PROSE: r"looks? around"}),
    ("progress of a rank, progress exchange", {PROSE: r"whereabouts|roll calls?"}),
    ("operation log, event ring", {PROSE: r"ledgers?"}),
    ("preferred bucket size", {PROSE: r"long enough bytes"}),
    ("rebuild buckets", {PROSE: r"ready order"}),
    ("CUDA graph, repeats", {PROSE: r"recorded steps?|steps? that (?:comes?|came) again|(?:comes?|came|coming) again"}),
    ("asynchronous scalars", {PROSE: r"late results?|readbacks?"}),
    ("saved preactivation", {PROSE: r"asides?"}),
    ("a stream's own backend", {PROSE: r"siblings?"}),
    ("clear the gradient", {PROSE: r"forget(?:s|ting)? (?:the |a )?gradients?|gradients? (?:that|are|is) forgotten"}),
    ("factory", {PROSE: r"recipes?"}),
    ("corrupt", {PROSE: r"damage(?:d|s)?"}),
    ("synthetic", {PROSE: r"made[- ]up"}),
    ("untrusted", {PROSE: r"foreign (?:bytes|data|files?)"}),
    ("checkpoint manifest, model metadata", {PROSE: r"(?:model|checkpoint) cards?|adopt(?:s|ed)? (?:a |the )?cards?"}),
    ("exit status, local addresses, stale directories", {PROSE: r"own names?|left[- ]behind"}),
    ("after", {PROSE: r"behind"}),
    ("before", {PROSE: r"in front of|in front"}),
    ("checked against, compared with", {PROSE: r"held (?:to|against)|holds? \w+(?: \w+)? against"}),
    ("evaluate, measure", {PROSE: r"judg(?:e|es|ed|ing)"}),
    ("given, sent, reported", {PROSE: r"told|tells?|telling"}),
    ("resume, continue", {PROSE: r"go(?:es|ing)? on|went on|gone on"}),
    ("alternate", {PROSE: r"tak(?:e|es|en|ing) turns|took turns|in turns"}),
    ("hand over, share", {PROSE: r"len(?:d|ds|t|ding)"}),
    ("rendezvous, connect, exist", {PROSE: r"meets?|meetings?|meeting point|met"}),
    ("hint, remedy", {PROSE: r"counsel"}),
    ("per rank, per step", {PROSE: r"(?:\d[\d,.]*|one|two|batch) (?:(?!(?:in|of|on|within) )[\w/-]+ ){0,2}an? (?:rank|step|host|line|class|input|"
                                   r"operation|primitive|device|core|second)"}),
    ("every process does the same work", {PROSE: r"master of"}),
    ("learning-rate schedule", {PROSE: r"course of the (?:learning )?rate"}),
    ("last heard from at", {PROSE: r"does not answer since"}),
]

GENERATED = re.compile(r"<!-- bench/compare: begin .*?<!-- bench/compare: end -->", re.DOTALL)  # the program's words


def blank(match):
    return re.sub(r"[^\n]", " ", match[0])


def prose_of(text):
    """Without blocks of code, code in backticks, and addresses of links; lines keep their numbers."""
    text = GENERATED.sub(blank, text)
    text = re.sub(r"^```.*?^```$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", blank, text)
    return re.sub(r"\]\([^)]*\)", blank, text)


def documents():
    names = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    return [*(SOURCE / name for name in names), *sorted((SOURCE / "docs").glob("*.md")), *sorted(SOURCE.glob("*/README.md"))]


def sources():
    """The modules' sources, tests and examples."""
    modules = sorted(path.parent for path in SOURCE.glob("*/CMakeLists.txt") if not (path.parent / "CMakeCache.txt").exists())
    return [path for module in modules for path in sorted(module.rglob("*"))
            if path.suffix in (".h", ".cuh", ".cpp", ".cu")]


def code_of(path):
    """Without comments and texts."""
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', path.read_text())
    return re.sub(r"//.*|/\*.*?\*/", blank, text, flags=re.DOTALL if "/*" in text and "//" not in text else 0)


def texts_of(path):
    text = re.sub(r"^\s*(?:#include|//).*", "", path.read_text(), flags=re.MULTILINE)
    return "\n".join(re.findall(r'"((?:\\.|[^"\\\n])*)"', text))


SCOPES = {  # what is searched: pairs of a name and a text
    PROSE: lambda: [(path, prose_of(path.read_text())) for path in documents()],
    IDENTIFIERS: lambda: [(path, code_of(path)) for path in sources()],
    FILE_NAMES: lambda: [(path, path.name) for path in sources()],
    TEXTS: lambda: [(path, texts_of(path)) for path in sources()],
}


def pattern_of(scope, words):
    if scope in (PROSE, TEXTS):
        words = words.replace(" ", r"\s+")
        return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{words})(?![A-Za-z0-9_])")


def found_in(text, scope):
    """Line numbers, words and what to write instead."""
    for instead, patterns in RETIRED:
        if scope in patterns:
            for match in pattern_of(scope, patterns[scope]).finditer(text):
                yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


class Words(unittest.TestCase):
    def test_retired_words(self):
        for scope, read in SCOPES.items():
            if not any(scope in patterns for _, patterns in RETIRED):
                continue
            wrong = [f"{path.relative_to(SOURCE)}:{line}: {word} → {instead}"
                     for path, text in read() for line, word, instead in sorted(found_in(text, scope))]
            with self.subTest(scope):
                self.assertEqual(wrong, [], "\n".join(["", *wrong]))

    def test_what_is_prose(self):
        text = ("a `room` and [b](room.md)\n```\nroom\n```\ntwo\n`room\nroom` c\n"
                "<!-- bench/compare: begin (x) -->\nroom\n<!-- bench/compare: end -->\nThe Rooms")
        self.assertEqual(list(found_in(prose_of(text), PROSE)), [(11, "Rooms", "module")])
        wrapped = "the same step takes\n  turns with it, mushrooms, a lane-less row"
        self.assertEqual([word for _, word, _ in found_in("batch 64 a rank; which samples a rank takes", PROSE)],
                         ["batch 64 a rank"])
        self.assertEqual(list(found_in(prose_of(wrapped), PROSE)), [(1, "takes turns", "alternate")])

    def test_scopes_read_something(self):
        for scope, read in SCOPES.items():
            with self.subTest(scope):
                self.assertGreater(sum(bool(text.strip()) for _, text in read()), 10)
        self.assertEqual({scope for _, patterns in RETIRED for scope in patterns} - set(SCOPES), set())


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
