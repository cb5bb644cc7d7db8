"""Print what pyproject.toml asks for to build, run and test kda, one requirement a line."""

import tomllib
from pathlib import Path

toml = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text())
project = toml["project"]
print(*toml["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["test"], sep="\n")
