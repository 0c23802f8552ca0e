"""The decoder of a package, and an adapter that was trained with it, in onnxruntime-genai."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from benchmarks import apart

PROMPT, COUNT = [3, 4, 5], 6


def hand_over(written: Path, work: Path, interpreter: Path) -> str:
    """Whether onnxruntime-genai draws odtpack's tokens: equal, other, or none without a decoder."""
    import numpy as np

    from odtpack.adapters import AdapterSpec
    from odtpack.build import build_package
    from odtpack_runtime import CheckpointState, Generator, Package, save_adapter

    spec = AdapterSpec("lora", ("model.*_proj",))
    build_package(
        written / "model.onnx", work / "package", loss="next_token", adapter=spec, segments=True
    )
    package = Package.open(work / "package")
    state = CheckpointState.load_checkpoint(package.checkpoint)
    random = np.random.default_rng(0)
    for array in state.arrays(trainable=True).values():
        np.add(array, 0.3 * random.normal(size=array.shape), out=array, casting="same_kind")
    save_adapter(package, state, work / "mine.onnx_adapter")
    if "decoder_model" not in [file.role for file in package.manifest.files.extra]:
        return "none"
    generator = Generator(package)
    generator.add_adapter("mine", work / "mine.onnx_adapter")
    ours = [
        [*generator.generate(PROMPT, adapter=name, max_tokens=COUNT, temperature=0)]
        for name in (None, "mine")
    ]
    for name in ("decoder.onnx", "decoder.weights", "segments.weights"):
        shutil.copy(work / "package" / name, work)
    for path in written.glob("*.json"):
        shutil.copy(path, work)
    settings = json.loads((written / "genai_config.json").read_text())
    settings["model"]["decoder"]["filename"] = "decoder.onnx"
    settings["model"]["eos_token_id"] = settings["model"]["vocab_size"] - 1
    (work / "genai_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(RuntimeError):
        return "equal" if apart.call(drawn, python=interpreter, work=work) == ours else "other"
    return "other"


def drawn(*, work: str) -> list[list[int]]:
    """The tokens that its generator draws, without and with the adapter; in its environment."""
    import onnxruntime_genai as genai

    found: list[list[int]] = []
    model = genai.Model(work)
    adapters = genai.Adapters(model)
    adapters.load(str(Path(work, "mine.onnx_adapter")), "mine")
    for used in (False, True):
        settings = genai.GeneratorParams(model)
        settings.set_search_options(max_length=len(PROMPT) + COUNT, do_sample=False)
        generator = genai.Generator(model, settings)
        if used:
            generator.set_active_adapter(adapters, "mine")
        generator.append_tokens(PROMPT)
        found.append([])
        while not generator.is_done():
            generator.generate_next_token()
            found[-1].append(int(generator.get_next_tokens()[0]))
    return found
