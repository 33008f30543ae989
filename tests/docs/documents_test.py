"""The code in README.md, docs/*.md and */README.md: commands are run, C++ must be in examples/, which compiles.

  documents_test.py [--source DIR] [--build DIR] [--list] [unittest's arguments]

Commands are the blocks marked `sh`, and the middle columns of docs/from-pytorch.md and docs/from-horovod.md. They run as they
stand, the document's one after the other in one directory; those that need something else are in NOT_RUN, and their flags are
compared with the program's. Blocks marked `sh installed` are for the package: tests/install runs them. --list prints the
documents that have commands, as the tests of Commands name them.
"""
import argparse
import pathlib
import re
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
parser.add_argument("--list", action="store_true")
places, others = parser.parse_known_args()
SOURCE, BUILD = places.source.absolute(), (places.build or places.source / "build").absolute()
sys.path += [str(pathlib.Path(__file__).resolve().parent), str(SOURCE / "tests/docker")]

import fixtures  # noqa: E402
import shell  # noqa: E402
from commands import unknown_flags, words_of  # noqa: E402

TABLES = {"docs/from-pytorch.md": 40, "docs/from-horovod.md": 14}  # and more code than this stands in them
ELSEWHERE = {  # documents that are not looked at here
    "docs/docker.md": "tests/docker",
    "docs/cluster.md": "tests/docker",
    "docs/results.md": "its commands take minutes, other machines or other hosts",
}
# What is not run, and why not: whole lines of blocks, without comments.
NOT_RUN = {
    "it installs packages, builds or tests": (
        "scripts/demo", "scripts/test",
    ),
    "it installs or measures PyTorch, for minutes; bench_scripts tests them": (
        "bench/peers/setup", "bench/compare --quick", "bench/compare --out docs/results/compare.txt",
    ),
    "it measures for minutes; bench_scaling tests it": (
        "lockstep bench scaling mlp,cnn --html scaling.html",
        "lockstep bench scaling mlp,cnn --out new.jsonl --baseline scaling.jsonl",
    ),
    "it trains for minutes": (
        "lockstep launch -n 2 -- lockstep train gpt --data text:licences.txt --layers 3 --heads 4 --width 128 --context 64 "
        "--batch 4 --steps 4000 --lr 3e-3 --betas 0.9,0.95 --schedule cosine --warmup 100 --log-every 1000 --save gpt.safetensors",
        "lockstep launch -n 2 -- lockstep train resnet18-cifar --data images:shapes --image-size 32 --augment no --batch 16 "
        "--schedule cosine --warmup 20 --epochs 4 --save shapes.safetensors",
        "examples/draw_shapes.py shapes",
    ),
    "a GPU": (
        "scripts/gpu-check", "scripts/gpu-check --quick", "scripts/gpu-check --only tests,ranks --out DIR", "scripts/pack-for-gpu",
        "lockstep launch -- lockstep train cnn --data mnist:DIR --precision bf16",
        "lockstep launch -- lockstep train cnn --data mnist:DIR --precision fp16",
        "lockstep infer resnet18 --weights resnet18.pth --input photos --device cuda:0,1 --batch 32",
        "lockstep train mlp --data digits --device cuda:3 --tf32",
        "lockstep bench step cnn --batch 4096 --device cuda --precision bf16 --timeline",
    ),
    "other hosts; tests/launcher/hosts": (
        "lockstep launch --hosts a:4,b:4 -- lockstep train cnn --data digits",
        "lockstep launch --hosts a:4,b:4 -- lockstep train cnn --data digits --encrypt",
        "lockstep launch --hostfile hosts.txt -- ./my_program",
        "lockstep doctor --hosts a,b,c",
        "lockstep bench scaling gpt2 --hosts a:4,b:4 -- --precision bf16 --zero 1",
    ),
    "GPT-2's files; parity_weights tests small ones": (
        "lockstep eval gpt2 --data tokens:val.bin --weights model.safetensors",
        'lockstep infer gpt2 --weights model.safetensors --vocab vocab.json --merges merges.txt --prompt "Hello, I am"',
    ),
}
REASONS = {line: why for why, lines in NOT_RUN.items() for line in lines}


def documents():
    found = {str(path.relative_to(SOURCE)): path.read_text() for path in
             (SOURCE / "README.md", *sorted((SOURCE / "docs").glob("*.md")), *sorted(SOURCE.glob("*/README.md")))}
    return {name: text for name, text in found.items() if name not in ELSEWHERE}


def blocks(text, language):
    """Those that are marked so, alone. Of C++ those too that are whole files, whose name stands after the language."""
    name = r"(?: [\w.]+)?" if language == "cpp" else ""
    return re.findall(rf"^```{language}{name}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def lines_of(block):
    """Continued lines joined, comments cut off, blanks as one."""
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip()]


def rows(text):
    """The middle column's code in all tables of three columns."""
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    for row in cells:
        if len(row) != 3:
            raise ValueError(f"{' | '.join(row)}: {len(row)} cells, not 3")
        if row[1] != "here":
            yield row[1]


def is_command(code):
    return re.match(r"(lockstep|mpirun|data_parallel|two_ways|chosen_device|[A-Z_]+=)[\s=\d]", code) is not None


def plain(code):
    """C++ as one line: no comments to the line's end, no blanks at brackets."""
    code = " ".join(re.sub(r"(^|\s)//.*", "", line).strip() for line in code.splitlines())
    code = re.sub(r"\s+", " ", code)
    return re.sub(r"\s*([(){}\[\];,:])\s*", r"\1", code).strip()


EXAMPLES = {path.name: plain(path.read_text()) for path in sorted((SOURCE / "examples").glob("*.cpp"))}


def example_with(code):
    """The example in which this stands, parts between … in their order."""
    parts = [plain(part) for part in code.split("…") if plain(part)]
    for name, text in EXAMPLES.items():
        place = 0
        for part in parts:
            place = text.find(part, place)
            if place < 0:
                break
            place += len(part)
        else:
            return name
    return None


class Commands(unittest.TestCase):
    """Each document in a directory of its own, with build/ in the PATH."""

    @classmethod
    def setUpClass(cls):
        cls.kept = tempfile.TemporaryDirectory(prefix="lockstep-docs-")
        cls.addClassCleanup(cls.kept.cleanup)

    def run_document(self, name):
        text = documents()[name]
        scripts = ["\n".join(line for line in lines_of(block) if line not in REASONS) for block in blocks(text, "sh")]
        if name in TABLES:
            scripts = [code for cell in rows(text) for code in re.findall(r"`(.+?)`", cell) if is_command(code)]
            self.assertGreater(len(scripts), 10)
        scripts = [script for script in scripts if script]
        with tempfile.TemporaryDirectory(prefix="lockstep-docs-") as directory:
            directory = pathlib.Path(directory)
            fixtures.make(directory, SOURCE, BUILD, pathlib.Path(self.kept.name), "\n".join(scripts))
            for script in scripts:
                with self.subTest(script):
                    done = shell.run(script, directory, BUILD)
                    self.assertEqual(done.returncode, 0, f"{script}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


class Rules(unittest.TestCase):
    """What is not run, and where commands stand."""

    def test_flags_of_what_is_not_run(self):
        for line in REASONS:
            with self.subTest(line):
                self.assertEqual(unknown_flags(str(BUILD / "lockstep"), words_of(line)), [])

    def test_all_that_is_not_run_stands_somewhere(self):
        everything = {line for text in documents().values() for block in blocks(text, "sh") for line in lines_of(block)}
        self.assertEqual(sorted(set(REASONS) - everything), [])

    def test_no_command_hides_in_other_blocks(self):
        for name, text in documents().items():
            for block in blocks(text, ""):
                self.assertEqual([line for line in block.splitlines() if re.match(r"(lockstep|mpirun) ", line)], [],
                                 f"{name}: a block of commands begins with ```sh")


class Code(unittest.TestCase):
    """C++ that people copy."""

    def test_blocks_stand_in_examples(self):
        count = 0
        for name, text in documents().items():
            for block in blocks(text, "cpp"):
                count += 1
                with self.subTest(name):
                    self.assertIsNotNone(example_with(block), f"{name}: in no program of examples/ stands\n{block}")
        self.assertGreater(count, 3)

    def test_the_table_stands_in_examples(self):
        for table, least in TABLES.items():
            count = 0
            for cell in rows(documents()[table]):
                codes = re.findall(r"`(.+?)`", cell)
                self.assertTrue(codes, cell)
                for code in codes:
                    if not is_command(code):
                        count += 1
                        with self.subTest(code):
                            self.assertIsNotNone(example_with(code), f"{table}: in no program of examples/")
            self.assertGreater(count, least)

    def test_the_checks_find_mistakes(self):
        self.assertIsNotNone(example_with("tape.backward( loss.value );  // all of it\n…\n  tape.reset();"))
        self.assertIsNone(example_with("tape.reset();\n…\nfor (int step = 0; step < 300; ++step) {\n…\nint steps;"))
        self.assertIsNone(example_with("tape.backwards(loss.value);"))
        self.assertEqual(lines_of("a  b \\\n   --c # d\n# e\n\nf\n"), ["a b --c", "f"])
        self.assertTrue(is_command("lockstep devices") and is_command("RANK=0 lockstep") and is_command("data_parallel 3"))
        self.assertFalse(is_command("nn::x") or is_command("devices.count()"))
        self.assertEqual(list(rows("| PyTorch | here | why |\n|---|---|---|\n| `a` | `b c` | d |\n| | `e` | |\n")), ["`b c`", "`e`"])


WITH_COMMANDS = {re.sub(r"\W", "_", name.removesuffix(".md").lower()): name for name, text in documents().items()
                 if name in TABLES or blocks(text, "sh")}
for test_name, document in WITH_COMMANDS.items():
    setattr(Commands, f"test_{test_name}", lambda self, name=document: self.run_document(name))

if __name__ == "__main__":
    if places.list:
        print("\n".join(WITH_COMMANDS))
    else:
        unittest.main(argv=[sys.argv[0], *others])
