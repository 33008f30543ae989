"""What programs that are compiled against the installed package rely on, and what of it may change.

  abi_test.py [--source DIR] [--build DIR] [--update] [unittest's arguments]

cmake/exported.map has the public names, under the version that a program asks for, and cmake/layouts.txt the layouts of
classes. A test fails where they are not what the headers and libraries have. --update writes them. A version that has been
released, as CHANGELOG.md has it, keeps both: whatever changes them raises the version in CMakeLists.txt first.
"""
import os
import re
import sys
import unittest

sys.dont_write_bytecode = True
import abi  # noqa: E402
import package  # noqa: E402
from package import SOURCE, run  # noqa: E402

MAP, LAYOUTS = SOURCE / "cmake/exported.map", SOURCE / "cmake/layouts.txt"
UPDATE = "--update" in package.others
COMPONENTS = ("trainer", "nn", "c", "ddp", "comm", "base")  # each before those that it needs
OWN = "_ZN8 _ZNK8 _ZNR8 _ZNKR8 _ZNO8 _ZNKO8 _ZTIN8 _ZTSN8 _ZTVN8 _ZTTN8 _ZThn*N8 _ZTv*N8 _ZGVN8 _ZGVZN8 _ZZN8"


def map_of(version, names):
    lines = ["/* Written by tests/install/abi_test.py --update. First what programs may use; then what only lockstep's own",
             "   libraries use of each other. */", f"LOCKSTEP_{version} {{", "  global:", *(f"    {name};" for name in names),
             "};", f"LOCKSTEP_{version}_INTERNAL {{", "  global:", *(f"    {name}lockstep*;" for name in OWN.split()), "  local:",
             "    *;", "};"]
    return "\n".join(lines) + "\n"


class Abi(package.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        include = cls.prefix / "include"
        headers = sorted(path.relative_to(include) for path in include.rglob("*.h"))
        cls.has_mpi = include.joinpath("lockstep/comm/mpi.h").exists()
        cls.has_cuda = "nccl" in run([cls.prefix / "bin/lockstep", "version"]).stdout
        flags = run(["mpicc", "--showme:compile"]).stdout.split() if cls.has_mpi else []
        # LibTorch's are compiled, with its library, by whoever has it.
        cls.interface = abi.Interface(cls.here, include, [path for path in headers if "torch" not in str(path)], flags)
        cls.lib = next(cls.prefix.rglob("liblockstep_comm.so")).parent
        cls.shared = [cls.lib / f"liblockstep_{name}.so" for name in COMPONENTS]
        cls.static = [cls.lib / f"liblockstep_{name}.a" for name in COMPONENTS]
        cls.so_version = cls.version.rpartition(".")[0]
        # A program that takes the address of each function that it has to find in a library.
        cls.wanted = sorted(name for name in cls.interface.declared.keys() - cls.interface.inline
                            if cls.interface.needs_definition(name))
        cls.here.joinpath("all.s").write_text(".section .note.GNU-stack\n.data\n" + "".join(f".quad {name}\n" for name in cls.wanted))
        cls.here.joinpath("main.cpp").write_text("int main() {}\n")

    def link(self, *libraries):
        program = self.here / "all"
        run(["g++", self.here / "main.cpp", self.here / "all.s", *libraries, "-o", program])
        run([program])

    def test_every_function_of_the_headers_links_with_the_shared_libraries(self):
        self.assertGreater(len(self.wanted), 500)
        self.link(*self.shared, f"-Wl,-rpath,{self.lib}")
        print(f"{len(self.wanted)} functions of {len(self.interface.classes)} classes and of no class", file=sys.stderr)

    def test_every_function_of_the_headers_links_with_the_static_libraries(self):
        flags = run(["pkg-config", "--static", "--libs", "lockstep_trainer", "lockstep_c"],
                    env=os.environ | {"PKG_CONFIG_PATH": str(self.lib / "pkgconfig")}).stdout.split()
        self.link(*self.static, *(flag for flag in flags if not flag.startswith("-llockstep_")))

    def test_what_c_declares_is_what_its_library_has(self):
        """Read by another way than the rest: a C header is simple enough to."""
        header = self.prefix.joinpath("include/lockstep/lockstep.h").read_text()
        said = set(re.findall(r"\b(lockstep_\w+)\(", re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)))
        self.assertEqual(said, {name for name in self.wanted if name.startswith("lockstep_")})
        shown = abi.symbols_of([self.lib / "liblockstep_c.so"], "-D")
        self.assertEqual(said, {name for name in shown if name.startswith("lockstep_")})

    def test_public_names_have_the_version_and_others_another(self):
        found = abi.run("nm", "-D", "--defined-only", *self.shared)
        versions = set(re.findall(r"@@(\S+)", found))
        self.assertEqual(versions, {f"LOCKSTEP_{self.so_version}", f"LOCKSTEP_{self.so_version}_INTERNAL"})
        self.assertIn(f"_ZN8lockstep4comm10make_groupERKNS0_12GroupOptionsE@@LOCKSTEP_{self.so_version}\n", found)

    def recorded(self):
        """What the two files should hold. Which inline functions a library has is the optimizer's choice, and programs have
        their own: the file keeps those that it has."""
        inline = {name for name in self.interface.declared
                  if name in self.interface.inline or not self.interface.needs_definition(name)}
        kept = set(re.findall(r"^    (\w+);$", MAP.read_text(), re.MULTILINE)) if MAP.exists() else set()
        names = sorted((set(self.interface.public(abi.symbols_of(self.static))) - inline) | (kept & inline))
        layouts = [f"version {self.so_version}", *sorted(self.interface.layouts)]
        return {MAP: map_of(self.so_version, names), LAYOUTS: "\n".join(layouts) + "\n"}

    def test_the_recorded_interface_is_what_there_is(self):
        if not self.has_mpi:
            self.skipTest("a build without MPI lacks some of it")
        for file, wanted in self.recorded().items():
            with self.subTest(file=file.name):
                recorded, now = (set(text.splitlines()) for text in (file.read_text(), wanted))
                if not self.has_cuda:
                    # Libraries have those inline functions alone that something in them uses; programs have their own.
                    recorded -= {f"    {name};" for name in self.interface.inline}
                    now -= {f"    {name};" for name in self.interface.inline}
                changes = [*(f"- {line}" for line in sorted(recorded - now)), *(f"+ {line}" for line in sorted(now - recorded))]
                if changes:
                    self.fail("\n".join([f"{file.name} is not what the headers have → tests/install/abi_test.py --update",
                                         *changes[:20]]))


def released(version):
    heading = re.search(rf"^## {re.escape(version)}\.\d+ — (.*)$", (SOURCE / "CHANGELOG.md").read_text(), re.MULTILINE)
    return heading is not None and heading[1] != "unreleased"


def update():
    Abi.setUpClass()
    try:
        case = Abi()
        for file, text in case.recorded().items():
            if file.exists() and file.read_text() == text:
                continue
            if f"version {Abi.so_version}\n" in LAYOUTS.read_text() and released(Abi.so_version):
                sys.exit(f"{file.name} of the released version {Abi.so_version} would change → raise the version in CMakeLists.txt")
            file.write_text(text)
            print(f"{file}: written")
    finally:
        Abi.doClassCleanups()


if __name__ == "__main__":
    if UPDATE:
        update()
    else:
        unittest.main(argv=[sys.argv[0], *package.others])
