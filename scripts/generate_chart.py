#!/usr/bin/env python3
"""Write the plain objects of the Helm chart from the kustomization's files,
or with --check say whether they are up to date (exit 1 when they are not).

Roles, policies, accounts and the like have no values of their own: only names, namespaces and the
domain of vgpu-manager's keys differ from one release to the next. Their templates are these files
with these words replaced. Workloads and configurations, which do have values, are written by hand;
tests/real_node/test_chart.py compares all of them with what kustomize builds.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "manifests"
TEMPLATES = MANIFESTS / "chart" / "templates" / "generated"

BASE = ("serviceaccount.yaml", "rbac.yaml")
# Files of components that have values besides names, and so templates written by hand.
WRITTEN_BY_HAND = frozenset(
    {
        "scheduler/configmap.yaml",
        "scheduler/deployment.yaml",
        "webhook/configurations.yaml",
        "webhook/deployment.yaml",
        "network-policy/networkpolicy.yaml",
    }
)

NAMESPACE = '{{ include "vgpu-agent.namespace" . }}'
NAME = '{{ include "vgpu-agent.fullname" . }}'
SCHEDULER = "{{ .Values.scheduler.schedulerName }}"
DOMAIN = "{{ .Values.globalDomain }}"
_KEYS = r"name|policyName|app\.kubernetes\.io/name"


def replaced(text: str) -> str:
    """A manifest with the names of the kustomization replaced by those of the release."""
    text = re.sub(
        r"^(\s*(?:- )?namespace): vgpu-agent$", rf"\1: {NAMESPACE}", text, flags=re.MULTILINE
    )
    text = re.sub(
        rf"^(\s*(?:- )?(?:{_KEYS})): vgpu-agent(-[a-z-]+)?$",
        lambda found: f"{found[1]}: {NAME}{found[2] or ''}",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(
        rf"^(\s*(?:- )?(?:{_KEYS})): vgpu-scheduler(-[a-z-]+)?$",
        lambda found: f"{found[1]}: {SCHEDULER}{found[2] or ''}",
        text,
        flags=re.MULTILINE,
    )
    text = text.replace("resourceNames: [vgpu-agent-webhook]", f'resourceNames: ["{NAME}-webhook"]')
    text = text.replace("resourceNames: [vgpu-scheduler]", f'resourceNames: ["{SCHEDULER}"]')
    text = text.replace('[^:]+:vgpu-agent$")', f'[^:]+:{NAME}$")')
    # The labels that Helm's own tools look for, behind that of the kustomization.
    return re.sub(
        r"^(  labels:\n    app\.kubernetes\.io/name: .+)$",
        r'\1\n    {{- include "vgpu-agent.labels" . | nindent 4 }}',
        text,
        flags=re.MULTILINE,
    )


def of_the_domain(text: str) -> str:
    """The policy with the keys of vgpu-manager in the domain that is set; the four version labels
    of the Node keep theirs (vgpu-manager §6).
    """
    lines = [
        line
        if re.search(r"node-(driver|cuda)-", line)
        else line.replace('"nvidia.com/', f'"{DOMAIN}/')
        for line in text.splitlines()
    ]
    # Resources of NVIDIA's names are counted under any domain.
    counted = f'key.startsWith("{DOMAIN}/")'
    other = (
        '{{ if ne .Values.globalDomain "nvidia.com" }} || key.startsWith("nvidia.com/"){{ end }}'
    )
    return "\n".join(line.replace(counted, counted + other) for line in lines) + "\n"


def templates() -> dict[str, str]:
    """The text of each generated template by its file name."""
    sources = dict.fromkeys(BASE, "")
    for folder in sorted((MANIFESTS / "components").iterdir()):
        for path in sorted(folder.glob("*.yaml")):
            file = f"{folder.name}/{path.name}"
            if path.name not in {"kustomization.yaml", "daemonset.yaml"} and (
                file not in WRITTEN_BY_HAND
            ):
                sources[f"components/{file}"] = folder.name
    made = {}
    for source, component in sources.items():
        text = replaced((MANIFESTS / source).read_text())
        if component == "own-node-only":
            text = of_the_domain(text)
        head = f"{{{{- /* Made from manifests/{source} by scripts/generate. */}}}}\n"
        if component:
            condition = f'include "vgpu-agent.on" (list . "{component}")'
            text = f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"
        made[source.removeprefix("components/").replace("/", "-")] = head + text
    return made


def main() -> int:
    """Write what differs, or name it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    wanted = templates()
    found = {path.name: path.read_text() for path in TEMPLATES.glob("*")}
    stale = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    if check:
        for name in stale:
            print(f"{TEMPLATES.relative_to(ROOT)}/{name} is stale: run scripts/generate")
        return 1 if stale else 0
    TEMPLATES.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in wanted:
            (TEMPLATES / name).write_text(wanted[name])
        else:
            (TEMPLATES / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
