"""The wheel of the program (pyproject.toml): built, installed where nothing of lockstep is, and run; and the same of its source
distribution. Needs a network for pip.

  wheel_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import sys
import unittest

sys.dont_write_bytecode = True
import package  # noqa: E402
from package import SOURCE, run  # noqa: E402


class Wheel(package.WithFiles):
    def check(self, what):
        """Installs it in a new environment, and trains with its program in an environment that names nothing else."""
        environment = self.here / "environment"
        run([sys.executable, "-m", "venv", "--clear", environment])
        run([environment / "bin/pip", "install", "--no-deps", what], timeout=1800)
        env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(self.here), "LC_ALL": "C.UTF-8"}
        trained = run(["lockstep", "launch", "-n", "2", "--", "lockstep", "train", "cnn", "--data", "digits", "--epochs", "20",
                       "--threads", "1"], env=env, cwd=self.here)
        self.assertRegex(trained.stdout, r"accuracy 9[78]\.\d\d %  loss ")
        version = run(["lockstep", "version"], env=env).stdout
        self.assertIn("without          MPI", version)
        self.assertIn("without          CUDA", version)
        self.assertTrue((environment / "share/man/man1/lockstep.1").exists())

    def test_the_program_in_one_command(self):
        wheel = run([SOURCE / "scripts/build-wheel", "--program", sys.executable], timeout=1800).stdout.splitlines()[-1]
        self.assertRegex(wheel, r"/lockstep-[\d.]+-py3-none-manylinux_\d+_\d+_x86_64\.whl$")
        self.check(wheel)

    def test_its_sources(self):
        self.check(run([SOURCE / "scripts/build-wheel", "--program", "--sdist", sys.executable], timeout=300).stdout.splitlines()[-1])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *package.others])
