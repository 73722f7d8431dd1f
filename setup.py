"""The README of a package index, which pyproject.toml cannot say: its links must work outside of the repository."""

import re

from setuptools import setup
from setuptools.command.egg_info import egg_info

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


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


setup(cmdclass={"egg_info": DescriptionWithLinks})
