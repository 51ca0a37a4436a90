"""A Nomad server and its clients in memory, driven by the test: what `recorded.json` shows a real 1.6.3 to do."""

from tests.fakenomad.containers import Container
from tests.fakenomad.server import NomadServer
from tests.fakenomad.state import FakeNode, FakeNomad

__all__ = ["Container", "FakeNode", "FakeNomad", "NomadServer"]
