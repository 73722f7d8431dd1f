"""Two things that pyproject.toml cannot say: types of the modules at the root, and the README of a package index.

PEP 561 has no `py.typed` for a module outside of a package, only stubs: a wheel has each of these modules once more, as
`modeling_mote-stubs/__init__.pyi`.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


class BuildWithStubs(build_py):
    """Add the stubs."""

    def run(self) -> None:
        """Build, and copy modules as stubs, unless the sources are used where they are."""
        super().run()
        for module in self.py_modules if not self.editable_mode else ():
            folder = Path(self.build_lib, f"{module}-stubs")
            folder.mkdir(exist_ok=True)
            shutil.copyfile(f"{module}.py", folder / "__init__.pyi")


class DescriptionWithLinks(egg_info):
    """Write the metadata with links that work outside of the repository."""

    def run(self) -> None:
        """Make relative links absolute, or plain text as long as the repository has no public address."""
        metadata = self.distribution.metadata
        source = (metadata.project_urls or {}).get("Source")

        def outside(link: re.Match[str]) -> str:
            image, text, path = link.groups()
            if source is None:
                return "" if image else text
            return f"{image}[{text}]({source}/{'raw' if image else 'blob'}/main/{path})"

        metadata.long_description = LINK.sub(outside, metadata.long_description)
        super().run()


setup(cmdclass={"build_py": BuildWithStubs, "egg_info": DescriptionWithLinks})
