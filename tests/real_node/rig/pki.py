"""A throw-away certificate authority, certificates, tokens and kubeconfigs of one rig.

Written anew for every rig with the `openssl` command: half a second, and no key ever lies in a
cache. Users authenticate by token; each has the group that its role needs, so that RBAC and the
node authoriser are as real as the rest.

Called by inside.py before anything starts; api.py reads the admin's token.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from typing import TYPE_CHECKING

from tests.real_node.rig.layout import API_SERVER, SERVICE_ADDRESS, Layout, node_address

if TYPE_CHECKING:
    from pathlib import Path

_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def write(layout: Layout, *, nodes: int) -> None:
    """Write all keys, certificates, tokens and kubeconfigs into the rig's folder."""
    layout.pki.mkdir(mode=0o700)
    _openssl(
        layout.pki,
        "req",
        "-x509",
        *_EC_KEY,
        "-days",
        "30",
        "-subj",
        "/CN=rig-ca",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
    )
    names = [
        "DNS:localhost",
        "DNS:kubernetes",
        "DNS:kubernetes.default",
        "DNS:kubernetes.default.svc",
    ]
    addresses = [f"IP:{address}" for address in ("127.0.0.1", SERVICE_ADDRESS, node_address(1))]
    _certificate(
        layout.pki,
        "apiserver",
        "/CN=kube-apiserver",
        ["extendedKeyUsage=serverAuth", "subjectAltName=" + ",".join(names + addresses)],
    )
    _certificate(
        layout.pki,
        "apiserver-kubelet",
        "/O=system:masters/CN=kube-apiserver-kubelet-client",
        ["extendedKeyUsage=clientAuth"],
    )
    _openssl(layout.pki, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    _openssl(layout.pki, "ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    users = {
        "admin": ("admin", "system:masters"),
        "scheduler": ("system:kube-scheduler", ""),
        "controllers": ("system:kube-controller-manager", ""),
    }
    for index in range(1, nodes + 1):
        node = layout.node(index)
        users[node.name] = (f"system:node:{node.name}", "system:nodes")
    tokens = []
    for file, (user, group) in users.items():
        token = secrets.token_hex(16)
        tokens.append(f'{token},{user},{user},"{group}"\n')
        layout.kubeconfig(file).write_text(json.dumps(_kubeconfig(layout, token), indent=1))
    (layout.pki / "tokens.csv").write_text("".join(tokens))


def _kubeconfig(layout: Layout, token: str) -> dict[str, object]:
    cluster = {"server": API_SERVER, "certificate-authority": str(layout.pki / "ca.crt")}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "rig", "cluster": cluster}],
        "users": [{"name": "me", "user": {"token": token}}],
        "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": "me"}}],
        "current-context": "rig",
    }


def _certificate(folder: Path, name: str, subject: str, extensions: list[str]) -> None:
    request, extension_file = folder / f"{name}.csr", folder / f"{name}.ext"
    extension_file.write_text("\n".join(extensions) + "\n")
    _openssl(
        folder, "req", *_EC_KEY, "-subj", subject, "-keyout", f"{name}.key", "-out", request.name
    )
    _openssl(
        folder,
        *(
            "x509",
            "-req",
            "-in",
            request.name,
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
        ),
        *("-days", "30", "-extfile", extension_file.name, "-out", f"{name}.crt"),
    )
    request.unlink()
    extension_file.unlink()


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["openssl", *arguments],
        cwd=folder,
        check=True,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
