"""What ``pyproject.toml`` cannot say: a wheel that carries the built C++ half is for one platform and one Python."""

from pathlib import Path

from setuptools import Distribution, setup


class _Package(Distribution):
    def has_ext_modules(self) -> bool:
        return any((Path(__file__).parent / "src/marid/native/_built").glob("*.so"))


setup(distclass=_Package)
