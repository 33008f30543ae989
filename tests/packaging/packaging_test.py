"""packaging/: Conan makes a package, and the others are tried as far as it goes without their managers.

  packaging_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "install"))
import package  # noqa: E402
from package import BUILD, SOURCE, run  # noqa: E402

VERSION = re.search(r"project\(lockstep VERSION ([\d.]+)", (SOURCE / "CMakeLists.txt").read_text())[1]
# As CMake's code declares them.
COMPONENTS = ["base", *re.findall(r"^lockstep_component\((?!base)(\w+)", (SOURCE / "CMakeLists.txt").read_text(), re.MULTILINE)]


def check_variables(test, words):
    """Each -DNAME is a variable that lockstep's build or CMake knows, and the components are there."""
    known = (BUILD / "CMakeCache.txt").read_text()
    for word in words:
        name, value = re.match(r"-D(\w+)(?::\w+)?=(.*)", word).groups()
        package_name = re.fullmatch(r"CMAKE_(?:DISABLE|REQUIRE)_FIND_PACKAGE_(\w+)", name)
        if package_name:
            test.assertRegex((SOURCE / "cmake").joinpath("LockstepDependencies.cmake").read_text() +
                             (SOURCE / "cmake/LockstepCuda.cmake").read_text(), rf"find_package\({package_name[1]}\b")
        else:
            test.assertRegex(known, rf"(?m)^{name}:")
        if name == "LOCKSTEP_COMPONENTS":
            test.assertEqual(set(value.split(";")) - set(COMPONENTS), set())


class Conan(unittest.TestCase):
    # Debian's packages take the places of Conan Center's, of versions that it accepts: nothing is fetched.
    def test_a_program_that_finds_the_package(self):
        place = SOURCE / ".cache/conan"
        if not (place / "wanted").exists():
            self.skipTest("Conan is not there → scripts/get-conan")
        if not shutil.which("pkg-config"):
            self.skipTest("pkg-config is not installed")
        with tempfile.TemporaryDirectory(prefix="lockstep-conan-") as directory:
            here = pathlib.Path(directory)
            env = os.environ | {"CONAN_HOME": directory, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
            conan = [sys.executable, "-m", "conans.conan"]
            modules = {"fmt": "fmt", "spdlog": "spdlog", "openssl": "libcrypto", "nlohmann_json": "nlohmann_json",
                       "hwloc": "hwloc"}
            installed = {name: run(["pkg-config", "--modversion", module]).stdout.strip() for name, module in modules.items()}
            compiler = run(["c++", "-dumpversion"]).stdout.strip().split(".")[0]
            (here / "profile").write_text(
                "[settings]\nos=Linux\narch=x86_64\ncompiler=gcc\ncompiler.libcxx=libstdc++11\ncompiler.cppstd=20\n"
                f"compiler.version={compiler}\nbuild_type=Debug\n[platform_requires]\n" +
                "".join(f"{name}/{version}\n" for name, version in installed.items()))
            # Conan writes beside the test program: into a copy.
            checkout = here / "checkout"
            shutil.copytree(SOURCE, checkout, ignore=lambda place, names: [
                name for name in names if pathlib.Path(place) == SOURCE and (name[0] == "." or re.match("build|tests$|docs$", name))
                or name == "__pycache__"])
            done = run([*conan, "create", checkout / "packaging/conan", "-o", "lockstep/*:components=comm", "-o",
                        "lockstep/*:mpi=False", "-pr:a", here / "profile", "--no-remote"], timeout=500, env=env)
            said = done.stdout + done.stderr
            self.assertIn("\n1 ranks: 1\n", said)
            self.assertIn(f"lockstep/{VERSION}", said)
            files = {path.name for path in (here / "p").rglob("p/lib/*")}
            self.assertTrue({"liblockstep_comm.so", "liblockstep_comm.a"} <= files, files)
            self.assertNotIn("liblockstep_nn.so", files)
            done = run([*conan, "graph", "info", checkout / "packaging/conan", "-o", "&:components=comm,trumpets", "-pr:a",
                        here / "profile", "--no-remote"], env=env)
            self.assertIn("no component 'trumpets': there are comm, ddp, c, nn, trainer", done.stdout + done.stderr)


class Others(unittest.TestCase):
    def test_vcpkgs_manifest(self):
        manifest = json.loads((SOURCE / "packaging/vcpkg/vcpkg.json").read_text())
        self.assertEqual(manifest["version-semver"], VERSION)
        self.assertEqual(set(manifest), {"name", "version-semver", "description", "license", "supports", "dependencies",
                                         "default-features", "features"})
        features = manifest["features"]
        self.assertLessEqual(set(manifest["default-features"]), set(features))
        for one in (manifest, *features.values()):
            for dependency in one["dependencies"]:
                if isinstance(dependency, dict):
                    self.assertLessEqual(set(dependency), {"name", "host", "default-features", "features"})
                    self.assertLessEqual(set(dependency.get("features", ())), set(features))

    # With functions in place of vcpkg's that print what they are called with.
    def test_vcpkgs_port(self):
        port = SOURCE / "packaging/vcpkg"
        with tempfile.TemporaryDirectory() as directory:
            stand_in = pathlib.Path(directory, "vcpkg.cmake")
            names = ("check_linkage", "cmake_configure", "cmake_install", "cmake_config_fixup", "fixup_pkgconfig",
                     "install_copyright")
            stand_in.write_text("cmake_minimum_required(VERSION 3.25)\n" + "".join(f'function(vcpkg_{name})\nmessage(STATUS "{name} |${{ARGV}}|")\nendfunction()\n'
                                        for name in names) + f"include({port}/portfile.cmake)\n")
            for features, components in (("comm", "base;comm;ddp;c"), ("comm;nn;trainer;mpi", "base;comm;ddp;c;nn;trainer")):
                done = run(["cmake", f"-DFEATURES={features}", f"-DCURRENT_PORT_DIR={port}", "-DPORT=lockstep",
                            f"-DCURRENT_PACKAGES_DIR={directory}/packages", "-P", stand_in])
                said = dict(re.findall(r"-- (\w+) \|(.*)\|", done.stdout))
                self.assertEqual(set(said), set(names))
                source, options = re.fullmatch(r"SOURCE_PATH;(.*?);OPTIONS;(.*)", said["cmake_configure"]).groups()
                self.assertEqual(pathlib.Path(source), SOURCE)
                options = re.split(r";(?=-D)", options)
                self.assertIn(f"-DLOCKSTEP_COMPONENTS={components}", options)
                self.assertEqual("-DCMAKE_REQUIRE_FIND_PACKAGE_MPI=ON" in options, "mpi" in features)
                check_variables(self, options)
                self.assertTrue(pathlib.Path(directory, "packages/share/lockstep/usage").exists())

    # With a module in place of Spack's that writes down what it is called with.
    def test_spacks_package(self):
        said = []
        spack = types.ModuleType("spack.package")
        for name in ("license", "version", "variant", "depends_on", "generator"):
            setattr(spack, name, lambda *words, name=name, **more: said.append((name, words, more)))

        class CMakePackage:
            def __init__(self, mpi):
                self.spec = types.SimpleNamespace(satisfies=lambda variant: {"+mpi": mpi}[variant])

            @staticmethod
            def define(name, value):
                return f"-D{name}:BOOL={'ON' if value else 'OFF'}"

        spack.CMakePackage = CMakePackage
        sys.modules |= {"spack": types.ModuleType("spack"), "spack.package": spack}
        text = (SOURCE / "packaging/spack/package.py").read_text()
        made = {}
        exec(compile(text, "package.py", "exec"), made)
        for mpi in (True, False):
            words = made["Lockstep"](mpi).cmake_args()
            self.assertEqual("-DCMAKE_REQUIRE_FIND_PACKAGE_MPI:BOOL=ON" in words, mpi)
            check_variables(self, words)
        variants = [words[0] for name, words, _ in said if name == "variant"]
        for name, words, more in said:
            if name == "depends_on" and "when" in more:
                self.assertIn(more["when"].lstrip("+"), variants)

    # All three take what the build looks for, each in its words.
    def test_each_has_all_libraries(self):
        by = {path: re.sub(r"[_-]", "", (SOURCE / "packaging" / path).read_text()) for path in
              ("conan/conanfile.py", "vcpkg/vcpkg.json", "spack/package.py")}
        for name in ("fmt", "spdlog", "openssl", "nlohmannjson", "hwloc", "onednn", "libzip", "zlib", "pcre2", "libspng",
                     "libjpegturbo", "utf8proc", "cxxopts", "tomlplusplus", "openmpi"):
            for path, text in by.items():
                self.assertIn(name, text, path)

    @unittest.skipUnless(pathlib.Path("/usr/share/modules/init/sh").exists(), "no Environment Modules")
    def test_the_modulefile(self):
        with tempfile.TemporaryDirectory() as directory:
            prefix = pathlib.Path(directory, "moved")
            run(["cmake", "--install", BUILD, "--prefix", pathlib.Path(directory, "first")])
            pathlib.Path(directory, "first").rename(prefix)
            done = run(["sh", "-c", f". /usr/share/modules/init/sh && module use {prefix}/share/lockstep/modulefiles && "
                        "module load lockstep && command -v lockstep && lockstep version && "
                        "pkg-config --modversion lockstep_comm && module unload lockstep && ! command -v lockstep"],
                       env={"PATH": "/usr/bin:/bin"})
            lines = done.stdout.splitlines()
            self.assertEqual(lines[0], f"{prefix}/bin/lockstep")
            self.assertEqual(lines[-1], VERSION)
            self.assertEqual(done.stderr, "")


if __name__ == "__main__":
    program = unittest.main(argv=[sys.argv[0], *package.others], exit=False)
    if not program.result.wasSuccessful():
        sys.exit(1)
    sys.exit(77 if program.result.skipped and len(program.result.skipped) == program.result.testsRun else 0)
