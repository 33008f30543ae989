"""What compiles and links an extension of the PyTorch that the Python which runs this has, as JSON on stdout; or one line on
stderr, and exit code 1.

pip builds packages in an environment of their own, whose PyTorch would be another one than the user's. It is made by
PYTHONPATH: `python -E`, as CMakeLists.txt calls this, sees the user's."""
import json
import pathlib
import re
import sys
import sysconfig

OLDEST = (2, 7)


def find():
    try:
        import torch
    except ImportError as error:
        return None, (f"{sys.executable} has no PyTorch ({error}) → install it there first; or, where the environment that "
                      "builds is another one (uv, python -m build), build without isolation")
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if (int(version[1]), int(version[2])) < OLDEST:
        return None, f"PyTorch {torch.__version__} is too old → take {OLDEST[0]}.{OLDEST[1]} or newer"
    if not torch.distributed.is_available():
        return None, f"PyTorch {torch.__version__} was built without torch.distributed → take another build of it"
    if not torch.compiled_with_cxx11_abi():
        return None, "this PyTorch was built for the C++ ABI before C++11, and lockstep was not → take another build of it"
    root = pathlib.Path(torch.__file__).parent
    # How pybind11 of that build names its types, where it says so.
    names = {name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
    return {"version": torch.__version__, "cuda": torch.version.cuda or "",
            "include": f"{root / 'include'};{root / 'include/torch/csrc/api/include'}",
            "libraries": str(root / "lib"),
            "definitions": ";".join(f'PYBIND11_{name}="{value}"' for name, value in names.items() if value is not None)}, ""


if __name__ == "__main__":
    if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
        sys.exit(f"no Python.h in {sysconfig.get_path('include')} → install the package python3-dev")
    found, problem = find()
    if found is None:
        sys.exit(problem)
    print(json.dumps(found))
