#!/usr/bin/env python3
"""ONNX files of lockstep, checked by onnx and run by onnxruntime, against what lockstep computes.

    onnx_check.py --lockstep build/lockstep --cases build/tests/onnx_cases [--only PATTERN] [unittest's arguments]

All operators and models of onnx_cases, on several numbers of samples and lengths of texts; then the program itself: what
it trains, exports and infers. It prints the largest difference of each, relative to the largest magnitude. The packages
onnx, onnxruntime and numpy are this Python's, or those of the environment peers/onnx beside the program; exit code 77
where there are none.
"""
import argparse
import fnmatch
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("--lockstep", required=True, type=os.path.abspath)
ARGUMENTS.add_argument("--cases", required=True, type=os.path.abspath)
ARGUMENTS.add_argument("--only", default="*")
OPTIONS, REST = ARGUMENTS.parse_known_args()

try:
    import numpy as np
    import onnx
    import onnxruntime
except ImportError as error:
    python = pathlib.Path(OPTIONS.lockstep).parent / "peers/onnx/bin/python"
    if python.exists() and pathlib.Path(sys.executable) != python:
        os.execv(python, [python, *sys.argv])
    print(f"skipped: {error}")
    sys.exit(77)

MOST = 1e-5  # difference, relative to the largest magnitude
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
SEEN = []  # differences of all that was compared


def run(*words, cwd, stdin=None):
    done = subprocess.run([*map(str, words)], cwd=cwd, env=ENVIRONMENT, text=True, input=stdin or "",
                          capture_output=True, timeout=600)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
    return done.stdout


def read_safetensors(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    types = {"F32": np.float32, "I32": np.int32, "I64": np.int64}
    arrays = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        values = np.frombuffer(content[8 + length + begin:8 + length + end], types[tensor["dtype"]])
        arrays[name] = values.reshape(tensor["shape"])
    return arrays


def session_of(path):
    """The model, after onnx has checked it: operators, types, shapes."""
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def difference(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise AssertionError(f"{ours.shape} and {theirs.shape}")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise AssertionError("not all numbers are finite")
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))


class Cases(unittest.TestCase):
    """Each operator and model."""

    def compare(self, name, directory, *more):
        run(OPTIONS.cases, "write", name, directory, *more, cwd=directory)
        session = session_of(directory / f"{name}.onnx")
        wanted = [one.name for one in session.get_inputs()]
        self.assertTrue(all(one.shape[0] == "batch" for one in session.get_inputs()))
        largest = 0.0
        for path in sorted(directory.glob(f"{name}.*.safetensors")):
            tensors = read_safetensors(path)
            given = {}
            for key in wanted:
                value = tensors["in." + key]
                if value.dtype == np.int32:
                    value = value.astype(np.int64)
                given[key] = value.transpose(0, 3, 1, 2) if value.ndim == 4 else value
            for output, result in zip(session.get_outputs(), session.run(None, given)):
                largest = max(largest, difference(result, tensors["out." + output.name]))
        print(f"{name:<40} {largest:.1e}", flush=True)
        SEEN.append(largest)
        self.assertLess(largest, MOST)

    def test_all(self):
        names = run(OPTIONS.cases, "list", cwd=".").split()
        self.assertGreater(len(names), 100)
        for name in fnmatch.filter(names, OPTIONS.only):
            with self.subTest(name), tempfile.TemporaryDirectory() as directory:
                self.compare(name, pathlib.Path(directory))

    def test_weights_beside_the_file(self):
        with tempfile.TemporaryDirectory() as directory:
            directory = pathlib.Path(directory)
            self.compare("resnet18-cifar", directory, 100_000)
            self.assertLess((directory / "resnet18-cifar.onnx").stat().st_size, 100_000)
            self.assertGreater((directory / "resnet18-cifar.onnx.data").stat().st_size, 40_000_000)


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def png_of(pixels):
    """Of grey pixels (height, width)."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", *pixels.shape[::-1], 8, 0, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


class Program(unittest.TestCase):
    """Trains, exports and infers with the program."""

    def setUp(self):
        self.holder = tempfile.TemporaryDirectory()
        self.directory = pathlib.Path(self.holder.name)
        self.addCleanup(self.holder.cleanup)

    def lockstep(self, *words, stdin=None):
        return run(OPTIONS.lockstep, *words, cwd=self.directory, stdin=stdin)

    def train_and_export(self, model, *words):
        self.lockstep("train", model, *words, "--device", "cpu", "--quiet", "--save", "w.safetensors")
        self.lockstep("export", "onnx", model, "--weights", "w.safetensors", "--output", "w.onnx")
        session = session_of(self.directory / "w.onnx")
        return session, json.loads(session.get_modelmeta().custom_metadata_map["lockstep"])

    def expect(self, name, ours, theirs):
        found = difference(ours, theirs)
        print(f"{name:<40} {found:.1e}", flush=True)
        SEEN.append(found)
        self.assertLess(found, MOST)

    def results(self, *words, stdin=None):
        lines = self.lockstep("infer", *words, "--weights", "w.safetensors", "--device", "cpu", "--json", "--quiet",
                              stdin=stdin).splitlines()
        return [json.loads(line) for line in lines]

    def probabilities(self, results, classes):
        made = np.zeros((len(results), classes))
        for row, result in enumerate(results):
            for one in result["classes"]:
                made[row, one["class"]] = one["probability"]
        return made

    def test_images(self):
        values = np.random.default_rng(1).integers(0, 256, (4, 8, 8), dtype=np.uint8)
        for number, pixels in enumerate(values):
            (self.directory / f"{number}.png").write_bytes(png_of(pixels))
        session, said = self.train_and_export("cnn", "--data", "digits", "--epochs", "1")
        form = said["image"]
        pixels = (values[:, None].astype(np.float32) / 255 - form["mean"][0]) / form["std"][0]
        ours = self.probabilities(self.results("cnn", "--input", "0.png,1.png,2.png,3.png", "--top", 10), 10)
        self.expect("infer cnn", softmax(session.run(["logits"], {"input": pixels})[0]), ours)

    def test_tables(self):
        rng = np.random.default_rng(2)
        words, numbers = rng.choice(["red", "blue", "green"], 90), rng.normal(size=(90, 2)).round(3)
        kinds = np.where(numbers[:, 0] + (words == "red") > 0.3, "up", "down")
        rows = [f"{a},{b},{word},{kind}" for (a, b), word, kind in zip(numbers, words, kinds)]
        (self.directory / "table.csv").write_text("a,b,colour,label\n" + "\n".join(rows) + "\n")
        session, said = self.train_and_export("tabular", "--data", "table:table.csv", "--target", "label",
                                              "--epochs", "3")
        columns = said["table"]["columns"]
        given = {"input": [], "categories": []}
        first = 0  # each column's codes follow those of the columns before it
        for column in columns:
            if "categories" not in column:
                values = numbers[:, 0 if column["name"] == "a" else 1]
                given["input"].append((values - column["mean"]) / column["deviation"])
                continue
            given["categories"].append([first + 1 + column["categories"].index(word) for word in words])
            first += 1 + len(column["categories"])
        given = {"input": np.array(given["input"], np.float32).T, "categories": np.array(given["categories"], np.int64).T}
        classes = len(said["table"]["target"]["categories"])
        ours = self.probabilities(self.results("tabular", "--input", "table.csv", "--top", classes), classes)
        self.expect("infer tabular", softmax(session.run(None, given)[0]), ours)

    def test_texts_that_are_read(self):
        rows = "".join(f"a {word} day {number},{kind}\n" for number in range(20)
                       for word, kind in (("fine", "good"), ("dull", "bad")))
        (self.directory / "reviews.csv").write_text("text,label\n" + rows)
        session, said = self.train_and_export("bert", "--data", "csv:reviews.csv", "--layers", "2", "--width", "32",
                                              "--heads", "2", "--max-length", "16", "--epochs", "1")
        texts = ["a fine day 7", "dull"]
        pieces = {piece: number for number, piece in enumerate(said["word_pieces"])}

        def tokens_of(word):
            """The longest piece first; those within a word begin with ##."""
            begin, found = 0, []
            while begin < len(word):
                mark = "##" if begin else ""
                end = next(end for end in range(len(word), begin, -1) if mark + word[begin:end] in pieces)
                found.append(pieces[mark + word[begin:end]])
                begin = end
            return found

        tokens = [[pieces["[CLS]"], *sum(map(tokens_of, text.split()), []), pieces["[SEP]"]] for text in texts]
        longest = max(map(len, tokens))
        given = {"input": np.array([row + [0] * (longest - len(row)) for row in tokens], np.int64),
                 "token_types": np.zeros((2, longest), np.int64),
                 "lengths": np.array([len(row) for row in tokens], np.int64)}
        (self.directory / "texts.txt").write_text("\n".join(texts) + "\n")
        ours = self.probabilities(self.results("bert", "--input", "texts.txt", "--lines", "--top", 2), 2)
        self.expect("infer bert", softmax(session.run(None, given)[0]), ours)

    def test_texts_that_are_continued(self):
        (self.directory / "text.txt").write_text("The quick brown fox jumps over the lazy dog; " * 40)
        for model, words in (("gpt", ["--layers", "2", "--heads", "2", "--width", "32"]),
                             ("llama", ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--width", "32"]),
                             ("lstm", ["--layers", "2", "--width", "32"])):
            session, said = self.train_and_export(model, "--data", "text:text.txt", "--context", "32", "--steps", "60",
                                                  *words)
            characters = said["characters"]
            tokens = [characters.index(one) for one in "The quick"]
            for _ in range(16):
                logits = session.run(None, {"input": np.array([tokens], np.int64)})[0]
                self.assertEqual(logits.shape, (1, len(tokens), len(characters)))
                tokens.append(int(logits[0, -1].argmax()))
            made, = self.results(model, "--prompt", "The quick", "--tokens", 16, "--temperature", 0)
            self.assertEqual(made["prompt"] + made["text"], "".join(characters[one] for one in tokens))


if __name__ == "__main__":
    result = unittest.main(argv=[sys.argv[0], *REST], exit=False).result
    print(f"{len(SEEN)} compared by onnxruntime {onnxruntime.__version__}, the largest difference {max(SEEN, default=0):.1e}")
    sys.exit(not result.wasSuccessful())
