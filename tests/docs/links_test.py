"""What the documents name exists: targets of links and their headings, files in backticks, titles of notes, and the
glossary's types.

  links_test.py [--source DIR] [unittest's arguments]
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

MODULES = sorted(path.parent for path in SOURCE.glob("*/CMakeLists.txt") if not (path.parent / "CMakeCache.txt").exists())
MODULES.append(SOURCE / "include")
CODE = (".h", ".cuh", ".cpp", ".cu")
PLACEHOLDER = re.compile(r"\b(MODULE|NAME|DIR)\b|NAME_")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")  # with a slash; the first part is a directory of this tree


def documents():
    found = [SOURCE / name for name in ("README.md", "CONTRIBUTING.md")]
    return found + sorted((SOURCE / "docs").glob("*.md")) + sorted(SOURCE.glob("*/README.md"))


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", without_blocks(text)))


def notes():
    title = re.compile(r"^\s*//+ Note \[([^\]]+)\]$", re.MULTILINE)
    return {name for module in MODULES for path in module.rglob("*") if path.suffix in CODE
            for name in title.findall(path.read_text())}


class Names(unittest.TestCase):
    def for_each(self, find, wrong):
        """No document has a name, as `find` finds them in its text, of which `wrong` says so."""
        count = 0
        for document in documents():
            for name in find(document.read_text()):
                count += 1
                with self.subTest(name):
                    self.assertFalse(wrong(document, name), f"{document.relative_to(SOURCE)}: there is no {name}")
        self.assertGreater(count, 10)

    def test_links(self):
        def wrong(document, link):
            if re.match(r"https?:", link):
                return False
            file, _, anchor = link.partition("#")
            target = document.parent / file if file else document
            return not target.exists() or bool(anchor) and anchor not in anchors(target.read_text())

        self.for_each(links, wrong)

    def test_files(self):
        top = {path.name for path in SOURCE.iterdir() if path.is_dir() and not (path / "CMakeCache.txt").exists()}
        self.for_each(lambda text: [name for name in FILE.findall(without_blocks(text)) if name.split("/")[0] in top],
                      lambda document, name: not (PLACEHOLDER.search(name) or (SOURCE / name).exists()))

    def test_notes(self):
        known = notes()
        self.for_each(lambda text: [" ".join(name.split()) for name in re.findall(r"`Note\s\[([^\]]+)\]`", text)],
                      lambda document, name: name not in known)

    def test_glossary(self):
        rows = re.findall(r"^\|.*\| (.*) \|$", (SOURCE / "docs/glossary.md").read_text(), re.MULTILINE)
        self.assertGreater(len(rows), 60)
        everything = "".join(path.read_text() for module in MODULES for path in module.rglob("*") if path.suffix in CODE)
        for row in rows:
            code = re.findall(r"`([^`]+)`", row)
            files = [name for name in code if "/" in name]
            text = "".join((SOURCE / name).read_text() for name in files) or everything
            for name in set(code) - set(files):
                with self.subTest(name):
                    for part in re.split(r"::|\(\)", name):
                        self.assertIn(part, text, row)

    def test_the_checks_find_mistakes(self):
        text = "# A `b` c\n```\n[x](y)\n```\n[a](b.md#c) `[i](j)` `comm/x.h` and `Note [Any]`\n"
        self.assertEqual(anchors(text), {"a-b-c"})
        self.assertEqual(links(text), ["b.md#c"])
        self.assertEqual(FILE.findall(text), ["comm/x.h"])
        self.assertIn("Same order", notes())


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
