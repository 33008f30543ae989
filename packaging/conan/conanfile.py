"""lockstep for Conan 2: `conan create packaging/conan`. packaging/README.md says how to take libraries of the system."""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

# What each component needs besides those before it.
COMPONENTS = ("comm", "ddp", "c", "nn", "trainer")
LIBRARIES = {
    "base": ("fmt/[>=9 <13]", "spdlog/[>=1.10 <2]", "openssl/[>=3 <4]", "nlohmann_json/[>=3.10 <4]"),
    "comm": ("hwloc/[>=2.7 <3]",),
    "nn": ("onednn/[>=2.6 <4]", "libzip/[>=1.7 <2]", "zlib/[>=1.2.11 <2]"),
    "trainer": ("pcre2/[>=10.40 <11]", "libspng/[>=0.7 <1]", "libjpeg-turbo/[>=2.1 <4]", "utf8proc/[>=2.7 <3]",
                "cxxopts/[>=3 <4]", "tomlplusplus/[>=3.3 <4]"),
}
NEEDS = {"comm": ("base",), "ddp": ("base", "comm"), "c": ("base", "comm"), "nn": ("base", "nn"),
         "trainer": ("base", "comm", "nn", "trainer")}


class Lockstep(ConanFile):
    name = "lockstep"
    license = "Apache-2.0"
    description = "Data-parallel training: one process per device, collectives, gradient reducer, models and trainer"
    topics = ("distributed-training", "deep-learning", "collectives", "mpi", "nccl")
    settings = "os", "arch", "compiler", "build_type"
    # components: "all", which has the program too, or some of COMPONENTS, separated by ','. Each package has shared and
    # static libraries.
    options = {"components": ["ANY"], "mpi": [True, False], "cuda": [True, False]}
    default_options = {"components": "all", "mpi": True, "cuda": False}

    @property
    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def _components(self):
        chosen = str(self.options.components)
        return COMPONENTS if chosen == "all" else tuple(chosen.split(","))

    def set_version(self):
        text = load(self, os.path.join(self._root, "CMakeLists.txt"))
        self.version = re.search(r"project\(lockstep VERSION ([\d.]+)", text)[1]

    def export_sources(self):
        modules = [name for name in os.listdir(self._root) if os.path.isfile(os.path.join(self._root, name, "CMakeLists.txt"))]
        for place in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "docker/*",
                      *(f"{name}/*" for name in modules if name != "tests")):
            copy(self, place, self._root, self.export_sources_folder, excludes="*/__pycache__/*")

    def validate(self):
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("lockstep is for Linux")
        for name in self._components():
            if name not in COMPONENTS:
                raise ConanInvalidConfiguration(f"components: no component '{name}': there are {', '.join(COMPONENTS)}, "
                                                "separated by ',', or all")

    def requirements(self):
        wanted = [group for name in self._components() for group in NEEDS.get(name, ())]
        for reference in dict.fromkeys(one for group in wanted for one in LIBRARIES[group]):
            self.requires(reference)
        if self.options.mpi and "comm" in wanted:
            self.requires("openmpi/[>=4.1 <6]")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        variables = toolchain.cache_variables
        variables["BUILD_TESTING"] = False
        variables["LOCKSTEP_CCACHE"] = False
        variables["LOCKSTEP_COMPONENTS"] = "" if self.options.components == "all" else ";".join(self._components())
        for package, wanted in (("MPI", self.options.mpi), ("CUDAToolkit", self.options.cuda)):
            variables[f"CMAKE_REQUIRE_FIND_PACKAGE_{package}" if wanted else f"CMAKE_DISABLE_FIND_PACKAGE_{package}"] = True
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # find_package(lockstep COMPONENTS …) reads lockstep's own files, as everywhere.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "lockstep")]
        self.cpp_info.libs = [f"lockstep_{name}" for name in ("base", *COMPONENTS)
                              if os.path.exists(os.path.join(self.package_folder, "lib", f"liblockstep_{name}.so"))]
