"""What is installed, for tests of it: --source DIR, --build DIR, and unittest's arguments, which are left in `others`."""
import argparse
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
places, others = parser.parse_known_args()
SOURCE = places.source.absolute()
BUILD = (places.build or SOURCE / "build").absolute()
COMPILER = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror"]
NO_LIBTORCH = "LibTorch is not there → scripts/get-torch"


def run(argv, code=0, timeout=240, **more):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=timeout, **more)
    if done.returncode != code:
        raise AssertionError(f"{argv} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done


def libtorch():
    """The directory with its include/ and lib/: what scripts/get-torch has fetched, else bench/peers/setup; or None."""
    places = [SOURCE / ".cache/torch/torch", *sorted((BUILD / "peers").glob("*/lib/python*/site-packages/torch"))]
    return next((place for place in places if (place / "lib/libtorch_cpu.so").exists()), None)


class WithFiles(unittest.TestCase):
    """cls.here is a directory for the files of all its tests."""

    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory(prefix=f"lockstep-{cls.__name__.lower()}-")
        cls.addClassCleanup(holder.cleanup)
        cls.here = pathlib.Path(holder.name)


class Case(WithFiles):
    """Tests of an installed tree at cls.prefix."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        first = cls.here / "first"
        run(["cmake", "--install", BUILD, "--prefix", first])
        cls.prefix = first.rename(cls.here / "prefix")  # an installed tree may be moved
        cls.version = re.search(r"(\d+\.\d+\.\d+)", run([cls.prefix / "bin/lockstep", "version"]).stdout)[1]

    def compile_headers(self, headers, *flags):
        """In one file, each twice."""
        run([*COMPILER, "-fsyntax-only", *flags, f"-I{self.prefix / 'include'}", "-x", "c++", "-"],
            input="".join(f"#include <{header}>\n" for header in [*headers, *headers]))

    @classmethod
    def configure(cls, directory, *flags, code=0):
        """Of a CMakeLists.txt in which @VERSION@ is what find_package() asks for."""
        script = directory / "CMakeLists.txt"
        script.write_text(script.read_text().replace("@VERSION@", cls.version.rpartition(".")[0]))
        flags = [f"-DCMAKE_PREFIX_PATH={cls.prefix}", *flags]
        return run(["cmake", "-S", directory, "-B", directory / "build", *flags], code)

    def find(self, text, *flags, code):
        """What CMake says of a project with this line, which compiles nothing."""
        with tempfile.TemporaryDirectory(dir=self.here) as directory:
            pathlib.Path(directory, "CMakeLists.txt").write_text(
                f"cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES NONE)\n{text}\n")
            return " ".join(self.configure(pathlib.Path(directory), *flags, code=code).stderr.split())

    @staticmethod
    def ranks(count, *argv, code=0, group="tcp"):
        start = [SOURCE / "tests/support/run_ranks", count] if count > 1 else []
        return run([*start, *argv], code, env=os.environ | {"LOCKSTEP_TEST_GROUP": group})
