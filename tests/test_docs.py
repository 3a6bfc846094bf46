"""Consistency of the documentation. Building the site checks the pages and runs the notebooks."""

import inspect
import re
from pathlib import Path

import pytest

import jax_flash

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^(```+|~~~+).*?^\1 *$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_every_public_name_is_in_the_api_page():
    described = re.findall(r"^\.\. [\w:]+:: jax_flash\.([\w.]+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted([*jax_flash.__all__, "flax.attention_fn"])


@pytest.mark.parametrize("name", inspect.signature(jax_flash.flash_attention).parameters)
def test_every_parameter_is_in_the_options_page(name):
    assert re.search(rf"\b{name}\b", (DOCS / "options.md").read_text())


@pytest.mark.parametrize(("page", "folder"), [("options.md", "options"), ("long_context.md", "layouts")])
def test_every_picture_is_shown(page, folder):
    shown = re.findall(rf'src="({folder}/\w+\.png)"', (DOCS / page).read_text())
    assert sorted(shown) == sorted(str(path.relative_to(DOCS)) for path in DOCS.glob(f"{folder}/*"))


def test_every_page_is_in_the_index():
    """Sphinx checks it, too, but not every change to a page is built."""
    entries = re.findall(r"^[\w/]+$", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(entries) == sorted(set(pages) - {"index"})


WALK = re.findall(r"^\| \d+ \| (.+?) \| (.+) \|$", (DOCS / "extending.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("files", "step"), WALK)
def test_every_symbol_of_the_walk_is_where_it_says(files, step):
    """The steps from keyword to instruction, in docs/extending.md."""
    names = re.findall(r"`([^`]+)`", f"{files} {step}")
    sources = "".join((ROOT / name).read_text() for name in names if "/" in name)
    for symbol in (name for name in names if "/" not in name and name not in ("cp.async", "ldmatrix")):
        assert symbol.partition("(")[0] in sources


EXCERPTS = [
    (page, source, dict(re.findall(r"^:([\w-]+): (.*)$", options, re.MULTILINE)))
    for page in PAGES
    for source, options in re.findall(
        r"^```\{literalinclude\} (\S+)\n((?::.*\n)*)", page.read_text(), re.MULTILINE
    )
]


@pytest.mark.parametrize(("page", "source", "options"), EXCERPTS)
def test_every_excerpt_is_in_its_source(page, source, options):
    """Sphinx checks it, too, but not after every change to a source."""
    text = (page.parent / source).read_text()
    for bound in (
        options[name].strip('"') for name in ("start-at", "end-at", "end-before") if name in options
    ):
        assert bound in text
        text = text[text.index(bound) + len(bound) :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_into_its_column(page):
    blocks = re.findall(r"^```[^\n]*\n(.*?)^``` *$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)", prose(page)) + re.findall(r'(?:src|href)="([^"#]+)"', prose(page))
    for target in targets:
        assert re.match(r"https?://", target) or (page.parent / target).exists(), target
