"""What scripts/gpu-check runs: sources, packed programs and tests, and the archive that they come in.

  gpu_check_build_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
import unittest.mock

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
places, others = parser.parse_known_args()
SOURCE, BUILD = places.source, (places.build or places.source / "build").absolute()
sys.path.insert(0, str(SOURCE / "bench"))

from gpu_check import build, correctness, sources  # noqa: E402
from gpu_check.check import Check  # noqa: E402
from harness.processes import Failure, clean_up  # noqa: E402


class Sources(unittest.TestCase):
    def test_a_change_shows(self):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            (root / "nn").mkdir()
            (root / "CMakeLists.txt").write_text("x")
            (root / "nn" / "CMakeLists.txt").write_text("x")
            (root / "nn" / "a.cu").write_text("1")
            first = sources.digest(root)
            (root / "nn" / "notes.md").write_text("not a source")
            self.assertEqual(sources.digest(root), first)
            (root / "nn" / "a.cu").write_text("2")
            second = sources.digest(root)
            self.assertNotEqual(second, first)
            (root / "new_module").mkdir()
            (root / "new_module" / "CMakeLists.txt").write_text("x")
            self.assertNotEqual(sources.digest(root), second)


class Choice(unittest.TestCase):
    """Of the packed program and a build."""

    def test_a_program_that_does_not_start_is_built_anew(self):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            place = root / ".gpu"
            program = place / "build" / "lockstep"
            program.parent.mkdir(parents=True)
            (root / "CMakeLists.txt").write_text("x")
            (place / "packed.json").write_text(json.dumps(
                {"programs": True, "sources": sources.digest(root), "revision": "1", "multiarch": "x86_64-linux-gnu"}))
            made = []

            def make(where, package):
                made.append(package)
                where.mkdir()
                (where / "lockstep").write_text("#!/bin/sh\n")
                (where / "lockstep").chmod(0o755)

            with unittest.mock.patch.multiple(build, PLACE=place, ARCHIVE=place / "none", ROOT=root, make=make):
                program.write_text("#!/bin/sh\necho \"version `GLIBC_2.99' not found\" >&2\nexit 1\n".replace("`", ""))
                program.chmod(0o755)
                with self.assertRaisesRegex(Failure, "does not start here: .*GLIBC_2.99"):
                    build.choose(None, no_build=True)
                self.assertEqual(build.choose(None, no_build=False)[0], root / "build-gpu")
                self.assertFalse(any("CMAKE_PREFIX_PATH" in flag for flag in build.cmake_flags(made[0])))
                self.assertTrue(any("CUDNN_FRONTEND" in flag for flag in build.cmake_flags(made[0])))
                program.write_text("#!/bin/sh\nexit 0\n")
                self.assertEqual(build.choose(None, no_build=False)[0], place / "build")
                self.assertEqual(len(made), 1)


class Packed(unittest.TestCase):
    """Tests of an archive, which is unpacked elsewhere than it was made."""

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(lambda: subprocess.run(["rm", "-rf", self.directory], check=True))
        self.check = Check(self.directory / ".gpu/build", ["GPU"], True, {}, time.monotonic() + 60)
        self.addCleanup(lambda: subprocess.run(["rm", "-rf", self.check.scratch], check=True))
        self.check.build.mkdir(parents=True)

    def write(self, tests: list) -> None:
        (self.check.build / "tests.json").write_text(json.dumps(tests))

    def test_are_found_and_find_their_files(self):
        (self.directory / "tests").mkdir()
        program = self.check.build / "a_test"
        program.write_text('#!/bin/bash\ncat "$LOCKSTEP_TEST_SOURCE/golden" && [[ $CACHE == */.gpu/build/cache ]]\n')
        program.chmod(0o755)
        (self.directory / "golden").write_text("right\n")
        self.write([{"name": "a_gpu_test", "command": ["@BUILD@/a_test", "@SOURCE@/tests/x"], "timeout_s": 10,
                     "environment": ["CACHE=@BUILD@/cache", "LOCKSTEP_TEST_SOURCE=@SOURCE@"]}])
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir("/")
        with unittest.mock.patch.object(correctness, "ROOT", self.directory):
            test, = correctness.tests_of(self.check)
            self.assertEqual(test["command"], [str(program), f"{self.directory}/tests/x"])
            data = {}
            correctness.test_programs(self.check, data)
        self.assertEqual(self.check.section.problems, [])
        self.assertEqual([program["code"] for program in data["programs"]], [0])

    def test_pack_for_gpu_says_where_the_sources_are(self):
        script = (SOURCE / "scripts/pack-for-gpu").read_text()
        program = script.split("<<'PY'\n")[1].split("\nPY\n")[0]
        built, place = self.directory / "built", self.directory / "place"
        (built / "tests").mkdir(parents=True)
        (place / "tests").mkdir(parents=True)
        listed = {"tests": [{"name": "a_gpu_test", "command": [f"{self.directory}/tests/support/run_ranks", "2"],
                             "properties": [{"name": "ENVIRONMENT", "value": [f"XDG_CACHE_HOME={built}/cache"]}]}]}
        (self.directory / "listed.json").write_text(json.dumps(listed))
        subprocess.run([sys.executable, "-c", program, self.directory / "listed.json", self.directory, built, place],
                       check=True)
        test, = json.loads((place / "tests.json").read_text())
        self.assertEqual(test["command"], ["@SOURCE@/tests/support/run_ranks", "2"])
        self.assertEqual(test["environment"], ["XDG_CACHE_HOME=@BUILD@/cache", "LOCKSTEP_TEST_SOURCE=@SOURCE@"])

    @unittest.skipUnless((BUILD / "tests/parity_tests").exists(), "it is not built")
    def test_parity_reads_where_it_is_told(self):
        def passes(**more) -> bool:
            done = subprocess.run([BUILD / "tests/parity_tests", "--gtest_filter=Ops.CrossEntropy"], cwd="/", timeout=60,
                                  env=self.check.env | more, capture_output=True, text=True)
            self.assertIn("Ops.CrossEntropy", done.stdout)
            return done.returncode == 0

        golden = self.directory / "tests/parity/golden"
        golden.parent.mkdir(parents=True)
        golden.symlink_to((SOURCE / "tests/parity/golden").absolute())
        self.assertTrue(passes())
        self.assertTrue(passes(LOCKSTEP_TEST_SOURCE=str(self.directory)))
        golden.unlink()
        self.assertFalse(passes(LOCKSTEP_TEST_SOURCE=str(self.directory)))

    def test_have_no_other_path_of_the_machine_that_built_them(self):
        sources_of_gpu_tests = [*SOURCE.glob("tests/*/cuda/*.cpp"), *SOURCE.glob("tests/*/*cuda*_test.cpp"),
                                *SOURCE.glob("tests/parity/*_test.cpp"), *SOURCE.glob("tests/nn/gradient*_test.cpp")]
        self.assertGreater(len(sources_of_gpu_tests), 30)
        alone = {"twins_test.cpp", "weight_files_test.cpp", "gradient_coverage_test.cpp"}  # which need no GPU
        for path in sources_of_gpu_tests:
            if path.name not in alone:
                self.assertNotIn("LOCKSTEP_SOURCE_DIR", path.read_text(), path)


class Archive(unittest.TestCase):
    def test_is_unpacked_once_and_whole(self):
        with tempfile.TemporaryDirectory() as directory:
            place = pathlib.Path(directory) / ".gpu"
            (place / "tree" / "bin").mkdir(parents=True)
            (place / "tree" / "packed.json").write_text('{"programs": false}')
            (place / "tree" / "bin" / "mpirun").write_text("1")
            archive = place / "lockstep-gpu.tar.xz"

            def pack():
                with tarfile.open(archive, "w:xz") as made:
                    made.add(place / "tree", ".")

            program = place / "bin" / "mpirun"
            with unittest.mock.patch.multiple(build, PLACE=place, ARCHIVE=archive, ROOT=pathlib.Path(directory)):
                build.unpack()
                self.assertEqual(build.packed(), {})
                pack()
                whole = archive.read_bytes()
                archive.write_bytes(whole[:len(whole) // 2])
                with self.assertRaisesRegex(Failure, "cannot be unpacked"):
                    build.unpack()
                archive.write_bytes(whole)
                build.unpack()
                self.assertEqual(build.packed(), {"programs": False})
                program.write_text("kept")
                build.unpack()
                self.assertEqual(program.read_text(), "kept")
                # Another one, though it may be of an earlier hour.
                pack()
                os.utime(archive, (1, 1))
                build.unpack()
                self.assertEqual(program.read_text(), "1")


if __name__ == "__main__":
    with clean_up():
        unittest.main(argv=[sys.argv[0], *others])
