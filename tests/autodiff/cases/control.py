"""Models with If, Loop and Scan, each with the same function in PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff import oracle
from tests.autodiff.oracle import Array, ints, normal, spread

Tensor = torch.Tensor


def cases(name, text, feeds, function, opsets=(17,), **options):
    return oracle.cases(name, feeds, function, opsets, text=text, **{"double": True} | options)


EVERY = (12, 13, 16, 19, 21, 24, 26)
W, X, H = normal(3, 3, seed=1, scale=0.5), normal(5, 2, 3, seed=2), normal(2, 3, seed=3)
B, V = normal(3, seed=4), spread(2, 3, seed=5)
YES, NO = np.array(True), np.array(False)


def times(count: int) -> Array:
    return np.array(count, np.int64)


# Scan


def rnn(x: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Any:
    outputs = []
    for part in x:
        h = torch.tanh(part @ w + h @ w + b)
        outputs.append(h * part)
    return h, torch.stack(outputs)


def rnn_text(time: str = "5", batch: str = "2") -> str:
    return f"""
net (float[{time}, {batch}, 3] x, float[{batch}, 3] h, float[3, 3] w, float[3] b)
    => (float[{batch}, 3] last, float[{time}, {batch}, 3] ys) {{
  last, ys = Scan <num_scan_inputs = 1, body = turn (float[{batch}, 3] s, float[{batch}, 3] part)
      => (float[{batch}, 3] t, float[{batch}, 3] y) {{
    xw = MatMul(part, w) sw = MatMul(s, w) sum = Add(xw, sw) biased = Add(sum, b)
    t = Tanh(biased) y = Mul(t, part)
  }}> (h, x)
}}"""


def both_ways(x: Tensor, z: Tensor, h: Tensor) -> Any:
    """x is cut along its last axis from the end, z along its first."""
    ys, zs = [], []
    for t in range(4):
        h = torch.sigmoid(h * x[..., 3 - t]) + z[t]
        ys.append(h * h)
        zs.insert(0, torch.exp(z[t] * 0.5))
    return h, torch.stack(ys, -1), torch.stack(zs, 1)


BOTH_WAYS = """
net (float[2, 3, 4] x, float[4, 2, 3] z, float[2, 3] h)
    => (float[2, 3] last, float[2, 3, 4] ys, float[2, 4, 3] zs) {
  half = Constant <value = float {0.5}> ()
  last, ys, zs = Scan <num_scan_inputs = 2, scan_input_axes = [-1, 0],
      scan_input_directions = [1, 0], scan_output_axes = [AXIS, 1],
      scan_output_directions = [0, 1],
      body = turn (float[2, 3] s, float[2, 3] a, float[2, 3] b)
      => (float[2, 3] t, float[2, 3] y, float[2, 3] e) {
    product = Mul(s, a) open = Sigmoid(product) t = Add(open, b) y = Mul(t, t)
    halved = Mul(b, half) e = Exp(halved)
  }> (h, x, z)
}"""


BATCH_FIRST = """
net (float[2, 5, 3] x, float[2, 3] h, float[3, 3] w, float[3] b)
    => (float[2, 3] last, float[5, 2, 3] ys) {
  last, ys = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
      scan_output_directions = [1], body = turn (float[2, 3] s, float[2, 3] part)
      => (float[2, 3] t, float[2, 3] y) {
    zero = Constant <value = int64 {0}> () first = Gather(w, zero) st = Transpose(s)
    xw = MatMul(part, w) sw = MatMul(s, w) ws = MatMul(w, st) wst = Transpose(ws)
    one = Add(xw, sw) two = Add(one, wst) three = Add(two, first) biased = Add(three, b)
    t = Tanh(biased) y = Mul(t, part)
  }> (h, x)
}"""


def batch_first(x: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Any:
    """From the last step to the first; w multiplies from both sides, and its row is added."""
    outputs = []
    for t in reversed(range(5)):
        h = torch.tanh(x[:, t] @ w + h @ w + (w @ h.T).T + w[0] + b)
        outputs.insert(0, h * x[:, t])
    return h, torch.stack(outputs)


def lookups(table: Tensor, ids: Tensor, keep: Tensor) -> Any:
    count, total, ys = 0, table[0] * 0 + 1, []
    for i, flag in zip(ids, keep, strict=True):
        count += 1
        total = total * table[i] if flag else total + count
        ys.append(total)
    return torch.tensor(count), torch.stack(ys)


LOOKUPS = """
net (float[4, 3] table, int64[5] ids, bool[5] keep) => (int64 n, float[5, 3] ys) {
  zero = Constant <value = int64 {0}> () start = Constant <value = float[3] {1.0, 1.0, 1.0}> ()
  one = Constant <value = int64 {1}> ()
  n, last, ys = Scan <num_scan_inputs = 2, body = turn (int64 c, float[3] s, int64 i, bool k)
      => (int64 d, float[3] t, float[3] y) {
    d = Add(c, one) row = Gather(table, i) product = Mul(s, row) f = CastLike(d, s)
    sum = Add(s, f) t = Where(k, product, sum) y = Identity(t)
  }> (zero, start, ids, keep)
}"""

PLAIN_MAP = """
net (float[5, 2, 3] x, float[3, 3] w) => (float[5, 2, 3] ys) {
  ys = Scan <num_scan_inputs = 1, body = turn (float[2, 3] part) => (float[2, 3] y) {
    wt = Transpose(w) m = MatMul(part, wt) e = Exp(m) y = Mul(e, m)
  }> (x)
}"""

SUM_ONLY = """
net (float[5, 2, 3] x, float[3] b) => (float[2, 3] last) {
  zero = Constant <value = float {0.0}> () sizes = Constant <value = int64[2] {2, 3}> ()
  h = Expand(zero, sizes)
  last, unused = Scan <num_scan_inputs = 1, body = turn (float[2, 3] s, float[2, 3] part)
      => (float[2, 3] t, float[2, 3] y) {
    u = Add(s, b) t = Identity(u) y = Mul(part, part)
  }> (h, x)
}"""

PASSED_THROUGH = """
net (float[5, 2, 3] x, float[2, 3] h) => (float[2, 3] a, float[2, 3] b, float[5, 2, 3] ys) {
  a, b, ys = Scan <num_scan_inputs = 1,
      body = turn (float[2, 3] s, float[2, 3] r, float[2, 3] part)
      => (float[2, 3] t, float[2, 3] t2, float[2, 3] y) {
    t = Identity(s) t2 = Mul(r, t) y = Add(part, t2)
  }> (h, h, x)
}"""


def passed_through(x: Tensor, h: Tensor) -> Any:
    powers = torch.stack([h ** (t + 2) for t in range(5)])
    return h, powers[-1], x + powers


# Loop

POWERS = """
net (int64 m, float[2, 3] h, float[3, 3] w) => (float[2, 3] last, float[t, 2, 3] ys) {
  last, ys = Loop <body = turn (int64 i, bool go, float[2, 3] s)
      => (bool on, float[2, 3] t, float[2, 3] y) {
    on = Identity(go) sw = MatMul(s, w) t = Tanh(sw) f = CastLike(i, s) y = Mul(t, f)
  }> (m, , h)
}"""

# Each turn moves the first row to the end: inference alone loses their number.
SLIDING = """
net (int64 m, float[n, 3] h, float[3, 3] w) => (float[n, 3] last) {
  zero = Constant <value = int64[1] {0}> () one = Constant <value = int64[1] {1}> ()
  end = Constant <value = int64[1] {9223372036854775807}> ()
  last = Loop <body = turn (int64 i, bool go, float[] s) => (bool on, float[] t) {
    on = Identity(go) sw = MatMul(s, w) u = Tanh(sw) rest = Slice(u, one, end, zero)
    first = Slice(s, zero, one, zero) t = Concat <axis = 0> (rest, first)
  }> (m, , h)
}"""


def sliding(m: Tensor, h: Tensor, w: Tensor) -> Any:
    for _ in range(int(m)):
        h = torch.cat([torch.tanh(h @ w)[1:], h[:1]])
    return h


def powers(m: Tensor, h: Tensor, w: Tensor) -> Any:
    ys = []
    for i in range(int(m)):
        h = torch.tanh(h @ w)
        ys.append(h * i)
    return h, torch.stack(ys) if ys else h.new_zeros(0, 2, 3) + 0 * w.sum()


def until(inputs: str, trips: str, start: str, limit: str) -> str:
    """Doubles and adds until the sum exceeds a limit."""
    return f"""
net ({inputs}float[2, 3] h, float[3] b) => (float[2, 3] last, float[t] sums, int64 n) {{
  limit = Constant <value = float {{{limit}}}> () zero = Constant <value = int64 {{0}}> ()
  one = Constant <value = int64 {{1}}> ()
  last, n, sums = Loop <body = turn (int64 i, bool go, float[2, 3] s, int64 c)
      => (bool on, float[2, 3] t, int64 d, float y) {{
    d = Add(c, one) double = Mul(s, b) t = Add(double, h) squares = Mul(t, t)
    y = ReduceSum <keepdims = 0> (squares) on = Less(y, limit)
  }}> ({trips}, {start}, h, zero)
}}"""


def until_torch(limit: float, most: int | None = None) -> Callable[..., Any]:
    def function(h: Tensor, b: Tensor, **ignored: Tensor) -> Any:
        s, sums = h, []
        while (not sums or sums[-1] < limit) and len(sums) != most:
            s = s * b + h
            sums.append((s * s).sum())
        return s, torch.stack(sums), torch.tensor(len(sums))

    return function


ROWS = """
net (float[4, 3] x, float[1, 3] h) => (float[1, 3] last) {
  shape = Shape(x) zero = Constant <value = int64[1] {0}> () n = Gather(shape, zero)
  count = Squeeze(n, zero) zeros = Constant <value = int64 {0}> ()
  true = Constant <value = int32 {1}> () go0 = Cast <to = 9> (true)
  last = Loop <body = turn (int64 i, bool go, float[1, 3] s) => (bool on, float[1, 3] t) {
    on = Identity(go) j = Unsqueeze(i, zero) row = Gather(x, j) e = Mul(s, row) t = Sin(e)
  }> (count, go0, h)
}"""


def rows(x: Tensor, h: Tensor) -> Any:
    for row in x:
        h = torch.sin(h * row)
    return h


STACKED = """
net (int64 m, float[2, 3] h, float[3, 3] w) => (float[2, 3] last, float[t, 2, 3] ys) {
  last, ys = Loop <body = turn (int64 i, bool go, float[2, 3] s)
      => (bool on, float[2, 3] t, float[2, 3] y) {
    on = Identity(go) t = MatMul(s, w) y = Mul(t, s)
  }> (m, , h)
}"""


def stacked(m: Tensor, h: Tensor, w: Tensor) -> Any:
    ys = []
    for _ in range(int(m)):
        ys.append(h @ w * h)
        h = h @ w
    return h, torch.stack(ys)


GROWING = """
net (int64 m, float[1, 3] h, float[3, 3] w) => (float[n, 3] rows) {
  last, rows = Loop <body = turn (int64 i, bool go, float[1, 3] s, float[] all)
      => (bool on, float[1, 3] t, float[] more) {
    on = Identity(go) sw = MatMul(s, w) t = Tanh(sw) more = Concat <axis = 0> (all, t)
  }> (m, , h, h)
}"""


def growing(m: Tensor, h: Tensor, w: Tensor) -> Any:
    rows = [h]
    for _ in range(int(m)):
        rows.append(torch.tanh(rows[-1] @ w))
    return torch.cat(rows)


ADDED = """
net (int64 m, float[2, 3] h, float[3] w) => (float[2, 3] last) {
  last = Loop <body = turn (int64 i, bool go, float[2, 3] s) => (bool on, float[2, 3] t) {
    on = Identity(go) t = Add(s, w)
  }> (m, , h)
}"""

UNDECLARED = """
net (int64 m, float[2, 3] h, float[3, 3] w) => (float[2, 3] y) {
  last = Loop <body = turn (int64 i, bool go, float[] s) => (bool on, float[] t) {
    on = Identity(go) sw = MatMul(s, w) u = Tanh(sw) t = Add(u, h)
  }> (m, , h)
  y = Mul(last, last)
}"""


def undeclared(m: Tensor, h: Tensor, w: Tensor) -> Any:
    s = h
    for _ in range(int(m)):
        s = torch.tanh(s @ w) + h
    return s * s


# If

BRANCHES = """
net (bool c, float[2, 3] x, float[3, 3] w, float[3] b) => (float[n, 3] y, float[2, 3] z) {
  e = Exp(x)
  y, z = If (c) <
    then_branch = yes () => (float[2, 3] y1, float[2, 3] z1) {
      m = MatMul(e, w) y1 = Tanh(m) z1 = Mul(m, b) },
    else_branch = no () => (float[4, 3] y2, float[2, 3] z2) {
      s = Sin(x) y2 = Concat <axis = 0> (e, s) z2 = Add(e, x) }>
}"""


def branches(c: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
    e = x.exp()
    return (torch.tanh(e @ w), e @ w * b) if c else (torch.cat([e, x.sin()]), e + x)


CONSTANT_BRANCH = """
net (bool c, float[2, 3] x) => (float[2, 3] y) {
  h = Mul(x, x)
  y = If (c) <
    then_branch = yes () => (float[2, 3] y1) { y1 = Softplus(h) },
    else_branch = no () => (float[2, 3] y2) {
      one = Constant <value = float {1.0}> () n = Shape(h) y2 = Expand(one, n) }>
}"""

NESTED_IF = """
net (bool c, bool d, float[2, 3] x, float[3, 3] w) => (float[2, 3] y) {
  y = If (c) <
    then_branch = yes () => (float[2, 3] y1) {
      m = MatMul(x, w)
      k = If (d) <
        then_branch = yy () => (float[2, 3] k1) { n = MatMul(m, w) k1 = Tanh(n) },
        else_branch = yn () => (float[2, 3] k2) { k2 = Sigmoid(m) }>
      y1 = Mul(k, m) },
    else_branch = no () => (float[2, 3] y2) { y2 = Mul(x, x) }>
}"""


def nested_if(c: Tensor, d: Tensor, x: Tensor, w: Tensor) -> Any:
    m = x @ w
    return (torch.tanh(m @ w) if d else torch.sigmoid(m)) * m if c else x * x


# One inside the other

IF_IN_LOOP = """
net (int64 m, float[2, 3] h, float[3, 3] w, float[3] b) => (float[2, 3] last) {
  two = Constant <value = int64 {2}> () zero = Constant <value = int64 {0}> ()
  last = Loop <body = turn (int64 i, bool go, float[2, 3] s) => (bool on, float[2, 3] t) {
    on = Identity(go) odd = Mod(i, two) is_even = Equal(odd, zero) sw = MatMul(s, w)
    t = If (is_even) <
      then_branch = yes () => (float[2, 3] t1) { a = MatMul(sw, w) p = Tanh(a) t1 = Add(p, b) },
      else_branch = no () => (float[2, 3] t2) { q = Sin(sw) t2 = Mul(q, s) }>
  }> (m, , h)
}"""


def if_in_loop(m: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Any:
    for i in range(int(m)):
        h = torch.sin(h @ w) * h if i % 2 else torch.tanh(h @ w @ w) + b
    return h


def loop_in_scan_text(trips: str) -> str:
    return f"""
net (float[4, 3] x, int64[4] ns, float[3] h, float[3, 3] w) => (float[3] last, float[4, 3] ys) {{
  three = Constant <value = int64 {{3}}> ()
  last, ys = Scan <num_scan_inputs = 2, body = outer (float[3] s, float[3] part, int64 n)
      => (float[3] t, float[3] y) {{
    u = Loop <body = inner (int64 i, bool go, float[3] a) => (bool on, float[3] b) {{
      on = Identity(go) aw = MatMul(a, w) c = Add(aw, part) b = Tanh(c)
    }}> ({trips}, , s)
    t = Mul(u, part) y = Identity(u)
  }}> (h, x, ns)
}}"""


def loop_in_scan(count: int | None) -> Callable[..., Any]:
    def function(x: Tensor, ns: Tensor, h: Tensor, w: Tensor) -> Any:
        ys = []
        for part, n in zip(x, ns, strict=True):
            for _ in range(int(n) if count is None else count):
                h = torch.tanh(h @ w + part)
            ys.append(h)
            h = h * part
        return h, torch.stack(ys)

    return function


SCAN_IN_LOOP_IN_IF = """
net (bool c, int64 m, float[5, 2, 3] x, float[2, 3] h, float[3, 3] w) => (float[2, 3] y) {
  xw = MatMul(x, w)
  y = If (c) <
    then_branch = yes () => (float[2, 3] y1) {
      y1 = Loop <body = turn (int64 i, bool go, float[2, 3] s) => (bool on, float[2, 3] t) {
        on = Identity(go)
        r = Scan <num_scan_inputs = 1, body = step (float[2, 3] a, float[2, 3] part)
            => (float[2, 3] b) { aw = MatMul(a, w) d = Add(aw, part) b = Tanh(d) }> (s, xw)
        t = Add(r, h)
      }> (m, , h) },
    else_branch = no () => (float[2, 3] y2) { y2 = Neg(h) }>
}"""


def scan_in_loop_in_if(c: Tensor, m: Tensor, x: Tensor, h: Tensor, w: Tensor) -> Any:
    if not c:
        return -h
    s = h
    for _ in range(int(m)):
        for part in x @ w:
            s = torch.tanh(s @ w + part)
        s = s + h
    return s


# Rules that add outputs or nodes to the forward pass, and function bodies, inside a body


def in_scan(nodes: str, x: str = "float[2, 3]", more: str = "") -> str:
    dims = x.removeprefix("float[")
    return f"""
net (float[4, {dims} x, {x} h{more}) => ({x} last, float[4, {dims} ys) {{
  last, ys = Scan <num_scan_inputs = 1, body = turn ({x} s, {x} part) => ({x} t, {x} y) {{
    {nodes} y = Mul(t, part)
  }}> (h, x)
}}"""


def step_by_step(step: Callable[..., Tensor]) -> Callable[..., Any]:
    def function(x: Tensor, h: Tensor, **more: Tensor) -> Any:
        ys = []
        for part in x:
            h = step(h, part, **more)
            ys.append(h * part)
        return h, torch.stack(ys)

    return function


IMAGES, IMAGE = spread(4, 1, 2, 4, 4, seed=6), spread(1, 2, 4, 4, seed=7)
K = normal(2, 2, 3, 3, seed=8, scale=0.3)
SCALE = spread(3, seed=9)

CASES = [
    *cases("Scan", rnn_text(), {"x": X, "h": H, "w": W, "b": B}, rnn, EVERY),
    *cases("Scan-open-sizes", rnn_text("time", "batch"), {"x": X, "h": H, "w": W, "b": B}, rnn,
           (13, 21)),
    *cases("Scan-one-turn", rnn_text("time", "batch"), {"x": X[:1], "h": H, "w": W, "b": B}, rnn),
    *cases("Scan-weights-only", rnn_text(), {"x": X, "h": H, "w": W, "b": B}, rnn,
           const=["x", "h"]),
    *cases("Scan-data-only", rnn_text(), {"x": X, "h": H, "w": W, "b": B}, rnn,
           const=["w", "b", "h"]),
    *cases("Scan-both-ways", BOTH_WAYS.replace("AXIS", "-1"),
           {"x": normal(2, 3, 4), "z": normal(4, 2, 3, seed=1), "h": H}, both_ways, (12, 16, 24)),
    *cases("Scan-both-ways-axis2", BOTH_WAYS.replace("AXIS", "2"),
           {"x": normal(2, 3, 4), "z": normal(4, 2, 3, seed=1), "h": H}, both_ways),
    *cases("Scan-batch-first", BATCH_FIRST, {"x": normal(2, 5, 3), "h": H, "w": W, "b": B},
           batch_first, (12, 16, 24)),
    *cases("Scan-integers", LOOKUPS,
           {"table": spread(4, 3), "ids": ints(1, 3, 1, 0, 2),
            "keep": np.array([True, False, True, True, False])}, lookups, (16, 21)),
    *cases("Scan-no-state", PLAIN_MAP, {"x": X, "w": W},
           lambda x, w: (x @ w.T).exp() * (x @ w.T), EVERY),
    *cases("Scan-nothing-to-keep", SUM_ONLY, {"x": X, "b": B},
           lambda x, b: (5 * b).expand(2, 3), const=["x"]),
    *cases("Scan-passed-through", PASSED_THROUGH, {"x": X, "h": V}, passed_through),
    *cases("Loop", POWERS, {"m": times(4), "h": H, "w": W}, powers, (15, 16, 19, 21, 24, 26)),
    *cases("Loop-no-turn", POWERS, {"m": times(0), "h": H, "w": W}, powers, (15, 26)),
    *cases("Loop-one-turn", POWERS, {"m": times(1), "h": H, "w": W}, powers),
    *cases("Loop-stacked", STACKED, {"m": times(3), "h": H, "w": W}, stacked, (12, 13, 21)),
    *cases("Loop-growing", GROWING, {"m": times(3), "h": H[:1], "w": W}, growing, (13, 17, 23)),
    *cases("Loop-sliding", SLIDING, {"m": times(3), "h": H, "w": W}, sliding, (13, 17, 23)),
    *cases("Loop-until", until("", "", "", "40.0"), {"h": V, "b": SCALE}, until_torch(40.0),
           (13, 17, 23)),
    *cases("Loop-until-or-count", until("int64 m, ", "m", "", "1e9"),
           {"m": times(3), "h": V, "b": SCALE}, until_torch(1e9, 3)),
    *cases("Loop-condition", until("bool c, ", "", "c", "60.0"),
           {"c": YES, "h": V, "b": SCALE}, until_torch(60.0)),
    *cases("Loop-rows", ROWS, {"x": spread(4, 3), "h": spread(1, 3, seed=1)}, rows, (13, 21)),
    *cases("Loop-nothing-to-keep", ADDED, {"m": times(3), "h": H, "w": B},
           lambda m, h, w: h + 3 * w, (12, 17, 26)),
    *cases("Loop-undeclared-shapes", UNDECLARED, {"m": times(3), "h": H, "w": W}, undeclared,
           (13, 17, 26)),
    *cases("If-then", BRANCHES, {"c": YES, "x": V, "w": W, "b": B}, branches, EVERY),
    *cases("If-else", BRANCHES, {"c": NO, "x": V, "w": W, "b": B}, branches, EVERY),
    *cases("If-constant-then", CONSTANT_BRANCH, {"c": YES, "x": V},
           lambda c, x: F.softplus(x * x), double=False),
    *cases("If-constant-else", CONSTANT_BRANCH, {"c": NO, "x": V},
           lambda c, x: torch.ones(2, 3, dtype=x.dtype) + 0 * x, double=False),
    *(case for c in (YES, NO) for d in (YES, NO)
      for case in cases(f"If-in-If-{c}-{d}", NESTED_IF, {"c": c, "d": d, "x": V, "w": W},
                        nested_if, (12, 21))),
    *cases("If-in-Loop", IF_IN_LOOP, {"m": times(5), "h": H, "w": W, "b": B}, if_in_loop,
           (12, 16, 24)),
    *cases("If-in-Loop-no-turn", IF_IN_LOOP, {"m": times(0), "h": H, "w": W, "b": B}, if_in_loop),
    *cases("Loop-in-Scan", loop_in_scan_text("three"),
           {"x": normal(4, 3), "ns": ints(3, 3, 3, 3), "h": B, "w": W}, loop_in_scan(3), (12, 21)),
    *cases("Loop-in-Scan-counts-differ", loop_in_scan_text("n"),
           {"x": normal(4, 3), "ns": ints(2, 0, 3, 1), "h": B, "w": W}, loop_in_scan(None),
           (12, 21)),
    *(case for c in (YES, NO)
      for case in cases(f"Scan-in-Loop-in-If-{c}", SCAN_IN_LOOP_IN_IF,
                        {"c": c, "m": times(2), "x": X, "h": H, "w": W}, scan_in_loop_in_if,
                        (12, 21))),
    *cases("Scan-of-LayerNormalization",
           in_scan("u = Add(s, part) t = LayerNormalization(u, w)", more=", float[3] w"),
           {"x": normal(4, 2, 3), "h": H, "w": SCALE},
           step_by_step(lambda s, part, w: F.layer_norm(s + part, (3,), w)), (17, 23),
           double=False),
    *cases("Scan-of-function-bodies",
           in_scan("u = Add(s, part) v = Celu(u) k = Mish(v) t = HardSwish(k)"),
           {"x": normal(4, 2, 3), "h": H},
           step_by_step(lambda s, part: F.hardswish(F.mish(F.celu(s + part)))), (18, 24),
           double=False),
    *cases("Scan-of-MaxPool",
           in_scan("c = Conv <pads = [1, 1, 1, 1]> (s, w) "
                   "p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c) "
                   "g = GlobalAveragePool(p) q = Tanh(g) t = Mul(q, part)",
                   "float[1, 2, 4, 4]", ", float[2, 2, 3, 3] w"),
           {"x": IMAGES, "h": IMAGE, "w": K},
           step_by_step(lambda s, part, w: F.max_pool2d(F.conv2d(s, w, padding=1), 2)
                        .mean((2, 3), keepdim=True).tanh() * part), (13, 17, 21), double=False),
]  # fmt: skip
