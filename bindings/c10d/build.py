#!/usr/bin/env python3
"""Builds lockstep_c10d, the torch.distributed backend "lockstep", for the Python that runs this, against its PyTorch and an
installed lockstep. About a minute on two cores; it needs a C++20 compiler and nothing else.

  python3 /opt/lockstep/share/lockstep/bindings/c10d/build.py              # into this Python's site-packages
  python3 …/build.py --out DIR                                            # into DIR, for PYTHONPATH
  python3 …/build.py --prefix /opt/lockstep                               # a lockstep elsewhere than these files
"""
import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
OLDEST = (2, 7)


class Refused(Exception):
    pass


def library_directory(prefix: pathlib.Path) -> pathlib.Path:
    for library in sorted(prefix.glob("lib*/**/liblockstep_comm.so")):
        if (prefix / "include/lockstep/comm/key_value_store.h").exists():
            return library.parent
    raise Refused(f"no lockstep with the component comm in {prefix} → --prefix DIR, where cmake --install has put it")


def torch_flags() -> tuple:
    """What compiles and links an extension of this Python's PyTorch."""
    try:
        import torch
    except ImportError as error:
        raise Refused(f"{sys.executable} has no PyTorch ({error}) → run this with the Python that trains") from error
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if (int(version[1]), int(version[2])) < OLDEST:
        raise Refused(f"PyTorch {torch.__version__} is too old → take {OLDEST[0]}.{OLDEST[1]} or newer")
    if not torch.distributed.is_available():
        raise Refused(f"PyTorch {torch.__version__} was built without torch.distributed")
    if not torch.compiled_with_cxx11_abi():
        raise Refused("this PyTorch was built for the C++ ABI before C++11, and lockstep was not")
    root = pathlib.Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise Refused(f"no Python.h in {sysconfig.get_path('include')} → install the package python3-dev")
    compile_flags = [f"-isystem{path}" for path in include] + ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED"]
    # How pybind11 of that build names its types, where it says so.
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        if (value := getattr(torch._C, f"_PYBIND11_{name}", None)) is not None:
            compile_flags.append(f'-DPYBIND11_{name}="{value}"')
    libraries = root / "lib"
    # Not libtorch.so: it brings CUDA's libraries along, which PyTorch itself has loaded if it has them.
    return compile_flags, [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def run(argv: list) -> None:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{shlex.join(str(word) for word in argv)}\n{done.stdout}{done.stderr}".rstrip())


def build(prefix: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    libraries = library_directory(prefix)
    compile_flags, link_flags = torch_flags()
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    package = out / "lockstep_c10d"
    with tempfile.TemporaryDirectory(prefix="lockstep-c10d-") as directory:
        scratch = pathlib.Path(directory)
        # PyTorch's headers are most of what is compiled, those for Python the larger half: once for each.
        whole = scratch / "backend.cpp"
        sources = sorted(path for path in HERE.glob("*.cpp") if path.name != "module.cpp")
        whole.write_text("".join(f'#include "{path}"\n' for path in sources))

        def compiled(source: pathlib.Path) -> pathlib.Path:
            target = scratch / f"{source.stem}.o"
            run([*compiler, "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{HERE.parents[1]}", f"-I{prefix / 'include'}",
                 *compile_flags, *shlex.split(os.environ.get("CXXFLAGS", "")), "-c", source, "-o", target])
            return target

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compiled, [whole, HERE / "module.cpp"]))
        library = scratch / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        run([*compiler, "-shared", *objects, "-o", library, f"-L{libraries}", "-llockstep_comm",
             f"-Wl,-rpath,{libraries}", *link_flags])
        package.mkdir(parents=True, exist_ok=True)
        for old in package.glob("_C.*"):
            old.unlink()
        for path in [library, *(HERE / "lockstep_c10d").glob("*.py")]:
            shutil.copy(path, package)
    return package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=pathlib.Path, default=HERE.parents[3],
                        help="where lockstep is installed; default: where this file is")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(sysconfig.get_path("platlib")),
                        help="where the package goes; default: %(default)s")
    options = parser.parse_args()
    try:
        print(f"built {build(options.prefix.absolute(), options.out.absolute())}")
    except (Refused, OSError) as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
