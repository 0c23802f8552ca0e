"""Which initializers are taken for parameters when nothing is named."""

from typing import Any

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack.package.candidates import candidates
from tests.model_text import parsed
from tests.refused import refused

RANDOM = np.random.default_rng(0)


def _candidates(body: str, types: str = "float[2, 3] x", **values: Any) -> set[str]:
    return set(candidates(load_model(_model(body, types, **values))))


def _model(body: str, types: str = "float[2, 3] x", **values: Any) -> onnx.ModelProto:
    arrays = {name: np.asarray(value) for name, value in ({"w": _random(3, 3)} | values).items()}
    arrays = {n: np.float32(a) if a.dtype == np.float64 else a for n, a in arrays.items()}
    text = f"g ({types}) => (float[A, B] y) {{ h = MatMul(x, w) {body} }}"
    return parsed(text, 21, ir_version=10, **arrays)


def _random(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


def test_weights_biases_and_tables():
    found = _candidates(
        "e = Gather(table, i) a = Add(h, e) y = Add(a, bias)",
        table=_random(5, 3), i=np.array([1, 2]), bias=np.zeros(3), unused=_random(3),
    )  # fmt: skip
    assert found == {"w", "table", "bias"}


@pytest.mark.parametrize(("body", "values"), [
    ("u = Unsqueeze(h, z) y = Resize<mode = \"linear\">(u, , scales)",
     {"z": np.array([0, 1]), "scales": np.array([1.0, 1.0, 2.0, 2.0])}),
    ("y = BatchNormalization(h, scale, bias, mean, variance)",
     {"scale": np.ones(3), "bias": np.zeros(3), "mean": _random(3), "variance": np.ones(3)}),
    ("y = Add(h, mask)", {"mask": np.array([0.0, -np.inf, 0.0])}),
    ("y = Add(h, mask)", {"mask": np.array([0.0, np.finfo(np.float32).min, 0.0])}),
    ("y = Mul(h, val_3)", {"val_3": np.array([0.125])}),
    ("y = Add(h, val_3)", {"val_3": np.zeros((2, 3))}),
    ("y = Add(h, val_3)", {"val_3": np.full((2, 3), 0.1)}),
    ("y = Mul(h, val_3)", {"val_3": np.arange(3.0)}),
    ("y = Mul(h, s)", {"s": np.array(2.0)}),
    ("c = Constant<value = float[1] {0.5}>() y = Mul(h, c)", {}),
    ("c = Constant<value = float[3] {0.5, 1.0, 2.0}>() y = Mul(h, c)", {}),
    ("c = Constant<value_floats = [0.5, 1.0, 2.0]>() y = Mul(h, c)", {}),
])  # fmt: skip
def test_what_is_no_parameter(body, values):
    assert _candidates(body, **values) - {"scale", "bias"} == {"w"}


def _sinusoid(rows: int, size: int) -> np.ndarray:
    angles = np.arange(rows)[:, None] / 10000 ** (np.arange(0, size, 2) / size)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(rows, size)


def _front_end(mels: int, rate: int = 16000, size: int = 400) -> dict[str, np.ndarray]:
    """A windowed Fourier basis, [frequencies, 1, samples], and triangles on a mel scale."""
    bins, samples = np.arange(size // 2 + 1), np.arange(size)
    angles = 2 * np.pi * bins[:, None] * samples / size
    window = 0.5 - 0.5 * np.cos(2 * np.pi * samples / size)
    mel = np.linspace(0, 2595 * np.log10(1 + rate / 1400), mels + 2)
    corners = 700 * (10 ** (mel / 2595) - 1)
    above = (bins[:, None] * rate / size - corners)[:, :-1] / np.diff(corners)
    bank = np.maximum(0, np.minimum(above[:, :-1], 1 - above[:, 1:]))
    real, imaginary = window * np.cos(angles), -window * np.sin(angles)
    return {"real": real[:, None], "both": np.concatenate([real, imaginary])[:, None], "mel": bank}


FRONT_END = _front_end(40)
NORMALIZED = "x2 = Sub(x, mean) x3 = Div(x2, pixel_std) h2 = MatMul(x3, w) y = Add(h, h2)"


GUARDED = """n = IsNaN(x) z = Constant <value = float {0}>() a = Where(n, z, x)
    b = Sub(a, mean) y = Add(b, h)"""


@pytest.mark.parametrize(("body", "values", "buffers"), [
    (NORMALIZED, {"mean": _random(3), "pixel_std": np.full((1, 3), 0.3)}, "mean pixel_std"),
    ("y = Add(h, pe)", {"pe": _sinusoid(40, 6)}, "pe"),
    ("y = Add(h, pe)", {"pe": _sinusoid(40, 6)[None]}, "pe"),
    ("a = Cast <to = 1> (pe) y = Add(h, a)", {"pe": np.float16(_sinusoid(400, 6))}, "pe"),
    ("a = Cast <to = 1> (pe) y = Add(h, a)", {"pe": np.float16(_random(400, 6) / 9)}, ""),
    ("y = Mul(h, cos)", {"cos": _sinusoid(400, 64)[:, 1::2]}, "cos"),
    ("y = Add(h, pe)", {"pe": _sinusoid(40, 6) + 0.01 * _random(40, 6)}, ""),
    ("y = Add(h, real)", {"real": FRONT_END["real"]}, "real"),
    ("y = Add(h, both)", {"both": FRONT_END["both"]}, "both"),
    ("y = MatMul(h, mel)", {"mel": FRONT_END["mel"].T}, "mel"),
    ("y = MatMul(h, mel)", {"mel": np.float16(_front_end(80)["mel"] / 300)}, "mel"),
    ("y = MatMul(h, mel)", {"mel": FRONT_END["mel"] * (1 + 0.01 * _random(201, 40))}, ""),
    ("y = MatMul(h, mel)", {"mel": np.abs(_random(201, 40))}, ""),
    ("y = MatMul(h, mel)", {"mel": np.tri(40, 20)}, ""),
    ("y = MatMul(h, gate)", {"gate": np.outer(np.ones(64), np.eye(8)[0])}, ""),
    ("y = MatMul(h, gate)", {"gate": np.outer(np.eye(16)[3], np.ones(16)) / 16}, ""),
    ("y = MatMul(h, means)", {"means": np.kron(np.eye(8), np.ones((16, 1)))}, ""),
    ("y = Add(h, near)", {"near": -np.abs(np.arange(-63, 64))[:, None] * np.ones(8) / 63}, ""),
    ("y = Add(h, table)", {"table": np.eye(8)}, ""),
    ("y = Add(h, table)", {"table": np.zeros((8, 3))}, ""),
    ("y = Add(h, bins)", {"bins": np.linspace(0, 5, 16).reshape(16, 1)}, "bins"),
    ("y = Add(h, a.bias)", {"a.bias": np.zeros(16)}, ""),
    ("y = Mul(h, loss.pos_weight)", {"loss.pos_weight": _random(3)}, "loss.pos_weight"),
    ("y = Mul(h, loss.weight)", {"loss.weight": _random(3)}, "loss.weight"),
    ("y = Add(h, loss.weight)", {"loss.weight": _random(4, 3)}, ""),
    ("y = Add(h, bn.running_mean)", {"bn.running_mean": _random(3)}, "bn.running_mean"),
    ("a = Mul(x, a.weight) y = Add(a, h)", {"a.weight": _random(3)}, ""),
    ("a = Add(x, positions) y = Add(a, h)", {"positions": _random(2, 3)}, ""),
    ("a = Mul(x, scale) y = Add(a, h)", {"scale": _random(3)}, ""),
    ("a = Mul(x, std) b = Add(h, std) y = Add(a, b)", {"std": _random(3)}, ""),
    ("a = Abs(x) b = Log(a) c = Sub(b, mean) y = Add(c, h)", {"mean": _random(3)}, "mean"),
    (GUARDED, {"mean": _random(3)}, "mean"),
    ("a = Add(x, own) b = Log(a) c = Sub(b, mean) y = Add(c, h)",
     {"own": _random(3), "mean": _random(3)}, ""),
])  # fmt: skip
def test_what_looks_like_a_buffer(body, values, buffers):
    named = body
    for place, name in enumerate(values):
        named = named.replace(name, f"v{place}")
    model = _model(named, w=_random(3, 3), **{f"v{i}": v for i, v in enumerate(values.values())})
    for place, name in enumerate(values):  # the parser takes no dots
        for node in model.graph.node:
            node.input[:] = [name if each == f"v{place}" else each for each in node.input]
        next(t for t in model.graph.initializer if t.name == f"v{place}").name = name
    assert set(candidates(load_model(model))) == ({"w"} | set(values)) - set(buffers.split())


def test_a_setting_that_is_also_used_as_a_value():
    values = {"scale": np.ones(3), "bias": np.zeros(3), "mean": _random(3), "var": np.ones(3)}
    body = "n = BatchNormalization(h, scale, bias, mean, var) y = Mul(n, mean)"
    assert _candidates(body, **values) == {"w", "scale", "bias", "mean"}


def test_a_pattern_says_what_it_leaves_out(tmp_path):
    model = _model(
        'a = Mul(h, "gate.bins") b = Mul(a, "gate.scale") y = Add(b, "gate.bias")', w=_random(3, 8),
        **{"gate.bins": np.linspace(0, 1, 8), "gate.scale": 2.0, "gate.bias": np.zeros(8)},
    )  # fmt: skip

    def said(*train: str) -> list[str]:
        found: list[str] = []
        build_package(model, tmp_path, loss="mse", train=train, remark=found.append)
        return found

    text = "--train does not train what looks like a buffer: "
    bins, scale = "gate.bins (evenly spaced numbers)", "gate.scale (a setting)"
    which = "; to train one, give its exact name, as in --train 'gate"
    assert said("gate.*") == [f"{text}{bins}, {scale}{which}.bins'"]
    assert said("gate.*", "gate.bins") == [f"{text}{scale}{which}.scale'"]
    assert said("gate.b*s") == [f"{text}{bins}{which}.bins'"]
    assert said("w", "gate.bias") == []
    with refused("unknown-parameter", what="only what looks like a buffer: gate.bins",
                 hint="--train 'gate.bins'"):  # fmt: skip
        said("gate.bin*")
    build_package(model, tmp_path, loss="mse", freeze=["gate.bin*"])  # which does not train anyway


def test_a_tied_tensor_that_is_an_output_stays(tmp_path):
    model = _model("a = MatMul(h, one) y = MatMul(a, two)", one=_random(3, 3), two=_random(3, 3))
    model.graph.initializer[-1].raw_data = model.graph.initializer[-2].raw_data
    model.graph.output.add().CopyFrom(
        onnx.helper.make_tensor_value_info("two", onnx.TensorProto.FLOAT, [3, 3])
    )
    names = tmp_path / "names.txt"
    names.write_text(
        "# odtpack names: name [shape] kind requires_grad\n"
        "one [3,3] parameter true\ntwo [3,3] parameter true of one\n"
    )
    manifest = build_package(model, tmp_path / "p", loss="mse", like=names)
    assert {each.name for each in manifest.parameters} >= {"one", "two"}


def test_what_the_exporter_noted_decides():
    """A table of positions may be a parameter or a buffer; torch.export notes which."""
    model = _model("a = Add(h, one) y = Add(a, two)", one=_random(2, 3), two=_random(2, 3))
    for name, kind in (("one", "PARAMETER"), ("two", "BUFFER")):
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3])
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
        model.graph.value_info.append(info)
    assert set(candidates(load_model(model))) == {"w", "one"}


def test_folded_biases_of_zeros_are_parameters():
    assert "onnx::Add_5" in _candidates('y = Add(h, "onnx::Add_5")', **{"onnx::Add_5": np.zeros(3)})


def test_a_model_that_keeps_everything_in_constants():
    """As some converters write them: then weights are constants, and so are factors."""
    text = """g (float[2, 2] x) => (float[2, 2] y) {
        w = Constant<value = float[2, 2] {1, 2, 3, 4}>() b = Constant<value = float[2] {1, 2}>()
        half = Constant<value = float[1] {0.5}>() h = Gemm(x, w, b) y = Mul(h, half)
    }"""
    assert set(candidates(load_model(parsed(text)))) == {"w", "b"}


@pytest.mark.parametrize(("bias", "layer"), [("half, b", True), ("half, x", False)])
def test_a_layer_in_constants_beside_initializers_is_a_parameter(bias, layer):
    """Its matrix and bias are constants; a window or a basis has no bias, and stays."""
    text = f"""g (float[2, 2] x) => (float[2, 2] y) <float[2, 2] w = {{1, 2, 3, 4}}> {{
        m = Constant<value = float[2, 2] {{1, 2, 3, 4}}>() b = Constant<value = float[2] {{1, 2}}>()
        h = MatMul(x, w) half = MatMul(h, m) y = Add({bias})
    }}"""
    assert set(candidates(load_model(parsed(text)))) == ({"w", "m", "b"} if layer else {"w"})


def test_constants_of_a_local_function_are_no_parameters():
    text = """g (float[2, 2] x) => (float[2, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
    { h = MatMul(x, w) y = local.shifted(h) }
    <domain: "local", opset_import: ["": 17]>
    shifted (a) => (b) { c = Constant<value = float[2] {1, 2}>() b = Add(a, c) }"""
    assert set(candidates(load_model(parsed(text, domains=["local"])))) == {"w"}


def test_constants_that_double_level_by_level():
    """What is computed from constants is looked through once."""
    doubled = " ".join(f"c{i + 1} = Add(c{i}, c{i})" for i in range(60))
    body = f"{doubled} a = Mul(x, c60) y = Add(a, h)"
    model = _model(body, mean=_random(3))
    model.graph.node[1].input[:] = ["mean", "mean"]
    assert set(candidates(load_model(model))) == {"w"}


def test_a_constant_that_an_operator_of_one_input_reads_is_of_no_layer():
    """As PyTorch's older exporter writes the angles of a rotary embedding."""
    angles = "angles = Constant<value = float[2, 3] {1, 2, 3, 4, 5, 6}>()"
    assert _candidates(f"{angles} turned = Cos(angles) y = Add(h, turned)") == {"w"}
