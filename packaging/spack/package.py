# lockstep for Spack: packaging/README.md says how to use it from a checkout.
from spack.package import *


class Lockstep(CMakePackage):
    """Data-parallel training with one process per device: collectives, a gradient reducer, models and a trainer."""

    license("Apache-2.0")

    # No release is published yet: `spack develop` gives the checkout.
    version("develop")

    variant("mpi", default=True, description="Ranks of mpirun, and communicators of MPI")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("ninja", type="build")

    depends_on("fmt@9:")
    depends_on("spdlog@1.10:")
    depends_on("openssl@3:")
    depends_on("nlohmann-json@3.10:")
    depends_on("hwloc@2.7:")
    depends_on("onednn@2.6: cpu_runtime=omp")
    depends_on("libzip@1.7:")
    depends_on("zlib-api")
    depends_on("pcre2@10.40:")
    depends_on("libspng@0.7:")
    depends_on("libjpeg-turbo@2.1:")
    depends_on("utf8proc@2.7:")
    depends_on("cxxopts@3:")
    depends_on("tomlplusplus@3.3:")
    depends_on("openmpi@4.1:", when="+mpi")

    generator("ninja")

    def cmake_args(self):
        # GPUs need cudnn-frontend, for which Spack has no package.
        mpi = "REQUIRE" if self.spec.satisfies("+mpi") else "DISABLE"
        return [
            self.define("BUILD_TESTING", False),
            self.define("LOCKSTEP_CCACHE", False),
            self.define("CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit", True),
            self.define(f"CMAKE_{mpi}_FIND_PACKAGE_MPI", True),
        ]
