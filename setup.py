"""Says where the packages are: `plugins/` and `trtkv/` stand at the top of the tree, and are imported by these names."""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["trtkv", "trtkv.*", "plugins", "plugins.*"]))
