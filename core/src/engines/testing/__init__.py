"""The conformance kit: what every engine must prove, run by pytest on an engine of anybody's.

In an empty folder:

    pytest --engine mine

or in a test file of the engine's own distribution:

    from engines.testing import conformance

    tests = conformance("mine")

Importing this package costs nothing; the kit itself needs the extra `engines-core[testing]`.
"""

from __future__ import annotations

from engines.testing.conformance import Conformance, conformance

__all__ = ["Conformance", "conformance"]
