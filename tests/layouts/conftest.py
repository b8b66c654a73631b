"""The limit of time that tests of parsers have."""

from tests.formats.conftest import limit_of_time

__all__ = ("limit_of_time",)
