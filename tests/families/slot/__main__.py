"""The agent's real command line, with one more family."""

import sys

from tests.families.slot.spec import SPEC
from vgpu_agent.families import registry

registry.register(SPEC)

# the family comes before everything that is made from the families
from vgpu_agent.cli.main import main  # noqa: E402

sys.exit(main())
