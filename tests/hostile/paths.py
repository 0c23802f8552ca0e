"""Paths of a package's files: what leaves the folder, or is another file on another system."""

from tests.hostile.cases import everyone

REFUSED = (
    "", ".", "..", "../checkpoint", "a/../checkpoint", "a/../../checkpoint", "./checkpoint",
    "checkpoint/.", "checkpoint/", "/checkpoint", "/etc/passwd", "//host/share", "a//checkpoint",
    "\\checkpoint", "..\\checkpoint", "a\\checkpoint", "\\\\?\\checkpoint", "C:\\checkpoint",
    "C:checkpoint", "C:/checkpoint", "checkpoint:stream", "file:///etc/passwd", "http://host/a",
    "check\0point", "check\npoint", "check\rpoint", "check\tpoint", "check\x1bpoint",
    "check\x7fpoint", "check\x85point", "check\u202epoint", "check\u202apoint", "check\u2066point",
    "check\u2069point", "check\u200epoint", "check\u200fpoint", "checkpoint.", "checkpoint ",
    "checkpoint. .", " checkpoint", "a/ checkpoint", "a /checkpoint", "a./checkpoint", " ../secret",
    " /secret", ".. /secret", "con", "CON", "con.txt", "Con.tar.gz", "prn", "aux.onnx", "nul",
    "NUL.onnx", "com0", "com1", "COM9.txt", "lpt0", "lpt9", "LPT1.x.y", "aux/checkpoint", "a/nul",
    "check*point", "check?point", "check|point", "check<point", "check>point", 'check"point',
    "a" * 256, "\u00e9" * 128, "/".join(["a" * 200] * 6), "x/" * 512 + "x", "a/" + "b" * 256,
    "manifest.json", "MANIFEST.JSON", "manifest.sig", "Manifest.Sig", "training_model.onnx",
    "TRAINING_MODEL.ONNX", "Eval_Model.onnx", "\ud800", "a/\udc00b",
)  # fmt: skip
"""None of them may be the path of the checkpoint."""

ACCEPTED = (
    "checkpoint", "a/checkpoint", "a/b/c/checkpoint", "check point", "check  point", "#checkpoint",
    "check#point", "check%point", "%2e%2e", "%2e%2e/secret", "a%2fb", "%00", "check&point=1",
    "check+point", "check;point", "check,point", "check'point", "check`point", "$HOME",
    "~checkpoint", "-checkpoint", ".checkpoint", "..checkpoint", "...a", "check..point", "console",
    "nullify.txt", "com10", "lpt", "auxiliary/checkpoint", "conf/con_", "\u00e9t\u00e9",
    "e\u0301te\u0301", "\u6a21\u578b/checkpoint", "\U0001f600", "a" * 255, "\u00e9" * 127,
    "/".join(["a" * 200] * 5), "[checkpoint]", "{checkpoint}", "check@point", "check!point",
    "check^point", "__proto__", "constructor/toString", "checkpoint (1)",
)  # fmt: skip
"""Any of them may be: the file is there, and loads."""

ODD = {
    "com\u00b9": "a name that some versions of Windows reserve",
    "conin$": "a name that some versions of Windows reserve",
    "con .txt": "a name that some versions of Windows reserve",
    "check\u00adpoint": "a character that shows nothing",
    "check\u200dpoint": "a character that shows nothing",
    "\ufeffcheckpoint": "a character that shows nothing",
}
"""What a reader may refuse or take."""


def odd() -> dict[str, dict[str, str]]:
    """Paths that may be refused, and why by whom."""
    return {path: everyone(why) for path, why in ODD.items()}
