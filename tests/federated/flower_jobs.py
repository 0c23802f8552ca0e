"""Runs in the environment of Flower: plays a job in Flower's own simulation, and prints JSON.

python -m tests.federated.flower_jobs JOB.json
"""

import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as mods
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies
from flwr.simulation import run_simulation
from flwr.supercore.privacy_accounting import SamplingMethod
from flwr.supercore.task_identity import TaskIdentity

from odtpack.flower import (
    client_app,
    fleet_data,
    guarded,
    initial_arrays,
    legacy_mod,
    named_arrays,
    save_checkpoint,
    server_evaluation,
)
from odtpack.flower.client import client_number
from odtpack.flower.records import to_arrays, to_record

logging.getLogger("flwr").setLevel(logging.ERROR)


def hostile(app: ClientApp, attacks: dict[str, str]) -> ClientApp:
    """The app, in which some clients send what they should not."""

    def spoil(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        kind = attacks.get(str(client_number(context)))
        if kind is None or reply.has_error() or "arrays" not in reply.content:
            return reply
        arrays = {k: v.copy() for k, v in to_arrays(reply.content["arrays"]).items()}
        name = max(arrays, key=lambda key: arrays[key].size)
        if kind == "nan":
            arrays[name].flat[0] = np.nan
        elif kind == "shape":
            arrays[name] = arrays[name].reshape(-1)
        elif kind == "huge":
            arrays[name] += np.float32(1e4)
        elif kind == "order":
            arrays = dict(reversed(arrays.items()))
        elif kind == "name":
            arrays["unheard of"] = arrays.pop(name)
        content = reply.content
        if kind == "owner":  # against what it learned, and of more samples than there are
            begun = to_arrays(message.content["arrays"])
            arrays = {k: (10 * begun[k] - 9 * v).astype(v.dtype) for k, v in arrays.items()}
            content["metrics"]["num-examples"] = 10**9
        metrics = {
            "weight": {"num-examples": -5}, "loss": {"train_loss": np.nan},
            "metrics": {"more": 1.0}, "seconds": {"seconds": np.inf},
        }  # fmt: skip
        content["metrics"].update(metrics.get(kind, {}))
        content["arrays"] = to_record(arrays)
        if kind == "archive":  # which NumPy opens as well
            stream = io.BytesIO()
            np.savez(stream, **arrays)
            content["arrays"][name].data = stream.getvalue()
        return Message(content, reply_to=message)

    wrapped = ClientApp(mods=[spoil])
    inner = app

    @wrapped.train()
    def train(message: Message, context: Context) -> Message:
        return inner(message, context)

    @wrapped.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        reply = inner(message, context)
        kind = attacks.get(str(client_number(context)))
        if kind == "metrics" and not reply.has_error():
            del reply.content["metrics"]["loss"]
        elif kind == "evaluation" and not reply.has_error():
            reply.content["metrics"]["loss"] = np.nan
        return reply

    return wrapped


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Settings of Flower's engine; a process of its clients takes as long to start as a round."""
    processes = job.get("processes", 1)
    return {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": processes}}


def simulate(job: dict[str, Any]) -> dict[str, Any]:
    app = client_app(
        job["package"], fleet_data(job["fleet"], job["package"], job["data"]),
        mods=[getattr(mods, name) for name in job.get("mods", ())], **job["client"],
    )  # fmt: skip
    if job.get("attacks"):
        app = hostile(app, job["attacks"])
    found: dict[str, Any] = {"refused": []}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = getattr(strategies, job.get("strategy", "FedAvg"))(
            fraction_train=1.0, fraction_evaluate=job.get("evaluate", 0.0), **job.get("options", {})
        )
        if "private" in job:
            kind, settings = job["private"]
            strategy = getattr(strategies, kind)(strategy, **settings)
        strategy = guarded(
            strategy, job["package"], on_refused=lambda *what: found["refused"].append(what),
            **job.get("guarded", {}),
        )  # fmt: skip
        result = strategy.start(
            grid, initial_arrays(job["package"]), num_rounds=job["rounds"],
            train_config=ConfigRecord(job["train_config"]) if "train_config" in job else None,
            evaluate_fn=server_evaluation(job["package"], job.get("held_out", job["data"])),
        )  # fmt: skip
        save_checkpoint(job["package"], result.arrays, job["out"])
        found["server"] = {k: dict(v) for k, v in result.evaluate_metrics_serverapp.items()}
        found["train"] = {k: dict(v) for k, v in result.train_metrics_clientapp.items()}
        found["clients"] = {k: dict(v) for k, v in result.evaluate_metrics_clientapp.items()}

    run_simulation(server, app, num_supernodes=job["clients"], backend_config=engine(job))
    return found


def secure(job: dict[str, Any]) -> dict[str, Any]:
    """FedAvg by SecAgg+; those of ``job["diverged"]`` come to NaN, and say so."""
    package = job["package"]
    data = fleet_data(job["fleet"], package, job["data"])

    def samples(context: Context) -> Any:
        arrays, indices = data(context)
        if client_number(context) in job["diverged"]:
            arrays = {**arrays, "input": np.full_like(arrays["input"], np.nan)}
        return arrays, indices

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        """Note what leaves a client."""
        reply = call_next(message, context)
        masked = reply.content["secaggplus_configs"].get("masked_params", [])
        sent = {
            "arrays": sum(map(len, reply.content.array_records.values())),
            "metrics": [dict(each) for each in reply.content.metric_records.values()],
            "masked": [float(bytes_to_ndarray(each).mean()) for each in masked],
        }
        with (Path(job["out"]).parent / "sent.jsonl").open("a") as stream:
            stream.write(json.dumps(sent) + "\n")
        return reply

    app = client_app(
        package, samples, mods=[spy, secaggplus_mod, legacy_mod(package)], **job["client"]
    )
    found: dict[str, Any] = {"server": {}}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        evaluate = server_evaluation(package, job.get("held_out", job["data"]))

        def evaluated(number: int, arrays: list[np.ndarray], _config: Any) -> Any:
            metrics = dict(evaluate(number, named_arrays(package, arrays)))
            found["server"][number] = metrics
            return metrics["loss"], {}

        strategy = FedAvg(
            fraction_fit=1.0, fraction_evaluate=0.0, min_available_clients=job["clients"],
            initial_parameters=ndarrays_to_parameters(initial_arrays(package).to_numpy_ndarrays()),
            evaluate_fn=evaluated, on_fit_config_fn=lambda number: {"server-round": number},
        )  # fmt: skip
        legacy = LegacyContext(context, ServerConfig(num_rounds=job["rounds"]), strategy)
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(**job["secure"]))(grid, legacy)
        learned = legacy.state.array_records["parameters"].to_numpy_ndarrays()
        save_checkpoint(package, named_arrays(package, learned), job["out"])

    run_simulation(server, app, num_supernodes=job["clients"], backend_config=engine(job))
    return found


def by_hand(job: dict[str, Any]) -> dict[str, Any]:
    """Rounds of one ClientApp without an engine, its context kept from round to round."""
    app = client_app(
        job["package"], fleet_data(job["fleet"], job["package"], job["data"]), **job["client"]
    )
    context = Context(
        run_id=1, node_id=7, node_config={"partition-id": 0}, state=RecordDict(), run_config={}
    )
    # What an engine sets before it makes messages.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    arrays: ArrayRecord = initial_arrays(job["package"])
    steps = []
    kinds = [*(("train", extra) for extra in job["configs"]), ("evaluate", {})]
    for number, (kind, extra) in enumerate(kinds, 1):
        content = RecordDict(
            {"arrays": arrays, "config": ConfigRecord({"server-round": number, **extra})}
        )
        reply = app(Message(content, dst_node_id=7, message_type=kind), context)
        if reply.has_error():
            steps.append({"code": reply.error.code, "reason": reply.error.reason})
            continue
        kept = context.state.array_records.get("odtpack.optimizer")
        answer = to_arrays(reply.content["arrays"]) if kind == "train" else {}
        moves = [(answer[n] - a).ravel() for n, a in to_arrays(arrays).items() if n in answer]
        steps.append({
            "metrics": dict(reply.content["metrics"]),
            "moves": np.concatenate(moves or [[]]).tolist(),
            "step": None if kept is None else int(kept["step"].numpy()),
        })  # fmt: skip
    return {"steps": steps}


def accounted(job: dict[str, Any]) -> dict[str, Any]:
    """What Flower's accounting of privacy says around a guarded strategy, and within one."""
    sampling = SimpleNamespace(sampling_method=SamplingMethod.NO_AMPLIFICATION)

    def private(strategy: Any) -> Any:
        return strategies.DifferentialPrivacyServerSideFixedClipping(
            strategy, noise_multiplier=1.0, clipping_norm=0.1, num_sampled_clients=5,
            accountant=SimpleNamespace(config=sampling),
        )  # fmt: skip

    guarded(private(strategies.FedAvg()), job["package"])
    found = []
    for aggregate in ("mean", "median"):
        inner = guarded(strategies.FedAvg(), job["package"], aggregate=aggregate)
        try:
            private(inner)
        except ValueError as error:
            found.append(str(error))
    return {"said": found}


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    tasks = {"simulate": simulate, "by_hand": by_hand, "secure": secure, "accounted": accounted}
    done = tasks[wanted["task"]](wanted)
    print("\n" + json.dumps(done))
