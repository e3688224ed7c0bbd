"""Build the site: the pages of paraplan/docs, the notebook as it runs, and the API reference from the docstrings.

    python scripts/build_site.py [FOLDER]        default: build/site

A warning is an error: a link that leads nowhere, a page outside of the table of contents. Styles and fonts come with
the site, which needs no network.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import paraplan
from paraplan.cli.explain import GROUPS as PAGE_GROUPS

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "paraplan" / "docs"
NOTEBOOK = PAGES / "planning.ipynb"
GROUPS = {
    "Read what is there": (
        "load_workload",
        "load_model",
        "load_cluster",
        "probe_topology",
        "read_topology",
        "load_calibration",
        "load_history",
    ),
    "Plan": (
        *("Workload", "TrainingSpec", "StackSettings", "ParallelPlan", "Constraints"),
        *("estimate", "recommend", "sweep", "check", "check_script"),
    ),
    "Answers": ("Estimate", "Recommendation", "PlanCheck"),
    "Plans in files and in other tools": ("PlanFile", "load_plan", "export", "Exported", "import_plan", "ImportedPlan"),
    "Records": ("ModelSpec", "Cluster", "NodeTopology"),
    "Errors": ("ParaplanError", "PlanError", "NoPlanFitsError"),
}
MEMBERS = ":members:\n:undoc-members:\n:exclude-members: model_config\n"
CONFIGURATION = """
project = "paraplan"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "paraplan"
html_show_copyright = False
smartquotes = False  # options have two hyphens
default_role = "code"
highlight_language = "none"
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"


def setup(app):
    # The fields of a record follow, each with its default: its constructor would say all of them once more.
    def signature_of(app, what, name, value, options, signature, returns):
        return ("", None) if what == "class" else (signature, returns)

    # So would the list of fields that help() shows.
    def without_fields(app, what, name, value, options, lines):
        if "Fields:" in lines:
            del lines[lines.index("Fields:") :]

    app.connect("autodoc-process-signature", signature_of)
    app.connect("autodoc-process-docstring", without_fields)
"""


def reference() -> str:
    """Return the page of the API reference."""
    listed = {name for names in GROUPS.values() for name in names}
    left_out = set(paraplan.__all__) - listed - {"__version__"}
    if left_out or listed - set(paraplan.__all__):
        sys.exit(f"GROUPS and paraplan.__all__ differ: {sorted(left_out | (listed - set(paraplan.__all__)))}")
    parts = ["# Python API\n", "Each name is one of `paraplan`, imported when it is first used.\n"]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            is_class = inspect.isclass(getattr(paraplan, name))
            kind, options = ("autoclass", MEMBERS) if is_class else ("autofunction", "")
            parts.append(f"```{{eval-rst}}\n.. {kind}:: paraplan.{name}\n{_indented(options)}```\n")
    return "\n".join(parts)


def _indented(options: str) -> str:
    return "".join(f"   {line}\n" for line in options.splitlines())


def contents() -> str:
    """Return the first page: what this is, how it begins, one answer, and the pages in their groups."""
    readme = (ROOT / "README.md").read_text()
    first = readme.split("\n\n")[1]
    commands = next(part for part in readme.split("\n\n") if part.startswith("    pip install"))
    more = {"Start": "planning\n", "Understand": "reference\n"}
    groups = "\n".join(
        f"```{{toctree}}\n:maxdepth: 1\n:caption: {title}\n\n{more.get(title, '')}" + "\n".join(topics) + "\n```\n"
        for title, topics in PAGE_GROUPS.items()
    )
    answer = "![paraplan recommend in a terminal](recommend.svg)"
    return f"# paraplan\n\n{first}\n\n{commands}\n\n{answer}\n\n{groups}"


def notebook() -> str:
    """Return the notebook as it runs, as a page of the site."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--execute", str(NOTEBOOK), "--stdout"]
    done = subprocess.run([*command, "--template", "basic"], check=True, capture_output=True, text=True)
    cells = re.sub(r"<h1.*?</h1>", "", done.stdout, count=1, flags=re.DOTALL)
    return f"# Planning in Python, a notebook\n\n```{{raw}} html\n{cells}\n```\n"


def build(site: Path) -> None:
    """Write the site. Ends the program where anything is missing or broken."""
    source = site.parent / f"{site.name}-source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for page in (*PAGES.glob("*.md"), *PAGES.glob("*.svg")):
        shutil.copy(page, source)
    (source / "index.md").write_text(contents())
    (source / "reference.md").write_text(reference())
    (source / "conf.py").write_text(CONFIGURATION)
    (source / "planning.md").write_text(notebook())
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run([sys.executable, "-m", "sphinx", *options, str(source), str(site)], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    print(f"the site is {site / 'index.html'}")


def main() -> None:
    """Build the site into the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    build(parser.parse_args().folder)


if __name__ == "__main__":
    main()
