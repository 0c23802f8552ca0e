"""The app of the guide, on a SuperLink and two SuperNodes in processes of their own."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from tests.federated.play import ENVIRONMENT, ROOT, SETTINGS, WITHIN
from tests.fleet.fleets import write_digits
from tests.programs import ran

pytestmark = pytest.mark.federated
GUIDE = (ROOT / "docs" / "guides" / "federated.md").read_text()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def started(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(port: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(f"nothing listens at port {port}")


# Each node starts a process for each message, and a secure round has four.
@pytest.mark.parametrize(("which", "nodes", "rounds"), [("plain", 2, 3), ("secure", 3, 1)])
def test_the_app_of_the_guide_trains_on_real_supernodes(which, nodes, rounds, tmp_path):
    root = tmp_path / "fleet"
    root.mkdir()
    write_digits(root)
    fleet, project = re.findall(r"^```toml\n(.*?)^```$", GUIDE, re.M | re.S)
    code = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.M | re.S)
    client, server = code[:2] if which == "plain" else code[2:]
    (root / "fleet.toml").write_text(fleet)
    app = tmp_path / "app" / "federated_digits"
    app.mkdir(parents=True)
    (app.parent / "pyproject.toml").write_text(project)
    for name, text in (("__init__", ""), ("client", client), ("server", server)):
        (app / f"{name}.py").write_text(text)
    home = tmp_path / ".flwr"
    home.mkdir()
    link, *ports = free_ports(1 + nodes)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{link}"\n'
        "insecure = true\n"
    )
    binaries = ENVIRONMENT / "bin"
    environment = os.environ | SETTINGS
    environment |= {
        "HOME": str(tmp_path),
        "FLWR_HOME": str(home),
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "packager"), str(ROOT / "runtime")]),
    }

    def command(name: str, *more: str) -> list[str]:
        return [*WITHIN, "600", str(binaries / name), "--insecure", *more]

    with ExitStack() as stack:
        stack.enter_context(
            started(
                command(
                    "flower-superlink", "--disable-runtime-dependency-installation",
                    "--port", str(link),
                ),
                tmp_path / "link.log",
                environment,
            )
        )  # fmt: skip
        wait_for(link)
        for number, port in enumerate(ports):
            node = ["--superlink", f"127.0.0.1:{link}", "--port", str(port)]
            node += ["--node-config", f"partition-id={number} num-partitions={nodes}"]
            log = tmp_path / f"node{number}.log"
            stack.enter_context(started(command("flower-supernode", *node), log, environment))
        done = ran(
            *(str(binaries / "flwr"), "run", str(app.parent), "here", "--stream"),
            *("--run-config", f"num-rounds={rounds}"), code=None, env=environment, timeout=300,
        )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    of, done_in_round = {
        "plain": (f"/{rounds}", "Received 2 results and 0 failures"),
        "secure": ("", "Secure aggregation completed"),
    }[which]
    for number in range(1, rounds + 1):
        assert f"[ROUND {number}{of}]" in said
    assert said.count(done_in_round) == rounds, said
    trained = CheckpointState.load_checkpoint(root / "federated.ckpt")
    before = CheckpointState.load_checkpoint(root / "package" / "checkpoint")
    for name, parameter in trained.parameters:
        assert np.isfinite(parameter.data).all()
        assert not np.array_equal(parameter.data, before.parameters[name].data), name
