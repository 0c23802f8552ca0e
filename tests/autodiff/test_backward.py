from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack.autodiff import Registry, differentiate
from odtpack.autodiff.backward import ancestors
from odtpack.autodiff.context import Context, Cotangents, Rule
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Ops
from odtpack.graph.inference import infer_shapes
from odtpack.ort import webgpu
from odtpack_runtime.session.device import Device
from tests.autodiff.oracle import (
    Array,
    add_gradients,
    ask_torch,
    feeds_of,
    gradient_model,
    normal,
    run,
    session,
)
from tests.autodiff.representatives import rule_of
from tests.autodiff.test_rules import CASES
from tests.model_text import inferred, parsed
from tests.refused import refused
from tests.software_gpu import reason_without
from tests.sweep import split


def net(body, inputs="float[2, 3] x", outputs="float[2, 3] y", opset=17, constants=""):
    text = f"net ({inputs}) => ({outputs}) <{constants}> {{ {body} }}"
    return inferred(text, opset, domains={"custom": 2})


def gradients(model: ir.Model, wrt: list[str], feeds: dict[str, Array]) -> dict[str, Array]:
    model, names = add_gradients(model, wrt)
    found = run(model, feeds, "off")
    return {name: found[output] for name, output in names.items()}


def values(model: ir.Model) -> dict[str, ir.Value]:
    found = {str(v.name): v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    return found | {str(y.name): y for node in model.graph for y in node.outputs}


X, SEED = normal(2, 3), normal(2, 3, seed=1)
FEEDS = {"x": X, "seed_y": SEED}


def test_contributions_of_every_use_add_up():
    found = gradients(net("a = Sin(x) b = Exp(x) c = Mul(a, x) s = Add(a, b) y = Add(s, c)"),
                      ["x"], FEEDS)  # fmt: skip
    expected = SEED * (np.cos(X) * (1 + X) + np.exp(X) + np.sin(X))
    np.testing.assert_allclose(found["x"], expected, rtol=1e-5)


def test_a_value_may_enter_a_node_twice():
    np.testing.assert_allclose(
        gradients(net("y = Mul(x, x)"), ["x"], FEEDS)["x"], 2 * X * SEED, rtol=1e-6
    )
    np.testing.assert_allclose(gradients(net("y = Sub(x, x)"), ["x"], FEEDS)["x"], 0)
    three = {"x": X, "seed_y": normal(2, 9)}
    model = net("y = Concat<axis=1>(x, x, x)", outputs="float[2, 9] y")
    expected = three["seed_y"].reshape(2, 3, 3).sum(1)
    np.testing.assert_allclose(gradients(model, ["x"], three)["x"], expected, rtol=1e-5)


SLICE = "Slice(x, c{}, c{}, one)"
BOUNDS = ", ".join(["int64[1] one = {1}", *(f"int64[1] c{i} = {{{i}}}" for i in range(4))])


@pytest.mark.parametrize(("bounds", "joined"), [
    pytest.param(((0, 1), (1, 3)), True, id="whole"),
    pytest.param(((1, 3), (0, 1)), True, id="whole, the other way round"),
    pytest.param(((0, 1), (2, 3)), False, id="with a gap"),
    pytest.param(((0, 2), (1, 3)), False, id="overlapping"),
    pytest.param(((1, 3), (1, 3), (0, 1)), False, id="one part twice"),
])  # fmt: skip
def test_cotangents_of_the_parts_of_a_value_are_joined(bounds, joined):
    parts = [f"s{i} = {SLICE.format(*b)} e{i} = Exp(s{i})" for i, b in enumerate(bounds)]
    sums = [f"r{i} = ReduceSum <keepdims = 0> (e{i})" for i in range(len(bounds))]
    names = ", ".join(f"r{i}" for i in range(len(bounds)))
    text = " ".join([*parts, *sums, f"t = Sum({names}) z = Sin(x) y = Add(t, z)"])
    model = net(text, constants=BOUNDS)
    times = np.array([sum(a <= i < b for a, b in bounds) for i in range(3)], np.float32)
    expected = SEED * np.cos(X) + SEED.sum() * np.exp(X) * times
    found = gradients(model, ["x"], FEEDS)["x"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    used = {node.op_type for node in ancestors([model.graph.outputs[-1]], model.graph)}
    assert ("Concat" in used, "Pad" in used) == (joined, not joined)


def test_outputs_add_up_and_may_depend_on_each_other():
    model = net("y = Sin(x) z = Exp(y)", outputs="float[2, 3] y, float[2, 3] z")
    other = normal(2, 3, seed=2)
    found = gradients(model, ["x"], {**FEEDS, "seed_z": other})
    expected = (SEED + other * np.exp(np.sin(X))) * np.cos(X)
    np.testing.assert_allclose(found["x"], expected, rtol=1e-5)


def test_branches_that_the_loss_does_not_see_are_not_differentiated():
    model = net("unused = custom.Unknown(x) dead = Exp(x) y = Sin(x)")
    before = len(model.graph)
    assert list(add_gradients(model, ["x"])[1]) == ["x"]
    assert [n.op_type for n in list(model.graph)[before:]] == ["Cos", "Mul", "Identity"]


def test_branches_that_no_source_reaches_are_not_differentiated():
    model = net("data = custom.Unknown(x) y = Mul(data, w)", inputs="float[2, 3] x, float[3] w")
    values(model)["data"].type, values(model)["data"].shape = ir.TensorType(1), ir.Shape([2, 3])
    before = len(model.graph)
    add_gradients(model, ["w"])
    assert [n.op_type for n in list(model.graph)[before:]] == ["Mul", "ReduceSum", "Identity"]


def test_a_source_that_the_loss_does_not_depend_on_is_left_out():
    model = net("y = Sin(x)", inputs="float[2, 3] x, float[3] w")
    assert list(add_gradients(model, ["w", "x"])[1]) == ["x"]


def test_interior_values_may_be_sources():
    model = net("h = Sin(x) g = Exp(h) y = Mul(g, h)")
    found = values(model)
    op = Ops(model.graph)
    seed = op.constant(SEED)
    result = differentiate(model.graph, {found["y"]: seed}, [found["h"], found["x"]], op)
    for name in ("h", "x"):
        result[found[name]].name = f"d{name}"
        result[found[name]].shape = found[name].shape
        model.graph.outputs.append(result[found[name]])
    outputs, h = run(model, {"x": X}, "off"), np.sin(X)
    np.testing.assert_allclose(outputs["dh"], SEED * np.exp(h) * (1 + h), rtol=1e-5)
    np.testing.assert_allclose(outputs["dx"], outputs["dh"] * np.cos(X), rtol=1e-5)


def test_a_seed_may_be_the_source_itself():
    model = net("y = Sin(x)")
    x = values(model)["x"]
    assert differentiate(model.graph, {x: x}, [x], Ops(model.graph)) == {x: x}


def test_gradients_stop_at_operators_without_a_slope():
    model = net("f = Floor(x) y = Mul(f, x)")
    np.testing.assert_allclose(gradients(model, ["x"], FEEDS)["x"], SEED * np.floor(X), rtol=1e-6)
    integers = net("i = Cast<to=7>(x) f = Cast<to=1>(i) y = Mul(f, x)")
    expected = SEED * np.trunc(X)
    np.testing.assert_allclose(gradients(integers, ["x"], FEEDS)["x"], expected, rtol=1e-6)


def test_without_rule_the_error_names_operator_node_opset_and_parameters():
    model = net(
        "h = Mul(x, w) k = Add(h, v) u = custom.Fancy(k) y = Add(u, free)",
        inputs="float[2, 3] x, float[3] w, float[3] v, float[3] free",
    )
    for node in model.graph:
        node.name = f"{node.op_type}_node"
    with refused("no-gradient") as error:
        add_gradients(model, ["w", "v", "free"])
    text = str(error.value)
    for part in ("Fancy", "custom", "opset 2", "'w', 'v'", "'Fancy_node'", "'u'", "--freeze"):
        assert part in text
    assert "free'" not in text.replace("--freeze", "")


def test_without_rule_inside_of_a_body_the_error_names_the_inner_node():
    branches = (
        "then_branch = t () => (float[2, 3] r) { q = Mul(a, w) r = custom.Fancy(q) }, "
        "else_branch = e () => (float[2, 3] s) { s = Identity(a) }"
    )
    body = f"a = Mul(x, w) b = If (c) <{branches}> y = Add(a, b)"
    model = net(body, inputs="float[2, 3] x, float[3] w, bool c")
    branch = next(node for node in model.graph if node.op_type == "If")
    branch.name = "choice"
    branch.attributes["then_branch"].as_graph()[1].name = "fancy"
    said = r"operator Fancy .* has no gradient; 'w' can", "node 'fancy', output 'r', in If 'choice'"
    with refused("no-gradient", *said):
        add_gradients(model, ["w"])


def test_what_a_rule_does_not_cover_is_an_error_that_names_the_node():
    model = net("y = Det(x)", inputs="float[n, n] x", outputs="float y")
    next(iter(model.graph)).name = "volume"
    with refused("unsupported-node", "'volume' \\(Det\\): the length of axis"):
        add_gradients(model, ["x"])


def custom(rule: Callable[[Context], Cotangents], **options: bool) -> Registry:
    registry = Registry()
    registry.add("custom", "Fancy", Rule(rule, **options))
    return registry


def test_a_rule_may_leave_out_inputs():
    model = net("y = custom.Fancy(x, w, x)", inputs="float[2, 3] x, float[2, 3] w")
    found = values(model)
    op, seed = Ops(model.graph), ir.val("seed")
    for cotangents in ([None, seed, None], [None, seed]):
        registry = custom(lambda ctx, cotangents=cotangents: cotangents)
        sources = [found["x"], found["w"]]
        result = differentiate(model.graph, {found["y"]: seed}, sources, op, registry)
        assert result == {found["w"]: seed}
    first_only = custom(lambda ctx: ctx.dy())
    assert differentiate(model.graph, {found["y"]: seed}, [found["w"]], op, first_only) == {}


def test_a_rule_sees_which_inputs_and_outputs_count():
    model = net(
        "y, z = custom.Fancy(x, w, , x)", inputs="float[2, 3] x, float[2, 3] w",
        outputs="float[2, 3] y, float[2, 3] z",
    )  # fmt: skip
    found, seed, seen = values(model), ir.val("seed"), []

    def rule(ctx: Context) -> Cotangents:
        seen.append(([ctx.needs(i) for i in range(5)], ctx.maybe_dy(0), ctx.maybe_dy(1)))
        assert ctx.maybe_x(2) is None
        with pytest.raises(OdtpackError, match="output 0"):
            ctx.dy()
        with pytest.raises(OdtpackError, match="lacks its input 2"):
            ctx.x(2)
        return []

    differentiate(model.graph, {found["z"]: seed}, [found["w"]], Ops(model.graph), custom(rule))
    assert seen == [([False, True, False, False, False], None, seed)]


def test_the_newest_rule_not_past_the_opset_wins():
    registry = Registry()
    rules = [Rule(lambda ctx: [], since=since) for since in (1, 13, 18)]
    for rule in (rules[1], rules[2], rules[0]):
        registry.add("", "Thing", rule)
    found = [registry.lookup(domain, "Thing", n) for domain, n in
             (("", 12), ("", 13), ("ai.onnx", 17), ("", 26))]  # fmt: skip
    assert found == [rules[0], rules[1], rules[1], rules[2]]
    assert registry.lookup("other", "Thing", 13) is None
    assert Registry().lookup("", "Thing", 13) is None
    with pytest.raises(ValueError, match=r"two rules for ai\.onnx::Thing since 13"):
        registry.add("", "Thing", Rule(None, since=13))


# Broadcasting: the cotangent of a broadcast input is summed back to its shape.


@st.composite
def broadcast_pair(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that broadcast with each other."""
    full = draw(st.lists(st.integers(1, 3), max_size=4))

    def narrowed() -> tuple[int, ...]:
        kept = full[draw(st.integers(0, len(full))) :]
        return tuple(draw(st.sampled_from([1, size])) for size in kept)

    return narrowed(), narrowed()


def declared(shape: tuple[int, ...], kinds: list[str], prefix: str) -> list[int | str | None]:
    """The shape as a model declares it: known, under a symbol, or unknown sizes."""
    return [
        {"known": size, "symbol": f"{prefix}{axis}", "unknown": None}[kind]
        for axis, (size, kind) in enumerate(zip(shape, kinds, strict=False))
    ]


@settings(max_examples=60, deadline=None)
@given(
    pair=broadcast_pair(),
    kinds=st.lists(st.sampled_from(["known", "symbol", "unknown"]), min_size=8, max_size=8),
    same_symbols=st.booleans(),
    ranks=st.booleans(),
    op_type=st.sampled_from(["Add", "Sub", "Mul"]),
    opset=st.sampled_from([12, 17]),
)
def test_cotangents_have_the_shapes_of_broadcast_inputs(
    pair, kinds, same_symbols,
    ranks, op_type, opset,
):  # fmt: skip
    opset = opset if ranks else 17
    shapes = dict(zip("ab", pair, strict=True))
    result = np.broadcast_shapes(*pair)
    inputs = {}
    for name, shape in shapes.items():
        offset = len(result) - len(shape)
        # One symbol stands for one size, so it is named by both.
        names = [f"{'s' if same_symbols else name}{offset + i}_{n}" for i, n in enumerate(shape)]
        dims = declared(shape, kinds[:4] if name == "a" else kinds[4:], "")
        dims = [names[i] if isinstance(dim, str) else dim for i, dim in enumerate(dims)]
        inputs[name] = ir.val(name, ir.DataType.FLOAT, dims if ranks or shape == () else None)
        if not ranks:
            inputs[name].shape = None
    node = ir.node(op_type, list(inputs.values()), name="node")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(list(inputs.values()), [node.outputs[0]], nodes=[node],
                     opset_imports={"": opset}, name="g")  # fmt: skip
    model = infer_shapes(ir.Model(graph, ir_version=8))
    if not ranks:
        node.outputs[0].shape = None
    arrays = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    seed = np.asarray(normal(*result, seed=2), np.float32)
    found = gradients(model, ["a", "b"], {**arrays, "seed_y": seed})
    wide = {"Add": (1, 1), "Sub": (1, -1), "Mul": (arrays["b"], arrays["a"])}[op_type]
    for (name, array), slope in zip(arrays.items(), wide, strict=True):
        full = np.broadcast_to(seed * slope, result)
        lead = len(result) - array.ndim
        axes = (*range(lead), *(lead + i for i, size in enumerate(array.shape) if size == 1))
        expected = full.sum(axes, keepdims=True).reshape(array.shape)
        assert found[name].shape == array.shape
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_before_opset_13_unknown_ranks_cannot_be_summed_to():
    model = net("y = Add(x, w)", inputs="float[n, 3] x, float[] w", opset=12,
                outputs="float[n, 3] y")  # fmt: skip
    with refused("unknown-shape", "must be known"):
        add_gradients(model, ["w"])


# The gradient of one case of each rule in the forms for WebGPU, there and on the processor.

WITHOUT = reason_without()
FIRST = [case for rule, case in {rule_of(case): case for case in reversed(CASES)}.items()]
DEVICES = [
    "CPUExecutionProvider",
    pytest.param("webgpu", marks=pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    split(FIRST, lambda case: case.op in {*webgpu._ALSO, "MaxPool"}, name=lambda case: case.id),
)
def test_gradient_is_that_of_the_processor(case, device):
    expected, seeds = ask_torch(case)
    with np.errstate(over="ignore"):  # bounds of a Clip may be the largest float32
        model, names = gradient_model(case)
    feeds, plain = feeds_of(case, model, seeds), session(model)
    forms = ir.to_proto(webgpu.lower(model)).SerializeToString()
    running = [plain, Device(device).session(forms, onnxruntime.SessionOptions())]
    wanted = [names[name] for name in case.differentiated]
    right, found = (each.run(wanted, feeds) for each in running)
    for name, processor, other in zip(case.differentiated, right, found, strict=True):
        exact = expected.gradients[name]
        allowed = 1e-5 * np.abs(processor).max(initial=0)
        assert off(other, processor) <= allowed or off(other, exact) <= 2 * off(processor, exact)


def off(one: Array, other: Array) -> float:
    return float(np.abs(np.subtract(one, other, dtype=np.float64)).max(initial=0))


@pytest.mark.parametrize("settings", [
    "kernel_shape = [5, 5], strides = [2, 2], pads = [2, 2, 2, 2]",
    "kernel_shape = [5, 3], dilations = [2, 1], storage_order = 1",
    "kernel_shape = [5, 5], strides = [3, 3], ceil_mode = 1",
    'kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER"',
])  # fmt: skip
def test_positions_of_maxima_are_those_of_the_kernel(settings):
    model = parsed(
        "g (float[N, 3, 13, 11] x) => (float[N, 3, a, b] y, int64[N, 3, a, b] i) "
        f"{{ y, i = MaxPool <{settings}> (x) }}"
    )
    forms = webgpu.lower(ir.from_proto(model))
    x = np.random.default_rng(0).integers(-3, 3, (2, 3, 13, 11)).astype(np.float32)  # many equal
    wanted, found = (run(each, {"x": x}).values() for each in (model, forms))
    assert [node.op_type for node in forms.graph if len(node.outputs) > 1] == []
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one, other)
