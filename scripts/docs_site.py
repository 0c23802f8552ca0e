"""What ``make docs`` adds to the Markdown files: a hook of MkDocs.

README, CHANGELOG and other files of the root become pages, each error code gets one, the table in
docs/stability.md says which names of Python the reference shows, and the reports' theme is the
site's. Links that the forge resolves are adapted where the site has another path.
"""

import functools
import itertools
import posixpath
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "runtime" / "odtpack_runtime"))  # as a module alone, without numpy
from errors import ErrorCode, error_codes  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "docs/README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository that have another place on the site."""
THEME = ROOT / "runtime" / "odtpack_simulator" / "reports" / "templates" / "theme.css"
TOOLS = ROOT / "build" / "docs-tools"
"""What scripts/setup_docs.sh made of the kits' sources, where their tools are installed."""
MERMAID, SHIM = TOOLS / "mermaid.min.js", TOOLS / "iframe-worker.js"
KITS = {"cpp": ("cpp/html", "annotated.html"), "javascript": ("javascript", "index.html")}
"""Folder of the tools, and first page."""
_LINK = re.compile(r'(\]\(|\bsrc=")([^)\s"#]+)(#[^)\s"]*)?(?=[)\s"])')


def error_page(code: str, entry: ErrorCode) -> str:
    """The page of an error code as Markdown; ``odtpack explain`` prints the same."""
    advice = entry.advice
    advice = advice[0].upper() + advice[1:] if re.match(r"[a-z]+ ", advice) else advice
    parts = [f"# {code}", f"`error[{code}]`", entry.means]
    parts += ["## Typical cause", entry.cause] if entry.cause else []
    parts += ["## What to do", advice if advice.endswith((".", ":")) else f"{advice}."]
    parts += ["## Example", f"```text\n{entry.example.rstrip()}\n```"] if entry.example else []
    raised = "odtpack and its training kits raise" if entry.kits else "odtpack raises"
    command = shlex.join(["odtpack", "explain", code])
    parts.append(f"{raised} this error. `{command}` prints this page. [All codes](../errors.md)\n")
    return "\n\n".join(parts)


def errors_index() -> str:
    """The page that leads to the page of each code."""
    before = (ROOT / "docs" / "errors.md").read_text("utf-8").partition("<!--")[0]
    lines = ["| code | what it means | kits |", "|---|---|:---:|"]
    for code, entry in error_codes().items():
        kits = "yes" if entry.kits else ""
        lines.append(f"| [`{code}`](errors/{code}.md) | {entry.means} | {kits} |")
    return before + "\n".join(lines) + "\n"


def public_names() -> dict[str, list[str]]:
    """Module -> its public names, as docs/stability.md lists them."""
    text = (ROOT / "docs" / "stability.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.M)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def python_page(module: str, names: list[str]) -> str:
    """The reference of a module's public names, for mkdocstrings."""
    shown = "".join(f"::: {module}.{name}\n\n" for name in names)
    options = ("members", "show_root_heading", "show_root_toc_entry")
    settings = "".join(f"      {option}: false\n" for option in options)
    return f"# {module}\n\n::: {module}\n    options:\n{settings}\n{shown}".removesuffix("\n")


def kits_page(built: list[str]) -> str:
    """The page that leads to the references of the kits."""
    lines = [
        "# Training kits\n",
        "The kits train a package in an app. [Their behaviour](../formats/kits.md) is the same in "
        "every language; the guides show how to use one.\n",
        "| language | guide | reference |",
        "|---|---|---|",
    ]
    guides = {"cpp": "C++ and C", "javascript": "JavaScript", "kotlin": "Kotlin and Java",
              "swift": "Swift", "csharp": "C#"}  # fmt: skip
    for key, title in guides.items():
        made = f"[generated from the sources]({key}/{KITS[key][1]})" if key in built else ""
        lines.append(f"| {title} | [guide](../guides/{key}.md) | {made or 'in the sources'} |")
    return "\n".join(lines) + "\n"


def site_theme() -> str:
    """The theme of the reports, with the dark colours where the site's switch asks for them."""
    light, dark = re.fullmatch(
        r"(:root \{.*?^\})\n@media \(prefers-color-scheme: dark\) \{\n  :root \{(.*?)^  \}\n\}\n",
        THEME.read_text("utf-8"),
        re.M | re.S,
    ).groups()  # type: ignore[union-attr]
    return f'{light}\n[data-md-color-scheme="slate"] {{\n  color-scheme: dark;{dark}}}\n'


def outside(text: str) -> Iterator[tuple[bool, str]]:
    """Parts of a page, and whether each is a block of code."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return zip(itertools.cycle((False, True)), parts, strict=False)


def place_of(path: str) -> str | None:
    """Where a file of the repository is on the site; None for a folder that is not there."""
    if path in PAGES:
        return PAGES[path]
    if path == "docs/adr":
        return "adr/index.md"
    if path.startswith("docs/") and not path.endswith(".fbs"):
        return path.removeprefix("docs/")
    return f"source/{path}.txt" if (ROOT / path).is_file() else None


def linked(origin: str, target: str) -> str:
    """The path in the repository that a page's link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def adapt_links(text: str, origin: str, place: str) -> str:
    """Rewrite the links of a page, whose path in the repository and on the site are given."""

    def adapted(found: re.Match[str]) -> str:
        before, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        where = place_of(linked(origin, target))
        if where is None:
            return f"{before}#"
        return f"{before}{posixpath.relpath(where, posixpath.dirname(place) or '.')}{anchor}"

    parts = [part if code else _LINK.sub(adapted, part) for code, part in outside(text)]
    return re.sub(r"\[([^\]]+)\]\(#\)", r"\1", "".join(parts))  # a folder is on the forge only


@functools.cache
def origins() -> dict[str, str]:
    """Place on the site -> path in the repository, of every page that is not generated."""
    pages = {place: path for path, place in PAGES.items()}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT).as_posix()
        pages.setdefault(PAGES.get(name, name.removeprefix("docs/")), name)
    return pages


def decisions_page() -> str:
    """The list of decisions."""
    lines = ["# Decisions\n", "Why odtpack is built as it is, one decision a page.\n"]
    for path in sorted((ROOT / "docs" / "adr").glob("*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ADR ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


@functools.cache
def generated() -> dict[str, str]:
    """Every page that no file holds, by its place."""
    pages = {f"errors/{code}.md": error_page(code, entry) for code, entry in error_codes().items()}
    pages |= {f"reference/python/{m}.md": python_page(m, n) for m, n in public_names().items()}
    return pages | {
        "errors.md": errors_index(), "adr/index.md": decisions_page(),
        "assets/theme.css": site_theme(), "reference/kits.md": kits_page(_built_kits()),
    }  # fmt: skip


def _built_kits() -> list[str]:
    return [key for key, kit in KITS.items() if TOOLS.joinpath(*kit).is_file()]


def on_config(config: Any) -> Any:
    """Fill the folders of the navigation, and draw diagrams where the library for them is."""
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    config.copyright = f"odtpack {version[1] if version else ''}, {config.copyright}"
    decisions = sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
    folders: dict[str, Any] = {
        "reference/python": [{m: f"reference/python/{m}.md"} for m in public_names()],
        "adr": ["adr/index.md", *(f"adr/{name}" for name in decisions)],
    }
    entries = (entry for section in config.nav or [] for own in section.values() for entry in own)
    for entry in entries:
        if isinstance(entry, dict):
            for key, value in entry.items():
                entry[key] = folders.get(value, value) if isinstance(value, str) else value
    # Search works without a server if a worker is imitated; the plugin would load that from a host.
    config.extra["polyfills"] = ["assets/iframe-worker.js"] if SHIM.is_file() else []
    if MERMAID.is_file():
        config.extra_javascript.append("assets/mermaid.min.js")
        fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
        from pymdownx.superfences import fence_code_format

        fences["custom_fences"] = [
            {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, what is generated, and the sources that pages link to."""
    from mkdocs.structure.files import File

    content: dict[str, Any] = dict(generated())
    for place, path in origins().items():
        text = (ROOT / path).read_text("utf-8")
        if path in PAGES:
            content[place] = text
        for code, part in outside(text):
            for found in () if code else _LINK.finditer(part):
                where = place_of(target := linked(path, found[2])) or ""
                if where.startswith("source/"):
                    content[where] = (ROOT / target).read_text("utf-8")
    for script in (MERMAID, SHIM):
        if script.is_file():
            content[f"assets/{script.name}"] = script.read_text("utf-8")
    for place in ("README.md", "adr/README.md", *content):
        present = files.get_file_from_path(place)
        if present is not None:
            files.remove(present)
    for place, text in content.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt the links of a page that is a file of the repository."""
    place = page.file.src_uri
    if place in generated():
        return markdown
    return adapt_links(markdown, origins()[place], place)


def on_post_build(config: Any) -> None:
    """Copy the references of the kits."""
    for key in _built_kits():
        target = Path(config.site_dir) / "reference" / key
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(TOOLS / KITS[key][0], target)
