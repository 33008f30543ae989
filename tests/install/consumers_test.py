"""What is installed, and programs that are built against it.

  consumers_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import concurrent.futures
import json
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


class Tree(package.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.headers = sorted(path.relative_to(cls.prefix / "include") for path in (cls.prefix / "include").rglob("*"))
        cls.headers = [path for path in cls.headers if path.suffix]
        # Those of components that are compiled by whoever has their library: torch_test.py compiles them.
        cls.plain_headers = [path for path in cls.headers if "torch" not in str(path)]
        cls.library = next(cls.prefix.rglob("liblockstep_comm.so"))
        cls.libraries = sorted(cls.prefix.rglob("liblockstep_*.so"))
        cls.has_mpi = "Open MPI v" in run([cls.prefix / "bin/lockstep", "version"]).stdout


    @classmethod
    def build_consumers(cls, *flags):
        shutil.copytree(SOURCE / "tests/install/package", cls.here / "consumer", dirs_exist_ok=True)
        cls.configure(cls.here / "consumer", f"-DEXAMPLES={cls.prefix / 'share/lockstep/examples'}")
        run(["cmake", "--build", cls.here / "consumer/build", "--parallel", "2", *flags], timeout=600)


class Examples(Tree):
    def test_all_of_them_compile_against_the_package(self):
        self.build_consumers()


class Headers(Tree):
    # The only header that includes another library's.
    def flags_of(self, header):
        if header.name != "mpi.h":
            return []
        return re.sub(r"(^|\s)-I", r"\1-isystem", run(["mpicc", "--showme:compile"]).stdout).split()

    def test_nothing_but_lockstep(self):
        tops = sorted(path.name for path in (self.prefix / "include").iterdir())
        self.assertEqual(tops, ["lockstep"])
        wanted = {path.relative_to(SOURCE / "include") for path in (SOURCE / "include").rglob("*.h")}
        if not self.has_mpi:
            wanted.remove(pathlib.Path("lockstep/comm/mpi.h"))
        self.assertEqual(set(self.headers), wanted)

    def chains(self, headers):
        """`headers` in lists in which each header includes, itself or through others, all that stand before it."""
        direct = {header: [pathlib.Path(name) for name in re.findall(
            r"^#include [<\"](lockstep/[^>\"]+)", (self.prefix / "include" / header).read_text(), re.MULTILINE)]
            for header in headers}

        def included(header):
            found, due = set(), [header]
            while due:
                new = set(direct[due.pop()]) - found
                found |= new
                due += new
            return found

        all_of = {header: included(header) for header in headers}
        left = sorted(headers, key=lambda header: len(all_of[header]))
        made = []
        while left:
            chain = [left.pop()]
            while inner := [header for header in left if header in all_of[chain[0]]]:
                chain.insert(0, inner[-1])
                left.remove(inner[-1])
            made.append(chain)
        return made

    # A header sees nothing in a chain that it would not see alone, and a third as many compilations do.
    def test_each_header_compiles_alone(self):
        chains = self.chains(self.plain_headers)
        self.assertEqual(sorted(header for chain in chains for header in chain), self.plain_headers)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda chain: self.compile_headers(
                chain, *[flag for header in chain for flag in self.flags_of(header)]), chains))

    # LibTorch's own folder has other versions of libraries that lockstep is made with.
    def test_headers_behind_libtorchs(self):
        torch = package.libtorch()
        if torch is None:
            self.skipTest(package.NO_LIBTORCH)
        mpi = [flag for header in self.plain_headers for flag in self.flags_of(header)]
        self.compile_headers(self.plain_headers, f"-I{torch / 'include'}", *mpi)

    def test_the_c_header_is_c(self):
        for language, standard in (("c", "c99"), ("c", "c11"), ("c++", "c++98"), ("c++", "c++20")):
            with self.subTest(standard=standard):
                flags = [] if standard == "c++98" else ["-pedantic"]  # which has neither long long nor its header
                run([{"c": "cc", "c++": "c++"}[language], f"-std={standard}", "-Wall", "-Wextra", "-Werror", *flags,
                     "-fsyntax-only", f"-I{self.prefix / 'include'}", "-x", language, "-"],
                    input="#include <lockstep/lockstep.h>\n#include <lockstep/lockstep.h>\nint main(void) { return 0; }\n")


# Those that are run.
PROGRAMS = ("consumer process_state sum reduce all_reduce regression "
            "sum_static reduce_static all_reduce_static regression_static").split()


class Installed(Tree):
    def test_the_libraries_show_their_own_names_and_need_what_they_use(self):
        functions = {}
        for library in self.libraries:
            lines = run(["nm", "-DC", "--defined-only", library]).stdout.splitlines()
            words = [line.split(" ", 2)[1:] for line in lines]
            self.assertGreater(len(words), 10)
            self.assertEqual([word for kind, word in words if "lockstep" not in word and kind != "A"], [])  # A: a version
            functions[library.name] = {word for kind, word in words if kind in "TBD"}
            needed = re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-d", library]).stdout)
            foreign = [name for name in needed if re.match("lib(dnnl|turbojpeg|spng|zip|pcre|gomp|gtest)", name)]
            if re.search(r"_(base|comm|ddp|c)\b", library.name):
                self.assertEqual(foreign, [])
        # A component has nothing that another one has: a program uses several.
        names = sorted(functions)
        for i, one in enumerate(names):
            for other in names[i + 1:]:
                self.assertEqual(functions[one] & functions[other], set(), f"{one} and {other}")

    def consumer(self, name="consumer"):
        build = self.here / "consumer/build"
        if not build.exists():
            self.build_consumers("--target", *PROGRAMS, *(["over_mpi"] if self.has_mpi else []))
        example = build / "examples/examples" / name
        return example if example.exists() else build / name

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

    def test_an_own_model_with_an_own_loss(self):
        for name, count in (("regression", 2), ("regression_static", 1)):
            with self.subTest(program=name):
                out = self.ranks(count, self.consumer(name), "--epochs", "3", "--threads", "1").stdout
                self.assertRegex(out, r"training net on waves \(4000 samples\) with " + str(count))
                self.assertLess(float(re.search(r"\nloss (\S+)  ", out)[1]), 0.2)

    def test_static_libraries_need_no_shared_one_of_lockstep(self):
        for name, wanted in (("sum_static", "1 ranks: 1\n"), ("reduce_static", "w = 3.000 on 1 ranks\n")):
            with self.subTest(program=name):
                self.assertEqual(self.ranks(1, self.consumer(name)).stdout, wanted)
                needed = run(["readelf", "-d", self.consumer(name)]).stdout
                self.assertNotIn("liblockstep", needed)

    def test_a_program_with_a_communicator_of_its_own(self):
        if not self.has_mpi:
            self.skipTest("built without MPI")
        done = run([SOURCE / "tests/support/run_ranks", 3, self.consumer("over_mpi")])
        self.assertEqual(done.stdout, "2 of 3 ranks: 1, the least sum: 1\n")

    def test_programs_in_c_and_python(self):
        for count in (1, 2, 3):
            with self.subTest(ranks=count):
                sum_of_ranks = count * (count - 1) // 2
                self.assertEqual(self.ranks(count, self.consumer("all_reduce")).stdout,
                                 f"{count} ranks: {3 * count}, gradients {sum_of_ranks} and {count}\n")
        self.assertEqual(self.ranks(1, self.consumer("all_reduce_static")).stdout, "1 ranks: 3, gradients 0 and 1\n")
        library = next(self.prefix.rglob("liblockstep_c.so"))
        done = run([self.prefix / "bin/lockstep", "launch", "-n", 3, "--", sys.executable, SOURCE / "examples/allreduce.py"],
                   env=os.environ | {"LIBLOCKSTEP": str(library)})
        self.assertIn("3 ranks: 6, the slowest: 0.5", done.stdout)

    # The table of docs/embed.md.
    def test_what_changes_in_a_process(self):
        openmp = r"omp_get_(max_threads|dynamic|max_active_levels): "
        lasting = rf"training: {openmp}|the end: ({openmp}|threads: \d+ → \d+$)"
        passing = r"(collectives|training): (descriptors|threads): \d+ → \d+$"
        crashes = r"[\w ]+: handler of (4|6|7|8|11): 0 0 → \d+ \d+$"  # those of which a process dies
        record = r"the end: descriptors: \d+ → \d+$"  # the flight record's
        of_mpi = r"[\w ]+: variable (OMPI_\w+|HWLOC_COMPONENTS|PMIX_\w+): "
        program = self.consumer("process_state")
        launched = [self.prefix / "bin/lockstep", "launch", "-n", 2, "--no-prefix", "--", program]
        for starter, start, differences in (
                ("alone", [program], [lasting, passing]),
                ("ranks", [SOURCE / "tests/support/run_ranks", 2, program], [lasting, passing]),
                ("launch", launched, [lasting, passing, crashes, record, of_mpi])):
            with self.subTest(starter=starter):
                done = run(start, env=os.environ | {"LOCKSTEP_TEST_GROUP": "tcp"})
                lines = done.stdout.splitlines()
                self.assertIn("signals: 3", lines)
                others = [line for line in lines if line != "signals: 3" and not re.match("|".join(differences), line)]
                self.assertEqual(set(others) - {"collectives: the same"}, set(), done.stdout)
                self.assertEqual(any(re.match(crashes, line) for line in lines), starter == "launch")
                if starter == "alone" and len(os.sched_getaffinity(0)) > 1:
                    self.assertIn("training: omp_get_max_threads: ", done.stdout)
                self.assertEqual(done.stderr, "")

    def test_a_program_that_exits_with_a_group(self):
        done = run([self.consumer("process_state"), "exit"], code=7)
        self.assertEqual(done.stdout + done.stderr, "")

    # What documents say to whoever has the package: files with a name after the language, and commands, from an empty
    # directory to running programs. The variables are those of packaging's modulefile.
    def test_documents_from_an_empty_directory(self):
        paths = {"PATH": self.prefix / "bin", "LD_LIBRARY_PATH": self.library.parent, "CMAKE_PREFIX_PATH": self.prefix,
                 "PKG_CONFIG_PATH": self.library.parent / "pkgconfig"}
        env = os.environ | {name: f"{path}:{os.environ.get(name, '')}".rstrip(":") for name, path in paths.items()}
        for name in ("embed.md", "models.md"):
            blocks = re.findall(r"^```(\w+) ([\w.]+)\n(.*?)^```", (SOURCE / "docs" / name).read_text(), re.MULTILINE | re.DOTALL)
            self.assertEqual([word for language, word, _ in blocks if language == "sh"], ["installed"], name)
            with self.subTest(name), tempfile.TemporaryDirectory(dir=self.here) as directory:
                for language, word, text in blocks:
                    if language != "sh":
                        pathlib.Path(directory, word).write_text(text)
                        continue
                    said = run(["bash", "-ec", text], cwd=directory, env=env).stdout
                    self.assertRegex(said, {"embed.md": r"2 ranks: 3\n(.*\n)*1 ranks: 1\n", "models.md":
                                            r"accuracy 9\d.* on 2 ranks(.*\n)*.*accuracy 9\d.* on 3 ranks"}[name])

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
        self.assertNotIn("-lhwloc", flags)
        self.assertIn("-lhwloc", run(["pkg-config", "--static", "--libs", "lockstep_comm"], env=env).stdout)
        self.assertEqual(run(["pkg-config", "--modversion", "lockstep_comm"], env=env).stdout.strip(), self.version)
        c_flags = run(["pkg-config", "--cflags", "--libs", "lockstep_c"], env=env).stdout.split()
        in_c = self.here / "all_reduce_c"
        run(["cc", "-std=c99", "-pedantic", "-Werror", SOURCE / "examples/all_reduce.c", "-o", in_c, *c_flags,
             f"-Wl,-rpath,{self.library.parent}"])
        self.assertEqual(run([in_c]).stdout, "1 ranks: 3, gradients 0 and 1\n")
        program = self.here / "sum"
        run([*package.COMPILER, SOURCE / "examples/sum.cpp", "-o", program, *flags, f"-Wl,-rpath,{self.library.parent}"])
        self.assertEqual(run([program]).stdout, "1 ranks: 1\n")


INSTALLED = ("bin/lockstep", "share/man/man1/lockstep.1", "share/bash-completion/completions/lockstep",
             "share/zsh/site-functions/_lockstep", "share/fish/vendor_completions.d/lockstep.fish",
             "share/lockstep/examples/CMakeLists.txt", "share/lockstep/slurm/cpu.sbatch",
             "share/lockstep/kubernetes/mpijob.yaml", "include/lockstep/trainer.h")


class Packages(unittest.TestCase):
    @unittest.skipUnless(shutil.which("dpkg-deb") and shutil.which("dpkg-shlibdeps"), "no Debian's tools")
    def test_debians_has_all_and_names_what_it_needs(self):
        with tempfile.TemporaryDirectory(prefix="lockstep-deb-") as directory:
            here = pathlib.Path(directory)
            # Packing, not compressing, is what is tried.
            run(["cpack", "-G", "DEB", "--config", BUILD / "CPackConfig.cmake", "-B", here,
                 "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=none"])
            package_file = next(here.glob("lockstep_*.deb"))
            needed = run(["dpkg-deb", "--field", package_file, "Depends"]).stdout
            for library in ("libc6", "libhwloc", "libssl", "libdnnl"):
                self.assertIn(library, needed)
            run(["dpkg-deb", "--extract", package_file, here / "tree"])
            usr = here / "tree/usr"
            for path in INSTALLED:
                self.assertTrue((usr / path).exists(), path)
            self.assertIn("lockstep ", run([usr / "bin/lockstep", "version"]).stdout)
            self.assertTrue(list(usr.rglob("liblockstep_trainer.so")) and list(usr.rglob("lockstepConfig.cmake")))

    @unittest.skipUnless(shutil.which("rpmbuild"), "no rpmbuild")
    def test_rpms_has_all_and_names_what_it_needs(self):
        with tempfile.TemporaryDirectory(prefix="lockstep-rpm-") as directory:
            here = pathlib.Path(directory)
            run(["cpack", "-G", "RPM", "--config", BUILD / "CPackConfig.cmake", "-B", here,
                 "-D", "CPACK_RPM_COMPRESSION_TYPE=none", "-D", "CPACK_STRIP_FILES=OFF"])
            package_file = next(here.glob("lockstep-*.rpm"))
            needed = run(["rpm", "-qp", "--requires", package_file]).stdout
            for library in ("libc.so.6", "libhwloc.so", "libcrypto.so", "libdnnl.so"):
                self.assertIn(library, needed)
            files = run(["rpm", "-qp", "--list", package_file]).stdout.splitlines()
            for path in INSTALLED:
                self.assertIn(f"/usr/{path}", files)
            self.assertNotIn("/usr/share/man", files)  # which every package has


class Embedded(package.WithFiles):
    """lockstep's sources within another build: nothing of lockstep's own options, tests and programs is seen there."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.build = cls.here
        cls.configured = run(["cmake", "-S", SOURCE / "tests/install/embedded", "-B", cls.build, "-G", "Ninja",
                              f"-DSOURCE={SOURCE}"]).stdout

    def test_its_flags_stay_its_own(self):
        commands = json.loads((self.build / "compile_commands.json").read_text())
        own = [one["command"] for one in commands if one["file"].endswith("sum.cpp")]
        self.assertEqual(len(own), 1)
        flags = [word for word in own[0].split() if word.startswith("-") and not word.startswith("-o")]
        self.assertEqual(flags, [f"-I{SOURCE}/include", "-std=gnu++20", "-c"])
        cache = (self.build / "CMakeCache.txt").read_text()
        self.assertIn("CMAKE_BUILD_TYPE:STRING=\n", cache)

    def test_no_other_parts_are_built_or_looked_for(self):
        for path in ("lockstep/nn", "lockstep/cli", "lockstep/tests", "lockstep/examples"):
            self.assertFalse((self.build / path).exists(), path)
        self.assertNotIn("GTest", self.configured)
        self.assertNotIn("DNNL", (self.build / "CMakeCache.txt").read_text())

    def test_it_runs(self):
        run(["cmake", "--build", self.build, "--target", "sum", "--parallel", "2"], timeout=600)
        self.assertEqual(run([self.build / "sum"]).stdout, "1 ranks: 1\n")

    def test_a_component_that_there_is_not(self):
        with tempfile.TemporaryDirectory() as directory:
            done = run(["cmake", "-S", SOURCE, "-B", directory, "-DLOCKSTEP_COMPONENTS=trumpets"], code=1)
        self.assertIn("LOCKSTEP_COMPONENTS: no component 'trumpets': there are base comm ddp c nn trainer",
                      " ".join(done.stderr.split()))  # CMake wraps long messages


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *package.others])
