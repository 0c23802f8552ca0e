"""Writes models with every exporter, trains each file beside PEFT, and keeps what came of it.

    python -m benchmarks.exporters                     # all of them
    python -m benchmarks.exporters --exporter optimum --model t5

The record, ``benchmarks/exporters/record.json``, has the last outcome of each file;
``scripts/generate_docs`` makes docs/exporters.md of it. Exit code 1 if a file is trained wrongly.
"""

import copy
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from benchmarks import apart
from benchmarks.exporters.write import EXPORTERS, SUBJECTS, Exporter, Subject, hand_over, write_all
from odtpack.adapters import AdapterSpec
from odtpack.errors import OdtpackError
from scripts.harness import ROOT, keep, options, scratch
from scripts.record_tables import EXPORTED
from tests.adapters import test_follow_peft as peft_tests
from tests.adapters.test_follow_peft import ALPHA, RANK, follow
from tests.adapters.written.models import HEADS
from tests.adapters.written.values import LINEAR, Undecided, matrices, take_over

UNLIKE, ROUNDED = 2e-3, 0.1
BATCHES = 60  # at most, where data are rounded
SEEDS, AS_PYTORCH = range(4, 10), 1.25  # batches, and what chance makes of the mean over them
HALF_SHARE = 3e-2  # of a file in float16, whose gradients are off by 0.5 %, in PyTorch too


def _root_mean_square(module: nn.Module) -> None:
    for each in module.modules():
        if type(each).__name__ == "OlmoLayerNorm":
            each.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _uncapped(module: nn.Module) -> None:
    for each in module.modules():
        if hasattr(each, "attn_logit_softcapping"):
            each.attn_logit_softcapping = None


_DIFFERENT: dict[tuple[str, str], tuple[str, Callable[[nn.Module], None]]] = {
    ("genai-*", "olmo"): ("genai's builder writes RMSNorm for OLMo's LayerNorm", _root_mean_square),
    **dict.fromkeys(
        (("optimum*", "gemma2"), ("olive-*", "gemma2"), ("ort-*", "gemma2")),
        ("optimum leaves out the soft cap of Gemma 2's attention", _uncapped),
    ),
}
"""Where an exporter writes something else than its model, by patterns of both: what it writes, and
what makes the module the same. An adapter is trained beside that: the file is tried as well."""


def as_written(exporter: str, model: str, module: nn.Module) -> str | None:
    """Change a module to what the exporter writes; says what that is, None for the model itself."""
    for (pattern, name), (said, change) in _DIFFERENT.items():
        if name == model and fnmatchcase(exporter, pattern):
            change(module)
            return said
    return None


def loss_of(subject: Subject) -> tuple[str, Any]:
    """The loss by its name, and PyTorch's."""
    own = peft_tests.next_token if subject.loss == "next_token" else nn.functional.cross_entropy
    return subject.loss, lambda output, labels: own(output.logits, labels)


def unlike(
    model: Path | bytes, module: nn.Module, subject: Subject, batch: dict[str, np.ndarray]
) -> float:
    """How far ONNX Runtime's logits of a file are from the module's, with an empty cache."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    inputs = {each.name: each for each in session.get_inputs()}
    known = {name: batch[name] for name in inputs if name in batch}
    feeds = dict(known)
    for name, each in inputs.items():
        if name not in known:
            heads = each.shape[1] if isinstance(each.shape[1], int) else HEADS
            kind = np.float16 if "float16" in each.type else np.float32
            feeds[name] = np.zeros([len(batch["labels"]), heads, 0, subject.head_size], kind)
    try:
        found = session.run(["logits"], feeds)[0].astype(np.float32)
    except Exception:
        return 0.0
    with torch.no_grad():
        wanted = module(**{name: torch.from_numpy(value) for name, value in known.items()}).logits
    return float(np.linalg.norm(found - wanted.numpy()) / wanted.norm())


def exact(proto: onnx.ModelProto) -> bytes:
    """The model with its products of bytes in float32, which holds such sums exactly."""
    changed, nodes, make = onnx.ModelProto(), [], onnx.helper.make_node
    changed.CopyFrom(proto)
    for node in changed.graph.node:
        if node.op_type != "MatMulInteger":
            nodes.append(node)
            continue
        name, factors = node.output[0], []
        for value, zero in zip(node.input[:2], node.input[2:], strict=True):
            parts = [f"{name}.{value}", f"{name}.{value}.zero"]
            factors.append(f"{name}.{value}.factor")
            nodes += [make("Cast", [value], parts[:1], to=1), make("Cast", [zero], parts[1:], to=1),
                      make("Sub", parts, factors[-1:])]  # fmt: skip
        nodes.append(make("MatMul", factors, [f"{name}.sum"]))
        nodes.append(make("Cast", [f"{name}.sum"], [name], to=6))
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    return changed.SerializeToString()


def in_half(module: nn.Module, proto: onnx.ModelProto) -> None:
    """Round what a file in float16 stores in it: weights, often but of norms, and rotations."""
    half = onnx.TensorProto.FLOAT16
    norms = {each.data_type for each in proto.graph.initializer if "norm" in each.name.lower()}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if half in norms or "norm" not in name.lower():
                weight.copy_(weight.half().float())
    for each in module.modules():
        if type(each).__name__.endswith("RotaryEmbedding"):
            each.register_forward_hook(
                lambda _, __, given: tuple(table.half().to(table.dtype) for table in given)
            )


def tables_of(module: nn.Module, proto: onnx.ModelProto) -> list[nn.Embedding]:
    """The embeddings whose rows a file stores in floats."""
    stored = {each.name: [*each.dims] for each in proto.graph.initializer if each.data_type == 1}
    floats = [stored.get(node.input[0]) for node in proto.graph.node if node.op_type == "Gather"]
    found = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    return [each for each in found if [*each.weight.shape] in floats]


def off_in_half(module: nn.Module, subject: Subject, names: list[str], seed: int) -> float:
    """How far PyTorch's own float16 is from float64: the worst parameter, as ``follow`` returns."""
    import peft

    batch = subject.batch(seed)
    ids, labels = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
    spec = AdapterSpec("lora", subject.on, (), RANK, ALPHA)
    ways = []
    for kind in (torch.float64, torch.float16):
        torch.manual_seed(seed)  # which draws the same adapter
        base = copy.deepcopy(module).to(kind)
        model = peft.get_peft_model(base, peft_tests.config(spec, names)).eval()  # it stays float32
        if kind == torch.float64:
            model = model.double()
        trained = [each for each in model.parameters() if each.requires_grad]
        start = {n: v.double().clone() for n, v in peft.get_peft_model_state_dict(model).items()}
        optimizer = torch.optim.AdamW(
            trained, peft_tests.RATES["lora"], eps=peft_tests.EPSILON, weight_decay=0.01
        )
        ways.append([])
        for _ in range(peft_tests.STEPS):
            optimizer.zero_grad()
            loss_of(subject)[1](model(input_ids=ids), labels).backward()
            optimizer.step()
            now = peft.get_peft_model_state_dict(model)
            ways[-1].append({name: now[name].double() - first for name, first in start.items()})
    return max(
        float((rounded[name] - way).norm() / way.norm())
        for whole, rounded in zip(*ways, strict=True)
        for name, way in whole.items()
    )


def as_pytorch_rounds(
    subject: Subject, module: nn.Module, model: Path, names: list[str]
) -> dict[str, Any]:
    """Whether a file in float16 is as far from float64 as PyTorch's float16, on several batches."""
    spec, ours, theirs = AdapterSpec("lora", subject.on, (), RANK, ALPHA), [], []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "package"
            batch = subject.batch(seed)
            ours.append(follow(module, model, folder, spec, loss_of(subject), batch, share=1.0))
        theirs.append(off_in_half(module, subject, names, seed))
    found, own = (float(np.exp(np.mean(np.log(each)))) for each in (ours, theirs))
    said = (
        f"on {len(SEEDS)} batches {min(ours):.1%} to {max(ours):.1%}, PyTorch's own float16 "
        f"{min(theirs):.1%} to {max(theirs):.1%} (geometric means {found:.1%}, {own:.1%})"
    )
    assert found <= AS_PYTORCH * own, said
    return {"error": found, "beside": said}


def batches(subject: Subject, exporter: Exporter) -> Iterator[dict[str, np.ndarray]]:
    """What is trained on.

    Where data are rounded, float32 and float64 may round a value to neighbouring codes. PEFT's side
    tells: another batch is taken then, and one row at a time, as few have no such value.
    """
    if exporter.precision != "dynamic":
        yield subject.batch()
        return
    for seed in range(4, 4 + BATCHES):
        yield {name: value[:1] for name, value in subject.batch(seed).items()}


def decided(module: nn.Module, subject: Subject, batch: dict[str, np.ndarray]) -> bool:
    """Whether the module rounds no value that lies between two codes."""
    known = {name: torch.from_numpy(batch[name]) for name in subject.takes}
    known = {n: each.double() if each.is_floating_point() else each for n, each in known.items()}
    try:
        with torch.no_grad():
            copy.deepcopy(module).double()(**known)
    except Undecided:
        return False
    return True


def steps(
    module: nn.Module, model: Path, folder: Path, subject: Subject, exporter: Exporter, **build: Any
) -> float:
    """Make ten steps beside PEFT's; of several batches, on the first that is right."""
    spec = AdapterSpec("lora", subject.on, (), RANK, ALPHA)
    wrong = AssertionError("every batch has values between two codes")
    for batch in batches(subject, exporter):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            return follow(module, model, folder, spec, loss_of(subject), batch, **build)
        except Undecided:
            continue
        except AssertionError as problem:  # ten steps are not right by chance
            wrong = problem
    raise wrong


def compare(subject: Subject, exporter: Exporter, folder: Path, **build: Any) -> dict[str, Any]:
    """What becomes of ten steps: the error, a refusal, or what is wrong."""
    if (said := folder / "error.txt").exists():
        return {"kind": "not written", "said": said.read_text()}
    model, module = folder / "model.onnx", subject.module()
    proto, dynamic = onnx.load(model), exporter.precision == "dynamic"
    written = as_written(folder.parent.name, folder.name, module)
    half = proto.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    if half:
        in_half(module, proto)
        build["share"] = HALF_SHARE
    tables = [(each, each.weight.detach().clone()) for each in tables_of(module, proto)]
    try:
        take_over(module, matrices(proto))
    except AssertionError as problem:
        return {"kind": "wrong", "said": str(problem)}
    for each, rows in tables:
        each.weight = nn.Parameter(rows)  # not tied to the product's, which are of few bits
    # MatMulNBits rounds data while ONNX Runtime infers, and the module does not.
    most = UNLIKE if dynamic or exporter.precision in ("fp32", "fp16") else ROUNDED
    among = (each for each in batches(subject, exporter) if decided(module, subject, each))
    if (first := next(among, None)) is None:
        return {"kind": "wrong", "said": "every batch has values between two codes"}
    if (off := unlike(model, module, subject, first)) > most:
        said = f"the file's logits are {off:.1%} off the module's"
        if dynamic and unlike(exact(proto), module, subject, first) < UNLIKE:
            said = (
                "products of bytes saturate on this processor; exact ones give the module's logits"
            )
        return {"kind": "other", "said": said}
    linear = [name for name, each in module.named_modules() if type(each).__name__ in LINEAR]
    names = [name for name in linear if any(fnmatchcase(name, on) for on in subject.on)]
    try:
        with tempfile.TemporaryDirectory() as place:
            package = Path(place) / "package"
            try:
                found = {"error": steps(module, model, package, subject, exporter, **build)}
            except AssertionError:
                if not half:
                    raise
                found = as_pytorch_rounds(subject, module, model, names)
            manifest = (package / "manifest.json").read_text()
            missing = [name for name in names if f'"{name}"' not in manifest]
            assert not missing, f"{min(missing)} is not adapted"
    except OdtpackError as refusal:
        return {"kind": "refused", "said": f"{refusal.code}: {refusal.what}"}
    except Exception as problem:
        text = (str(problem).strip().splitlines() or [""])[0]
        return {"kind": "wrong", "said": f"{type(problem).__name__}: {text:.200}"}
    return {"kind": "right", **({"beside": written} if written else {}), **found}


# Whose decoder and adapter are given to onnxruntime-genai's generator, and where that is.
GENERATES = {"genai-0.18-int4-cpu": "transformers-5"}
FILES = ROOT / "build" / "exporters"
PYTHON = f"{ROOT}/.venv-exporters/{{}}/bin/python"


def main() -> int:
    given = options(__doc__, exporter=[*EXPORTERS], model=[*SUBJECTS])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    wrong = False
    for label in given.exporter:
        subjects, own = given.model, EXPORTERS[label].environment
        apart.call(
            write_all, python=PYTHON.format(own) if own else sys.executable, label=label,
            root=FILES, subjects=subjects, environment={"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        for name in (each for each in subjects if (FILES / label / each).is_dir()):
            folder = FILES / label / name
            outcome = compare(SUBJECTS[name], EXPORTERS[label], folder)
            if label in GENERATES and outcome["kind"] == "right":
                with scratch() as work:
                    outcome["tokens"] = hand_over(
                        folder, work, Path(PYTHON.format(GENERATES[label]))
                    )
                if outcome["tokens"] == "other":
                    outcome |= {"kind": "wrong", "said": "onnxruntime-genai draws others"}
            keep(EXPORTED, {name: outcome}, label, sort=True)
            figure = f"{outcome['error']:.0e}" if "error" in outcome else ""
            print(f"{label:28}{name:12}{outcome['kind']:12}{figure}{outcome.get('said', '')}",
                  flush=True)  # fmt: skip
            wrong |= outcome["kind"] == "wrong"
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
