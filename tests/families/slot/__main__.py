"""The agent's real command line, with one more family and other values for constants."""

from tests.families.slot.spec import SPEC
from vgpu_agent.families import registry

registry.register(SPEC)

# the family comes before everything that is made from the families
from vgpu_agent.sim.with_constants import main  # noqa: E402

main()
