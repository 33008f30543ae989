"""What is installed, and programs that are built against it.

  consumers_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import package  # noqa: E402
from package import BUILD, SOURCE, run  # noqa: E402


class Installed(package.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.headers = sorted(path.relative_to(cls.prefix / "include") for path in (cls.prefix / "include").rglob("*"))
        cls.headers = [path for path in cls.headers if path.suffix]
        # Those of components that are compiled by whoever has their library: torch_test.py compiles them.
        cls.plain_headers = [path for path in cls.headers if "torch" not in str(path)]
        cls.library = next(cls.prefix.rglob("liblockstep_comm.so"))
        cls.libraries = sorted(cls.prefix.rglob("liblockstep_*.so"))

    def test_nothing_but_lockstep(self):
        tops = sorted(path.name for path in (self.prefix / "include").iterdir())
        self.assertEqual(tops, ["lockstep"])
        wanted = {path.relative_to(SOURCE / "include") for path in (SOURCE / "include").rglob("*.h")}
        self.assertEqual(set(self.headers), wanted)

    def test_each_header_compiles_alone(self):
        for header in self.plain_headers:
            with self.subTest(header=str(header)):
                self.compile_header(header)

    # LibTorch's own folder has other versions of libraries that lockstep is made with.
    def test_headers_behind_libtorchs(self):
        torch = package.libtorch()
        if torch is None:
            self.skipTest(package.NO_LIBTORCH)
        for header in self.plain_headers:
            self.compile_header(header, f"-I{torch / 'include'}")

    def test_the_libraries_show_their_own_names_and_need_what_they_use(self):
        functions = {}
        for library in self.libraries:
            lines = run(["nm", "-DC", "--defined-only", library]).stdout.splitlines()
            words = [line.split(" ", 2)[1:] for line in lines]
            self.assertGreater(len(words), 10)
            self.assertEqual([word for _, word in words if "lockstep" not in word], [])
            functions[library.name] = {word for kind, word in words if kind in "TBD"}
            needed = re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-d", library]).stdout)
            foreign = [name for name in needed if re.match("lib(dnnl|turbojpeg|spng|zip|pcre|gomp|gtest)", name)]
            self.assertEqual(foreign, [])
        # A component has nothing that another one has: a program uses several.
        names = sorted(functions)
        for i, one in enumerate(names):
            for other in names[i + 1:]:
                self.assertEqual(functions[one] & functions[other], set(), f"{one} and {other}")

    def consumer(self, name="consumer"):
        program = self.here / "consumer/build" / name
        if program.exists():
            return program
        shutil.copytree(SOURCE / "tests/install/comm", self.here / "consumer")
        shutil.copytree(SOURCE / "examples", self.here / "examples")
        self.configure(self.here / "consumer", f"-DEXAMPLES={self.here / 'examples'}")
        run(["cmake", "--build", self.here / "consumer/build"])
        return program

    def test_a_program_that_finds_the_package(self):
        for count in (1, 2, 3):
            with self.subTest(ranks=count):
                self.assertEqual(self.ranks(count, self.consumer()).stdout, f"mine: 0 wrong on {count} ranks\n")

    def test_examples_of_components(self):
        for count in (1, 2, 3):
            with self.subTest(ranks=count):
                self.assertEqual(self.ranks(count, self.consumer("sum")).stdout,
                                 f"{count} ranks: {count * (count + 1) // 2}\n")
                self.assertEqual(self.ranks(count, self.consumer("reduce")).stdout, f"w = 3.000 on {count} ranks\n")

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
                self.assertIn(wanted, self.find(text, code=1))

    # A directory of LibTorch's that has what `lacks` is not: each is refused with what to do.
    def test_libtorch_that_is_not_there_or_cannot_be_taken(self):
        text = f"find_package(lockstep {self.version} REQUIRED COMPONENTS torch)"
        with tempfile.TemporaryDirectory(dir=self.here) as directory:
            torch = pathlib.Path(directory)

            def write(name, text=""):
                (torch / name).parent.mkdir(parents=True, exist_ok=True)
                (torch / name).write_text(text)

            self.assertIn("needs LibTorch: give -DLOCKSTEP_TORCH=", self.find(text, code=1))
            given = f"-DLOCKSTEP_TORCH={torch}"
            self.assertIn(f"no LibTorch in {torch}, which lacks include/torch/csrc", self.find(text, given, code=1))
            for name in ("include/torch/csrc/api/include/torch/torch.h", "include/torch/csrc/autograd/function_hook.h",
                         "lib/libtorch_cpu.so", "lib/libc10.so"):
                write(name)
            self.assertIn("too old", self.find(text, given, code=1))
            write("include/torch/csrc/autograd/function_hook.h", "struct PostAccumulateGradHook {};")
            self.assertIn("CXX among the project's LANGUAGES", self.find(text, given, code=1))
            config = "share/cmake/Torch/TorchConfig.cmake"
            write(config, "set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=0\")")
            by_directory = f"-DTorch_DIR={(torch / config).parent}"
            for way in (given, by_directory, f"-DCMAKE_PREFIX_PATH={self.prefix};{torch}"):
                self.assertIn("was built for the C++ ABI before C++11", self.find(text, way, code=1))
            # Who asks for other components has no need of it.
            self.find(f"find_package(lockstep {self.version} REQUIRED)", code=0)
            self.find(f"find_package(lockstep {self.version} REQUIRED COMPONENTS comm OPTIONAL_COMPONENTS torch)", code=0)

    def test_pkg_config(self):
        if not shutil.which("pkg-config"):
            self.skipTest("pkg-config is not installed")
        env = os.environ | {"PKG_CONFIG_PATH": str(self.library.parent / "pkgconfig")}
        flags = run(["pkg-config", "--cflags", "--libs", "lockstep_comm"], env=env).stdout.split()
        self.assertEqual(run(["pkg-config", "--modversion", "lockstep_comm"], env=env).stdout.strip(), self.version)
        program = self.here / "sum"
        run([*package.COMPILER, SOURCE / "examples/sum.cpp", "-o", program, *flags, f"-Wl,-rpath,{self.library.parent}"])
        self.assertEqual(run([program]).stdout, "1 ranks: 1\n")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *package.others])
