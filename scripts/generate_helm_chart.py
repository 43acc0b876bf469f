#!/usr/bin/env python3
"""Write the plain objects of the Helm chart from the kustomization's files,
or with --check say whether they are up to date (exit 1 when they are not).

Roles, policies, accounts and the like have no values of their own: only names, namespaces and the
domain of vgpu-manager's keys differ from one release to the next. Their templates are these files
with these words replaced. The dashboards, which scripts/generate_dashboards.py has made before, are
copied. Workloads and configurations, which do have values, are written by hand;
tests/real_node/test_chart.py compares all of them with what kustomize builds.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "manifests"
CHART = MANIFESTS / "chart"
TEMPLATES = CHART / "templates" / "generated"
DASHBOARDS = CHART / "dashboards"  # a chart can only read files of its own

BASE = ("serviceaccount.yaml", "rbac.yaml")
# Files of components that have values besides names, and so templates written by hand.
WRITTEN_BY_HAND = frozenset(
    {
        "scheduler/configmap.yaml",
        "scheduler/deployment.yaml",
        "webhook/configurations.yaml",
        "webhook/deployment.yaml",
        "network-policy/networkpolicy.yaml",
        # The version of kube-scheduler chooses between these and those of the component scheduler.
        "scheduler/poddisruptionbudget.yaml",
        "scheduler-1.24/configmap.yaml",
        "scheduler-1.21/configmap.yaml",
        "scheduler-1.21/deployment.yaml",
        "scheduler-1.20/configmap.yaml",
    }
)

NAMESPACE = '{{ include "vgpu-agent.namespace" . }}'
NAME = '{{ include "vgpu-agent.fullname" . }}'
SCHEDULER = "{{ .Values.scheduler.schedulerName }}"
DOMAIN = "{{ .Values.globalDomain }}"
_KEYS = r"name|policyName|app\.kubernetes\.io/name"


# PodDisruptionBudgets are in policy/v1 from Kubernetes 1.21 on.
_POLICY_VERSION = (
    '{{ ternary "v1" "v1beta1" (semverCompare ">=1.21.0-0" .Capabilities.KubeVersion.Version) }}'
)


def replaced(text: str) -> str:
    """A manifest with the names of the kustomization replaced by those of the release."""
    text = text.replace("{{", '{{ "{{" }}')  # Prometheus' own templates, in alerts
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
    for account, name in (("vgpu-agent", NAME), ("vgpu-scheduler", SCHEDULER)):
        text = text.replace(
            f'"system:serviceaccount:vgpu-agent:{account}"',
            f'"system:serviceaccount:{NAMESPACE}:{name}"',
        )
    text = text.replace("apiVersion: policy/v1\n", f"apiVersion: policy/{_POLICY_VERSION}\n")
    text = text.replace('job="vgpu-agent"', f'job="{NAME}"')
    text = text.replace('job="vgpu-scheduler"', f'job="{SCHEDULER}"')
    # The labels that Helm's own tools look for, after that of the kustomization.
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


def with_more_writers(text: str) -> str:
    """The policy of what pods hold with the accounts of `podState.accounts` beside its own."""
    more = """\
    {{- range $place, $account := .Values.podState.accounts }}
    - name: not-another-{{ $place }}
      expression: request.userInfo.username != "system:serviceaccount:{{ $account }}"
    {{- end }}
"""
    return text.replace("  variables:\n", f"{more}  variables:\n")


def update_strategy() -> str:
    """A template of the DaemonSet's updateStrategy, without its comments."""
    text = (MANIFESTS / "daemonset.yaml").read_text()
    found = re.search(r"^  updateStrategy:\n((?: {4}.*\n)+)", text, flags=re.MULTILINE)
    if found is None:
        sys.exit("manifests/daemonset.yaml has no spec.updateStrategy")
    lines = [line[4:] for line in found[1].splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(
        ['{{- define "vgpu-agent.updateStrategy" -}}', *lines, "{{- end }}", ""],
    )


def found_by_an_operator(text: str) -> str:
    """Objects of the Prometheus operator with the labels by which it chooses them, and links to
    wherever the documentation is served.
    """
    more = "{{- with .Values.monitoring.labels }}\n    {{- toYaml . | nindent 4 }}\n    {{- end }}"
    labels = '    {{- include "vgpu-agent.labels" . | nindent 4 }}'
    text = text.replace(labels, f"{labels}\n    {more}")
    return text.replace(
        "runbook_url: docs/", "runbook_url: {{ .Values.monitoring.runbookUrl }}docs/"
    )


def templates() -> dict[pathlib.Path, str]:
    """The text of each generated file."""
    sources = dict.fromkeys(BASE, "")
    for folder in sorted((MANIFESTS / "components").iterdir()):
        for path in sorted(folder.glob("*.yaml")):
            file = f"{folder.name}/{path.name}"
            if path.name not in {"kustomization.yaml", "daemonset.yaml"} and (
                file not in WRITTEN_BY_HAND
            ):
                sources[f"components/{file}"] = folder.name
    made: dict[pathlib.Path, str] = {}
    for source, component in sources.items():
        text = replaced((MANIFESTS / source).read_text())
        if component in {"own-node-only", "pod-state"}:
            text = of_the_domain(text)
        if component == "pod-state":
            text = with_more_writers(text)
        if component == "monitoring":
            text = found_by_an_operator(text)
        head = f"{{{{- /* Made from manifests/{source} by scripts/generate. */}}}}\n"
        if component:
            condition = f'include "vgpu-agent.on" (list . "{component}")'
            text = f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"
        name = source.removeprefix("components/").replace("/", "-")
        made[TEMPLATES / name] = head + text
    head = "{{- /* Made from manifests/daemonset.yaml by scripts/generate. */}}\n"
    made[TEMPLATES / "_update-strategy.tpl"] = head + update_strategy()
    for path in (MANIFESTS / "components" / "monitoring" / "dashboards").iterdir():
        made[DASHBOARDS / path.name] = path.read_text()
    return made


def main() -> int:
    """Write what differs, or name it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    wanted = templates()
    found = {
        path: path.read_text() for folder in (TEMPLATES, DASHBOARDS) for path in folder.glob("*")
    }
    stale = sorted(
        path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path)
    )
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run scripts/generate")
        elif path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
