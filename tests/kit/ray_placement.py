"""A program that asks launcher `ray` where runs get their GPUs, in the current folder, and prints the answers as JSON.

Two nodes of two GPUs each (logical ones: Ray counts them) and, later, a third node whose view of the current folder is
hidden by a mount of its own, which needs root.
"""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from retrain.api import BackendError, Job
from retrain.campaign.ray_launcher import Options, RayLauncher

TELLS = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], os.getppid(), flush=True); time.sleep(5)"
HIDES = "mount -t tmpfs none {folder} && cd / && exec {python} -m ray.scripts.scripts start {options} --block"


def job(name: str, num_gpus: int) -> Job:
    """A run that tells its GPUs and its worker, and takes a while."""
    folder = Path(name)
    folder.mkdir()
    argv = (sys.executable, "-c", TELLS)
    return Job(name=name, argv=argv, environ={}, cwd=Path.cwd(), folder=folder, num_gpus=num_gpus)


def main() -> None:
    """Two runs of two GPUs side by side, one that is too large, and one beside a node that sees nothing."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=2, num_gpus=2)
    ray.init(address=made.address, log_to_driver=False)
    launcher, told = RayLauncher(Options(), has_gpus=True), list[str]()
    logging.getLogger("retrain").addFilter(lambda record: told.append(record.getMessage()) is None)
    jobs = [launcher.start(job(name, 2)) for name in ("a", "b")]
    while any(each.poll() is None for each in jobs):
        time.sleep(0.1)
    large = launcher.start(job("c", 8))
    large.stop()

    options = f"--address={made.address} --num-cpus=1"
    hides = HIDES.format(folder=Path.cwd(), python=sys.executable, options=options)
    null = subprocess.DEVNULL
    blind = subprocess.Popen(["unshare", "--mount", "sh", "-c", hides], stdout=null, stderr=null)
    while sum(node["Alive"] for node in ray.nodes()) < 4:
        assert blind.poll() is None, "the third node did not start"
        time.sleep(0.2)
    refusal = ""
    try:
        RayLauncher(Options(), has_gpus=True).start(job("d", 0))
    except BackendError as error:
        refusal = str(error)
    blind.terminate()
    blind.wait()
    ray.shutdown()
    made.shutdown()
    said = [Path(name, "stdout.log").read_text().split() for name in ("a", "b")]
    print(json.dumps({"codes": [each.poll() for each in jobs], "said": said, "refusal": refusal, "told": told}))


if __name__ == "__main__":
    main()
