"""PyTorch's backend "lockstep" (bindings/c10d), built against the installed package and a PyTorch with Python: its operations,
PyTorch's own DDP and fully_shard over it, what failures look like, and launchers. Without PyTorch it ends with 77, which
ctest takes for skipped.

  c10d_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import os
import re
import socket
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
import package  # noqa: E402
from package import BUILD, SOURCE, run  # noqa: E402

SKIPPED = 77
PYTHON = BUILD / "peers/torch/bin/python"
PROGRAMS = SOURCE / "tests/install/c10d"


class C10d(package.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.site = cls.here / "site"
        build = cls.prefix / "share/lockstep/bindings/c10d/build.py"
        cls.built = run([PYTHON, "-W", "ignore", build, "--out", cls.site], timeout=600).stdout

    def environment(self, **more):
        tools = BUILD / "c10d/tools"  # scripts/try-c10d's, with NumPy; without it objects are left out
        return os.environ | {"PYTHONPATH": f"{self.site}:{tools}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                             "PYTHONWARNINGS": "ignore", **more}

    def ranks(self, count, program, *arguments, hosts=None, codes=None):
        """The output of each rank, which must end with `codes`, 0 unless they are given. hosts: a letter for each."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        processes = []
        for rank in range(count):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if hosts:
                variables["LOCKSTEP_HOST_NAME"] = hosts[rank]
            processes.append(subprocess.Popen([PYTHON, "-B", PROGRAMS / program, *arguments], text=True,
                                              stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                              env=self.environment(**variables)))
        outputs = []
        try:
            for process in processes:
                outputs.append(process.communicate(timeout=200))
        finally:
            for process in processes:
                process.kill()
        for rank, (process, (text, errors)) in enumerate(zip(processes, outputs)):
            self.assertEqual(process.returncode, codes[rank] if codes else 0, f"rank {rank}: {text}{errors}")
        return [text for text, _ in outputs]

    def test_operations(self):
        for count, hosts in ((1, None), (2, None), (3, None), (2, "ab"), (3, "aab")):
            with self.subTest(ranks=count, hosts=hosts):
                self.assertIn(f"{count} ranks: all operations are right", self.ranks(count, "collectives.py", hosts=hosts)[0])

    def test_training_as_over_gloo(self):
        for count, hosts in ((2, None), (3, None), (2, "ab")):
            with self.subTest(ranks=count, hosts=hosts):
                texts = self.ranks(count, "training.py", hosts=hosts)
                self.assertEqual(len(re.findall(r"^(?:ddp|sharded) on .* differ", "".join(texts), re.MULTILINE)), 2 * count)
                print("".join(texts), end="")

    def test_failures(self):
        for hosts in ("aa", "ab"):
            with self.subTest(hosts=hosts):
                late, _ = self.ranks(2, "failures.py", "late", hosts=hosts)
                self.assertEqual(len(re.findall(r"rank 0: allreduce #2 \(sum of .* timed out after .* waiting for rank 1 .*the "
                                                "timeout of init_process_group", late)), 2, late)
                dead, _ = self.ranks(2, "failures.py", "dead", hosts=hosts, codes=[0, -9])
                self.assertRegex(dead, r"rank 0: rank 1 \(host .*, pid \d+\) has ended")
        for text in self.ranks(2, "failures.py", "different"):
            self.assertRegex(text, r"out of step: rank . .*sum of 100[01] f32.*sum of 100[01] f32")

    def test_ends_without_destroying_the_group(self):
        for case, hosts in (("left", "ab"), ("alone", "aa")):
            with self.subTest(case=case, hosts=hosts):
                self.assertEqual(self.ranks(2, "failures.py", case, hosts=hosts), ["rank 0: left\n", "rank 1: left\n"])

    def test_a_rank_that_never_comes(self):
        self.assertIn("waiting for rank 1, which has not joined", self.ranks(2, "failures.py", "absent")[0])

    def test_launchers(self):
        program = PROGRAMS / "collectives.py"
        for argv in ([self.prefix / "bin/lockstep", "launch", "-n", "2", "--", PYTHON, "-B", program],
                     [PYTHON, "-B", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", program]):
            done = run(argv, env=self.environment())
            self.assertIn("2 ranks: all operations are right", done.stdout)

    def test_what_cannot_be_built(self):
        build = self.prefix / "share/lockstep/bindings/c10d/build.py"
        for argv, wanted in (([PYTHON, "-W", "ignore", build, "--prefix", self.here / "nothing"], "no lockstep with the component comm"),
                             ([sys.executable, "-I", build], "has no PyTorch")):
            if "no PyTorch" in wanted and subprocess.run([sys.executable, "-I", "-c", "import torch"],
                                                         capture_output=True).returncode == 0:
                continue
            self.assertIn(wanted, run(argv, code=1).stderr)


if __name__ == "__main__":
    if not PYTHON.exists():
        print("skipped: PyTorch is not there → bench/peers/setup torch")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *package.others])
