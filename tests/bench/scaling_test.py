"""lockstep bench scaling, as people call it: tiny jobs on one and two ranks, interrupted, continued, compared, and refused.

  scaling_test.py PROGRAM [unittest's arguments]

No figure is checked: only that it is there, and that what is made of it holds together.
"""
import html.parser
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
import xml.etree.ElementTree

sys.dont_write_bytecode = True
PROGRAM = os.path.abspath(sys.argv.pop(1))
TINY = ["mlp", "--ranks", "1,2", "--steps", "2", "--warmup-steps", "1", "--batch", "4", "--global-batch", "8",
        "--device", "cpu", "--rounds"]  # and how many
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(html.parser.HTMLParser):
    """Well formed: each element that is opened is closed, in order. Remembers tags and attributes."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes = [], [], []
        self.feed(text)
        self.close()
        if self.open:
            raise ValueError(f"not closed: {self.open}")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes nothing at {self.getpos()}")


class Scaling(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.out = self.directory / "scaling.jsonl"
        self.mark = uuid.uuid4().hex.encode()
        self.environment = {"SCALING_TEST": self.mark.decode()} | {name: value for name, value in os.environ.items()
                            if not name.startswith(("LOCKSTEP_", "OMPI_", "PMI"))}

    def start(self, *arguments, **more):
        return subprocess.Popen([PROGRAM, "bench", "scaling", *map(str, arguments)], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=self.directory,
                                env=self.environment, **more)

    def run_it(self, *arguments):
        process = self.start(*arguments)
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err

    def processes(self):
        """Of those that this test has started, the ones that live."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if self.mark in (entry / "environ").read_bytes() and (entry / "stat").read_text().rsplit(")")[-1].split()[0] != "Z":
                    found.append(int(entry.name))
            except (OSError, ValueError):
                pass
        return found

    def jobs(self):
        return [json.loads(line) for line in self.out.read_text().splitlines()[1:]]

    def test_measures_reports_and_compares(self):
        page, figure = self.directory / "page.html", self.directory / "figure.svg"
        code, out, err = self.run_it(*TINY, 2, "--json", "--html", page, "--svg", figure)
        self.assertEqual(code, 0, err)
        data = json.loads(out)
        self.assertEqual([(s["mode"], s["model"]) for s in data["series"]], [("weak", "mlp"), ("strong", "mlp")])
        jobs = self.jobs()
        self.assertEqual([(j["round"], j["mode"], j["ranks"]) for j in jobs],
                         [(1, "weak", 1), (1, "weak", 2), (1, "strong", 1), (1, "strong", 2),
                          (2, "strong", 2), (2, "strong", 1), (2, "weak", 2), (2, "weak", 1)])
        self.assertEqual({j["batch"] for j in jobs if j["mode"] == "weak"}, {4})
        self.assertEqual([j["batch"] for j in jobs if j["mode"] == "strong"], [8, 4, 4, 8])
        weak = data["series"][0]["points"]
        rates = {(j["round"], j["ranks"]): j["samples_per_s"] for j in jobs if j["mode"] == "weak"}
        gains = [rates[r, 2] / rates[r, 1] / 2 for r in (1, 2)]
        self.assertAlmostEqual(weak[1]["efficiency"]["middle"], (gains[0] * gains[1]) ** 0.5, places=4)
        self.assertGreater(weak[1]["peak_memory_bytes"], 1 << 20)
        for name in ("CPU", "cores", "memory", "instruction set", "date", "command", "lockstep", "oneDNN"):
            self.assertTrue(data["machine"][name], name)

        text = page.read_text()
        parsed = Page(text)
        self.assertEqual(parsed.tags.count("svg"), 6)  # of each mode gains, throughput, time
        self.assertEqual(parsed.tags.count("figure"), 6)
        self.assertFalse({"script", "link", "img", "iframe", "object"} & set(parsed.tags))
        self.assertFalse([a for a in parsed.attributes if a[0] in ("src", "href", "xlink:href", "srcset")])
        self.assertEqual([a[1] for a in parsed.attributes if "//" in (a[1] or "") and a[0] != "xmlns"], [])
        self.assertTrue(all(dict(e.attrib)["aria-label"] for e in [xml.etree.ElementTree.parse(figure).getroot()]))

        # The same again is a report of what is there; as a table.
        code, out, err = self.run_it(*TINY, 2)
        self.assertEqual(code, 0, err)
        self.assertIn("nothing is measured anew", err)
        self.assertIn("mlp, weak", out)
        self.assertEqual(self.jobs(), jobs)

        # Six rounds are enough for the test: a baseline that was twice as fast, and one that was as fast.
        lines = self.out.read_text().splitlines()
        for name, factor in (("fast", 0.5), ("same", 1)):
            with (self.directory / f"{name}.jsonl").open("w") as file:
                file.write(lines[0] + "\n")
                for one in range(1, 7):
                    for job in jobs:
                        if job["round"] == 1:
                            file.write(json.dumps({**job, "round": one,
                                                   "step_ms": job["step_ms"] * factor * (1 + one / 1e4)}) + "\n")
        self.out.write_text((self.directory / "same.jsonl").read_text())
        code, out, err = self.run_it(*TINY, 6, "--baseline", "fast.jsonl")
        self.assertEqual(code, 1, err)
        self.assertEqual(out.count("  slower\n"), 4, out)
        self.assertIn("Mann and Whitney's U test", out)
        code, out, err = self.run_it(*TINY, 6, "--baseline", "same.jsonl", "--html", page)
        self.assertEqual(code, 0, err)
        self.assertEqual(out.count("  same\n"), 4, out)
        self.assertIn("Against an earlier run", page.read_text())
        Page(page.read_text())
        code, _, err = self.run_it(*TINY, 2, "--baseline", "same.jsonl")
        self.assertEqual(code, 2)
        self.assertIn("measure at least 5 rounds", err)

    def test_interrupted_it_continues(self):
        process = self.start(*TINY, 1000, start_new_session=True)
        deadline = time.monotonic() + 100
        while not self.out.exists() or self.out.read_text().count("\n") < 4:
            self.assertIsNone(process.poll(), process.stderr)
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, ""), err)
        self.assertEqual(len(err.strip().splitlines()[-1:]), 1)
        self.assertIn("the same command continues", err)
        done = self.jobs()
        self.assertGreaterEqual(len(done), 3)
        with self.out.open("a") as file:
            file.write('{"event":"job","round":1,"mo')  # as if it had been killed within a write
        code, out, err = self.run_it(*TINY, 2, "--json")
        self.assertEqual(code, 0, err)
        self.assertEqual(self.jobs()[:len(done)], done)
        self.assertGreaterEqual(len(self.jobs()), 8)
        self.assertEqual([p["rounds"] for s in json.loads(out)["series"] for p in s["points"]], [2] * 4)

    def test_killed_it_leaves_no_process(self):
        process = self.start(*TINY, 1000)
        deadline = time.monotonic() + 100
        while not self.out.exists() or self.out.read_text().count("\n") < 2 or len(self.processes()) < 3:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 60
        while self.processes():
            self.assertLess(time.monotonic(), deadline, "processes are left")
            time.sleep(0.1)

    def test_a_job_that_fails_is_named_and_the_others_continue(self):
        # A divergence: exit code 7.
        code, out, err = self.run_it(*TINY, 1, "--mode", "weak", "--", "--lr", "1e30")
        self.assertEqual(code, 7, err)
        self.assertIn("mlp, weak, 2 ranks failed with exit code 7", err)
        self.assertIn("failed: exit code 7", out)

    def test_wrong_input_is_said_in_one_line_before_anything_is_measured(self):
        (self.directory / "notes.txt").write_text("notes\n")
        for arguments, code, words in (
                (["mpl"], 2, ["'mpl'", "mlp"]),
                (["mlp,mlp"], 2, ["mlp,mlp", "different"]),
                ([], 2, ["needs a MODEL"]),
                (["mlp", "--mode", "week"], 2, ["week", "weak or strong"]),
                (["mlp", "--ranks", "1,x"], 2, ["--ranks", "integer"]),
                (["mlp", "--ranks", "1,4", "--global-batch", "3"], 2, ["--global-batch 3", "4 ranks"]),
                (["mlp", "--hosts", "a,b"], 2, ["--hosts a:4,b:4"]),
                (["mlp", "cnn"], 2, ["'cnn'", "MODEL"]),
                (["mlp", "--device", "tpu"], 2, ["tpu"]),
                (["mlp", "--", "--lrr", "1"], 2, ["--lrr", "--lr"]),
                (["mlp", "--", "--csv"], 2, ["--csv"]),
                (["mlp", "--out", "/nowhere/x"], 3, ["/nowhere/x", "--out"]),
                (["mlp", "--out", "notes.txt"], 3, ["notes.txt", "line 1"]),
                (["mlp", "--html", "/nowhere/x"], 3, ["/nowhere"]),
                (["mlp", "--baseline", "none.jsonl"], 3, ["none.jsonl"]),
                (["mlp", "--baseline", "notes.txt"], 3, ["notes.txt"]),
                (["mlp", "--baseline", "scaling.jsonl"], 2, ["--out"])):
            got, out, err = self.run_it(*arguments)
            self.assertEqual((got, out), (code, ""), (arguments, err))
            self.assertEqual(len(err.splitlines()), 1, err)
            for word in (*words, "→"):
                self.assertIn(word, err)
        self.assertEqual((self.directory / "notes.txt").read_text(), "notes\n")


if __name__ == "__main__":
    unittest.main()
