#!/usr/bin/env python3
"""A report in headless Chromium: it renders, says nothing on the console, and its numbers are those of the metrics file."""

import argparse
import html.parser
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile


class Tables(html.parser.HTMLParser):
    """The rows of all tables, as lists of cells, and how many plots there are."""

    def __init__(self):
        super().__init__()
        self.rows, self.cell, self.plots, self.title = [], None, 0, ""

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = ""
        if tag == "svg":
            self.plots += 1

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self.cell)
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    args = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("skipped: no Chromium")
        return 77
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train = "train cnn --data digits --epochs 3 --threads 1 --global-batch 64 --quiet --device cpu"
        subprocess.run([args.lockstep, "launch", "-n", "2", "--", "lockstep", *train.split(), "--metrics", "m.jsonl", "--trace",
                        "t.json"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([args.lockstep, "report", "."], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for width in (400, 1200):
            shown = subprocess.run([browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                                    f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2000", "--dump-dom",
                                    (folder / "report.html").as_uri()], capture_output=True, text=True, timeout=120, check=True)
            assert "CONSOLE" not in shown.stderr, shown.stderr
            page = Tables()
            page.feed(shown.stdout)
            events = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
            steps = [event for event in events if event["event"] == "step"]
            evaluations = [event for event in events if event["event"] == "eval"]
            rows = {row[0]: row for row in page.rows if row}

            def number(value):
                return f"{value:.6g}"

            losses = [step["loss"] for step in steps]
            least, most = min(steps, key=lambda s: s["loss"]), max(steps, key=lambda s: s["loss"])
            want = ["training", str(len(steps)), number(losses[0]), f"{number(least['loss'])} at {least['step']}",
                    f"{number(most['loss'])} at {most['step']}", number(losses[-1])]
            assert rows["training"] == want, (rows["training"], want)
            of_validation = [row for row in page.rows if row and row[0] == "validation"]
            for row, figure in zip(of_validation, ("loss", "accuracy"), strict=True):
                assert row[2] == number(evaluations[0][figure]) and row[-1] == number(evaluations[-1][figure]), row
            assert page.plots >= 8, page.plots
            assert any(row[:2] == ["0", "1"] or row[0] == "0" for row in page.rows if row)
    print("the report's numbers are those of the metrics file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
