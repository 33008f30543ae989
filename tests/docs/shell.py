"""Shell commands in a directory of their own, as somebody with build/ in the PATH types them."""
import os
import pathlib
import signal
import subprocess


def environment(build: pathlib.Path) -> dict:
    """No job's rank, no GPU, one epoch where a command names no number; as many ranks as a command asks for."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(
        ("OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_", "LOCKSTEP_", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE"))}
    return ours | {
        "PATH": f"{build}:{build / 'examples'}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "LOCKSTEP_EPOCHS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_WAIT_POLICY": "passive",
        "HWLOC_COMPONENTS": "-gl",
    }


def run(script: str, directory: pathlib.Path, build: pathlib.Path, seconds: int = 180):
    """Runs a script until its first failure, jobs in the background included. What is left after `seconds` is ended."""
    script = f"set -e\n{script}\nfor job in $(jobs -p); do wait $job; done\n"
    process = subprocess.Popen(["bash", "-c", script], cwd=directory, env=environment(build), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=os.setpgrp)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        err += f"\nended after {seconds} s"
    return subprocess.CompletedProcess(script, process.returncode, out, err)
