"""What is installed, and programs that are built against it.

  consumers_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
places, others = parser.parse_known_args()
SOURCE = places.source.absolute()
BUILD = (places.build or SOURCE / "build").absolute()
COMPILER = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror"]


def run(argv, code=0, **more):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=240, **more)
    if done.returncode != code:
        raise AssertionError(f"{argv} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory(prefix="lockstep-install-")
        cls.addClassCleanup(holder.cleanup)
        cls.here = pathlib.Path(holder.name)
        first = cls.here / "first"
        run(["cmake", "--install", BUILD, "--prefix", first])
        cls.prefix = first.rename(cls.here / "prefix")  # an installed tree may be moved
        cls.headers = sorted(path.relative_to(cls.prefix / "include") for path in (cls.prefix / "include").rglob("*"))
        cls.headers = [path for path in cls.headers if path.suffix]
        cls.library = next((cls.prefix).rglob("liblockstep_comm.so"))
        cls.version = re.search(r"(\d+\.\d+\.\d+)", run([cls.prefix / "bin/lockstep", "version"]).stdout)[1]

    def compile_header(self, header, *flags):
        run([*COMPILER, "-fsyntax-only", *flags, f"-I{self.prefix / 'include'}", "-x", "c++", "-"],
            input=f"#include <{header}>\n#include <{header}>\n")

    def test_nothing_but_lockstep(self):
        tops = sorted(path.name for path in (self.prefix / "include").iterdir())
        self.assertEqual(tops, ["lockstep"])
        wanted = {path.relative_to(SOURCE / "include") for path in (SOURCE / "include").rglob("*.h")}
        self.assertEqual(set(self.headers), wanted)

    def test_each_header_compiles_alone(self):
        for header in self.headers:
            with self.subTest(header=str(header)):
                self.compile_header(header)

    # LibTorch's own folder has other versions of libraries that lockstep is made with.
    def test_headers_behind_libtorchs(self):
        found = sorted((BUILD / "peers").glob("**/torch/include"))
        if not found:
            self.skipTest("PyTorch is not installed → bench/peers/setup")
        for header in self.headers:
            self.compile_header(header, f"-I{found[0]}")

    def test_the_library_shows_its_own_names_and_needs_what_it_moves_data_with(self):
        names = [line.split()[-1] for line in run(["nm", "-DC", "--defined-only", self.library]).stdout.splitlines()]
        self.assertGreater(len(names), 100)
        words = [line.split(" ", 2)[2] for line in run(["nm", "-DC", "--defined-only", self.library]).stdout.splitlines()]
        strangers = [word for word in words if "lockstep" not in word]
        self.assertEqual(strangers, [])
        needed = re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-d", self.library]).stdout)
        self.assertEqual([name for name in needed if re.match("lib(dnnl|turbojpeg|spng|zip|pcre|gomp|gtest)", name)], [])

    def consumer(self):
        program = self.here / "consumer/build/consumer"
        if program.exists():
            return program
        shutil.copytree(SOURCE / "tests/install/comm", self.here / "consumer")
        script = self.here / "consumer/CMakeLists.txt"
        script.write_text(script.read_text().replace("@VERSION@", self.version.rpartition(".")[0]))
        run(["cmake", "-S", self.here / "consumer", "-B", self.here / "consumer/build",
             f"-DCMAKE_PREFIX_PATH={self.prefix}"])
        run(["cmake", "--build", self.here / "consumer/build"])
        return program

    def ranks(self, count, *argv, code=0):
        env = os.environ | {"LOCKSTEP_TEST_GROUP": "tcp"}
        start = [SOURCE / "tests/support/run_ranks", count] if count > 1 else []
        return run([*start, *argv], code, env=env)

    def test_a_program_that_finds_the_package(self):
        for count in (1, 2, 3):
            with self.subTest(ranks=count):
                self.assertEqual(self.ranks(count, self.consumer()).stdout, f"mine: 0 wrong on {count} ranks\n")

    def test_mistakes_blame_the_program(self):
        done = self.ranks(1, self.consumer(), "view", code=2)
        self.assertIn("2 elements of 4 bytes at byte 60 do not fit an arena of 64 bytes → ", done.stderr)
        done = self.ranks(2, self.consumer(), "size", code=5)
        self.assertIn("out of step", done.stderr)
        self.assertIn("allreduce", done.stderr)

    def test_versions_and_components_that_are_not_there(self):
        for text, wanted in ((f"find_package(lockstep {self.version} REQUIRED COMPONENTS trumpets)", "trumpets"),
                             ("find_package(lockstep 99.0 REQUIRED COMPONENTS comm)", "99.0")):
            with self.subTest(text=text):
                with tempfile.TemporaryDirectory(dir=self.here) as directory:
                    pathlib.Path(directory, "CMakeLists.txt").write_text(
                        f"cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES NONE)\n{text}\n")
                    done = run(["cmake", "-S", directory, "-B", f"{directory}/build",
                                f"-DCMAKE_PREFIX_PATH={self.prefix}"], code=1)
                    self.assertIn(wanted, done.stderr)

    def test_pkg_config(self):
        if not shutil.which("pkg-config"):
            self.skipTest("pkg-config is not installed")
        env = os.environ | {"PKG_CONFIG_PATH": str(self.library.parent / "pkgconfig")}
        flags = run(["pkg-config", "--cflags", "--libs", "lockstep_comm"], env=env).stdout.split()
        self.assertEqual(run(["pkg-config", "--modversion", "lockstep_comm"], env=env).stdout.strip(), self.version)
        program = self.here / "sum"
        run([*COMPILER, SOURCE / "examples/sum.cpp", "-o", program, *flags, f"-Wl,-rpath,{self.library.parent}"])
        self.assertEqual(run([program]).stdout, "1 ranks: 1\n")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
