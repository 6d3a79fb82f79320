"""Says where the packages are: `plugins/` stands at the top of the tree and is installed as `trtkv.plugins`."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["trtkv", "trtkv.*"]) + ["trtkv.plugins"] + [f"trtkv.plugins.{name}" for name in find_packages("plugins")],
    package_dir={"trtkv": "trtkv", "trtkv.plugins": "plugins"},
)
