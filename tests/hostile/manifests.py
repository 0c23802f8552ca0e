"""Hostile manifests: text, numbers, sizes, session options, schedules, names."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.cases import everyone

INVALID = ("manifest-invalid",)
Content = dict[str, Any]
Text = bytes | Content
Made = tuple[str, Text, tuple[str, ...], dict[str, str]]
"""Name, manifest, codes of a refusal, and who may be stricter."""

_KEYS = Path(__file__).with_name("config_keys.txt").read_text().split()
_HUGE = 2**53
_STRICT = {"python": "it takes no key that it does not know"}
_SCHEMA = {"python": "it checks every key, read or not"}


def manifests(good: Content) -> Iterator[Made]:
    """Yield manifests that differ from a good one of a package with groups and a schedule."""
    good = {key: value for key, value in good.items() if key != "digest"}
    names: set[str] = set()
    for family in (
        _texts, _sessions, _values, _numbers, _shapes, _layouts, _groups, _schedules, _keys,
        _self_checks, _names, _types,
    ):  # fmt: skip
        for made, text, codes, *stricter in family(copy.deepcopy(good)):
            name = made
            while name.casefold() in names:  # 256 and "256"
                name += "_too"
            names.add(name.casefold())
            yield f"manifest_{name}", text, codes, stricter[0] if stricter else {}


def edited(good: Content, change: Callable[[Content], object]) -> Content:
    """A copy that was changed."""
    content = copy.deepcopy(good)
    change(content)
    return content


def _set(good: Content, *way: Any) -> Content:
    """A copy with a value, the last of ``way``, at the place that the others name."""
    *steps, last, value = way
    content = copy.deepcopy(good)
    at: Any = content
    for step in steps:
        at = at[step]
    at[last] = value
    return content


def _texts(good: Content) -> Iterator[Any]:
    text = json.dumps(good)
    data = text.encode()
    yield "unchanged", data, ()
    yield "spaces", json.dumps(good, indent=8).encode() + b"\n\n", ()
    yield "escapes", json.dumps(good, ensure_ascii=True).encode(), ()
    for name, wrong in {
        "empty": b"", "spaces_only": b"  \n", "null": b"null", "list": b"[]", "number": b"1",
        "text": b'"manifest"', "byte_order_mark": b"\xef\xbb\xbf" + data,
        "utf16": text.encode("utf-16"), "utf16_plain": text.encode("utf-16-le"),
        "latin1": text.replace("odtpack", "\u00e9dtpack", 1).encode("latin-1"),
        "overlong": data.replace(b"cross_entropy", b"cross\xc0\xafentropy", 1),
        "surrogate_bytes": data.replace(b"cross_entropy", b"cross\xed\xa0\x80", 1),
        "cut": data[:-1], "cut_in_half": data[: len(data) // 2], "one_more_brace": data + b"}",
        "two_values": data + b" {}", "two_manifests": data + data, "trailing_zero": data + b"\0",
        "trailing_comma": data[:-1] + b",}", "comment": b"/* odtpack */" + data,
        "line_comment": b"// odtpack\n" + data, "single_quotes": data.replace(b'"', b"'"),
        "bare_keys": data.replace(b'"schema_version"', b"schema_version"),
        "control_in_text": data.replace(b"cross_entropy", b"cross\nentropy", 1),
        "bad_escape": data.replace(b"cross_entropy", b"cross\\xentropy", 1),
        "nan": data[:-1] + b', "release": NaN}',
        "infinity": data[:-1] + b', "release": Infinity}',
        "minus_infinity": data[:-1] + b', "release": -Infinity}',
        "leading_zero": data.replace(b'"schema_version": 1', b'"schema_version": 01'),
        "plus": data.replace(b'"schema_version": 1', b'"schema_version": +1'),
        "hexadecimal": data.replace(b'"schema_version": 1', b'"schema_version": 0x1'),
        "leading_point": data.replace(b'"schema_version": 1', b'"schema_version": .1e1'),
        "brackets": b"[" * 100_000, "braces": b'{"a":' * 100_000,
        "too_large": data[:-1] + b" " * (4 * 2**20 + 1 - len(data)) + b"}",
        "too_large_key": data[:-1] + b', "x": "' + b"y" * 2**23 + b'"}',
        "empty_lists": b'{"parameters": [' + b"[]," * 1_400_000 + b"[]]}",
        "empty_objects": b'{"groups": [' + b"{}," * 2_000_000 + b"{}]}",
        "many_parameters_nulls": b'{"parameters": [' + b"null," * 700_000 + b"null]}",
    }.items():  # fmt: skip
        yield name, wrong, INVALID
    yield "as_large_as_it_may_be", data[:-1] + b" " * (4 * 2**20 - len(data)) + b"}", ()
    for depth, codes in ((64, ()), (65, INVALID), (2000, INVALID)):
        nested = json.dumps(_set(good, "loss_options", {"a": "NESTED"}))
        brackets = "[" * (depth - 2) + "]" * (depth - 2)
        yield f"nested_{depth}_deep", nested.replace('"NESTED"', brackets).encode(), codes
    yield "brackets_in_text", _set(good, "loss_options", {"a": "[" * 200}), ()
    for name, old, new in (
        ("top", '"schema_version": 1', '"schema_version": 1, "schema_version": 1'),
        ("file", '"path": "checkpoint"', '"path": "checkpoint", "path": "checkpoint"'),
        ("session", '"optimization_level"', '"threads": 1, "threads": 1, "optimization_level"'),
        ("escaped", '"schema_version": 1', '"schema_version": 1, "schema\\u005fversion": 1'),
        ("different", '"accumulation_steps": 1', '"accumulation_steps": 1, '
         '"accumulation_steps": 2'),
        ("parameter", '"role": "trainable"', '"role": "frozen", "role": "trainable"'),
        ("unknown", '"schema_version": 1', '"unknown": 1, "unknown": 2, "schema_version": 1'),
    ):  # fmt: skip
        whole = json.dumps(_set(good, "accumulation_steps", 1))
        assert old in whole, old
        yield f"key_twice_{name}", whole.replace(old, new, 1).encode(), INVALID
    yield "lone_surrogate", data.replace(b"cross_entropy", b"\\ud800", 1), INVALID
    yield "lone_low_surrogate", data.replace(b"cross_entropy", b"\\udc00x", 1), INVALID
    parameter = good["parameters"][0]["name"].encode()
    yield "surrogate_in_name", data.replace(parameter, b"\\ud83d", 1), INVALID
    yield "version_2", _set(good, "schema_version", 2), ("manifest-version",)
    yield "version_huge", _set(good, "schema_version", 2**40), ("manifest-version",)
    yield "version_text", _set(good, "schema_version", "1"), INVALID
    yield "version_true", _set(good, "schema_version", True), INVALID
    yield "version_half", _set(good, "schema_version", 1.5), (*INVALID, "manifest-version")
    yield "version_1_0", data.replace(b'"schema_version": 1', b'"schema_version": 1.0'), ()
    yield "version_1e0", data.replace(b'"schema_version": 1', b'"schema_version": 1e0'), ()


def _sessions(good: Content) -> Iterator[Any]:
    def config(name: str, value: Any) -> Any:
        return f"session_{name}", _set(good, "session", "config", value), INVALID

    for key in _KEYS:
        if key != "session.force_spinning_stop":
            yield config(f"config_{key.replace('.', '_')}", {key: "1"})
    spinning, stats = "session.force_spinning_stop", "session.collect_node_memory_stats_to_file"
    for name, wrong in {
        "writes_a_file": {spinning: "1", stats: "stats.csv"}, "spinning_0": {spinning: "0"},
        "spinning_number": {spinning: 1}, "spinning_true": {spinning: True},
        "spinning_null": {spinning: None}, "spinning_space": {f"{spinning} ": "1"},
        "spinning_case": {"Session.Force_Spinning_Stop": "1"},
        "spinning_zero_byte": {f"{spinning}\0x": "1"}, "long_key": {"k" * 2000: "1"},
        "long_value": {spinning: "1" * 9000}, "list": [], "null": None, "text": spinning,
    }.items():  # fmt: skip
        yield config(f"config_{name}", wrong)
    for key in ("__proto__", "__proto__.polluted", "constructor", "constructor.assign",
                "prototype", "toString", "hasOwnProperty", ""):  # fmt: skip
        yield config(f"config_{key.replace('.', '_') or 'empty'}_key", {key: "1"})
    yield "session_config_empty", _set(good, "session", "config", {}), ()
    without = edited(good, lambda content: content["session"].pop("config", None))
    yield "session_config_absent", without, ()
    yield "session_absent", edited(good, lambda content: content.pop("session")), ()
    yield "session_null", _set(good, "session", None), ()
    for name, value in {
        "list": [], "text": "all", "number": 1, "true": True, "empty": {},
        "level_unknown": {"optimization_level": "fast"},
        "level_number": {"optimization_level": 99}, "level_null": {"optimization_level": None},
    }.items():  # fmt: skip
        yield f"session_{name}", _set(good, "session", value), INVALID
    for key, value in (
        ("unknown", 1), ("__proto__", {}), ("profiling", "x"), ("enable_profiling", True),
        ("profile_file_prefix", "stats.csv"), ("optimized_model_path", "stats.csv"),
        ("custom_ops_library", "libevil.so"), ("providers", ["CUDAExecutionProvider"]),
        ("execution_provider", "evil"), ("memory_pattern", "true"), ("memory_pattern", 1),
        ("arena", "no"), ("arena", None), ("shared_allocator", 1), ("prepacking", 0),
    ):  # fmt: skip
        kind = type(value).__name__
        yield f"session_{key}_{kind}", _set(good, "session", key, value), INVALID


def _values(good: Content) -> Iterator[Any]:
    """What a key may not hold, and what it may."""
    elements, size = good["layout"]["elements"], good["parameters"][0]["size_bytes"]
    last = max(i for i, item in enumerate(good["parameters"]) if item["role"] == "trainable")
    chunk = ((0, -1, 255, 2**30 + 1, 2**63, "256", 256.5), (256, 2**20, None))
    for name, way, wrong, right in (
        ("session_threads", ("session", "threads"),
         (0, -1, 257, 2000, 2**31, 2**63, 1.5, "4", True), (1, 2, 4.0, None)),
        *((f"session_{key}", ("session", key), *chunk)
          for key in ("initial_chunk_size_bytes", "max_dead_bytes_per_chunk")),
        ("size_bytes", ("files", "checkpoint", "size_bytes"),
         (-1, _HUGE, 2**63, 2**64, 10**30, 1e300, 0.5, "1", True, None, [1]), ()),
        ("class_count", ("inputs", 1, "class_count"), (0, -1, 2**31, _HUGE, 2.5, "2", True), ()),
        ("ignore_index", ("inputs", 1, "ignore_index"),
         (_HUGE, -_HUGE, 2**63, 0.5, "-100", True), (-100, 0, 255, -1.0, 2**53 - 1)),
        ("accumulation", ("accumulation_steps",),
         (0, -1, 2**20 + 1, 2**40, _HUGE, 1.5, "1", True), (2, 4.0, 2**20)),
        ("chunk_elements", ("layout", "chunk_elements"),
         (0, 512, 1023, 2**30 + 1, 2**40, 2**63, -1, 1024.5, "1024", True, None),
         (1024, 131072.0, 2**30)),
        ("elements", ("layout", "elements"),
         (0, 1, elements - 1, elements + 1, elements + 16, elements * 2, 2**28, 2**40, _HUGE, -16,
          "16", True, None), ()),
        ("offset", ("parameters", last, "offset"),
         (1, 8, 15, -16, 2**28, 2**40, _HUGE, "0", 0.5, True), ()),
        ("run", ("layout", "run"), ("all", "", "CHUNKS", None, 1), ()),
        ("layout_dtype", ("layout", "dtype"), ("float16", "int32", "double", None), ()),
        ("group_scale", ("groups", 0, "learning_rate_scale"),
         (0, -1, -0.5, 1e300, 1e39, 1e-46, 1e-300, "1", None, True, [1]), (1, 2.5, 1e-30, 1e30)),
        ("group_decay", ("groups", 0, "weight_decay"), ("0", None, True), ()),
        ("self_check_rate", ("self_check", "learning_rate"),
         (0, -1, 1e300, 1e-46, "0.1", None, True), ()),
        ("self_check_bound", ("self_check", "inputs", 1, "bound"), (0, -1, _HUGE, 1.5, "2"), ()),
        ("scale", ("parameters", 0, "scale"), ("nothing", "__proto__", ""), ()),
        ("model_dtype", ("parameters", 0, "model_dtype"), ("double", "", 1), ()),
        ("parameter_size", ("parameters", 0, "size_bytes"), (size + 1, -1, "16", _HUGE), ()),
    ):  # fmt: skip
        for values, codes in ((wrong, INVALID), (right, ())):
            for value in values:
                yield f"{name}_{value}", _set(good, *way, value), codes


def _numbers(good: Content) -> Iterator[Any]:
    size = ("files", "checkpoint", "size_bytes")
    whole = good["files"]["checkpoint"]["size_bytes"]
    yield "size_bytes_as_float", _set(good, *size, float(whole)), ()
    text = json.dumps(good).replace(f'"size_bytes": {whole}', f'"size_bytes": {whole}0E-1')
    yield "size_bytes_with_exponent", text.encode(), ()
    for name, digits in (("1e400", b"1e400"), ("digits", b"9" * 5000), ("minus_1e400", b"-1e400")):
        data = json.dumps(good).encode()
        at = b'"size_bytes": %d' % whole
        yield f"size_bytes_{name}", data.replace(at, b'"size_bytes": ' + digits, 1), INVALID
    yield "class_count_as_float", _set(good, "inputs", 1, "class_count", 2.0), ()
    yield "class_count_most", _set(good, "inputs", 1, "class_count", 2**31 - 1), ()


def _shapes(good: Content) -> Iterator[Any]:
    for where in (("inputs", 0), ("outputs", 0), ("evaluation_outputs", 0), ("parameters", 0)):
        at = where[0]
        fixed = at == "parameters"
        for name, shape in {
            "of_33": [1] * 33, "of_20000": [1] * 20_000, "negative": [-1], "huge": [2**50],
            "product": [2**20, 2**21], "size_2_53": [2**53], "size_2_64": [2**64],
            "half": [1.5], "true": [True], "nested": [[1]], "object": {}, "text": "batch",
            "null": None, "empty_name": [""],
        }.items():  # fmt: skip
            yield f"{at}_shape_{name}", _set(good, *where, "shape", shape), INVALID
        if not fixed:
            yield f"{at}_shape_1_0", _set(good, *where, "shape", ["batch", 4.0]), ()
            yield f"{at}_shape_named_huge", _set(good, *where, "shape", ["b", 2**41]), INVALID
            yield f"{at}_shape_of_32", _set(good, *where, "shape", [1] * 32), ()
        zero = _set(good, *where, "shape", [0, 2**50])
        yield f"{at}_shape_zero_and_huge", zero, (), everyone("some multiply in another order")
    for key, most in (("inputs", 1024), ("outputs", 1024), ("evaluation_outputs", 1024)):
        entry = good[key][-1]
        many = [entry | {"name": f"more{index}"} for index in range(most + 1)]
        yield f"{key}_too_many", _set(good, key, [good[key][0], *many]), INVALID


def _layouts(good: Content) -> Iterator[Any]:
    elements = good["layout"]["elements"]
    yield "elements_as_float", _set(good, "layout", "elements", float(elements)), ()
    trained = [i for i, item in enumerate(good["parameters"]) if item["role"] == "trainable"]
    first, last = trained[0], trained[-1]
    shared = good["parameters"][first]["offset"]
    yield "offset_shared", _set(good, "parameters", last, "offset", shared), INVALID
    without = edited(good, lambda content: content["parameters"][last].pop("offset"))
    yield "offset_absent", without, INVALID
    for value in ("a", [1], [[]], [""], None, {}):
        name = json.dumps(value).strip('[]{}"') or type(value).__name__
        yield f"layout_inputs_{name}", _set(good, "layout", "inputs", value), INVALID
    for name, value in {"axes_2": [2], "axes_many": [0, 1, 0], "axes_text": "0"}.items():
        state = [{"name": "first_order_moments", "axes": value}]
        yield f"state_{name}", _set(good, "layout", "state", state), INVALID
    twice = [{"name": "first_order_moments"}] * 2
    yield "state_same_name", _set(good, "layout", "state", twice), ()
    for key in ("dtype", "elements", "run", "chunk_elements", "inputs"):
        without = edited(good, lambda content, key=key: content["layout"].pop(key))
        yield f"layout_without_{key}", without, INVALID
    yield "layout_absent", edited(good, lambda content: content.pop("layout")), ()
    yield "layout_null", _set(good, "layout", None), ()
    for value in ([], 3, "chunks"):
        yield f"layout_{type(value).__name__}", _set(good, "layout", value), INVALID
    bare = edited(good, lambda content: content["parameters"][last].pop("offset"))
    yield "layout_and_offset_absent", edited(bare, lambda content: content.pop("layout")), ()
    wide = {"dtype": "float64", "size_bytes": 2 * good["parameters"][last]["size_bytes"]}
    typed = _set(good, "parameters", last, good["parameters"][last] | wide)
    yield "layout_of_another_type", typed, ()
    empty = good["parameters"][first] | {"name": "empty", "shape": [0], "size_bytes": 0}
    beside = _set(good, "groups", 0, "parameters", [*good["groups"][0]["parameters"], "empty"])
    yield "offset_of_nothing_shared", beside | {"parameters": [*good["parameters"], empty]}, ()


def _groups(good: Content) -> Iterator[Any]:
    data = json.dumps(good).encode()
    at = data.index(b'"learning_rate_scale": ')
    end = data.index(b",", at)
    yield "group_scale_1e400", data[:at] + b'"learning_rate_scale": 1e400' + data[end:], INVALID
    names = good["groups"][0]["parameters"]
    for name, value in {
        "none": [], "unknown": ["nothing"], "twice": [*names, names[0]], "text": names[0],
        "number": [1], "proto": ["__proto__"], "less": names[:-1],
    }.items():  # fmt: skip
        yield f"group_parameters_{name}", _set(good, "groups", 0, "parameters", value), INVALID
    yield "groups_object", _set(good, "groups", {}), INVALID
    yield "groups_text", _set(good, "groups", "all"), INVALID


def _schedules(good: Content) -> Iterator[Any]:
    def schedule(kind: Any, settings: Any, rate: Any = 0.01) -> Content:
        return _set(good, "schedule", {"kind": kind, "settings": settings, "learning_rate": rate})

    wrong: dict[Any, dict[str, Any]] = {
        "exponential": {"kind_unknown": {}}, "__proto__": {"kind_proto": {}},
        "constructor": {"kind_constructor": {}}, 1: {"kind_number": {}},
        "cosine": {
            "settings_list": [], "settings_text": "floor", "setting_unknown": {"gamma": 0.5},
            "setting_proto": {"__proto__": 1}, "floor_text": {"floor": "0.1"},
            "floor_null": {"floor": None}, "floor_negative": {"floor": -0.1},
            "floor_2": {"floor": 2}, "floor_object": {"floor": {}},
        },
        "step": {
            "gamma_text": {"period": 2, "gamma": "0.5"}, "gamma_0": {"period": 2, "gamma": 0},
            "gamma_above_1": {"period": 2, "gamma": 1.5},
            "gamma_huge": {"period": 2, "gamma": 1e300}, "period_0": {"period": 0},
            "period_negative": {"period": -3}, "period_half": {"period": 1.5},
            "period_text": {"period": "2"}, "period_absent": {},
        },
        "linear": {
            "warmup_negative": {"warmup_steps": -1}, "warmup_half": {"warmup_steps": 0.5},
            "warmup_huge": {"warmup_steps": _HUGE}, "total_0": {"total_steps": 0},
            "warmup_after_end": {"warmup_steps": 9, "total_steps": 8},
        },
        "multistep": {
            "milestones_empty": {"milestones": []}, "milestones_falling": {"milestones": [3, 1]},
            "milestones_text": {"milestones": ["1"]}, "milestones_number": {"milestones": 3},
            "milestones_negative": {"milestones": [-1]}, "milestones_half": {"milestones": [1.5]},
            "milestones_absent": {},
        },
    }  # fmt: skip
    for kind, cases in wrong.items():
        for name, settings in cases.items():
            yield f"schedule_{name}", schedule(kind, settings), INVALID
    for name, value in {"text": "cosine", "list": []}.items():
        yield f"schedule_{name}", _set(good, "schedule", value), INVALID
    for rate in (0, -1, -0.01, 1e300, 1e39, 1e-46, "0.01", True, [0.1]):
        yield f"schedule_rate_{rate}", schedule("cosine", {}, rate), INVALID
    for name, given in {
        "constant": ("constant", {}), "rate_null": ("constant", {}, None),
        "rate_1": ("constant", {}, 1), "step": ("step", {"period": 2}),
        "period_2_0": ("step", {"period": 2.0, "gamma": 1}),
        "linear": ("linear", {"warmup_steps": 2, "total_steps": 9.0}),
        "multistep": ("multistep", {"milestones": [1, 2.0, 2], "gamma": 0.5}),
    }.items():  # fmt: skip
        yield f"schedule_{name}", schedule(*given), ()
    yield "schedule_absent", edited(good, lambda content: content.pop("schedule")), ()


def _keys(good: Content) -> Iterator[Any]:
    for name, change in {
        "top": lambda content: content.update(unknown=1),
        "proto": lambda content: content.update({"__proto__": {"polluted": 1}}),
        "constructor": lambda content: content.update(constructor={"prototype": 1}),
        "file": lambda content: content["files"].update(unknown=1),
        "input": lambda content: content["inputs"][0].update(unknown=1),
        "layout": lambda content: content["layout"].update(unknown=1),
        "parameter": lambda content: content["parameters"][0].update(toString=1),
    }.items():  # fmt: skip
        yield f"unknown_key_{name}", edited(good, change), (), _STRICT
    for name, change in {
        "tool": lambda content: content.update(tool=[]),
        "clip": lambda content: content.update(clip="all"),
        "loss_options": lambda content: content.update(loss_options=3),
        "recipe_digest": lambda content: content.update(recipe_digest="x"),
    }.items():  # fmt: skip
        yield f"odd_{name}", edited(good, change), (), everyone("kits do not read it")
    for key in ("schema_version", "files", "inputs", "outputs", "parameters"):
        yield f"without_{key}", edited(good, lambda content, key=key: content.pop(key)), INVALID
        for name, value in {"null": None, "number": 3, "text": "all"}.items():
            codes = ("manifest-version", *INVALID) if value == 3 else INVALID
            yield f"{key}_{name}", _set(good, key, value), codes
    for key in ("training_model", "eval_model", "optimizer_model", "checkpoint"):
        without = edited(good, lambda content, key=key: content["files"].pop(key))
        yield f"without_file_{key}", without, INVALID
        yield f"file_{key}_text", _set(good, "files", key, "x"), INVALID
        yield f"file_{key}_null", _set(good, "files", key, None), INVALID
    for part in ("path", "size_bytes", "sha256"):
        without = edited(good, lambda content, part=part: content["files"]["checkpoint"].pop(part))
        yield f"file_without_{part}", without, INVALID
    for name, digest in {
        "short": "0" * 63, "long": "0" * 65, "upper": "A" * 64, "empty": "", "spaces": " " * 64,
        "number": 0, "null": None,
    }.items():  # fmt: skip
        yield f"sha256_{name}", _set(good, "files", "checkpoint", "sha256", digest), INVALID
    yield "sha256_other", _set(good, "files", "checkpoint", "sha256", "0" * 64), (
        "package-changed",)  # fmt: skip
    whole = good["files"]["checkpoint"]["size_bytes"]
    yield "size_other", _set(good, "files", "checkpoint", "size_bytes", whole + 1), (
        "package-changed",)  # fmt: skip
    wrong_digest = good | {"digest": "0" * 64}
    yield "digest_wrong", wrong_digest, (), {"python": "kits do not check the manifest's digest"}


def _self_checks(good: Content) -> Iterator[Any]:
    for name, shape in {
        "huge": [2**27], "product": [2**14, 2**13], "of_33": [1] * 33, "negative": [-2],
        "size_2_50": [2**50], "named": ["batch"], "null": None, "half": [2.5],
    }.items():  # fmt: skip
        made = _set(good, "self_check", "inputs", 0, "shape", shape)
        yield f"self_check_shape_{name}", made, INVALID
    for name, losses in {"four": [1, 1, 1, 1], "text": ["1"] * 5, "none": []}.items():
        yield f"self_check_losses_{name}", _set(good, "self_check", "losses", losses), INVALID


def _names(good: Content) -> Iterator[Any]:
    yield "inputs_same_name", _set(good, "inputs", good["inputs"] + [good["inputs"][0]]), INVALID
    both = good["parameters"] + [good["parameters"][0]]
    yield "parameters_same_name", _set(good, "parameters", both), INVALID
    outputs = good["outputs"] + [good["outputs"][0] | {"role": "additional"}]
    yield "outputs_same_name", _set(good, "outputs", outputs), INVALID
    evaluated = [good["outputs"][0] | {"role": "prediction"}]
    yield "outputs_in_both", _set(good, "evaluation_outputs", evaluated), INVALID
    yield "outputs_none", _set(good, "outputs", []), INVALID
    yield "outputs_without_loss", _set(good, "outputs", 0, "role", "additional"), INVALID
    for key in ("inputs", "outputs", "parameters"):
        for value in ("", None, 3, [], True):
            name = f"{key}_name_{json.dumps(value).strip('[]') or 'list'}"
            yield name.replace('"', "empty"), _set(good, key, 0, "name", value), INVALID
    for key, roles in {
        "inputs": ("label", "", "DATA", None, 1, "__proto__"),
        "outputs": ("", "predictions", None), "parameters": ("trained", "buffer", "", None, 1),
    }.items():  # fmt: skip
        for role in roles:
            yield f"{key}_role_{role}", _set(good, key, 0, "role", role), INVALID


def _types(good: Content) -> Iterator[Any]:
    for key in ("inputs", "outputs", "parameters"):
        for value in ("float", "bfloat16", "complex64", "int4", "Float32", "", None, 1):
            yield f"{key}_dtype_{value}", _set(good, key, 0, "dtype", value), INVALID
    yield "target_unknown", _set(good, "target", "tensorflow"), (*INVALID, "package-target")
    yield "inference_absent", edited(good, lambda content: content.pop("inference")), INVALID
    unknown = _set(good, "inference", "parameters", ["nothing"])
    yield "inference_parameter_unknown", unknown, INVALID
    yield "inference_parameter_number", _set(good, "inference", "parameters", [1]), INVALID
