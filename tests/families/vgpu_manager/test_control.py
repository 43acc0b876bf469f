"""The isolation backend of vgpu-manager's containers."""

from __future__ import annotations

import re
from typing import Any

from tests.settings import settings, switches
from vgpu_agent.config.vgpu_control import VgpuControl as ControlSettings
from vgpu_agent.families.spec import BuiltFamily, NodeFacts
from vgpu_agent.families.vgpu_manager.control import control_backend, why_blocked
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.vgpu_manager.settings import VgpuManager
from vgpu_agent.families.vgpu_manager.spec import SPEC
from vgpu_agent.isolation.backend import InstalledLibrary
from vgpu_agent.isolation.vgpu_control import DECISIVE, VgpuControl

INSTALLED = NodeFacts(
    libraries={"vgpu-control": InstalledLibrary("/h/libvgpu-control.so.1")}, cgroup_version=1
)
MISSING = NodeFacts(libraries={"vgpu-control": InstalledLibrary("", "there is none; deliver it")})


def built(facts: NodeFacts, **section: Any) -> BuiltFamily:
    """The family, switched on."""
    return SPEC.build(
        settings(families=switches(vgpu_manager=True), vgpu_manager=VgpuManager(**section)), facts
    )


def test_the_backend_follows_settings_and_node() -> None:
    """Gates and open kernel modules are the family's, the rest the backend's own section."""
    configured = settings(
        vgpu_control=ControlSettings("/h", processes="host-proc", disable_variable="ignore")
    )
    options = VgpuManagerOptions(
        open_kernel_modules=True, sm_watcher=True, tracks_virtual_memory=True
    )
    assert control_backend(configured, options, INSTALLED) == VgpuControl(
        "/h",
        "/h/libvgpu-control.so.1",
        processes="host-proc",
        cgroup_version=1,
        open_kernel_modules=True,
        disable_variable="ignore",
        sm_watcher=True,
        tracks_virtual_memory=True,
    )


def test_without_its_library_no_pod_is_served() -> None:
    """Shares without limits are never given out, unless the operator asks for them."""
    family = built(MISSING)
    assert (family.blocked, family.uses_library) == ("there is none; deliver it", "vgpu-control")
    assert not built(INSTALLED).blocked
    unlimited = built(MISSING, isolation="none")
    assert (unlimited.blocked, unlimited.uses_library) == ("", "")


def test_a_library_installed_before_serves_on() -> None:
    """A bad delivery displaces nothing."""
    library = InstalledLibrary("/h/libvgpu-control.so.1", "the new one is damaged")
    assert not why_blocked(settings(), NodeFacts(libraries={"vgpu-control": library}))


def test_the_variables_that_loosen_limits_are_known() -> None:
    """With early binding a pod that sets one is refused, for which it must be seen."""
    assert all(re.fullmatch(SPEC.variables, name) for name in DECISIVE)


def test_the_library_is_wanted_where_it_limits() -> None:
    """Nothing is installed for a family that shares without limits."""
    assert SPEC.library is not None
    assert SPEC.library.is_wanted(settings())
    assert not SPEC.library.is_wanted(settings(vgpu_manager=VgpuManager(isolation="none")))
