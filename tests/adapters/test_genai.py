"""onnxruntime-genai itself writes the decoder, and generates with what was trained on it."""

import json
import re
from pathlib import Path

import pytest

from odtpack.adapters import AdapterSpec
from odtpack_runtime import Generator, Package, save_adapter
from tests.adapters import llama
from tests.adapters.written.models import causal, run_builder, save
from tests.packaging_tools import built_training, losses_of_steps
from tests.programs import ran

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-exporters" / "transformers-5"
PYTHON = FOLDER / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not (FOLDER / ".ready").is_file(),
    reason="onnxruntime-genai is not set up (run: make exporters)",
)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_the_guides_hand_over(precision, tmp_path):
    """Tokens with and without the adapter are those of the generator."""
    save(causal("Qwen2", False, 64), tmp_path / "hf")
    run_builder(PYTHON, tmp_path / "hf", tmp_path / "genai", precision)
    phone = tmp_path / "phone"
    state, module, optimizer = built_training(
        tmp_path / "genai" / "model.onnx", phone, loss="next_token", segments=True,
        adapter=AdapterSpec("lora", ("model.*_proj",), (), 4, 8.0),
    )  # fmt: skip
    optimizer.set_learning_rate(0.05)
    losses_of_steps(module, optimizer, [llama.batch()] * 3)
    save_adapter(Package.open(phone), state, tmp_path / "mine.onnx_adapter")
    config = json.loads((tmp_path / "genai" / "genai_config.json").read_text())
    config["model"]["decoder"]["filename"] = "decoder.onnx"
    chat = tmp_path / "chat"
    chat.mkdir()
    (chat / "genai_config.json").write_text(json.dumps(config))
    for name in ("decoder.onnx", "decoder.weights", "segments.weights"):
        (chat / name).symlink_to(phone / name)

    guide = (ROOT / "docs" / "guides" / "language-models.md").read_text()
    (program,) = re.findall(r"^```python\n(import onnxruntime_genai.*?)^```$", guide, re.M | re.S)
    generator = Generator(Package.open(phone))
    generator.add_adapter("mine", tmp_path / "mine.onnx_adapter")
    found = []
    for adapter in ("mine", None):
        text = program if adapter else re.sub(r".*set_active_adapter.*\n", "", program)
        printed = ran(PYTHON, "-c", text, cwd=tmp_path).stdout
        found.append([int(each) for each in printed.split()])
        wanted = [*generator.generate([3, 1, 4], adapter=adapter, max_tokens=9)]
        assert found[-1] == wanted[: len(found[-1])]  # genai's ends at its end of a sequence
    assert found[0] != found[1]
