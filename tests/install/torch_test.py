"""lockstep's component `torch`, built against LibTorch and the installed package alone: its tests on 1 to 3 ranks, and its
example. Without LibTorch it ends with 77, which ctest takes for skipped.

  torch_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import re
import shutil
import sys
import unittest

sys.dont_write_bytecode = True
import package  # noqa: E402
from package import SOURCE, run  # noqa: E402

SKIPPED = 77
TORCH = package.libtorch()


class LibTorch(package.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        source = cls.here / "consumer"
        shutil.copytree(SOURCE / "tests/install/torch", source)
        shutil.copytree(SOURCE / "examples", cls.here / "examples")
        cls.configure(source, f"-DLOCKSTEP_TORCH={TORCH}", f"-DEXAMPLES={cls.here / 'examples'}")
        run(["cmake", "--build", source / "build", "--parallel", "2"], timeout=800)
        cls.tests, cls.example = source / "build/tests", source / "build/libtorch"

    # The programs begin with lockstep/torch.h, which has no more than the other one of the three.
    def test_a_header_compiles_alone(self):
        include = self.prefix / "include"
        headers = {str(path.relative_to(include)) for path in include.rglob("*.h")}
        self.assertEqual({header for header in headers if "torch" in header},
                         {"lockstep/torch.h", "lockstep/torch/distributed_data_parallel.h", "lockstep/torch/tensors_of.h"})
        self.compile_headers(["lockstep/torch/tensors_of.h"], f"-isystem{TORCH / 'include'}",
                             f"-isystem{TORCH / 'include/torch/csrc/api/include'}")

    def test_on_ranks(self):
        for count, group, wanted in ((1, "tcp", "self"), (2, "tcp", "shm"), (3, "tcp", "shm"), (2, "hosts1", "hosts")):
            with self.subTest(ranks=count, group=group):
                done = self.ranks(count, self.tests, group=group)
                self.assertIn(f"over {wanted}\n", done.stdout)
                self.assertRegex(done.stdout, r"\[  PASSED  \] [3-9]\d tests")

    def test_a_step_that_one_rank_leaves_out(self):
        done = self.ranks(2, self.tests, "step", code=5)
        self.assertRegex(done.stderr, "out of step: rank [01] .* step [23]")

    def test_nothing_of_cuda_is_linked(self):
        needed = re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-d", self.example]).stdout)
        self.assertEqual(sorted(name for name in needed if re.match("libtorch|libc10|libcu", name)),
                         ["libc10.so", "libtorch_cpu.so"])

    def trained(self, ranks):
        """The losses of the epochs, and each rank's accuracy and hash."""
        argv = [self.prefix / "bin/lockstep", "launch", "-n", ranks, "--", self.example, SOURCE / "data/digits/digits.bin"]
        text = run(argv).stdout
        losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", text)]
        ends = re.findall(rf"rank (\d) of {ranks}: accuracy (\S+) %, parameters' hash (\w{{16}})", text)
        self.assertEqual(sorted(rank for rank, _, _ in ends), [str(rank) for rank in range(ranks)], text)
        return losses, ends

    def test_the_example_trains_as_one_process_does(self):
        alone, _ = self.trained(1)
        self.assertEqual(len(alone), 5)
        self.assertLess(alone[-1], 0.3)
        for ranks in (2, 3):
            losses, ends = self.trained(ranks)
            differences = [abs(one - other) for one, other in zip(alone, losses, strict=True)]
            print(f"{ranks} ranks: losses differ by at most {max(differences):.1e} from one process")
            self.assertLess(max(differences), 1e-6)
            self.assertEqual(len({(accuracy, hashed) for _, accuracy, hashed in ends}), 1, ends)
            self.assertGreater(float(ends[0][1]), 88)


if __name__ == "__main__":
    if TORCH is None:
        print(f"skipped: {package.NO_LIBTORCH}")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *package.others])
