"""The planted defects of the directories beside this still apply, one by one, and name tests that there are.
scripts/try-mutants tries them.

Usage: mutants_test.py --source DIR --build DIR KIND...; a kind is the name of a directory. git apply works in any directory: the
source need be no repository.
"""
import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile


@dataclasses.dataclass(frozen=True)
class Mutant:
    path: pathlib.Path
    what: str
    programs: tuple  # the targets to build
    test: str        # ctest's name of it
    message: str     # a regular expression for what the test prints

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def kind(self) -> str:
        return self.path.parent.name

    @property
    def files(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(.*)$", self.path.read_text(), re.MULTILINE)


def read_mutants(source: pathlib.Path) -> list[Mutant]:
    mutants = []
    for path in sorted((source / "tests/mutants").glob("*/*.patch")):
        header = dict(line.split(": ", 1) for line in path.read_text().split("\n\n", 1)[0].splitlines())
        if path.parent.name == "simulation":
            header = {"Program": "lockstep simulated_job simulated_system", "Test": "simulation_schedules", **header}
        mutants.append(Mutant(path, header["What"], tuple(header["Program"].split()), header["Test"], header["Message"]))
    return mutants


def problem_of(mutant: Mutant, source: pathlib.Path) -> str:
    with tempfile.TemporaryDirectory() as directory:
        tree = pathlib.Path(directory)
        for name in mutant.files:
            if not (source / name).is_file():
                return f"there is no {name}"
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, tree / name)
        done = subprocess.run(["git", "apply", "--check", str(mutant.path)], cwd=tree, text=True,
                              env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout.strip() if done.returncode != 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("kinds", metavar="KIND", nargs="+")
    given = parser.parse_args()
    mutants = [mutant for mutant in read_mutants(given.source.resolve()) if mutant.kind in given.kinds]
    listed = subprocess.run(["ctest", "--test-dir", given.build, "-N"], text=True, stdout=subprocess.PIPE, check=True)
    tests = set(re.findall(r"Test +#\d+: (\S+)", listed.stdout))
    problems = 0
    for mutant in mutants:
        problem = problem_of(mutant, given.source)
        if not problem and mutant.test not in tests:
            problem = f"there is no test {mutant.test}"
        if not problem:
            try:
                re.compile(mutant.message)
            except re.error as error:
                problem = f"\"{mutant.message}\": {error}"
        if problem:
            problems += 1
            print(f"{mutant.path.name}: {problem}\n    make the patch again from the file as it is now", file=sys.stderr)
    print(f"{len(mutants)} mutants, {problems} of them with a problem")
    return 0 if {mutant.kind for mutant in mutants} == set(given.kinds) and problems == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
